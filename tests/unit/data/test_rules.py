"""Rules find what does not fit between data, tokenizer and model."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.data.helpers import BYTES, SYNTHETIC, hf_data, stdlib_data, text_data, write
from tpu_train.config import schema
from tpu_train.data.rules import rules


def run(data: Any, vocab_size: int = 258, tokenizer: Any = BYTES) -> schema.Run:
    """What the rules read of a run."""
    return cast(
        schema.Run, SimpleNamespace(model=SimpleNamespace(vocab_size=vocab_size), data=data, tokenizer=tokenizer)
    )


def found(data: Any) -> list[tuple[str, str]]:
    return [(problem.place, problem.message) for problem in rules(run(data))]


def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def test_what_fits_has_no_problems(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    assert found(stdlib_data(tmp_path)) == found(SYNTHETIC) == []
    assert found(text_data(str(tmp_path / "*.txt"), held_out_path=str(tmp_path))) == []
    assert found(text_data("memory://nothing/is/asked/*.txt")) == []
    assert found(hf_data(str(tmp_path))) == found(hf_data("owner/name")) == found(hf_data("name")) == []


def test_a_tokenizer_larger_than_the_model_gives_both_numbers(tmp_path: Path) -> None:
    (problem,) = rules(run(stdlib_data(tmp_path), vocab_size=257))
    assert problem.place == "model.vocab_size"
    assert problem.message == (
        "257 is smaller than the vocabulary of tokenizer=bytes, 258; "
        "set model.vocab_size=258 or choose another tokenizer"
    )


def test_missing_files_are_all_reported(tmp_path: Path) -> None:
    data = text_data(str(tmp_path / "none"), held_out_path=str(tmp_path / "*.txt"))
    problems = rules(run(data, tokenizer=schema.FileTokenizer(name="file", path=str(tmp_path / "t.json"))))
    assert [(problem.place, problem.message) for problem in problems] == [
        ("tokenizer.path", f"{tmp_path}/t.json: no such file"),
        ("data.path", f"{tmp_path}/none: no such file or folder, and as a glob it matches nothing"),
        ("data.held_out_path", f"{tmp_path}/*.txt: no such file or folder, and as a glob it matches nothing"),
    ]


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_libraries(monkeypatch)
    write(tmp_path / "a.parquet", "")
    write(tmp_path / "b.jsonl.zst", "")
    write(tmp_path / "c.jsonl.gz", "")
    assert found(text_data(str(tmp_path))) == [
        ("data.path", f"{tmp_path}/a.parquet: reading .parquet needs the library pyarrow: pip install pyarrow"),
        ("data.path", f"{tmp_path}/b.jsonl.zst: reading .jsonl.zst needs the library zstandard: pip install zstandard"),
    ]
    assert found(hf_data("name")) == [("data", "data=hf needs the library datasets: pip install 'tpu-train[hf]'")]


def test_urls_that_cannot_be_opened_are_named() -> None:
    assert found(text_data("nowhere://a")) == [("data.path", "nowhere://a: Protocol not known: nowhere")]


@pytest.mark.parametrize("path", ["/none/such", "~/none/such", "./none", "a/b/c"])
def test_a_data_set_that_can_only_be_a_folder_must_be_there(path: str) -> None:
    assert found(hf_data(path)) == [("data.dataset", f"{path}: no such folder")]
