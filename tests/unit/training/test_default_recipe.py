"""`tpu-train` without a word: a small Qwen3 learns Python's standard library, better than counting bytes could."""

import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy as np
import pytest

from tpu_train.config.compose import compose
from tpu_train.data.stream import PackedStream, build_streams
from tpu_train.data.tokenizers import build_tokenizer


def default_streams() -> tuple[PackedStream, PackedStream]:
    run = compose([]).run
    training, held_out = build_streams(
        run.data, build_tokenizer(run.tokenizer), seq_len=run.training.seq_len, batch_size=8, seed=0, vocab_size=320
    )
    assert isinstance(training, PackedStream)
    assert held_out is not None
    return training, held_out


def tokens_of(stream: PackedStream) -> np.ndarray:
    rows = [stream.sequence(i)["tokens"] for i in range(stream.num_blocks)]
    return np.concatenate(rows)[: stream.num_tokens]


def test_what_counting_bytes_and_pairs_of_bytes_gives() -> None:
    """The bar: cross-entropy on the held-out text of byte frequencies, and of next-byte frequencies, of the rest."""
    training, held_out = (tokens_of(stream) for stream in default_streams())
    single = np.bincount(training, minlength=320) + 1.0
    bytes_alone = -np.log(single / single.sum())[held_out].mean()
    pairs = np.zeros((320, 320)) + 0.01
    np.add.at(pairs, (training[:-1], training[1:]), 1)
    conditional = np.log(pairs / pairs.sum(1, keepdims=True))
    pairs_of_bytes = -conditional[held_out[:-1], held_out[1:]].mean()
    assert bytes_alone == pytest.approx(3.2, abs=0.1)
    assert pairs_of_bytes == pytest.approx(2.4, abs=0.1)


def test_the_default_run_beats_pairs_of_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tpu_train.cli", "run_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] > 5  # it starts from nothing: ln(320) is 5.77
    assert lines[-1]["validation_loss"] <= 2.2
    assert {line["compile_count"] for line in lines[:-1]} == {1}
    steps = lines[5:-1]  # without those that fill the queue of batches
    assert sum(line["data_wait_s"] for line in steps) <= 0.02 * sum(line["step_time_s"] for line in steps)
    words = ["generate", "run_dir=run", "prompt='def '", "num_samples=20", "--json"]
    written = subprocess.run([*command[:3], *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert written.returncode == 0, written.stderr
    texts = [sample["prompt"] + sample["text"] for sample in json.loads(written.stdout)["samples"]]
    assert len(texts) == 20
    python = [is_python(line) for text in texts for line in text.splitlines()]
    assert sum(python) >= 0.8 * len(python)


def is_python(line: str) -> bool:
    """Whether a line by itself is made of Python's tokens."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)
