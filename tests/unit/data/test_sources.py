"""Sources find their documents, and name file and line of what they cannot read."""

import json
import sysconfig
from pathlib import Path

import pytest

from tpu_train.data import sources
from tpu_train.data.sources import Document, find_files, stdlib_documents, text_documents


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(path: Path | str, field: str = "text") -> list[Document]:
    return list(text_documents(str(path), field))


def test_stdlib_has_real_text_in_order_and_no_tests() -> None:
    documents = list(stdlib_documents())
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"json/decoder.py", "dataclasses.py"} <= set(names)
    assert not [name for name in names if sources.STDLIB_SKIPPED & set(name.split("/"))]
    assert sum(len(document.text) for document in documents) > 5_000_000


def test_stdlib_skips_what_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    write(tmp_path / "b.py", b"\xef\xbb\xbfb = 1\n")
    write(tmp_path / "a.py", b"# \xe9\n")
    write(tmp_path / "c.pyc", b"")
    write(tmp_path / "idlelib/idle_test/d.py", "d = 1\n")
    assert list(stdlib_documents()) == [("b.py", "b = 1\n")]


@pytest.mark.parametrize("folder", [".", "python311.zip"])
def test_stdlib_without_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / folder)})
    with pytest.raises(ValueError, match=r"data=stdlib: no .py files in .*; use data=text"):
        list(stdlib_documents())


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntw\xc3\xb6 \xe2\x80\xa8")
    assert texts(path) == [("a.txt", "one\r\n\r\ntwö \u2028")]


def test_a_jsonl_line_is_one_document(tmp_path: Path) -> None:
    lines = ['\ufeff{"text": "a\\nb"}', "", "  \r", '{"text": "x\u2028y", "id": 3}\r']
    lines += ['{"text": "\\ud83c\\udf89"}', '{"text": ""}']  # no newline at the end
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    expected = [("a.jsonl:1", "a\nb"), ("a.jsonl:4", "x\u2028y"), ("a.jsonl:5", "🎉"), ("a.jsonl:6", "")]
    assert texts(path) == expected
    write(path, json.dumps({"body": "b"}))
    assert texts(path, "body") == [("a.jsonl:1", "b")]


def test_folders_and_globs_name_documents_alike(tmp_path: Path) -> None:
    write(tmp_path / "z.txt", "z")
    write(tmp_path / "sub/deep/b.txt", "b")
    write(tmp_path / "sub/a.jsonl", '{"text": "a"}\n')
    write(tmp_path / "sub/readme.md", "not text")
    everything = [("sub/a.jsonl:1", "a"), ("sub/deep/b.txt", "b"), ("z.txt", "z")]
    assert texts(tmp_path) == everything
    assert texts(tmp_path / "**" / "*") == everything
    assert texts(tmp_path / "sub" / "*") == [("a.jsonl:1", "a")]
    assert texts(tmp_path / "s*" / "*.jsonl") == [("sub/a.jsonl:1", "a")]


def test_a_name_with_wildcards_that_exists_is_that_file(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a[1].txt", "x")) == [("a[1].txt", "x")]


def test_paths_may_be_relative_or_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts("a.txt") == texts("*.txt") == texts(".") == texts("~/a.txt") == texts("~/*.txt") == [("a.txt", "x")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", r"nothing: no such file or folder, and as a glob it matches nothing"),
        ("*.txt", r"\*.txt: no such file or folder"),
        ("a.md", r"a.md: a .md; text is read from .txt or .jsonl"),
        ("plain", r"plain: a file without suffix; text is read from"),
        ("empty", r"empty: no .txt or .jsonl file in this folder or below"),
        ("*.md", r"\*.md: matches 1 paths, none of them a .txt or .jsonl file \(first: .*a.md\)"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    write(tmp_path / "a.md", "")
    write(tmp_path / "plain", "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        find_files(str(tmp_path / path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"not JSON: .* at column 13"),
        (b'{"text": ' + b"1" * 5000 + b"}", r"not readable as JSON: Exceeds the limit"),
        (b"[" * 100_000, r"not readable as JSON: maximum recursion depth"),
        (b'["a"]', r"a list, not an object with the field 'text'"),
        (b'{"body": "a", "id": 1}', r"no field 'text'; fields there: 'body', 'id'; set data.field"),
        (b"{}", r"no field 'text'; fields there: none"),
        (b'{"text": null}', r"field 'text' is a NoneType, not a string"),
        (b'{"text": "\\ud800"}', r"field 'text' has half a surrogate pair"),
        (b'{"text": "\xff"}', r"not UTF-8: byte 0xff \(invalid start byte\)"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:3: " + message):
        texts(path)


def test_bad_utf8_in_text_is_named_by_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad\.txt:3: not UTF-8: byte 0xc3 \(invalid continuation byte\)"):
        texts(write(tmp_path / "bad.txt", b"a\nb\n\xc3("))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        sources._walk(tmp_path / "gone", (".txt",), frozenset())
