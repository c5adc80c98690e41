"""Bad data on the real command line: refused with file and line before anything starts, or left out and counted."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.unit.training.test_train_command import TINY, metrics_of, tpu_train

WORDS = [*[word for word in TINY if word != "data=synthetic"], "data=text", "data.held_out_fraction=0"]
GOOD = b'{"text": "good"}\n'


def write(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def write_parquet(folder: Path, name: str, corrupt: bool) -> None:
    table = pyarrow.table({"text": ["good", None, "good"] if not corrupt else ["good"] * 500})
    pyarrow.parquet.write_table(table, folder / name)
    if corrupt:
        content = (folder / name).read_bytes()
        write(folder, name, content[: len(content) // 2])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + b'{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", GOOD + b'\n{"txet": "x"}\n', "a.jsonl:3: no field 'text'; fields there: 'txet'"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: field 'text' is a int, not a string"),
        ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl:2: not UTF-8: byte 0xff"),
        ("a.txt", b"one\ntwo\xff\n", "a.txt:2: not UTF-8: byte 0xff"),
        ("a.jsonl.gz", gzip.compress(GOOD * 100, mtime=0)[:-20], "a.jsonl.gz"),
        ("a.jsonl.zst", zstandard.compress(GOOD * 1000)[:-5], "a.jsonl.zst"),
        ("a.txt", b"short", "tokens to train on, and one batch of 4 sequences of 32 tokens takes"),
        ("a.csv", b"text\n", "no"),
    ],
    ids=["json", "field", "type", "utf8-jsonl", "utf8-txt", "gzip", "zstd", "small", "nothing"],
)
def test_bad_input_is_refused_with_its_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus", name, content)
    done = tpu_train(*WORDS, "data.path=corpus", "run_dir=r", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("corrupt", "message"), [(True, "a.parquet"), (False, "a.parquet")])
def test_bad_parquet_is_refused_with_its_file(corrupt: bool, message: str, tmp_path: Path) -> None:
    write_parquet(tmp_path, "a.parquet", corrupt)
    done = tpu_train(*WORDS, "data.path=a.parquet", "run_dir=r", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_records_are_left_out_and_counted(tmp_path: Path) -> None:
    good = json.dumps({"text": "some words that are long enough " * 20}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 5 + "broken\n" + good + '{"text": 7}\n')
    words = ["data.path=a.jsonl", "data.on_bad_record=skip", "training.steps=2", "run_dir=r"]
    done = tpu_train(*WORDS, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 records of the data could not be read and are left out" in done.stderr
    assert [line["skipped_records"] for line in metrics_of(tmp_path / "r")] == [2, 2]
