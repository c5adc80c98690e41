"""A byte-level BPE tokenizer (as GPT-2's, Radford et al. 2019) made from a data set."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpu_train.config import schema
from tpu_train.data.records import BadRecord, read_texts
from tpu_train.data.sources import Source, build_sources

EOS = "<|endoftext|>"
NUM_BYTES = 256
# How text is split before pairs are merged: GPT-4's pattern (tiktoken, cl100k_base) with runs of up to three digits.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TrainedTokenizer(NamedTuple):
    """What was made: the file, the size of its vocabulary, and documents that it was made from."""

    path: Path
    vocab_size: int
    num_documents: int


def train_tokenizer(
    config: schema.StdlibData | schema.TextData | schema.HuggingFaceData | schema.SyntheticData,
    vocab_size: int,
    path: str,
) -> TrainedTokenizer:
    """Writes a tokenizer.json that `tokenizer=file` takes; `<|endoftext|>` ends a document.

    Args:
        config: the data set; all of its documents are used.
        vocab_size: tokens; fewer where the text has no more pairs to merge.
        path: the file to write; one that is there is replaced once the new one is complete.

    Raises:
        ValueError: there is no text, a record cannot be read, or the vocabulary has no room for all bytes.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if isinstance(config, schema.SyntheticData):
        raise ValueError("data=synthetic has no text")
    if vocab_size < NUM_BYTES + 1:
        raise ValueError(f"vocab_size={vocab_size}: at least {NUM_BYTES + 1}, for every byte and {EOS}")
    target = Path(path).expanduser()
    if not target.parent.is_dir():
        raise ValueError(f"to={path}: no such folder: {target.parent}")
    source, _ = build_sources(config)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportCallIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,  # pyright: ignore[reportCallIssue]
        special_tokens=[EOS],  # pyright: ignore[reportCallIssue]
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # pyright: ignore[reportCallIssue]
        show_progress=False,  # pyright: ignore[reportCallIssue]
    )
    texts = _Texts(source)
    tokenizer.train_from_iterator(iter(texts), trainer)
    if not texts.count:
        raise ValueError(f"{source.description}: no text")
    _write(target, tokenizer.to_str(pretty=True))
    return TrainedTokenizer(target, tokenizer.get_vocab_size(), texts.count)


class _Texts:
    """The texts of a source that are not empty, counted."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        for chunk in self._source.chunks():
            for text in read_texts(chunk, self._source.field):
                if isinstance(text, BadRecord):
                    if self._source.stop_at_bad:
                        raise text
                elif text:
                    self.count += 1
                    yield text


def _write(path: Path, content: str) -> None:
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
