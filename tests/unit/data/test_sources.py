"""What a configuration names as data."""

import sysconfig
from pathlib import Path

import pytest

from tests.unit.data.helpers import write
from tpu_train.data import sources
from tpu_train.data.records import read_texts
from tpu_train.data.sources import stdlib_source


def texts() -> list[tuple[str, str]]:
    source = stdlib_source()
    return [(chunk.file, str(text)) for chunk in source.chunks() for text in read_texts(chunk, source.field)]


def test_stdlib_has_real_text_in_order_and_no_tests() -> None:
    root = sysconfig.get_paths()["stdlib"]
    documents = texts()
    names = [file.removeprefix(f"{root}/") for file, _ in documents]
    assert names == sorted(names)
    assert {"json/decoder.py", "dataclasses.py"} <= set(names)
    assert not [name for name in names if sources.STDLIB_SKIPPED & set(name.split("/"))]
    assert sum(len(text) for _, text in documents) > 5_000_000


def test_stdlib_skips_what_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    write(tmp_path / "b.py", b"\xef\xbb\xbfb = 1\n")
    write(tmp_path / "a.py", b"# \xe9\n")
    write(tmp_path / "c.pyc", b"")
    write(tmp_path / "idlelib/idle_test/d.py", "d = 1\n")
    assert not stdlib_source().stop_at_bad
    assert [text for _, text in texts()] == [
        f"{tmp_path}/a.py:1: not UTF-8: byte 0xe9 (invalid continuation byte)",
        "b = 1\n",
    ]


@pytest.mark.parametrize("folder", [".", "python311.zip"])
def test_stdlib_without_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / folder)})
    with pytest.raises(ValueError, match=r"data=stdlib: no .py files in .*; use data=text"):
        stdlib_source()
