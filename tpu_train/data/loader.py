"""The batches of a run, made ahead of time by a thread or by processes."""

import dataclasses
from collections.abc import Iterator
from types import TracebackType

import numpy as np

from tpu_train.data.prefetch import Prefetch
from tpu_train.data.processes import ordered_map
from tpu_train.data.sequences import ALL_ROWS, Batch, TokenStream


@dataclasses.dataclass(frozen=True)
class _MakeBatch:
    stream: TokenStream
    batch_size: int
    rows: slice
    num_microbatches: int = 1

    def __call__(self, first: int) -> Batch:
        size = self.batch_size // self.num_microbatches
        firsts = range(first, first + self.batch_size, size)
        parts = [self.stream.batch_from(part, size, self.rows) for part in firsts]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Loader:
    """Iterator over consecutive batches. For one consumer; a context manager, which ends what it started."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        first_sequence: int,
        num_steps: int,
        batch_size: int,
        rows: slice = ALL_ROWS,
        num_microbatches: int = 1,
        num_workers: int = 0,
    ) -> None:
        """Starts making batches.

        Args:
            stream: what they are of; the number of workers does not change them.
            first_sequence: of the first batch: the position of the run in its data.
            num_steps: how many.
            batch_size: sequences of a batch over all hosts.
            rows: those that this host has of each microbatch; no others are read.
            num_microbatches: of a batch; divides it. A batch is made of their rows one after the other.
            num_workers: processes that make them, where they can; 0: a thread of this one.

        Raises:
            ValueError: the stream's epochs are used up before.
        """
        firsts = range(first_sequence, first_sequence + num_steps * batch_size, batch_size)
        end = stream.num_sequences
        if end is not None and num_steps and firsts[-1] >= end:
            left = max(0, end - first_sequence)
            raise ValueError(
                f"{num_steps} steps of {batch_size} sequences from sequence {first_sequence} on, and data.epochs="
                f"{stream.epochs} leaves {left} sequences, {-(-left // batch_size)} steps; set data.epochs=null or "
                "less training.steps"
            )
        num_workers = num_workers if stream.can_be_pickled else 0
        self._batches = Prefetch(
            ordered_map(_MakeBatch(stream, batch_size, rows, num_microbatches), firsts, num_workers)
        )

    @property
    def data_wait_s(self) -> float:
        """Seconds that the latest `next` waited."""
        return self._batches.data_wait_s

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Ends thread and processes; `next` then raises StopIteration."""
        self._batches.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
