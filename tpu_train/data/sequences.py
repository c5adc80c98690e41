"""The numbered sequences that a run reads, and the batches made of them.

Key idea: sequence i is a pure function of data configuration, seed and i, so the position of a run in its data is one
integer, and no two readers need to agree on anything else.
"""

import abc
import hashlib
import math

import numpy as np

Row = dict[str, np.ndarray]
Batch = dict[str, np.ndarray]

IGNORED_LABEL = -100
ALL_ROWS = slice(None)


class TokenStream(abc.ABC):
    """Sequences, numbered from 0, epoch after epoch.

    Attributes:
        blocks_per_epoch: sequences of one pass over the data; None: there are no passes.
        epochs: passes that may be taken; None: any number.
        fingerprint: equal for two streams whose sequences are the same tokens in the same order.
        num_skipped_records: records of the data that could not be read.
        can_be_pickled: whether other processes can make its batches.
    """

    blocks_per_epoch: int | None = None
    epochs: int | None = None
    fingerprint: str
    num_skipped_records: int = 0
    can_be_pickled: bool = True

    @abc.abstractmethod
    def sequence(self, index: int) -> Row:
        """Sequence `index`, whatever was asked for before: arrays [S] int32 by name, as in `batch`."""

    @abc.abstractmethod
    def filler(self) -> Row:
        """A sequence whose labels are all ignored."""

    @property
    def num_sequences(self) -> int | None:
        """Sequences of all epochs that may be taken; None: any number."""
        if self.blocks_per_epoch is None or self.epochs is None:
            return None
        return self.blocks_per_epoch * self.epochs

    def max_steps(self, batch_size: int) -> int | None:
        """Batches of all epochs that may be taken, the last one filled up; None: any number."""
        return None if self.num_sequences is None else math.ceil(self.num_sequences / batch_size)

    def batch(self, step: int, batch_size: int, rows: slice = ALL_ROWS) -> Batch:
        """The batch of a step (from 0) of a run that begins with sequence 0 and keeps its batch size (B)."""
        return self.batch_from(step * batch_size, batch_size, rows)

    def batch_from(self, first: int, batch_size: int, rows: slice = ALL_ROWS) -> Batch:
        """The batch of sequences `first` to `first` + B - 1.

        Args:
            first: the position of the run in its data.
            batch_size: sequences of the whole batch (B).
            rows: those wanted of them, at least one; no other is read.

        Returns:
            int32 [rows, S]: `tokens`; `labels`, the token after each, or -100 for none; and where documents do not see
            each other, `positions` within the document and `segment_ids`, a number for each document of a row. Rows
            after the last epoch have no labels.
        """
        end = self.num_sequences
        indices = range(first, first + batch_size)[rows]
        sequences = [self.sequence(i) if end is None or i < end else self.filler() for i in indices]
        return {name: np.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}


class SyntheticStream(TokenStream):
    """Independent uniform tokens."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        """Draws from 0 to `vocab_size` - 1."""
        self._vocab_size, self._seq_len, self._seed = vocab_size, seq_len, seed
        self.fingerprint = fingerprint("synthetic", vocab_size, seq_len, seed)

    def sequence(self, index: int) -> Row:
        """Sequence `index`."""
        tokens = (draws(self._seq_len + 1, self._seed, index) % self._vocab_size).astype(np.int32)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}

    def filler(self) -> Row:
        """A sequence whose labels are all ignored."""
        return filler(self._seq_len)


def filler(seq_len: int) -> Row:
    """`tokens` and `labels` of a sequence that teaches nothing."""
    return {"tokens": np.zeros(seq_len, np.int32), "labels": np.full(seq_len, IGNORED_LABEL, np.int32)}


def fingerprint(*parts: str | int | None) -> str:
    """A short hash of what makes up a stream."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def draws(size: int, seed: int, index: int) -> np.ndarray:
    """Uniform uint64 [size]. Raw draws: NumPy fixes these across versions, and no method of `Generator` (NEP 19)."""
    return np.random.Philox(np.random.SeedSequence([seed, index])).random_raw(size)
