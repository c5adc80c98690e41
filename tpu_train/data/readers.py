"""Data files cut into chunks of whole records.

Key idea: bytes are cut at newlines only, and not looked into: what Python calls a line break inside a text is text. An
error of a file ends its chunks and is itself a chunk, so that it is told in its turn.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from tpu_train.data.files import DataFile
from tpu_train.data.records import Chunk

PIECE_BYTES = 1 << 20
COMPRESSED_PIECE_BYTES = 1 << 16  # may become a thousand times as much
CHUNK_ROWS = 256


def read_chunks(file: DataFile, field: str) -> Iterator[Chunk]:
    """The records of a file, in order; of a broken file those before the break, then a chunk of kind `error`.

    Args:
        file: its kind is its suffix; one that is not known is text.
        field: column of a Parquet file.

    Raises:
        OSError: it cannot be opened or read.
    """
    with file.open() as stream:
        if file.name.endswith(".parquet"):
            yield from _parquet_chunks(stream, file.path, field)
        elif file.name.endswith(".jsonl"):
            yield from _line_chunks(_pieces(stream, PIECE_BYTES), file.path)
        elif file.name.endswith(".jsonl.gz"):
            yield from _line_chunks(_decompress(stream, _Gzip), file.path)
        elif file.name.endswith(".jsonl.zst"):
            yield from _line_chunks(_decompress(stream, _zstd()), file.path)
        else:
            yield Chunk("text", file.path, 1, stream.read())


class _Broken(Exception):
    """The rest of a file cannot be read."""


def _line_chunks(pieces: Iterator[bytes], path: str) -> Iterator[Chunk]:
    first = 1
    pending: list[bytes] = []  # of the line that is not at its end
    try:
        for piece in pieces:
            end = piece.rfind(b"\n") + 1
            if end:
                data = b"".join([*pending, piece[:end]])
                yield Chunk("lines", path, first, data)
                first += data.count(b"\n")
                pending.clear()
            pending.append(piece[end:])
    except _Broken as error:
        yield Chunk("error", path, first, f"{path}:{first}: {error}")
        return
    if rest := b"".join(pending):
        yield Chunk("lines", path, first, rest)


def _pieces(stream: IO[bytes], size: int) -> Iterator[bytes]:
    while piece := stream.read(size):
        yield piece


class _Gzip:
    name = "gzip"
    error = zlib.error

    @staticmethod
    def start() -> Any:
        return zlib.decompressobj(31)  # 31: with gzip's header and checksum


def _zstd() -> Any:
    import zstandard

    class Zstd:
        name = "zstd"
        error = zstandard.ZstdError
        start: Callable[[], Any] = zstandard.ZstdDecompressor().decompressobj

    return Zstd


def _decompress(stream: IO[bytes], kind: Any) -> Iterator[bytes]:
    """Content of a file of one or more members, one after the other.

    Raises:
        _Broken: it ends within a member, or is not of this kind.
    """
    member = None
    for piece in _pieces(stream, COMPRESSED_PIECE_BYTES):
        rest = piece
        while rest:
            if member is None:
                rest = rest.lstrip(b"\0") if kind is _Gzip else rest  # padding between members, as gzip allows
                if not rest:
                    break
                member = kind.start()
            try:
                data = member.decompress(rest)
            except kind.error as error:
                raise _Broken(f"not readable as {kind.name}: {error}") from error
            if data:
                yield data
            rest = b""
            if member.eof:
                rest, member = member.unused_data, None
    if member is not None:
        raise _Broken(f"the {kind.name} file ends too early; it is truncated")


def _parquet_chunks(stream: IO[bytes], path: str, field: str) -> Iterator[Chunk]:
    import pyarrow
    from pyarrow import parquet

    row = 1
    try:
        with parquet.ParquetFile(stream) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                names = ", ".join(map(repr, schema.names)) or "none"
                message = f"{path}: no column {field!r}; columns there: {names}; set data.field"
                yield Chunk("error", path, row, message)
                return
            for batch in file.iter_batches(CHUNK_ROWS, columns=[field]):
                yield Chunk("values", path, row, _plain(batch.column(0)))
                row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:  # an OSError is what it raises for broken pages, too
        message = " ".join(str(error).split())
        yield Chunk("error", path, row, f"{path}, row {row}: not readable as Parquet: {message}")


def _plain(column: Any) -> list[Any]:
    """Values of an Arrow array; strings as bytes, which are not checked to be UTF-8 yet."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string(column.type):
        column = column.view("binary")
    elif types.is_large_string(column.type):
        column = column.view("large_binary")
    return column.to_pylist()
