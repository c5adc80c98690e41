"""Tokenized documents on disk, kept for later runs.

Key idea: a cache is a folder named by a hash of all that determines what is in it, filled under another name and
renamed at the end, so it is there in full or not at all. Its files are mapped into memory, not read.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from tpu_train.data.documents import Tokenize, Tokenized, token_dtype
from tpu_train.data.processes import ordered_map
from tpu_train.data.records import BadRecord
from tpu_train.data.sources import Source
from tpu_train.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)

META = "meta.json"
# The modules whose code determines what is in a cache.
CODE = (
    "cache.py",
    "documents.py",
    "files.py",
    "huggingface.py",
    "readers.py",
    "records.py",
    "sources.py",
    "tokenizers.py",
)
PROGRESS_SECONDS = 30


class TokenCache:
    """The documents of a data set, in the order of its files. A pickled one is its folder's name.

    Attributes:
        folder: where it is.
        tokens: of all documents, one after the other, [n] unsigned.
        ends: where each document ends in `tokens`, [d] int64.
        hashes: of each document's text, [d] uint64.
        num_skipped_records: that could not be read.
        first_skipped: what is wrong with the first of them.
        content: differs between caches of different documents or another tokenizer, wherever they were read from.
    """

    def __init__(self, folder: Path, temporary: bool = False) -> None:
        """Maps the files.

        Args:
            folder: a finished cache.
            temporary: whether it is removed when it is used no more.

        Raises:
            ValueError: it is not a finished cache.
        """
        self.folder = folder
        try:
            meta = json.loads((folder / META).read_bytes())
            self.tokens = _map(folder / "tokens.bin", meta["dtype"], meta["num_tokens"])
            self.ends = _map(folder / "ends.bin", "int64", meta["num_documents"])
            self.hashes = _map(folder / "hashes.bin", "uint64", meta["num_documents"])
            self.num_skipped_records: int = meta["num_skipped"]
            self.first_skipped: str = meta["first_skipped"]
            self.content: str = meta["content"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder}: not a finished token cache: {error}") from error
        if temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def __reduce__(self) -> tuple[type["TokenCache"], tuple[Path]]:
        return TokenCache, (self.folder,)


class CacheWriter:
    """Writes a cache into an empty folder, piece by piece."""

    def __init__(self, folder: Path, dtype: np.dtype, tokenizer_identity: str) -> None:
        self._folder, self._dtype = folder, dtype
        self._files = [(folder / name).open("wb") for name in ("tokens.bin", "ends.bin", "hashes.bin")]
        self.num_tokens = self.num_documents = self.num_skipped = 0
        self._first_skipped = ""
        self._content = hashlib.blake2b(tokenizer_identity.encode(), digest_size=16)

    def add(self, piece: Tokenized) -> None:
        """Appends documents."""
        ends = self.num_tokens + np.cumsum(piece.lengths)
        for file, array in zip(self._files, (piece.tokens, ends, piece.hashes), strict=True):
            file.write(array.tobytes())
        self._content.update(ends.tobytes())
        self._content.update(piece.hashes.tobytes())
        self.num_tokens += len(piece.tokens)
        self.num_documents += len(ends)
        if piece.num_bad and not self.num_skipped:
            self._first_skipped = piece.first_bad
        self.num_skipped += piece.num_bad

    def finish(self) -> None:
        """Makes it a cache."""
        self.close()
        meta = {
            "dtype": self._dtype.name,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_skipped": self.num_skipped,
            "first_skipped": self._first_skipped,
            "content": self._content.hexdigest(),
        }
        (self._folder / META).write_text(json.dumps(meta))

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()


def tokenize(source: Source, tokenizer: Tokenizer, cache_dir: str | None, num_workers: int) -> TokenCache:
    """The tokens of a source: kept from an earlier run, or made now.

    Args:
        source: the documents.
        tokenizer: their tokens.
        cache_dir: folder of the caches; None: `default_folder()`. One that cannot be written to is put aside for a
            temporary one.
        num_workers: processes that tokenize; 0: this one.

    Raises:
        ValueError: a record cannot be read and the source does not skip it.
    """
    parent = Path(cache_dir).expanduser() if cache_dir is not None else default_folder()
    key = _key(source, tokenizer)

    def build(folder: Path) -> None:
        _build(folder, source, tokenizer, num_workers)

    cache = _kept(parent / key)
    if cache is None:
        reason = _not_writable(parent)
        if reason is None:
            cache = _keep(parent, key, build)
        else:
            log.warning("tokens are not kept for later runs: %s; set data.cache_dir", reason)
            cache = _temporary(build)
        log.info(
            "%s: %s documents, %s tokens, in %s",
            source.description, f"{len(cache.ends):,}", f"{len(cache.tokens):,}", cache.folder,
        )  # fmt: skip
    if cache.num_skipped_records:
        log.warning(
            "%s: %d records that cannot be read are skipped, the first: %s",
            source.description, cache.num_skipped_records, cache.first_skipped,
        )  # fmt: skip
    return cache


def default_folder() -> Path:
    """`tpu-train/tokens` in the user's cache folder."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(configured) if os.path.isabs(configured) else Path("~/.cache").expanduser()  # as its standard has it
    return home / "tpu-train" / "tokens"


def _key(source: Source, tokenizer: Tokenizer) -> str:
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for name in CODE:
        digest.update((here / name).read_bytes())
    versions = metadata.version("tokenizers")
    parts = [source.identity(), source.field, source.stop_at_bad, tokenizer.identity, tokenizer.vocab_size, versions]
    digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


def _not_writable(folder: Path) -> str | None:
    """Why no folder can be made in a folder; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(suffix=".tmp", dir=folder)).rmdir()
    except OSError as error:
        return str(error)
    return None


def _temporary(build: Callable[[Path], None]) -> TokenCache:
    folder = Path(tempfile.mkdtemp(prefix="tpu-train-tokens-"))
    try:
        build(folder)
        return TokenCache(folder, temporary=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _kept(folder: Path) -> TokenCache | None:
    try:
        return TokenCache(folder) if folder.is_dir() else None
    except ValueError:
        return None


def _keep(parent: Path, key: str, build: Callable[[Path], None]) -> TokenCache:
    """Builds a cache under a lock; whoever waited for it takes what the other one made."""
    with _locked(parent / f"{key}.lock") as alone:
        cache = _kept(parent / key)
        if cache is not None:
            return cache
        if (parent / key).is_dir():  # only what came from outside can have damaged it
            log.warning("%s is damaged; it is made again", parent / key)
            shutil.rmtree(parent / key)
        if alone:  # then these are of builders that were killed
            for left in parent.glob(f"{key}.*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".tmp", dir=parent))
        try:
            build(partial)
            try:
                partial.rename(parent / key)
            except OSError:  # not alone, and the other one was faster
                if not (parent / key).is_dir():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return TokenCache(parent / key)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock that ends with the process. Gives whether it could be had: not every file system has locks."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that makes the same tokens (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


def _build(folder: Path, source: Source, tokenizer: Tokenizer, num_workers: int) -> None:
    told = time.monotonic()
    dtype = token_dtype(tokenizer)
    writer = CacheWriter(folder, dtype, tokenizer.identity)
    function = Tokenize(tokenizer, source.field, source.stop_at_bad)
    results = ordered_map(function, source.chunks(), num_workers)
    with contextlib.closing(writer), contextlib.closing(results) as pieces:
        for piece in pieces:
            if piece.num_bad and source.stop_at_bad:
                raise BadRecord(piece.first_bad)
            writer.add(piece)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                log.info("%s: %s tokens so far", source.description, f"{writer.num_tokens:,}")
        writer.finish()


def _map(path: Path, dtype: str, count: int) -> np.ndarray:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
