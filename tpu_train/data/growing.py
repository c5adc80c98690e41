"""A stream whose documents are tokenized while the run reads it, for data too large to be tokenized beforehand.

Key idea: documents are in the order in which they arrive, so the tokens of a block are known as soon as they are there,
and whoever asks for a later block waits for it. The order of blocks is mixed within windows, which need no more than
their own tokens. What has arrived is in a file without a name, which ends with the run however that ends.
"""

import array
import bisect
import contextlib
import os
import tempfile
import threading
import weakref

import numpy as np

from tpu_train.data.documents import Tokenize, Tokenized, token_dtype
from tpu_train.data.packing import Packing, filler_row, hash_limit, pack_row, permutation
from tpu_train.data.processes import ordered_map
from tpu_train.data.records import BadRecord
from tpu_train.data.sequences import ALL_ROWS, Batch, Row, TokenStream, fingerprint
from tpu_train.data.sources import Source
from tpu_train.data.tokenizers import Tokenizer

WINDOW_BLOCKS = 256
AHEAD_TOKENS = 1 << 24  # made before they are asked for, at most


class GrowingStream(TokenStream):
    """Blocks of documents in the order of their arrival; `blocks_per_epoch` is known once all have arrived.

    `shuffle` of `documents` or `blocks` mixes the blocks within each window of 256, in another order in each epoch.
    A run that goes on from a position tokenizes what is before it again.
    """

    can_be_pickled = False

    def __init__(
        self, source: Source, tokenizer: Tokenizer, packing: Packing, held_out_fraction: float, num_workers: int
    ) -> None:
        """Starts tokenizing.

        Args:
            source: the documents.
            tokenizer: their tokens.
            packing: how they become sequences.
            held_out_fraction: share of the documents that is left out, by hash.
            num_workers: processes that tokenize; 0: a thread of this one.
        """
        self._source, self._packing = source, packing
        self.epochs = packing.epochs
        self.fingerprint = fingerprint(
            "growing", repr(source.identity()), source.field, tokenizer.identity, repr(held_out_fraction),
            packing.seq_len, packing.shuffle, packing.seed, WINDOW_BLOCKS,
        )  # fmt: skip
        self._dtype = token_dtype(tokenizer)
        self._arrived = _Arrived(self._dtype, hash_limit(held_out_fraction))
        function = Tokenize(tokenizer, source.field, source.stop_at_bad)
        arguments = (self._arrived, source, function, num_workers)
        thread = threading.Thread(target=_produce, args=arguments, name="tokenize", daemon=True)
        weakref.finalize(self, _stop, self._arrived, thread)  # at the end of the program, too
        thread.start()

    @property
    def num_skipped_records(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Records so far that could not be read."""
        return self._arrived.num_skipped

    def require(self, batch_size: int) -> None:
        """Waits for the tokens of one batch.

        Raises:
            ValueError: there are not as many.
        """
        needed = (batch_size - 1) * self._packing.seq_len + 1
        found = self._arrived.wait(needed)
        if found < needed:
            raise ValueError(
                f"{self._source.description}: {found:,} tokens to train on, and one batch of {batch_size} sequences of "
                f"{self._packing.seq_len} tokens takes {needed:,}; use more text, a smaller batch or a smaller "
                "training.seq_len"
            )

    def batch_from(self, first: int, batch_size: int, rows: slice = ALL_ROWS) -> Batch:
        """The batch of sequences `first` to `first` + B - 1.

        Raises:
            ValueError: the epochs are used up.
        """
        if self._place(first) is None:
            raise ValueError(
                f"data.epochs={self.epochs} gives {self.num_sequences} sequences, and the run goes on to more; set "
                "data.epochs=null or less training.steps"
            )
        return super().batch_from(first, batch_size, rows)

    def sequence(self, index: int) -> Row:
        """Sequence `index`; waits until it is there."""
        block = self._place(index)
        if block is None:
            return self.filler()
        seq_len = self._packing.seq_len
        first = block * seq_len
        tokens, starts, ends = self._arrived.read(first, seq_len + 1)
        counts = np.minimum(ends, first + len(tokens)) - np.maximum(starts, first)
        positions = np.arange(first, first + len(tokens)) - np.repeat(starts, counts)
        return pack_row(tokens, positions, counts, seq_len, self._packing.document_mask)

    def filler(self) -> Row:
        """A sequence whose labels are all ignored."""
        return filler_row(self._packing.seq_len, self._packing.document_mask)

    def _place(self, index: int) -> int | None:
        """The block that a sequence is; None: it is after the last epoch."""
        seq_len = self._packing.seq_len
        epoch, position, window = 0, index, index // WINDOW_BLOCKS
        if self.blocks_per_epoch is None:
            end = (window + 1) * WINDOW_BLOCKS * seq_len + 1  # of the window, and the last label
            found = self._arrived.wait(end)
            if found < end:  # then these are all
                self.blocks_per_epoch = -(-found // seq_len)
        size = WINDOW_BLOCKS
        if self.blocks_per_epoch is not None:
            epoch, position = divmod(index, self.blocks_per_epoch)
            if self.epochs is not None and epoch >= self.epochs:
                return None
            window = position // WINDOW_BLOCKS
            size = min(WINDOW_BLOCKS, self.blocks_per_epoch - window * WINDOW_BLOCKS)
        if self._packing.shuffle == "none":
            return position
        seed = np.random.SeedSequence([self._packing.seed, epoch]).generate_state(1)[0]
        order = permutation(size, int(seed), window)
        return window * WINDOW_BLOCKS + int(order[position % WINDOW_BLOCKS])


class _Arrived:
    """Tokens that have arrived, in a file, and where documents end in it. One thread adds, any may read."""

    def __init__(self, dtype: np.dtype, limit: np.uint64) -> None:
        self._dtype, self._limit = dtype, limit
        self._file = tempfile.TemporaryFile(prefix="tpu-train-tokens-")  # noqa: SIM115
        self._ends = array.array("q")
        self._changed = threading.Condition()
        self._num_tokens = self._wanted = 0
        self._complete = self._stopped = False
        self._error: BaseException | None = None
        self.num_skipped = 0

    def wait(self, num_tokens: int) -> int:
        """Waits for so many tokens, or for the last; returns how many there are."""
        with self._changed:
            self._wanted = max(self._wanted, num_tokens)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_tokens >= num_tokens or self._complete or self._error is not None)
            if self._num_tokens < num_tokens and self._error is not None:
                raise self._error
            return self._num_tokens

    def read(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Up to `count` tokens that are there, and where each document of them starts and ends."""
        with self._changed:
            last = min(first + count, self._num_tokens) - 1
            low = bisect.bisect_right(self._ends, first)
            high = bisect.bisect_right(self._ends, last)
            ends = np.array(self._ends[low : high + 1], np.int64)
            start = self._ends[low - 1] if low else 0
        size = self._dtype.itemsize
        data = os.pread(self._file.fileno(), (last + 1 - first) * size, first * size)
        return np.frombuffer(data, self._dtype), np.append(start, ends[:-1]), ends

    def add(self, piece: Tokenized) -> bool:
        """Takes documents; waits if there are more than enough. Returns whether more are wanted."""
        keep = piece.hashes >= self._limit
        tokens = piece.tokens[np.repeat(keep, piece.lengths)]
        self._file.write(tokens.tobytes())
        self._file.flush()
        with self._changed:
            self._ends.extend((self._num_tokens + np.cumsum(piece.lengths[keep])).tolist())
            self._num_tokens += len(tokens)
            self.num_skipped += piece.num_bad
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._num_tokens < self._wanted + AHEAD_TOKENS)
            return not self._stopped

    def end(self, error: BaseException | None) -> None:
        """There is no more."""
        with self._changed:
            self._complete, self._error = error is None, error
            self._changed.notify_all()

    def stop(self) -> None:
        """No more is wanted."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Removes the file."""
        self._file.close()


def _produce(arrived: _Arrived, source: Source, function: Tokenize, num_workers: int) -> None:
    """Body of the thread. It does not hold the stream."""
    error = None
    try:
        with contextlib.closing(ordered_map(function, source.chunks(), num_workers)) as pieces:
            for piece in pieces:
                if piece.num_bad and source.stop_at_bad:
                    raise BadRecord(piece.first_bad)
                if not arrived.add(piece):
                    break
    except BaseException as caught:  # whatever it is, the reader must hear of it
        error = caught
    arrived.end(error)


def _stop(arrived: _Arrived, thread: threading.Thread) -> None:
    arrived.stop()
    thread.join(timeout=10)
    if not thread.is_alive():
        arrived.close()
