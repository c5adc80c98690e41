"""From a configuration to streams: what is visited, by whom, and what is refused."""

import dataclasses
import pickle
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.helpers import SYNTHETIC, stdlib_data, text_data, write
from tpu_train.config import schema
from tpu_train.data.sequences import SyntheticStream, TokenStream
from tpu_train.data.stream import PackedStream, build_streams
from tpu_train.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
EOS = BYTES.eos_id
FIXED_DRAWS = [980, 604, 341, 689]


def build(
    data: schema.TextData | schema.SyntheticData,
    seq_len: int = 8,
    batch: int = 2,
    seed: int = 0,
    steps: int | None = None,
) -> tuple[TokenStream, PackedStream | None]:
    return build_streams(data, BYTES, seq_len=seq_len, batch_size=batch, seed=seed, vocab_size=300, steps=steps)


def write_shards(folder: Path) -> tuple[Path, Counter[str]]:
    """Five shards of 70, 1, 0, 23 and 6 documents of 1 to 40 letters."""
    rng = np.random.default_rng(1)
    texts: Counter[str] = Counter()
    for shard, count in enumerate([70, 1, 0, 23, 6]):
        lines = []
        for i in range(count):
            text = f"{shard}.{i}" + "x" * int(rng.integers(0, 36))
            texts[text] += 1
            lines.append(f'{{"text": "{text}"}}\n')
        write(folder / f"{shard}.jsonl", "".join(lines))
    return folder, texts


def documents_of(rows: list[dict[str, np.ndarray]]) -> Counter[str]:
    """The documents that rows have tokens of, joined by document order of their inputs."""
    return Counter(BYTES.decode(part) for part in _split_at_ends(np.concatenate([row["tokens"] for row in rows])))


def _split_at_ends(tokens: np.ndarray) -> list[np.ndarray]:
    return np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]


@pytest.mark.parametrize("shuffle", ["documents", "none"])
def test_an_epoch_over_uneven_shards_has_every_document_once(tmp_path: Path, shuffle: str) -> None:
    folder, texts = write_shards(tmp_path / "data")
    stream, _ = build(text_data(folder, shuffle=shuffle))
    assert stream.blocks_per_epoch is not None
    for epoch in range(2):
        first = epoch * stream.blocks_per_epoch
        rows = [stream.sequence(first + i) for i in range(stream.blocks_per_epoch)]
        assert documents_of(rows) == texts


def test_an_epoch_of_shuffled_blocks_has_every_document_once(tmp_path: Path) -> None:
    folder, texts = write_shards(tmp_path / "data")
    stream, _ = build(text_data(folder, shuffle="blocks"))
    packed, _ = build(text_data(folder, shuffle="blocks"))
    assert isinstance(packed, PackedStream)
    packed._epoch = lambda number, get=packed._epoch: get(number)._replace(blocks=None)  # pyright: ignore
    in_order = [packed.sequence(i) for i in range(packed.num_blocks)]
    assert documents_of(in_order) == texts
    by_tokens = sorted(row["tokens"].tolist() for row in in_order)
    for epoch in range(2):
        rows = [stream.sequence(epoch * packed.num_blocks + i)["tokens"].tolist() for i in range(packed.num_blocks)]
        assert sorted(rows) == by_tokens
        assert rows != [row["tokens"].tolist() for row in in_order]


@pytest.mark.parametrize("shuffle", ["documents", "blocks"])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (4, 4), (1, 4), (4, 2), (2, 1)])
def test_hosts_have_the_rows_of_the_batch_also_when_their_number_changes(
    tmp_path: Path, shuffle: str, hosts: tuple[int, int]
) -> None:
    folder, _ = write_shards(tmp_path / "data")
    config, size = text_data(folder, shuffle=shuffle, epochs=1), 8
    whole, _ = build(config, batch=size)
    steps = whole.max_steps(size)
    assert steps is not None
    got: list[dict[str, np.ndarray]] = []
    streams: list[TokenStream] = []
    for step in range(steps):
        count = hosts[step >= steps // 2]
        streams = [build(config, batch=size)[0] for _ in range(count)] if step in (0, steps // 2) else streams
        parts = [
            stream.batch(step, size, slice(host * size // count, (host + 1) * size // count))
            for host, stream in enumerate(streams)
        ]
        assert {len(part["tokens"]) for part in parts} == {size // count}
        got.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    for step, batch in enumerate(got):
        expected = whole.batch(step, size)
        for name, array in expected.items():
            np.testing.assert_array_equal(batch[name], array)
    blocks = Counter(
        tuple(row)
        for batch in got
        for row, real in zip(batch["tokens"].tolist(), batch["labels"].max(1) > 0, strict=True)
        if real
    )
    everything = [whole.sequence(i) for i in range(whole.blocks_per_epoch or 0)]
    assert blocks == Counter(tuple(row["tokens"].tolist()) for row in everything if row["labels"].max() > 0)


def test_only_the_wanted_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _ = build(text_data(write_shards(tmp_path / "data")[0]))
    read: list[int] = []
    sequence = stream.sequence
    monkeypatch.setattr(stream, "sequence", lambda index: read.append(index) or sequence(index))
    stream.batch(3, 8, slice(2, 4))
    assert read == [26, 27]


def test_streams_repeat_for_a_seed_and_differ_between_seeds(tmp_path: Path) -> None:
    for data in (text_data(write_shards(tmp_path / "data")[0]), SYNTHETIC):
        one, again, other = (build(data, seed=seed)[0] for seed in (0, 0, 1))
        np.testing.assert_array_equal(one.batch(3, 2)["tokens"], again.batch(3, 2)["tokens"])
        assert not np.array_equal(one.batch(3, 2)["tokens"], other.batch(3, 2)["tokens"])
        assert one.fingerprint == again.fingerprint != other.fingerprint


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    folder, texts = write_shards(tmp_path / "data")
    train, held_out = build(text_data(folder, held_out_fraction=0.2, shuffle="documents"))
    assert held_out is not None
    seen = documents_of([train.sequence(i) for i in range(train.blocks_per_epoch or 0)])
    kept = documents_of([held_out.sequence(i) for i in range(held_out.num_blocks)])
    assert seen + kept == texts
    assert kept.total() == 20
    assert held_out.batch(0, 4)["tokens"].shape == (4, 8)
    last = held_out.batch(held_out.num_batches(7) - 1, 7)
    assert (last["labels"][held_out.num_blocks % 7 :] == -100).all()


def test_held_out_files_are_validated_on(tmp_path: Path) -> None:
    folder, texts = write_shards(tmp_path / "data")
    other = write(tmp_path / "other.txt", "held out")
    train, held_out = build(text_data(folder, held_out_path=str(other), held_out_fraction=0.5, shuffle="documents"))
    assert held_out is not None
    assert documents_of([train.sequence(i) for i in range(train.blocks_per_epoch or 0)]) == texts
    assert documents_of([held_out.sequence(i) for i in range(2)]) == Counter(["held out"])


def test_one_file_has_a_held_out_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "0123456789" * 10)
    train, held_out = build(text_data(path, held_out_fraction=0.1))
    assert held_out is not None
    assert isinstance(train, PackedStream)
    assert (train.num_tokens, held_out.num_tokens) == (91, 10)
    assert BYTES.decode(held_out.sequence(0)["tokens"]) == "12345678"


def test_nothing_held_out_means_no_validation(tmp_path: Path) -> None:
    assert build(text_data(write(tmp_path / "a.txt", "x" * 50)))[1] is None
    assert build(SYNTHETIC)[1] is None


@pytest.mark.parametrize("text", ["", "x" * 15])
def test_too_little_text_is_an_error_with_the_numbers(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.txt", text)
    size = len(text) + bool(text)
    with pytest.raises(
        ValueError, match=rf"a.txt: {size} tokens to train on, and one batch of 3 sequences of 8 tokens takes 17; "
    ):
        build(text_data(path), batch=3)


def test_the_message_says_what_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x" * 199)
    with pytest.raises(ValueError, match=r"takes 193 \(100 of 200 are held out: data.held_out_fraction\); use more"):
        build(text_data(path, held_out_fraction=0.5), batch=25)
    with pytest.raises(ValueError, match=r"a.txt: 1 of 200 tokens are held out for validation, and .* at least 2; use"):
        build(text_data(path, held_out_fraction=0.003))
    empty = write(tmp_path / "empty.txt", "")
    with pytest.raises(ValueError, match=r"empty.txt: 0 of 0 tokens are held out"):
        build(text_data(path, held_out_path=str(empty)))


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\*\.txt: no such file or folder, and as a glob it matches nothing"):
        build(text_data(tmp_path / "*.txt"))


def test_too_few_epochs_for_the_steps_are_an_error_with_both_ways_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x" * (8 * 625 - 1))  # 625 blocks
    data = text_data(path, epochs=1)
    message = (
        r"training.steps=1000 needs 3.2 epochs of the data, and data.epochs=1 gives 313 steps; "
        r"set training.steps=313 or data.epochs=null"
    )
    with pytest.raises(ValueError, match=message):
        build(data, steps=1000)
    build(data, steps=313)
    build(dataclasses.replace(data, epochs=None), steps=1000)


def test_synthetic_tokens_are_uniform_and_never_change() -> None:
    stream = SyntheticStream(7, 9_999, seed=0)
    counts = np.bincount(np.concatenate([stream.sequence(i)["tokens"] for i in range(7)]), minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - 10_000).max() < 500
    assert SyntheticStream(1000, 4, seed=0).sequence(3)["tokens"].tolist() == FIXED_DRAWS
    assert (stream.blocks_per_epoch, stream.max_steps(8), stream.num_skipped_records) == (None, None, 0)
    batch = pickle.loads(pickle.dumps(stream)).batch(2, 3)
    assert set(batch) == {"tokens", "labels"}
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_stdlib_loads_fast_and_is_text(tmp_path: Path) -> None:
    data = stdlib_data(tmp_path, held_out_fraction=0.05)
    start = time.process_time()
    build_streams(data, BYTES, seq_len=512, batch_size=8, seed=0, vocab_size=258)
    made = time.process_time()
    train, held_out = build_streams(data, BYTES, seq_len=512, batch_size=8, seed=0, vocab_size=258)
    assert made - start < 2
    assert time.process_time() - made < 0.5
    assert isinstance(train, PackedStream)
    assert held_out is not None
    assert train.num_blocks > 10 * held_out.num_blocks > 1000
    text = "".join(BYTES.decode(row) for row in held_out.batch(0, 100)["tokens"])
    assert text.count("self") > 20


def test_data_imports_neither_torch_nor_jax() -> None:
    modules = "cache, huggingface, loader, rules, sources, stream, tokenizer_training"
    heavy = "{'torch', 'jax', 'tokenizers', 'datasets', 'pyarrow', 'fsspec', 'zstandard'}"
    code = f"import sys; from tpu_train.data import {modules}; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
