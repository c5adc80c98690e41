"""The loader's batches are those of the stream, whoever makes them."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.helpers import make_cache
from tpu_train.data.loader import Loader
from tpu_train.data.packing import PackedStream, Packing, Part
from tpu_train.data.sequences import SyntheticStream, TokenStream


@pytest.fixture
def stream(tmp_path: Path) -> PackedStream:
    lengths = np.random.default_rng(0).integers(1, 60, 80)
    cache = make_cache(tmp_path / "c", [list(range(length)) for length in lengths])
    return PackedStream(cache, Part(held_out=False, fraction=0.0), Packing(16, "documents", 0, True, epochs=3))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 4)])
def test_batches_do_not_depend_on_the_workers(stream: PackedStream, num_workers: int, rows: slice) -> None:
    for source, num_steps in ((stream, 12), (SyntheticStream(50, 9, seed=3), 5)):
        with Loader(
            source, first_sequence=17, num_steps=num_steps, batch_size=6, rows=rows, num_workers=num_workers
        ) as loader:
            batches = list(loader)
            assert loader.data_wait_s >= 0
        assert len(batches) == num_steps
        for i, batch in enumerate(batches):
            expected = source.batch_from(17 + 6 * i, 6, rows)
            assert list(batch) == list(expected)
            for name, array in expected.items():
                np.testing.assert_array_equal(batch[name], array)
                assert batch[name].flags.c_contiguous


@pytest.mark.parametrize("num_workers", [0, 1])
def test_leaving_early_ends_what_was_started(stream: PackedStream, num_workers: int) -> None:
    with Loader(stream, first_sequence=0, num_steps=20, batch_size=6, num_workers=num_workers) as loader:
        next(loader)
    assert list(loader) == []


def test_no_steps_are_no_batches(stream: PackedStream) -> None:
    with Loader(stream, first_sequence=0, num_steps=0, batch_size=6) as loader:
        assert list(loader) == []


def test_more_steps_than_epochs_are_refused(stream: PackedStream) -> None:
    end = stream.num_sequences
    assert end is not None
    Loader(stream, first_sequence=end - 5, num_steps=2, batch_size=4).close()
    with pytest.raises(
        ValueError, match=r"3 steps of 4 .* data.epochs=3 leaves 5 sequences, 2 steps; set data.epochs=null"
    ):
        Loader(stream, first_sequence=end - 5, num_steps=3, batch_size=4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_reaches_the_consumer(num_workers: int, tmp_path: Path) -> None:
    loader = Loader(Broken(), first_sequence=0, num_steps=3, batch_size=1, num_workers=num_workers)
    with loader, pytest.raises(OSError, match="the disk is gone"):
        list(loader)


class Broken(TokenStream):
    fingerprint = ""

    def sequence(self, index: int) -> dict[str, np.ndarray]:
        raise OSError("the disk is gone")

    def filler(self) -> dict[str, np.ndarray]:
        return {}
