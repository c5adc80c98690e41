"""The files of a data set: found by path, folder, glob or URL, in an order that is the same everywhere.

Key idea: a file has a name relative to its data set, so that the order does not depend on where the files lie.
"""

import glob
import os
from pathlib import Path
from typing import IO, Any, NamedTuple

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


class DataFile(NamedTuple):
    """A file of a data set.

    Attributes:
        name: relative to the data set, with `/`.
        path: where it is; a URL for files that fsspec opens.
        remote: fsspec's file system and the path on it; None: a local file.
    """

    name: str
    path: str
    remote: tuple[Any, str] | None = None

    def open(self) -> IO[bytes]:
        """The file, to read."""
        if self.remote is None:
            return open(self.path, "rb")
        system, path = self.remote
        return system.open(path, "rb")

    def version(self) -> list[Any]:
        """What changes with the content: size and time of a local file, whatever a file system has of others."""
        if self.remote is None:
            status = os.stat(self.path)
            return [status.st_size, status.st_mtime_ns]
        system, path = self.remote
        return [system.ukey(path)]


def is_url(path: str) -> bool:
    """Whether fsspec opens a path."""
    return "://" in path


def find_files(path: str) -> list[DataFile]:
    """The files that a path stands for, by name.

    Args:
        path: a file, a folder (searched in full) or a glob, whose `**` stands for folders of any depth; local or a URL.

    Raises:
        ValueError: there are none, or the URL cannot be used.
    """
    return _find_remote(path) if is_url(path) else _find_local(path)


def walk(root: Path, suffixes: tuple[str, ...], skipped: frozenset[str] = frozenset()) -> list[DataFile]:
    """Files below `root` by name. A folder that cannot be read raises; links to folders are not followed."""
    found: list[DataFile] = []
    for folder, subfolders, files in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        paths = [Path(folder, name) for name in files if name.endswith(suffixes)]
        found += [DataFile(path.relative_to(root).as_posix(), str(path)) for path in paths]
    return sorted(found)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path on it.

    Raises:
        ValueError: there is no such kind of URL, or its library is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # fsspec says which library
        raise ValueError(f"{url}: {error}") from error


def _find_local(path: str) -> list[DataFile]:
    root = Path(path).expanduser()
    if root.is_file():
        _check_suffix(path, root.name)
        return [DataFile(root.name, str(root))]
    if root.is_dir():
        return _some(walk(root, SUFFIXES), path)
    matches = sorted(Path(match) for match in glob.glob(str(root), recursive=True))
    files = [match for match in matches if match.is_file() and match.name.endswith(SUFFIXES)]
    _check_matches(path, [str(match) for match in matches], bool(files))
    base = Path(_fixed_part(root.parent.parts))
    return [DataFile(file.relative_to(base).as_posix(), str(file)) for file in files]


def _find_remote(url: str) -> list[DataFile]:
    system, path = file_system(url)
    if system.isfile(path):
        _check_suffix(url, path)
        return [DataFile(path.rpartition("/")[2], url, (system, path))]
    if system.isdir(path):
        return _some(_remote(system, system.find(path), path), url)
    matches = sorted(system.glob(path))
    files = [match for match in matches if match.endswith(SUFFIXES) and system.isfile(match)]
    _check_matches(url, matches, bool(files))
    parts = path.split("/")[:-1]
    return _remote(system, files, "/".join(parts[: _num_fixed(parts)]))


def _remote(system: Any, paths: list[str], base: str) -> list[DataFile]:
    files = (path for path in paths if path.endswith(SUFFIXES))
    named = ((path.removeprefix(base).lstrip("/"), path) for path in files)
    return sorted(DataFile(name, system.unstrip_protocol(path), (system, path)) for name, path in named)


def _fixed_part(parts: tuple[str, ...]) -> str:
    """The folder that a glob's matches are named relative to: what precedes its first part with a wildcard."""
    return os.path.join("", *parts[: _num_fixed(parts)])


def _num_fixed(parts: tuple[str, ...] | list[str]) -> int:
    return next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))


def _check_suffix(path: str, name: str) -> None:
    if not name.endswith(SUFFIXES):
        suffix = Path(name).suffix
        what = f"a {suffix}" if suffix else "a file without suffix"
        raise ValueError(f"{path}: {what}; text is read from {_allowed()}")


def _check_matches(path: str, matches: list[str], usable: bool) -> None:
    if not matches:
        raise ValueError(f"{path}: no such file or folder, and as a glob it matches nothing")
    if not usable:
        raise ValueError(
            f"{path}: matches {len(matches)} paths, none of them a {_allowed()} file (first: {matches[0]})"
        )


def _some(files: list[DataFile], path: str) -> list[DataFile]:
    if not files:
        raise ValueError(f"{path}: no {_allowed()} file in this folder or below")
    return files


def _raise(error: OSError) -> None:
    raise error


def _allowed() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
