"""Rows of Parquet files, and the place of what cannot be read."""

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.unit.data.helpers import write
from tests.unit.data.test_readers import messages, read


def write_parquet(path: Path, column: Any, **options: Any) -> Path:
    parquet.write_table(pyarrow.table({"id": range(len(column)), "text": column}), path, **options)
    return path


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_a_row_is_one_document(tmp_path: Path, kind: pyarrow.DataType) -> None:
    texts = [f"row {i} ü\u2028" for i in range(1000)] + [""]
    path = write_parquet(tmp_path / "a.parquet", pyarrow.array(texts, kind), row_group_size=300)
    assert read(path) == texts


def test_a_file_without_rows_has_no_documents(tmp_path: Path) -> None:
    assert read(write_parquet(tmp_path / "a.parquet", pyarrow.array([], pyarrow.string()))) == []


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [*map(str, range(500)), None, "after"], row_group_size=100)
    assert messages(path)[-2:] == ["a.parquet, row 501: field 'text' is a NoneType, not a string", "after"]


def test_a_row_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    column = pyarrow.array([b"good", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    path = write_parquet(tmp_path / "a.parquet", column)
    assert messages(path) == ["good", "a.parquet, row 2: field 'text' is not UTF-8: byte 0xff (invalid start byte)"]


def test_a_column_that_is_no_text_or_is_missing_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["a"])
    assert messages(path, "id") == ["a.parquet, row 1: field 'id' is a int, not a string"]
    assert messages(path, "body") == ["a.parquet: no column 'body'; columns there: 'id', 'text'; set data.field"]


def test_a_broken_file_is_named_with_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "no.parquet", "no Parquet at all")
    assert messages(path)[0].startswith("no.parquet, row 1: not readable as Parquet: Parquet magic bytes not found")
    path = write_parquet(tmp_path / "a.parquet", [f"{i}" * 50 for i in range(1000)], row_group_size=500)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert messages(path)[0].startswith("a.parquet, row 1: not readable as Parquet: ")
    half = len(content) // 2
    path.write_bytes(content[:half] + b"\xa5" * 3000 + content[half + 3000 :])
    *texts, bad = messages(path)
    assert texts == [f"{i}" * 50 for i in range(len(texts))]
    assert bad.startswith(f"a.parquet, row {len(texts) + 1}: not readable as Parquet: ")
