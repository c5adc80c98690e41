"""Tokens are kept, made again when anything changed, and never half there."""

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.helpers import make_cache, text_data, write, write_tokenizer
from tpu_train.data import cache as cache_module
from tpu_train.data.cache import TokenCache, default_folder, tokenize
from tpu_train.data.records import BadRecord
from tpu_train.data.sources import build_sources
from tpu_train.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer

EOS = ByteTokenizer.eos_id


def tokens_of(folder: Path, tokenizer: Tokenizer | None = None, num_workers: int = 0, **changes: Any) -> TokenCache:
    config = text_data(folder, **changes)
    source, _ = build_sources(config)
    return tokenize(source, tokenizer or ByteTokenizer(), config.cache_dir, num_workers)


def documents(cache: TokenCache) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(cache.tokens), cache.ends)[:-1]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for i in range(5):
        lines = "".join(f'{{"text": "document {i}.{j} {"x" * 50 * j}"}}\n' for j in range(40))
        write(tmp_path / "data" / f"{i}.jsonl", lines)
    write(tmp_path / "data" / "e.txt", "")
    write(tmp_path / "data" / "f.txt", "text")
    return tmp_path / "data"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were filled."""
    made: list[Path] = []
    build = cache_module._build

    def counted(folder: Path, *arguments: Any) -> None:
        made.append(folder)
        build(folder, *arguments)

    monkeypatch.setattr(cache_module, "_build", counted)
    return made


def test_documents_are_in_the_order_of_the_files_and_the_empty_ones_left_out(data: Path) -> None:
    cache = tokens_of(data)
    found = documents(cache)
    assert len(found) == 5 * 40 + 1
    assert found[0] == [*b"document 0.0 ", EOS]
    assert found[-1] == [*b"text", EOS]
    assert cache.tokens.dtype == np.uint16
    assert len(set(cache.hashes.tolist())) == len(found)
    assert not cache.tokens.flags.writeable


def test_workers_make_the_same_tokens(data: Path, tmp_path: Path) -> None:
    write(data / "3.jsonl", '{"text": "a"}\n{"text": 1}\n' * 500)
    tokenizer = FileTokenizer(write_tokenizer(tmp_path))
    one, two = (tokens_of(data, tokenizer, n, cache_dir=str(tmp_path / f"{n}"), on_bad_record="skip") for n in (0, 2))
    assert one.folder.name == two.folder.name
    assert {p.name: p.read_bytes() for p in one.folder.iterdir()} == {
        p.name: p.read_bytes() for p in two.folder.iterdir()
    }
    assert one.num_skipped_records == 500


def test_tokens_are_kept_until_anything_changes(data: Path, tmp_path: Path, builds: list[Path]) -> None:
    tokens_of(data)
    assert len(builds) == 1
    tokens_of(data)
    tokens_of(data, num_workers=2)
    assert len(builds) == 1
    os.utime(data / "f.txt", ns=(1, 1))
    tokens_of(data)
    write(data / "g.txt", "g")
    tokens_of(data)
    tokens_of(data, on_bad_record="skip")
    tokens_of(data, FileTokenizer(write_tokenizer(tmp_path)))
    assert len(builds) == 5


def test_where_files_lie_does_not_change_what_the_documents_are(data: Path, tmp_path: Path) -> None:
    here = tokens_of(data)
    data.rename(tmp_path / "moved")
    there = tokens_of(tmp_path / "moved")
    assert here.content == there.content
    assert here.folder != there.folder
    write(tmp_path / "moved" / "f.txt", "tixt")
    assert tokens_of(tmp_path / "moved").content != here.content


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_bad_record_stops(data: Path, num_workers: int) -> None:
    write(data / "2.jsonl", '{"text": "a"}\n' * 9 + "{\n" + "}\n")
    write(data / "3.jsonl", "{\n")
    with pytest.raises(BadRecord, match=r"2\.jsonl:10: not JSON"):
        tokens_of(data, num_workers=num_workers)
    assert not list((data.parent / "token-cache").glob("*.tmp"))


def test_bad_records_are_skipped_counted_and_told_at_every_start(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = tokens_of(data).ends
    write(data / "2.jsonl", (data / "2.jsonl").read_text() + '{"text": 3}\n{"body": ""}\n')
    write(data / "x.jsonl.gz", b"\x1f\x8b\x08\x00")
    for _ in range(2):
        caplog.clear()
        cache = tokens_of(data, on_bad_record="skip")
        assert cache.num_skipped_records == 3
        np.testing.assert_array_equal(cache.ends, whole)
        (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
        assert record.getMessage() == (
            f"{data}: 3 records that cannot be read are skipped, the first: "
            f"{data}/2.jsonl:41: field 'text' is a int, not a string"
        )


def test_a_folder_that_cannot_be_written_is_put_aside(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "file", "")
    cache = tokens_of(data, cache_dir=str(file / "tokens"))
    assert documents(cache) == documents(tokens_of(data))
    assert f"tokens are not kept for later runs: [Errno 20] Not a directory: '{file}/tokens'" in caplog.text
    assert "set data.cache_dir" in caplog.text
    folder = cache.folder
    assert folder.is_dir()
    del cache
    assert not folder.exists()


def test_damage_is_found_and_repaired(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tokens_of(data)
    expected = documents(cache)
    for name, content in (("tokens.bin", b"1"), ("meta.json", b"{"), ("meta.json", b"{}")):
        (cache.folder / name).write_bytes(content)
        caplog.clear()
        assert documents(tokens_of(data)) == expected
        assert f"{cache.folder} is damaged; it is made again" in caplog.text
    with pytest.raises(ValueError, match=r"none: not a finished token cache: .*No such file"):
        TokenCache(data / "none")


def test_builders_at_the_same_time_build_once(data: Path, builds: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(4) as pool:
        caches = list(pool.map(lambda _: tokens_of(data), range(4)))
    assert len({cache.folder for cache in caches}) == 1
    assert len(builds) == 1


def test_without_locks_the_first_to_finish_wins(
    data: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(cache_module.fcntl, "flock", no_locks)
    with ThreadPoolExecutor(4) as pool:
        caches = list(pool.map(lambda _: tokens_of(data), range(4)))
    assert [documents(cache) for cache in caches[1:]] == [documents(caches[0])] * 3
    assert {path.name for path in caches[0].folder.parent.iterdir()} == {
        caches[0].folder.name,
        f"{caches[0].folder.name}.lock",
    }


def test_a_killed_builder_leaves_nothing_that_is_taken(data: Path) -> None:
    os.mkfifo(data / "z.txt")  # the builder has done the other files, and waits for this one
    folder = data.parent / "token-cache"
    code = (
        "import sys; from pathlib import Path; from tests.unit.data.test_cache import tokens_of; "
        "tokens_of(Path(sys.argv[1]), num_workers=1)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(data)]) as builder:
        for _ in range(1000):
            if list(folder.glob("*.tmp/*.bin")):
                break
            time.sleep(0.01)
        time.sleep(0.2)
        builder.send_signal(signal.SIGKILL)
    (partial,) = folder.glob("*.tmp")
    assert {path.name for path in partial.iterdir()} == {"tokens.bin", "ends.bin", "hashes.bin"}
    (data / "z.txt").unlink()
    key = partial.name.partition(".")[0]
    assert not (folder / key).exists()
    cache = tokens_of(data)
    assert len(cache.ends) == 201


def test_the_next_builder_removes_what_a_killed_one_left(data: Path) -> None:
    cache = tokens_of(data)
    left = cache.folder.with_name(f"{cache.folder.name}.abc.tmp")
    cache.folder.rename(left)
    (left / "meta.json").unlink()
    assert documents(tokens_of(data))
    assert not left.exists()


def test_a_source_without_documents_is_an_empty_cache(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.txt", "")
    cache = tokens_of(tmp_path / "data")
    assert (len(cache.tokens), len(cache.ends)) == (0, 0)


def test_the_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "tpu-train" / "tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, as its standard says
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "tpu-train" / "tokens"


def test_documents_begin_with_bos_if_the_tokenizer_says_so(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.txt", "the cat")
    path = write_tokenizer(tmp_path, more=["<s>"])
    write(tmp_path / "tokenizer_config.json", '{"add_bos_token": true, "bos_token": "<s>"}')
    tokenizer = FileTokenizer(path)
    (document,) = documents(tokens_of(tmp_path / "data", tokenizer))
    assert document == [1, *tokenizer.encode("the cat").tolist(), 0]


def test_a_cache_made_by_hand_is_a_cache(tmp_path: Path) -> None:
    assert documents(make_cache(tmp_path / "c", [[1, 2], [3]])) == [[1, 2], [3]]
