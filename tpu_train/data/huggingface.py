"""Documents of the Hugging Face `datasets` library: by name, or from a local folder.

Key idea: a data set is identified by what the library prepares it from, which is known before any of it is downloaded,
so that tokens kept from an earlier run need no download at all.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_train.config import schema
from tpu_train.data.records import Chunk

CHUNK_ROWS = 256
# What `save_to_disk` leaves: of a data set, of a dictionary of splits.
SAVED_ONE, SAVED_DICT = "state.json", "dataset_dict.json"
MISSING = "data=hf needs the library datasets: pip install 'tpu-train[hf]'"


def is_installed() -> bool:
    """Whether there is the library."""
    return importlib.util.find_spec("datasets") is not None


class HuggingFaceSource:
    """The rows of one split."""

    def __init__(self, config: schema.HuggingFaceData, split: str) -> None:
        """Opens the data set, without its rows.

        Raises:
            ValueError: the library is not installed, or it finds no such data set, subset or split.
        """
        if not is_installed():
            raise ValueError(MISSING)
        self.field, self.stop_at_bad = config.field, config.on_bad_record == "stop"
        subset = f"/{config.subset}" if config.subset is not None else ""
        self.description = f"{config.dataset}{subset}:{split}"
        self._split, self._streaming = split, config.streaming
        folder = Path(config.dataset).expanduser()
        try:
            saved = _saved(folder, config.subset, split)
            self._builder: Any = None if saved is not None else _builder(config, folder)
        except Exception as error:  # its kinds are many, and of several libraries
            raise ValueError(f"data.dataset={config.dataset}: {_in_one_line(error)}") from error
        self._saved = saved
        if self._builder is not None:
            splits = self._builder.info.splits
            if splits and "[" not in split and "+" not in split and split not in splits:
                raise ValueError(f"{config.dataset} has no split {split!r}; it has {', '.join(splits)}")

    def identity(self) -> Any:
        """What the data set is prepared from, and the split."""
        if self._saved is not None:
            return ["saved", _versions(self._saved)]
        builder = self._builder
        version = str(builder.config.version)
        return ["prepared", builder.dataset_name, builder.config_id, version, builder.hash, self._split]

    def chunks(self) -> Iterator[Chunk]:
        """The rows in order."""
        first = 1
        part: list[Any] = []
        try:
            for row in self._rows():
                part.append(row[self.field])
                if len(part) == CHUNK_ROWS:
                    yield Chunk("values", self.description, first, part)
                    first, part = first + len(part), []
            error = None
        except Exception as caught:  # of whatever reads the data set
            error = caught
        if part:
            yield Chunk("values", self.description, first, part)
        if error is not None:
            place = f"{self.description}, row {first + len(part)}"
            message = str(error) if isinstance(error, _NoField) else f"{place}: {_in_one_line(error)}"
            yield Chunk("error", self.description, first + len(part), message)

    def _rows(self) -> Any:
        """The rows, of the one field where it is known which there are.

        Raises:
            _NoField: the field is not one of them.
        """
        import datasets

        if self._saved is not None:
            rows: Any = datasets.load_from_disk(str(self._saved))
        elif self._streaming:
            rows = self._builder.as_streaming_dataset(split=self._split)
        else:
            self._builder.download_and_prepare()
            rows = self._builder.as_dataset(split=self._split)
        if rows.column_names is None:
            return rows
        if self.field not in rows.column_names:
            there = ", ".join(map(repr, rows.column_names)) or "none"
            raise _NoField(f"{self.description}: no field {self.field!r}; fields there: {there}; set data.field")
        return rows.select_columns([self.field])


class _NoField(Exception):
    """A data set does not have the text field."""


def _saved(folder: Path, subset: str | None, split: str) -> Path | None:
    """The folder of a split that `save_to_disk` wrote; None: the data set is of another kind."""
    if (folder / SAVED_ONE).is_file():
        found = folder
    elif (folder / SAVED_DICT).is_file():
        found = folder / split
        if not (found / SAVED_ONE).is_file():
            splits = ", ".join(sorted(path.parent.name for path in folder.glob(f"*/{SAVED_ONE}"))) or "none"
            raise ValueError(f"no split {split!r}; it has {splits}")
    else:
        return None
    if subset is not None:
        raise ValueError(f"a folder that save_to_disk wrote has no subsets, and data.subset is {subset}")
    return found


def _versions(folder: Path) -> list[Any]:
    statuses = sorted((path.name, os.stat(path)) for path in folder.iterdir())
    return [str(folder), *((name, status.st_size, status.st_mtime_ns) for name, status in statuses)]


def _builder(config: schema.HuggingFaceData, folder: Path) -> Any:
    import datasets

    name = str(folder) if folder.exists() else config.dataset
    return datasets.load_dataset_builder(name, config.subset)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
