"""From a data configuration to the streams of a run."""

import dataclasses
from typing import NamedTuple

from tpu_train.config import schema
from tpu_train.data.cache import TokenCache, tokenize
from tpu_train.data.growing import GrowingStream
from tpu_train.data.packing import PackedStream, Packing, Part
from tpu_train.data.sequences import Batch, SyntheticStream, TokenStream
from tpu_train.data.sources import Beginning, Source, build_sources
from tpu_train.data.tokenizers import Tokenizer

__all__ = ["Batch", "Data", "PackedStream", "SyntheticStream", "TokenStream", "build_streams", "check_steps"]

DocumentData = schema.StdlibData | schema.TextData | schema.HuggingFaceData
Data = DocumentData | schema.SyntheticData
HELD_OUT_CHUNKS = 32  # of 256 rows: read before the first step, where everything would be too much


def build_streams(
    config: Data,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    vocab_size: int,
    steps: int | None = None,
) -> tuple[TokenStream, PackedStream | None]:
    """The training stream, and the validation stream in a fixed order, or None where nothing is held out.

    Args:
        config: the data set.
        tokenizer: not used by `synthetic`.
        seq_len: tokens per sequence (S).
        batch_size: sequences per step (B); there must be as many in the training data.
        seed: of the order of the data.
        vocab_size: the model's; `synthetic` draws from it.
        steps: of the run, if known: `data.epochs` must be enough for them.

    Raises:
        ValueError: a file has an error, or a part is too small; the message says which and has the numbers.
    """
    if isinstance(config, schema.SyntheticData):
        return SyntheticStream(vocab_size, seq_len, seed), None
    assert tokenizer.vocab_size <= vocab_size, (tokenizer.vocab_size, vocab_size)
    source, held_out_source = build_sources(config)
    build = _build_growing if isinstance(config, schema.HuggingFaceData) and config.streaming else _build_packed
    training, held_out = build(config, tokenizer, Sources(source, held_out_source), Sizes(seq_len, batch_size, seed))
    if steps is not None:
        check_steps(training, steps, batch_size)
    return training, held_out


def batch_fields(
    config: schema.StdlibData | schema.TextData | schema.HuggingFaceData | schema.SyntheticData,
) -> list[str]:
    """The tensors of a batch, each int32 [B, S]."""
    masked = isinstance(config, DocumentData) and config.document_mask
    return ["tokens", "labels", *(["positions", "segment_ids"] if masked else [])]


class Sources(NamedTuple):
    """Where training data is, and validation data if it has a place of its own."""

    training: Source
    held_out: Source | None


class Sizes(NamedTuple):
    """What a run says of its sequences."""

    seq_len: int
    batch_size: int
    seed: int


def _build_packed(
    config: DocumentData, tokenizer: Tokenizer, sources: Sources, sizes: Sizes
) -> tuple[TokenStream, PackedStream | None]:
    """Everything is tokenized before the first batch."""
    seq_len, batch_size, seed = sizes
    source = sources.training
    cache = tokenize(source, tokenizer, config.cache_dir, config.num_workers)
    part = Part(held_out=False, fraction=config.held_out_fraction if sources.held_out is None else 0.0)
    needed = (batch_size - 1) * seq_len + 1
    found = part.documents(cache).num_tokens
    if found < needed:
        raise ValueError(
            f"{source.description}: {found:,} tokens to train on, and one batch of {batch_size} sequences of "
            f"{seq_len} tokens takes {needed:,}{_of_all(cache, found)}; use more text, a smaller batch or a smaller "
            "training.seq_len"
        )
    packing = Packing(seq_len, config.shuffle, seed, config.document_mask, config.epochs)
    training = PackedStream(cache, part, packing)
    packing = dataclasses.replace(packing, shuffle="hash", epochs=1)
    if sources.held_out is not None:
        cache = tokenize(sources.held_out, tokenizer, config.cache_dir, config.num_workers)
        return training, _held_out(cache, Part(held_out=False, fraction=0.0), packing, sources.held_out.description)
    if part.fraction == 0:
        return training, None
    return training, _held_out(cache, part._replace(held_out=True), packing, source.description)


def _build_growing(
    config: DocumentData, tokenizer: Tokenizer, sources: Sources, sizes: Sizes
) -> tuple[TokenStream, PackedStream | None]:
    """Training data is tokenized as it is read; validation data is of the first rows."""
    seq_len, batch_size, seed = sizes
    packing = Packing(seq_len, config.shuffle, seed, config.document_mask, config.epochs)
    part = Part(held_out=True, fraction=config.held_out_fraction, of_more=True)
    held_out = None
    if sources.held_out is not None or part.fraction > 0:
        source = Beginning(sources.held_out or sources.training, HELD_OUT_CHUNKS)
        cache = tokenize(source, tokenizer, config.cache_dir, config.num_workers)
        if sources.held_out is not None:
            part = Part(held_out=False, fraction=0.0)
        validation = dataclasses.replace(packing, shuffle="hash", epochs=1)
        held_out = _held_out(cache, part, validation, source.description)
    fraction = 0.0 if sources.held_out is not None else config.held_out_fraction
    training = GrowingStream(sources.training, tokenizer, packing, fraction, config.num_workers)
    training.require(batch_size)
    return training, held_out


def check_steps(stream: TokenStream, steps: int, batch_size: int) -> None:
    """Whether a stream has enough for a run.

    Raises:
        ValueError: its epochs are used up before.
    """
    limit = stream.max_steps(batch_size)
    if limit is None or steps <= limit:
        return
    assert stream.blocks_per_epoch is not None
    raise ValueError(
        f"training.steps={steps} needs {steps * batch_size / stream.blocks_per_epoch:.3g} epochs of the data, and "
        f"data.epochs={stream.epochs} gives {limit} steps; set training.steps={limit} or data.epochs=null"
    )


def _of_all(cache: TokenCache, found: int) -> str:
    total = len(cache.tokens)
    return f" ({total - found:,} of {total:,} are held out: data.held_out_fraction)" if total > found else ""


def _held_out(cache: TokenCache, part: Part, packing: Packing, description: str) -> PackedStream:
    found = part.documents(cache).num_tokens
    if found < 2:
        raise ValueError(
            f"{description}: {found} of {len(cache.tokens):,} tokens are held out for validation, and there must be at "
            "least 2; use more text or another data.held_out_fraction (0: nothing is held out)"
        )
    return PackedStream(cache, part, packing)
