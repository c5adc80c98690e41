"""Documents packed into sequences without padding.

Key idea: nothing is copied together beforehand. The documents of an epoch, in its order, are one long row of tokens;
where each of them begins in that row says which tokens a block of it has, and these are read from the cache.
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from tpu_train.data.cache import TokenCache
from tpu_train.data.sequences import IGNORED_LABEL, Row, TokenStream, draws, filler, fingerprint

_ORDER_SALT = np.uint64(0x9E3779B97F4A7C15)


class Documents(NamedTuple):
    """Where documents are in a cache, `starts` [d] and `lengths` [d] int64, and their texts' `hashes` [d] uint64."""

    starts: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray

    def take(self, indices: np.ndarray) -> "Documents":
        """Some of them."""
        return Documents(self.starts[indices], self.lengths[indices], self.hashes[indices])

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return int(self.lengths.sum())


class Part(NamedTuple):
    """A part of a cache's documents.

    Attributes:
        held_out: whether it is the share that is held out, or what is left.
        fraction: that share.
        of_more: whether the cache is only the beginning of the data; then the share is of all hashes that there can be.
    """

    held_out: bool
    fraction: float
    of_more: bool = False

    def documents(self, cache: TokenCache) -> Documents:
        """The documents of this part, in the order of the files.

        Those with the smallest hashes are held out, so that the same text is never on both sides. Where that
        would be none or all of them, it is the end of the longest one.
        """
        ends = np.asarray(cache.ends)
        starts = np.append(0, ends[:-1])[: len(ends)]
        everything = Documents(starts, ends - starts, np.asarray(cache.hashes))
        if self.fraction == 0 or not len(ends):
            return everything.take(np.full(len(ends), not self.held_out))
        if self.of_more:
            return everything.take((everything.hashes < hash_limit(self.fraction)) == self.held_out)
        count = round(self.fraction * len(ends))
        if count in (0, len(ends)):
            return self._of_one(everything)
        threshold = np.partition(everything.hashes, count - 1)[count - 1]
        return everything.take((everything.hashes <= threshold) == self.held_out)

    def _of_one(self, everything: Documents) -> Documents:
        longest = int(everything.lengths.argmax())
        length = int(everything.lengths[longest])
        cut = length - min(length, max(1, round(self.fraction * everything.num_tokens)))
        if self.held_out:
            start = everything.starts[longest : longest + 1] + cut
            return Documents(start, np.array([length - cut]), everything.hashes[longest : longest + 1])
        lengths = everything.lengths.copy()
        lengths[longest] = cut
        return everything._replace(lengths=lengths)


def hash_limit(fraction: float) -> np.uint64:
    """What a share of all hashes is below."""
    return np.uint64(int(fraction * 2**64))


@dataclasses.dataclass(frozen=True)
class Packing:
    """How documents become sequences.

    Attributes:
        seq_len: tokens per sequence (S).
        shuffle: `documents`: another order of documents in each epoch. `blocks`: documents in an order by hash, and
            another order of blocks in each epoch. `hash`: only the former. `none`: documents as in the files.
        seed: of the orders.
        document_mask: whether rows say which document each token is of, and no label is of another document.
        epochs: that may be taken; None: any number.
    """

    seq_len: int
    shuffle: Literal["documents", "blocks", "hash", "none"]
    seed: int
    document_mask: bool
    epochs: int | None


class _Epoch(NamedTuple):
    """The documents of an epoch in their order: where each is in the cache, and where it ends in the epoch's row."""

    number: int
    starts: np.ndarray
    ends: np.ndarray
    blocks: np.ndarray | None  # their order; None: as they are


class PackedStream(TokenStream):
    """Blocks of an epoch's row of tokens.

    Block k has the tokens k * S to k * S + S - 1 as inputs and the token after each as its label: every token is an
    input once in each epoch. The last block is filled up with tokens whose labels are ignored.

    Attributes:
        num_blocks: sequences per epoch.
        num_documents: documents per epoch.
        num_tokens: tokens per epoch.
    """

    def __init__(self, cache: TokenCache, part: Part, packing: Packing) -> None:
        """Packs the documents of a part; there must be at least one token."""
        self._arguments = (cache, part, packing)
        self._tokens, self._packing = cache.tokens, packing
        documents = part.documents(cache)
        if packing.shuffle in ("blocks", "hash"):
            documents = documents.take(np.argsort(_order_keys(documents.hashes), kind="stable"))
        self._documents = documents
        self.num_documents, self.num_tokens = len(documents.lengths), documents.num_tokens
        assert self.num_tokens > 0
        self.num_blocks = -(-self.num_tokens // packing.seq_len)
        self.blocks_per_epoch = self.num_blocks
        self.epochs = packing.epochs
        self.num_skipped_records = cache.num_skipped_records
        self.fingerprint = fingerprint(
            cache.content, repr(part), packing.seq_len, packing.shuffle, packing.seed, self.num_tokens
        )
        self._latest: _Epoch | None = None  # one reference, so threads may share it

    def __reduce__(self) -> tuple[type["PackedStream"], tuple[TokenCache, Part, Packing]]:
        return PackedStream, self._arguments

    def num_batches(self, batch_size: int) -> int:
        """Batches of one epoch; where `epochs` is 1 the last one is filled up."""
        return -(-self.num_blocks // batch_size)

    def sequence(self, index: int) -> Row:
        """Sequence `index`."""
        number, position = divmod(index, self.num_blocks)
        epoch = self._epoch(number)
        block = position if epoch.blocks is None else int(epoch.blocks[position])
        return self._row(epoch, block * self._packing.seq_len)

    def filler(self) -> Row:
        """A sequence whose labels are all ignored."""
        return filler_row(self._packing.seq_len, self._packing.document_mask)

    def _epoch(self, number: int) -> _Epoch:
        latest = self._latest
        if latest is None or latest.number != number:
            documents, blocks = self._documents, None
            if self._packing.shuffle == "documents":
                documents = documents.take(permutation(self.num_documents, self._packing.seed, number))
            if self._packing.shuffle == "blocks":
                blocks = permutation(self.num_blocks, self._packing.seed, number)
            latest = _Epoch(number, documents.starts, np.cumsum(documents.lengths), blocks)
            self._latest = latest
        return latest

    def _row(self, epoch: _Epoch, first: int) -> Row:
        """The row whose inputs begin at a token of an epoch."""
        seq_len = self._packing.seq_len
        last = min(first + seq_len, self.num_tokens - 1)  # a label only, unless it is the last of all
        low, high = np.searchsorted(epoch.ends, [first, last], side="right")
        ends = epoch.ends[low : high + 1]
        starts = np.append(epoch.ends[low - 1] if low else 0, ends[:-1])
        counts = np.minimum(ends, last + 1) - np.maximum(starts, first)  # of each document, in this row
        positions = np.arange(first, last + 1) - np.repeat(starts, counts)
        if low == high:
            start = int(epoch.starts[low])
            tokens = self._tokens[start + int(positions[0]) : start + int(positions[-1]) + 1]
        else:
            tokens = self._tokens[np.repeat(epoch.starts[low : high + 1], counts) + positions]
        return pack_row(tokens, positions, counts, seq_len, self._packing.document_mask)


def pack_row(tokens: np.ndarray, positions: np.ndarray, counts: np.ndarray, seq_len: int, document_mask: bool) -> Row:
    """A row of consecutive tokens of an epoch.

    Args:
        tokens: the inputs, and one more if the epoch goes on.
        positions: of each token in its document.
        counts: of these tokens in each document.
        seq_len: of the row; what is missing is filled up.
        document_mask: whether the row says which document each token is of.
    """
    num_inputs = min(len(tokens), seq_len)
    row = filler_row(seq_len, document_mask)
    row["tokens"][:num_inputs] = tokens[:num_inputs]
    row["labels"][: len(tokens) - 1] = tokens[1:]
    if document_mask:
        segments = np.repeat(np.arange(len(counts)), counts)
        row["labels"][: len(tokens) - 1][segments[1:] != segments[:-1]] = IGNORED_LABEL
        row["positions"][:num_inputs] = positions[:num_inputs]
        row["positions"][num_inputs:] -= num_inputs
        row["segment_ids"][:num_inputs] = segments[:num_inputs]
        row["segment_ids"][num_inputs:] = len(counts)
    return row


def filler_row(seq_len: int, document_mask: bool) -> Row:
    """A row whose labels are all ignored."""
    row = filler(seq_len)
    if document_mask:
        row["positions"] = np.arange(seq_len, dtype=np.int32)
        row["segment_ids"] = np.zeros(seq_len, np.int32)
    return row


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """An order of 0 to `size` - 1 for an epoch."""
    return np.argsort(draws(size, seed, epoch), kind="stable")


def _order_keys(hashes: np.ndarray) -> np.ndarray:
    """What documents are sorted by: their hashes with their numbers mixed in, so that equal texts do not lie together.

    (SplitMix64's finalizer, Steele et al. 2014, "Fast splittable pseudorandom number generators".)
    """
    mixed = hashes + np.arange(1, len(hashes) + 1, dtype=np.uint64) * _ORDER_SALT
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
