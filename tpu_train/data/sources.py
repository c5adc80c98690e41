"""What a configuration names as data: something that can be read in chunks, and says when it has changed."""

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tpu_train.config import schema
from tpu_train.data.files import DataFile, find_files, walk
from tpu_train.data.huggingface import HuggingFaceSource
from tpu_train.data.readers import read_chunks
from tpu_train.data.records import Chunk

# Folders of the standard library that are not read: installed packages, and tests, which many distributions leave out.
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class Source(Protocol):
    """Documents somewhere.

    Attributes:
        description: for messages.
        field: name of the text field of records.
        stop_at_bad: whether a record that cannot be read ends the run.
    """

    description: str
    field: str
    stop_at_bad: bool

    def identity(self) -> Any:
        """Plain data that differs whenever what is read may differ."""
        ...

    def chunks(self) -> Iterator[Chunk]:
        """All records, in an order that is the same everywhere."""
        ...


class Beginning:
    """The first chunks of a source."""

    def __init__(self, source: Source, num_chunks: int) -> None:
        self.description, self.field, self.stop_at_bad = source.description, source.field, source.stop_at_bad
        self._source, self._num_chunks = source, num_chunks

    def identity(self) -> Any:
        """The source, and how much of it."""
        return [self._source.identity(), self._num_chunks]

    def chunks(self) -> Iterator[Chunk]:
        """The first records."""
        return itertools.islice(self._source.chunks(), self._num_chunks)


class FileSource:
    """Records of files."""

    def __init__(self, files: list[DataFile], description: str, field: str, stop_at_bad: bool) -> None:
        self.description, self.field, self.stop_at_bad = description, field, stop_at_bad
        self._files = files

    def identity(self) -> Any:
        """Names, places, sizes and times of the files."""
        return [[file.name, file.path, *file.version()] for file in self._files]

    def chunks(self) -> Iterator[Chunk]:
        """The records, file by file."""
        for file in self._files:
            yield from read_chunks(file, self.field)


def stdlib_source() -> FileSource:
    """Source files of the running Python's standard library that are UTF-8.

    Raises:
        ValueError: there are none, as in a Python packed into a zip file.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = walk(root, (".py",), STDLIB_SKIPPED) if root.is_dir() else []
    if not files:
        raise ValueError(f"data=stdlib: no .py files in {root}; use data=text data.path=...")
    return FileSource(files, "data=stdlib", "text", stop_at_bad=False)


def build_sources(
    config: schema.StdlibData | schema.TextData | schema.HuggingFaceData,
) -> tuple[Source, Source | None]:
    """The source of training data, and of validation data if that has one of its own.

    Raises:
        ValueError: there is nothing to read, or what reads it is not installed.
    """
    match config:
        case schema.StdlibData():
            return stdlib_source(), None
        case schema.TextData():
            path = config.held_out_path
            return _text_source(config.path, config), None if path is None else _text_source(path, config)
        case schema.HuggingFaceData():
            split = config.held_out_split
            return HuggingFaceSource(config, config.split), None if split is None else HuggingFaceSource(config, split)


def _text_source(path: str, config: schema.TextData) -> FileSource:
    return FileSource(find_files(path), path, config.field, config.on_bad_record == "stop")
