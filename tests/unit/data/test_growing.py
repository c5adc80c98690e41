"""A stream that is tokenized while it is read has the same sequences whoever reads them, and ends with its reader."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tpu_train.data import growing
from tpu_train.data.growing import GrowingStream
from tpu_train.data.loader import Loader
from tpu_train.data.packing import Packing
from tpu_train.data.records import Chunk
from tpu_train.data.tokenizers import ByteTokenizer

EOS = ByteTokenizer.eos_id


class Texts:
    """A source of texts in chunks, whose reading can be watched."""

    description, field, stop_at_bad = "texts", "text", True

    def __init__(self, texts: list[Any], chunk: int = 10) -> None:
        self._texts, self._chunk = texts, chunk
        self.num_read = 0

    def identity(self) -> Any:
        return len(self._texts)

    def chunks(self) -> Iterator[Chunk]:
        for first in range(0, len(self._texts), self._chunk):
            self.num_read += 1
            yield Chunk("values", "texts", first + 1, self._texts[first : first + self._chunk])


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(growing, "WINDOW_BLOCKS", 4)
    monkeypatch.setattr(growing, "AHEAD_TOKENS", 100)
    yield
    gc.collect()
    for _ in range(500):
        if not [thread for thread in threading.enumerate() if thread.name == "tokenize"]:
            return
        time.sleep(0.01)
    raise AssertionError("a thread is left")


def stream(texts: Texts, shuffle: Any = "blocks", mask: bool = True, **options: Any) -> GrowingStream:
    packing = Packing(8, shuffle, options.get("seed", 0), mask, options.get("epochs"))
    return GrowingStream(texts, ByteTokenizer(), packing, options.get("fraction", 0.0), options.get("num_workers", 0))


def some_texts(count: int = 60) -> list[str]:
    lengths = np.random.default_rng(0).integers(1, 30, count)
    return [f"{i} " + "x" * int(length) for i, length in enumerate(lengths)]


def test_rows_are_those_of_the_documents_in_their_order() -> None:
    texts = ["abc", "", "defghij", "k"]
    rows = stream(Texts(texts), "none")
    first, second = rows.sequence(0), rows.sequence(1)
    assert first["tokens"].tolist() == [*b"abc", EOS, *b"defg"]
    assert first["labels"].tolist() == [*b"bc", EOS, -100, *b"efgh"]
    assert second["tokens"].tolist() == [*b"hij", EOS, *b"k", EOS, 0, 0]
    assert second["labels"].tolist() == [*b"ij", EOS, -100, EOS, -100, -100, -100]
    assert second["positions"].tolist() == [4, 5, 6, 7, 0, 1, 0, 1]
    assert second["segment_ids"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert rows.blocks_per_epoch == 2
    assert set(stream(Texts(texts), "none", mask=False).sequence(0)) == {"tokens", "labels"}


@pytest.mark.parametrize("shuffle", ["blocks", "documents"])
def test_every_epoch_has_every_block_once_mixed_within_windows(shuffle: str) -> None:
    in_order = stream(Texts(some_texts()), "none")
    blocks = [row.tolist() for row in epoch_of(in_order, 0)]
    mixed = stream(Texts(some_texts()), shuffle)
    epochs = [[row.tolist() for row in epoch_of(mixed, epoch)] for epoch in range(3)]
    assert blocks not in epochs
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        for first in range(0, len(blocks), 4):
            assert sorted(epoch[first : first + 4]) == sorted(blocks[first : first + 4])


def epoch_of(rows: GrowingStream, epoch: int) -> list[np.ndarray]:
    rows.batch_from(10_000, 1)  # which is far behind the end, so that the end is known
    assert rows.blocks_per_epoch is not None
    return [rows.sequence(epoch * rows.blocks_per_epoch + i)["tokens"] for i in range(rows.blocks_per_epoch)]


def test_sequences_do_not_depend_on_what_was_read_before_or_on_workers() -> None:
    one = stream(Texts(some_texts()))
    forward = [one.sequence(i)["tokens"].tolist() for i in range(150)]
    other = stream(Texts(some_texts(), chunk=7), num_workers=2)
    for i in np.random.default_rng(1).permutation(150):
        assert other.sequence(int(i))["tokens"].tolist() == forward[i]
    assert one.fingerprint == other.fingerprint != stream(Texts(some_texts()), seed=1).fingerprint


def test_no_more_is_read_than_is_asked_for_soon() -> None:
    texts = Texts(["x" * 9] * 10_000)
    rows = stream(texts)
    rows.sequence(0)
    time.sleep(0.1)
    assert texts.num_read < 5
    rows.sequence(40)
    assert texts.num_read < 20
    assert rows.blocks_per_epoch is None


def test_the_loader_reads_it_in_a_thread() -> None:
    rows = stream(Texts(some_texts()))
    with Loader(rows, first_sequence=3, num_steps=4, batch_size=5, num_workers=2) as loader:
        batches = list(loader)
    expected = [rows.batch_from(3 + 5 * i, 5) for i in range(4)]
    for batch, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch["tokens"], other["tokens"])


def test_epochs_end_with_rows_that_teach_nothing_and_then_with_an_error() -> None:
    rows = stream(Texts(["x" * 8] * 8), epochs=1)  # 72 tokens: 9 blocks
    assert (rows.batch(2, 4)["labels"].max(1) >= 0).tolist() == [True, False, False, False]
    with pytest.raises(
        ValueError, match=r"data.epochs=1 gives 9 sequences, and the run goes on to more; set data.epoc"
    ):
        rows.batch(3, 4)


def test_bad_records_end_it_where_they_are_or_are_counted() -> None:
    texts = Texts([*some_texts(), 7])
    rows = stream(texts)
    rows.sequence(0)
    with pytest.raises(ValueError, match=r"texts, row 61: field 'text' is a int, not a string"):
        rows.sequence(1000)
    texts.stop_at_bad = False
    rows = stream(texts)
    epoch_of(rows, 0)
    assert rows.num_skipped_records == 1


def test_too_little_text_is_an_error_with_the_numbers() -> None:
    rows = stream(Texts(["x" * 15]))
    rows.require(2)
    with pytest.raises(
        ValueError, match=r"texts: 16 tokens to train on, and one batch of 3 sequences .* takes 17; use"
    ):
        rows.require(3)


def test_a_share_of_the_documents_is_left_out() -> None:
    everything = {text.partition(" ")[0] for text in some_texts(400)}
    rows = stream(Texts(some_texts(400)), "none", fraction=0.25)
    tokens = np.concatenate(epoch_of(rows, 0))
    kept = {
        ByteTokenizer().decode(part).partition(" ")[0]
        for part in np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]
    }
    assert kept < everything
    assert 270 < len(kept) < 330
