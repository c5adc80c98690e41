"""From a chunk of records to the tokens of its documents: what the worker processes do."""

import dataclasses
import hashlib

import numpy as np

from tpu_train.data.records import BadRecord, Chunk, read_texts
from tpu_train.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """Documents of a chunk, without the empty ones.

    Attributes:
        tokens: of all documents, one after the other, [n] of the smallest unsigned dtype that holds the vocabulary.
        lengths: of each document, in tokens, [d] int64.
        hashes: of each document's text, [d] uint64.
        num_bad: records that cannot be read.
        first_bad: what is wrong with the first of them.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    num_bad: int
    first_bad: str


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Maps chunks to tokens; a document begins with BOS if the tokenizer has one, and ends with EOS.

    Attributes:
        tokenizer: its ids.
        field: name of the text field of records.
        stop_at_bad: whether what follows a record that cannot be read is of no interest.
    """

    tokenizer: Tokenizer
    field: str
    stop_at_bad: bool

    def __call__(self, chunk: Chunk) -> Tokenized:
        """The documents of a chunk."""
        texts: list[str] = []
        bad: list[BadRecord] = []
        for text in read_texts(chunk, self.field):
            if isinstance(text, BadRecord):
                bad.append(text)
                if self.stop_at_bad:
                    break
            elif text:
                texts.append(text)
        begin = np.array([] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id], np.int32)
        end = np.array([self.tokenizer.eos_id], np.int32)
        parts = [np.concatenate([begin, ids, end]) for ids in self.tokenizer.encode_batch(texts)]
        dtype = token_dtype(self.tokenizer)
        return Tokenized(
            tokens=np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype),
            lengths=np.array([len(part) for part in parts], np.int64),
            hashes=np.array([_hash(text) for text in texts], np.uint64),
            num_bad=len(bad),
            first_bad=str(bad[0]) if bad else "",
        )


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest unsigned dtype that holds the vocabulary."""
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
