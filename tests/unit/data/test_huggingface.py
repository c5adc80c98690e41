"""Data sets of the `datasets` library: saved ones, folders of files, streamed ones."""

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import huggingface_hub
import pytest

from tests.unit.data.helpers import hf_data, write
from tpu_train.config import schema
from tpu_train.data import huggingface
from tpu_train.data.huggingface import HuggingFaceSource
from tpu_train.data.packing import PackedStream
from tpu_train.data.sequences import TokenStream
from tpu_train.data.stream import build_streams
from tpu_train.data.tokenizers import ByteTokenizer

TEXTS = [f"document {i} ü" for i in range(600)]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def config(dataset: Path | str, cache: Path, **changes: Any) -> schema.HuggingFaceData:
    data = dataclasses.replace(hf_data(str(dataset)), cache_dir=str(cache), shuffle="documents")
    return dataclasses.replace(data, **changes)


def build(data: schema.HuggingFaceData) -> tuple[TokenStream, PackedStream | None]:
    return build_streams(data, ByteTokenizer(), seq_len=64, batch_size=2, seed=0, vocab_size=258)


def texts(stream: TokenStream | None) -> Counter[str]:
    """The documents of the first epoch, of a stream whose blocks are in order."""
    assert stream is not None
    tokens: list[int] = []
    while stream.blocks_per_epoch is None or len(tokens) < 64 * stream.blocks_per_epoch:
        tokens += stream.sequence(len(tokens) // 64)["tokens"].tolist()
    joined = "".join(chr(token) if token < 256 else "\n" for token in tokens).rstrip("\0")
    return Counter(joined.encode("latin-1").decode().splitlines())


def save(path: Path, values: list[Any], name: str = "text") -> Path:
    datasets.Dataset.from_dict({name: values, "id": list(range(len(values)))}).save_to_disk(str(path))
    return path


def test_a_saved_data_set_is_read(tmp_path: Path) -> None:
    stream, held_out = build(config(save(tmp_path / "d", TEXTS), tmp_path / "c"))
    assert texts(stream) == Counter(TEXTS)
    assert held_out is None


def test_saved_splits_are_read(tmp_path: Path) -> None:
    splits = {"train": TEXTS[:500], "test": TEXTS[500:]}
    dictionary = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": part}) for name, part in splits.items()}
    )
    dictionary.save_to_disk(str(tmp_path / "d"))
    stream, held_out = build(config(tmp_path / "d", tmp_path / "c", held_out_split="test", held_out_fraction=0.3))
    assert (texts(stream), texts(held_out)) == (Counter(TEXTS[:500]), Counter(TEXTS[500:]))
    with pytest.raises(ValueError, match=r"d: ValueError: no split 'dev'; it has test, train"):
        build(config(tmp_path / "d", tmp_path / "c", split="dev"))
    with pytest.raises(ValueError, match=r"no subsets, and data.subset is en"):
        build(config(tmp_path / "d", tmp_path / "c", subset="en"))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_files_is_read(tmp_path: Path, streaming: bool, num_workers: int) -> None:
    folder = tmp_path / "d"
    for name, part in {"train-0": TEXTS[:300], "train-1": TEXTS[300:500], "test": TEXTS[500:]}.items():
        datasets.Dataset.from_dict({"text": part}).to_parquet(str(folder / f"{name}.parquet"))
    shuffle = "none" if streaming else "documents"
    data = config(
        folder, tmp_path / "c", streaming=streaming, held_out_split="test", num_workers=num_workers, shuffle=shuffle
    )
    stream, held_out = build(data)
    assert (texts(stream), texts(held_out)) == (Counter(TEXTS[:500]), Counter(TEXTS[500:]))
    assert build(data)[0].fingerprint == stream.fingerprint
    kept = [path for path in (tmp_path / "c").iterdir() if path.is_dir()]
    assert len(kept) == (1 if streaming else 2)
    assert stream.batch(0, 2)["segment_ids"].shape == (2, 64)


@pytest.mark.parametrize("saved", [True, False])
def test_a_changed_data_set_is_read_again(tmp_path: Path, saved: bool) -> None:
    def put(values: list[str]) -> None:
        if saved:
            save(tmp_path / "d", values)
        else:
            datasets.Dataset.from_dict({"text": values}).to_parquet(str(tmp_path / "d" / "train.parquet"))

    for part in (TEXTS[:300], TEXTS[1:301]):
        put(part)
        assert texts(build(config(tmp_path / "d", tmp_path / "c"))[0]) == Counter(part)


def test_a_share_of_a_streamed_split_is_held_out(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(str(tmp_path / "d" / "train.parquet"))
    data = config(tmp_path / "d", tmp_path / "c", streaming=True, shuffle="none", held_out_fraction=0.1)
    stream, held_out = build(data)
    kept = texts(held_out)
    assert 30 < kept.total() < 90
    assert texts(stream) + kept == Counter(TEXTS)


def test_rows_without_text_are_named_or_skipped(tmp_path: Path) -> None:
    path = save(tmp_path / "d", [*TEXTS[:300], None, *TEXTS[300:]])
    with pytest.raises(ValueError, match=r"d:train, row 301: field 'text' is a NoneType, not a string"):
        build(config(path, tmp_path / "c"))
    stream, _ = build(config(path, tmp_path / "c", on_bad_record="skip"))
    assert (stream.num_skipped_records, texts(stream)) == (1, Counter(TEXTS))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"d:train: no field 'text'; fields there: 'body', 'id'; set data.field"):
        build(config(save(tmp_path / "d", TEXTS, "body"), tmp_path / "c"))


@pytest.mark.parametrize(("streaming", "message"), [(True, "JSON parse error"), (False, "DatasetGenerationError")])
def test_broken_files_are_named(tmp_path: Path, streaming: bool, message: str) -> None:
    write(tmp_path / "d" / "train.jsonl", '{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=rf"d:train, row 1: .*{message}"):
        build(config(tmp_path / "d", tmp_path / "c", streaming=streaming))


def test_an_error_on_the_way_is_named_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(_: object) -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in TEXTS[:300])
        raise ConnectionError("the hub\nis gone")

    monkeypatch.setattr(HuggingFaceSource, "_rows", rows)
    data = config(save(tmp_path / "d", TEXTS), tmp_path / "c")
    with pytest.raises(ValueError, match=r"d:train, row 301: ConnectionError: the hub is gone"):
        build(data)
    stream, _ = build(dataclasses.replace(data, on_bad_record="skip"))
    assert (texts(stream).total(), stream.num_skipped_records) == (300, 1)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data.dataset=.*empty: .*doesn't contain any data files"):
        build(config(tmp_path / "empty", tmp_path / "c"))
    with pytest.raises(ValueError, match=r"data.dataset=nobody/nothing: "):
        build(config("nobody/nothing", tmp_path / "c"))
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(str(tmp_path / "d" / "train.parquet"))
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"d.* split.*dev"):
            build(config(tmp_path / "d", tmp_path / "c", split="dev", streaming=streaming))


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not huggingface.is_installed()
    with pytest.raises(ValueError, match=r"data=hf needs the library datasets: pip install 'tpu-train\[hf\]'"):
        HuggingFaceSource(config("name", tmp_path), "train")
