"""From a chunk of a data file to the texts of its records.

Key idea: whoever reads files cuts them into chunks without looking inside; what is inside is judged here, which may be
in another process. A record that cannot be read is a value with its place, so that its turn among the others is kept.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive records of a file.

    Attributes:
        kind: `text`: one record, all of a file; `lines`: JSON records, one in each line that is not blank; `values`:
            the text fields of rows; `error`: what could not be read, and why.
        file: as messages name it.
        first: number of the first line or row, from 1.
        data: bytes of `text` and `lines`, values of `values` (what is neither bytes nor str is no text), the message of
            `error`, with its place.
    """

    kind: Literal["text", "lines", "values", "error"]
    file: str
    first: int
    data: Any


class BadRecord(ValueError):
    """A record that cannot be read; the message names file and line, or row."""


def read_texts(chunk: Chunk, field: str) -> Iterator[str | BadRecord]:
    """The records of a chunk in order: the text of each, or what is wrong with it.

    Args:
        chunk: of any kind.
        field: name of the text in a JSON record, and in messages.
    """
    match chunk.kind:
        case "text":
            yield _or_bad(lambda: _decode(chunk.data.removeprefix(BOM), chunk.file, 1))
        case "lines":
            yield from _json_texts(chunk, field)
        case "values":
            for row, value in enumerate(chunk.data, chunk.first):
                yield _or_bad(lambda value=value, row=row: _value_text(value, field, f"{chunk.file}, row {row}"))
        case "error":
            yield BadRecord(chunk.data)


def _or_bad(read: Callable[[], str]) -> str | BadRecord:
    try:
        return read()
    except BadRecord as error:
        return error


def _json_texts(chunk: Chunk, field: str) -> Iterator[str | BadRecord]:
    data = chunk.data.removeprefix(BOM) if chunk.first == 1 else chunk.data
    for number, line in enumerate(data.split(b"\n"), chunk.first):
        if line.strip():
            yield _or_bad(lambda line=line, number=number: _line_text(line, field, chunk.file, number))


def _line_text(line: bytes, field: str, file: str, number: int) -> str:
    place = f"{file}:{number}"
    try:
        record = json.loads(_decode(line, file, number).rstrip())
    except json.JSONDecodeError as error:
        raise BadRecord(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    except BadRecord:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested too deep
        raise BadRecord(f"{place}: not readable as JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadRecord(f"{place}: a {type(record).__name__}, not an object with the field {field!r}")
    if field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise BadRecord(f"{place}: no field {field!r}; fields there: {fields}; set data.field")
    return _value_text(record[field], field, place)


def _value_text(value: Any, field: str, place: str) -> str:
    if isinstance(value, bytes):  # of a file format that says it is a string
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise BadRecord(f"{place}: field {field!r} is {_not_utf8(error)}") from error
    if not isinstance(value, str):
        raise BadRecord(f"{place}: field {field!r} is a {type(value).__name__}, not a string")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise BadRecord(f"{place}: field {field!r} has half a surrogate pair, which is no character")
    return value


def _decode(data: bytes, file: str, first_line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise BadRecord(f"{file}:{line}: {_not_utf8(error)}") from error


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})"
