"""The documents of a data set, in an order that is the same everywhere.

Key idea: a document has a name relative to its data set, so that neither its order nor its identity depends on where
the files lie. Files are read as bytes and split at newlines only: what Python calls a line break inside a text is text.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Folders of the standard library that are not read: installed packages, and tests, which many distributions leave out.
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
SUFFIXES = (".txt", ".jsonl")


class Document(NamedTuple):
    """One text.

    Attributes:
        name: relative to the data set; `file:line` for a line of a file.
        text: may be empty.
    """

    name: str
    text: str


class DataFile(NamedTuple):
    """A file of a data set.

    Attributes:
        name: relative to the data set, with `/`.
        path: where it is.
    """

    name: str
    path: Path


def stdlib_documents() -> Iterator[Document]:
    """Source files of the running Python's standard library that are UTF-8, by name.

    Raises:
        ValueError: there are none, as in a Python packed into a zip file.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, (".py",), STDLIB_SKIPPED) if root.is_dir() else []
    if not files:
        raise ValueError(f"data=stdlib: no .py files in {root}; use data=text data.path=...")
    for name, path in files:
        try:
            yield Document(name, path.read_bytes().decode("utf-8-sig"))
        except UnicodeDecodeError:
            continue


def text_documents(path: str, field: str) -> Iterator[Document]:
    """Texts of `.txt` files (one document each) and `.jsonl` files (one in each line that is not blank).

    Args:
        path: as `find_files` takes it.
        field: name of the text in a `.jsonl` record.

    Raises:
        ValueError: nothing matches, or a file has an error; the message names file and line.
    """
    for file in find_files(path):
        if file.path.suffix == ".jsonl":
            yield from _jsonl_documents(file, field)
        else:
            yield Document(file.name, _decode(file.path.read_bytes().removeprefix(b"\xef\xbb\xbf"), file.path, 1))


def find_files(path: str) -> list[DataFile]:
    """The `.txt` and `.jsonl` files that a path stands for, by name.

    Args:
        path: a file, a folder (searched in full) or a glob, whose `**` stands for folders of any depth.

    Raises:
        ValueError: there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise ValueError(f"{path}: a {root.suffix or 'file without suffix'}; text is read from {_allowed()}")
        return [DataFile(root.name, root)]
    if root.is_dir():
        files = _walk(root, SUFFIXES, frozenset())
        if not files:
            raise ValueError(f"{path}: no {_allowed()} file in this folder or below")
        return files
    matches = sorted(Path(match) for match in glob.glob(str(root), recursive=True))
    if not matches:
        raise ValueError(f"{path}: no such file or folder, and as a glob it matches nothing")
    files = [match for match in matches if match.is_file() and match.suffix in SUFFIXES]
    if not files:
        raise ValueError(
            f"{path}: matches {len(matches)} paths, none of them a {_allowed()} file (first: {matches[0]})"
        )
    base = _fixed_part(root)
    return [DataFile(file.relative_to(base).as_posix(), file) for file in files]


def _fixed_part(pattern: Path) -> Path:
    """The folder that a glob's matches are named relative to: what precedes its first part with a wildcard."""
    fixed = Path()
    for part in pattern.parent.parts:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def _walk(root: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> list[DataFile]:
    """Files below `root` by name. A folder that cannot be read raises; links to folders are not followed."""
    found: list[DataFile] = []
    for folder, subfolders, files in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        paths = [Path(folder, name) for name in files if name.endswith(suffixes)]
        found += [DataFile(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(found)


def _jsonl_documents(file: DataFile, field: str) -> Iterator[Document]:
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                text = _record_text(_decode(content, file.path, number), field, f"{file.path}:{number}")
                yield Document(f"{file.name}:{number}", text)


def _record_text(line: str, field: str, place: str) -> str:
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested too deep
        raise ValueError(f"{place}: not readable as JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__}, not an object with the field {field!r}")
    if field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"{place}: no field {field!r}; fields there: {fields}; set data.field")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {field!r} is a {type(text).__name__}, not a string")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{place}: field {field!r} has half a surrogate pair, which is no character")
    return text


def _decode(data: bytes, path: Path, first_line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: not UTF-8: byte 0x{data[error.start]:02x} ({error.reason})") from error


def _raise(error: OSError) -> None:
    raise error


def _allowed() -> str:
    return " or ".join(SUFFIXES)
