"""Rules find what does not fit between data, tokenizer and model."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tpu_train.config import schema
from tpu_train.data.rules import rules

BYTES = schema.BytesTokenizer(name="bytes")
STDLIB = schema.StdlibData(name="stdlib", held_out_fraction=0.05)


def run(
    vocab_size: int = 258,
    data: schema.StdlibData | schema.TextData = STDLIB,
    tokenizer: schema.BytesTokenizer | schema.FileTokenizer = BYTES,
) -> schema.Run:
    """What the rules read of a run."""
    return cast(
        schema.Run, SimpleNamespace(model=SimpleNamespace(vocab_size=vocab_size), data=data, tokenizer=tokenizer)
    )


def test_what_fits_has_no_problems(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert rules(run()) == []
    data = schema.TextData(name="text", path=str(tmp_path / "*.txt"), field="text", held_out_fraction=0.0)
    assert rules(run(data=data)) == []


def test_a_tokenizer_larger_than_the_model_gives_both_numbers() -> None:
    (problem,) = rules(run(vocab_size=257))
    assert problem.place == "model.vocab_size"
    assert problem.message == (
        "257 is smaller than the vocabulary of tokenizer=bytes, 258; "
        "set model.vocab_size=258 or choose another tokenizer"
    )


def test_missing_files_are_all_reported(tmp_path: Path) -> None:
    data = schema.TextData(name="text", path=str(tmp_path / "none"), field="text", held_out_fraction=0.0)
    problems = rules(run(data=data, tokenizer=schema.FileTokenizer(name="file", path=str(tmp_path / "t.json"))))
    assert [(problem.place, problem.message) for problem in problems] == [
        ("tokenizer.path", f"{tmp_path}/t.json: no such file"),
        ("data.path", f"{tmp_path}/none: no such file or folder, and as a glob it matches nothing"),
    ]
