"""Records of files of each kind, and the place of what cannot be read."""

import gzip
import json
import zlib
from pathlib import Path

import pytest
import zstandard

from tests.unit.data.helpers import write
from tpu_train.data import readers
from tpu_train.data.files import find_files
from tpu_train.data.readers import read_chunks
from tpu_train.data.records import BadRecord, read_texts

GOOD = b'{"text": "good"}\n'
COMPRESS = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}


def read(path: Path, field: str = "text") -> list[str | BadRecord]:
    return [
        text
        for file in find_files(str(path))
        for chunk in read_chunks(file, field)
        for text in read_texts(chunk, field)
    ]


def messages(path: Path, field: str = "text") -> list[str]:
    """The texts, and the messages of what cannot be read without the folder."""
    return [str(text).removeprefix(f"{path.parent}/") for text in read(path, field)]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntw\xc3\xb6 \xe2\x80\xa8")
    assert read(path) == ["one\r\n\r\ntwö \u2028"]
    assert read(write(path, "")) == [""]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_json_line_is_one_document(tmp_path: Path, suffix: str) -> None:
    lines = ['\ufeff{"text": "a\\nb"}', "", "  \r", '{"text": "x\u2028y", "id": 3}\r']
    lines += ['{"text": "\\ud83c\\udf89"}', '{"text": ""}']  # no newline at the end
    path = write(tmp_path / f"a{suffix}", COMPRESS[suffix]("\n".join(lines).encode()))
    assert read(path) == ["a\nb", "x\u2028y", "🎉", ""]
    write(path, COMPRESS[suffix](b'{"body": "b"}\n'))
    assert read(path, "body") == ["b"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_lines_are_whole_wherever_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, piece: int
) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", piece)
    monkeypatch.setattr(readers, "COMPRESSED_PIECE_BYTES", piece)
    texts = [f"line {i} " + "ü" * (50 * i) for i in range(20)]
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    path = write(tmp_path / f"a{suffix}", COMPRESS[suffix](b"\n".join([*lines, b"{"])))
    assert messages(path) == [
        *texts,
        f"a{suffix}:21: not JSON: Expecting property name enclosed in double quotes at column 2",
    ]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_empty_files_have_no_documents(tmp_path: Path, suffix: str) -> None:
    assert read(write(tmp_path / f"a{suffix}", COMPRESS[suffix](b""))) == []
    assert read(write(tmp_path / f"a{suffix}", b"")) == []
    assert read(write(tmp_path / f"a{suffix}", COMPRESS[suffix](b"\n \n"))) == []


@pytest.mark.parametrize(("suffix", "padding"), [(".jsonl.gz", b"\0" * 10), (".jsonl.zst", b"")])
def test_compressed_files_may_have_several_members(tmp_path: Path, suffix: str, padding: bytes) -> None:
    members = [COMPRESS[suffix](b'{"text": "a"}\n{"te'), COMPRESS[suffix](b""), COMPRESS[suffix](b'xt": "b"}'), padding]
    assert read(write(tmp_path / f"a{suffix}", b"".join(members))) == ["a", "b"]


def test_a_very_long_line_is_a_document(tmp_path: Path) -> None:
    text = "long " * 1_000_000
    path = write(tmp_path / "a.jsonl", GOOD + json.dumps({"text": text}).encode() + b"\n" + GOOD)
    assert read(path) == ["good", text, "good"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not readable as JSON: Exceeds the limit"),
        (b"[" * 100_000, "not readable as JSON: maximum recursion depth"),
        (b'["a"]', "a list, not an object with the field 'text'"),
        (b'{"body": "a", "id": 1}', "no field 'text'; fields there: 'body', 'id'; set data.field"),
        (b"{}", "no field 'text'; fields there: none"),
        (b'{"text": null}', "field 'text' is a NoneType, not a string"),
        (b'{"text": "\\ud800"}', "field 'text' has half a surrogate pair"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff (invalid start byte)"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line_and_the_others_are_read(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = write(tmp_path / "bad.jsonl", GOOD + b"\n" + line + b"\n" + GOOD)
    before, bad, after = messages(path)
    assert (before, after) == ("good", "good")
    assert bad.startswith(f"bad.jsonl:3: {message}")


def test_bad_utf8_in_text_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.txt", b"a\nb\n\xc3(")
    assert messages(path) == ["bad.txt:3: not UTF-8: byte 0xc3 (invalid continuation byte)"]


@pytest.mark.parametrize(("suffix", "name"), [(".jsonl.gz", "gzip"), (".jsonl.zst", "zstd")])
def test_a_truncated_file_gives_its_lines_and_says_so(tmp_path: Path, suffix: str, name: str) -> None:
    content = b"".join(
        b'{"text": "%d %s"}\n' % (i, zlib.crc32(b"%d" % i).to_bytes(4).hex().encode()) for i in range(9999)
    )
    whole = COMPRESS[suffix](content)
    path = write(tmp_path / f"a{suffix}", whole[: len(whole) // 2])
    *texts, bad = messages(path)
    assert texts == [json.loads(line)["text"] for line in content.splitlines()[: len(texts)]]
    assert bad == f"a{suffix}:{len(texts) + 1}: the {name} file ends too early; it is truncated"
    path.write_bytes(whole[:-1])
    assert messages(path)[-1].endswith("it is truncated")


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        (".jsonl.gz", "1: not readable as gzip: Error -3 while decompressing data: incorrect header check"),
        (".jsonl.zst", "1: not readable as zstd: zstd decompressor error: Unknown frame descriptor"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, suffix: str, message: str) -> None:
    assert messages(write(tmp_path / f"a{suffix}", GOOD)) == [f"a{suffix}:{message}"]


def test_a_wrong_checksum_is_an_error(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(GOOD))
    content[-6] ^= 1
    (bad,) = messages(write(tmp_path / "a.jsonl.gz", bytes(content)))
    assert bad == "a.jsonl.gz:1: not readable as gzip: Error -3 while decompressing data: incorrect data check"
