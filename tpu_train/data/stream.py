"""The token stream that a run reads: documents packed without padding, cut into blocks, shuffled by seed.

Key idea: sequence i is a pure function of data configuration, seed and i, so the position of a run in its data is one
integer, and no two readers need to agree on anything else.
"""

import abc
import hashlib
from collections.abc import Iterable

import numpy as np

from tpu_train.config import schema
from tpu_train.data import sources
from tpu_train.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]
Data = schema.StdlibData | schema.TextData | schema.SyntheticData


class TokenStream(abc.ABC):
    """An endless numbered row of sequences."""

    @abc.abstractmethod
    def sequence(self, index: int) -> np.ndarray:
        """Sequence `index` (from 0), [S+1] int32, whatever was asked for before."""

    def batch(self, step: int, batch_size: int) -> Batch:
        """The batch of a step (from 0): sequences step * B to step * B + B - 1.

        Returns:
            `tokens` [B, S] int32, and `labels` [B, S] int32, the token after each; a label of -100 would be ignored.
        """
        first = step * batch_size
        rows = np.stack([self.sequence(i) for i in range(first, first + batch_size)])
        return {"tokens": np.ascontiguousarray(rows[:, :-1]), "labels": np.ascontiguousarray(rows[:, 1:])}


class PackedStream(TokenStream):
    """Blocks of a token array, each once per epoch.

    Block k is tokens k * S to k * S + S: neighbours share one token, a label in the first and an input in the second.
    What is left after the last whole block is not used.

    Attributes:
        num_blocks: sequences per epoch.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int | None) -> None:
        """Cuts `tokens` [n], any integer dtype, into blocks of `seq_len` + 1; no seed: in order, in every epoch."""
        assert len(tokens) > seq_len, (len(tokens), seq_len)
        self.num_blocks = (len(tokens) - 1) // seq_len
        self._tokens, self._seq_len, self._seed = tokens, seq_len, seed
        self._latest: tuple[int, np.ndarray] | None = None  # of one epoch; one reference, so threads may share it

    def sequence(self, index: int) -> np.ndarray:
        """Sequence `index`, [S+1] int32."""
        epoch, position = divmod(index, self.num_blocks)
        start = int(self._order(epoch)[position]) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int32)

    def _order(self, epoch: int) -> np.ndarray:
        latest = self._latest
        if latest is None or latest[0] != epoch:
            latest = (epoch, _permutation(self.num_blocks, self._seed, epoch))
            self._latest = latest
        return latest[1]


class SyntheticStream(TokenStream):
    """Independent uniform tokens."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        """Draws from 0 to `vocab_size` - 1."""
        self._vocab_size, self._seq_len, self._seed = vocab_size, seq_len, seed

    def sequence(self, index: int) -> np.ndarray:
        """Sequence `index`, [S+1] int32."""
        return (_draws(self._seq_len + 1, self._seed, index) % self._vocab_size).astype(np.int32)


def build_streams(
    config: Data, tokenizer: Tokenizer, *, seq_len: int, batch_size: int, seed: int, vocab_size: int
) -> tuple[TokenStream, PackedStream | None]:
    """The training stream, and the validation stream in order, or None where nothing is held out.

    Args:
        config: the data set.
        tokenizer: not used by `synthetic`.
        seq_len: tokens per sequence (S).
        batch_size: sequences per step (B); each stream must have as many blocks.
        seed: of the order of blocks.
        vocab_size: the model's; `synthetic` draws from it.

    Raises:
        ValueError: a file has an error, or a part is too small; the message says which and has the numbers.
    """
    if isinstance(config, schema.SyntheticData):
        return SyntheticStream(vocab_size, seq_len, seed), None
    assert tokenizer.vocab_size <= vocab_size, (tokenizer.vocab_size, vocab_size)
    tokens = pack(_documents(config), tokenizer)
    split = len(tokens) - round(len(tokens) * config.held_out_fraction)
    train, held_out = tokens[:split], tokens[split:]
    _check_size("training", train, len(tokens), seq_len, batch_size)
    training = PackedStream(train, seq_len, seed)
    if config.held_out_fraction == 0:
        return training, None
    _check_size("held-out", held_out, len(tokens), seq_len, batch_size)
    return training, PackedStream(held_out, seq_len, None)


def pack(documents: Iterable[sources.Document], tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of all documents that are not empty, each ended by EOS, in the order of a hash of name and text.

    Names often sort by topic. The hash mixes topics, so the end of the array, which is held out, is like the rest.

    Returns:
        [n] of the smallest unsigned dtype that holds the vocabulary.
    """
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    ordered = sorted((document for document in documents if document.text), key=_hash)
    parts = [np.append(tokenizer.encode(document.text), tokenizer.eos_id).astype(dtype) for document in ordered]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _documents(config: schema.StdlibData | schema.TextData) -> Iterable[sources.Document]:
    match config:
        case schema.StdlibData():
            return sources.stdlib_documents()
        case schema.TextData():
            return sources.text_documents(config.path, config.field)


def _hash(document: sources.Document) -> bytes:
    return hashlib.blake2b(document.name.encode(errors="surrogateescape") + b"\0" + document.text.encode()).digest()


def _check_size(part: str, tokens: np.ndarray, total_tokens: int, seq_len: int, batch_size: int) -> None:
    needed = batch_size * seq_len + 1
    if len(tokens) < needed:
        raise ValueError(
            f"data: the {part} part has {len(tokens)} of the data set's {total_tokens} tokens, and one batch of "
            f"{batch_size} sequences of {seq_len} tokens takes {needed}; use more text, a smaller batch or "
            f"training.seq_len, or another data.held_out_fraction (0: nothing is held out)"
        )


def _permutation(size: int, seed: int | None, epoch: int) -> np.ndarray:
    if seed is None:
        return np.arange(size)
    return np.argsort(_draws(size, seed, epoch), kind="stable")


def _draws(size: int, seed: int, index: int) -> np.ndarray:
    """Uniform uint64 [size]. Raw draws: NumPy fixes these across versions, and no method of `Generator` (NEP 19)."""
    return np.random.Philox(np.random.SeedSequence([seed, index])).random_raw(size)
