"""A tokenizer is made from a data set, and is one that a run takes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.data.helpers import SYNTHETIC, text_data, write
from tpu_train.data.tokenizer_training import train_tokenizer
from tpu_train.data.tokenizers import FileTokenizer

SCRIPT = Path(__file__).parents[3] / "scripts" / "train_tokenizer.py"
TEXT = "the cat sat on the mat, and 12345 others did not; naïve Größe 東京 🎉\r\n\r\n\tdef f(x):\n"


def corpus(folder: Path) -> Path:
    for i in range(3):
        write(folder / f"{i}.jsonl", '{"text": "the cat sat on the mat, the end"}\n' * 20 + '{"text": ""}\n')
    return folder


def run_script(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)


def test_a_tokenizer_made_here_is_taken_and_gives_text_back(tmp_path: Path) -> None:
    result = train_tokenizer(text_data(corpus(tmp_path / "data")), 300, str(tmp_path / "t.json"))
    tokenizer = FileTokenizer(result.path)
    assert (result.num_documents, result.vocab_size) == (60, tokenizer.vocab_size)
    assert 257 < tokenizer.vocab_size <= 300
    assert (tokenizer.eos_id, tokenizer.bos_id) == (0, None)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert 0 not in ids
    assert len(tokenizer.encode("the cat sat on the mat, the end")) <= 10


def test_the_same_text_gives_the_same_tokenizer(tmp_path: Path) -> None:
    data = text_data(corpus(tmp_path / "data"))
    first, second = (train_tokenizer(data, 280, str(tmp_path / name)).path.read_bytes() for name in ("a", "b"))
    assert first == second


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    data = text_data(corpus(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"vocab_size=256: at least 257, for every byte and <\|endoftext\|>"):
        train_tokenizer(data, 256, str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"to=.*none/t.json: no such folder: .*none"):
        train_tokenizer(data, 300, str(tmp_path / "none" / "t.json"))
    with pytest.raises(ValueError, match="data=synthetic has no text"):
        train_tokenizer(SYNTHETIC, 300, str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"e.txt: no text"):
        train_tokenizer(text_data(write(tmp_path / "e.txt", "")), 300, str(tmp_path / "t.json"))
    write(tmp_path / "data" / "1.jsonl", '{"text": 1}')
    with pytest.raises(ValueError, match=r"1.jsonl:1: field 'text' is a int"):
        train_tokenizer(data, 300, str(tmp_path / "t.json"))
    assert not (tmp_path / "t.json").exists()
    skipping = text_data(tmp_path / "data", on_bad_record="skip")
    assert train_tokenizer(skipping, 300, str(tmp_path / "t.json")).num_documents == 40


def test_the_script_takes_the_words_of_a_run(tmp_path: Path) -> None:
    folder, target = corpus(tmp_path / "data"), tmp_path / "t.json"
    result = run_script("data=text", f"data.path={folder}", "vocab_size=290", f"to={target}")
    assert result.returncode == 0, result.stderr
    size = FileTokenizer(target).vocab_size
    assert f"tokenizer=file tokenizer.path={target} model.vocab_size={size}" in result.stdout


def test_the_script_refuses_with_two(tmp_path: Path) -> None:
    for words, message in (
        (["vocab_size=many"], "vocab_size=many: not a number of tokens"),
        (["daata=text"], "there is no key 'daata'; nearest is 'data'"),
        (["data=text", f"data.path={tmp_path}/none"], "none: no such file or folder"),
    ):
        result = run_script(*words, f"to={tmp_path}/t.json")
        assert (result.returncode, message in result.stderr) == (2, True), result.stderr
    assert "vocab_size=4096" in run_script("--help").stdout
