"""Small data sets that the tests of the data share."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tpu_train.config import schema
from tpu_train.data.cache import CacheWriter, TokenCache
from tpu_train.data.documents import Tokenized

COMMON: dict[str, Any] = {
    "held_out_fraction": 0.0,
    "document_mask": True,
    "shuffle": "blocks",
    "epochs": None,
    "num_workers": 0,
    "cache_dir": None,
}
BYTES = schema.BytesTokenizer(name="bytes")
SYNTHETIC = schema.SyntheticData(name="synthetic", num_workers=0)


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def text_data(path: Path | str, **changes: Any) -> schema.TextData:
    """Data of files; the cache is beside them unless the changes say otherwise."""
    common: dict[str, Any] = COMMON | {
        "cache_dir": str(Path(path).parent / "token-cache") if isinstance(path, Path) else None
    }
    data = schema.TextData(
        name="text", path=str(path), held_out_path=None, field="text", on_bad_record="stop", **common
    )
    return dataclasses.replace(data, **changes)


def stdlib_data(cache_dir: Path, **changes: Any) -> schema.StdlibData:
    return dataclasses.replace(schema.StdlibData(name="stdlib", **COMMON), cache_dir=str(cache_dir), **changes)


def hf_data(dataset: str) -> schema.HuggingFaceData:
    return schema.HuggingFaceData(
        name="hf",
        dataset=dataset,
        subset=None,
        split="train",
        held_out_split=None,
        field="text",
        streaming=False,
        on_bad_record="stop",
        **COMMON,
    )


def make_cache(folder: Path, documents: Sequence[Sequence[int]], hashes: Sequence[int] | None = None) -> TokenCache:
    """A cache of documents of given tokens."""
    folder.mkdir(parents=True)
    writer = CacheWriter(folder, np.dtype("uint16"), "tokens of a test")
    writer.add(
        Tokenized(
            np.concatenate([np.array(document, np.uint16) for document in documents]),
            np.array([len(document) for document in documents], np.int64),
            np.array(range(len(documents)) if hashes is None else hashes, np.uint64),
            num_bad=0,
            first_bad="",
        )
    )
    writer.finish()
    return TokenCache(folder)


def write_tokenizer(folder: Path, special: str = "<|endoftext|>", more: Sequence[str] = ()) -> Path:
    """A byte-level BPE tokenizer.json trained on a few words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,  # pyright: ignore[reportCallIssue]
        special_tokens=[special, *more],  # pyright: ignore[reportCallIssue]
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),  # pyright: ignore[reportCallIssue]
        show_progress=False,  # pyright: ignore[reportCallIssue]
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end"] * 10, trainer)
    tokenizer.enable_truncation(2)  # as some published files have it
    tokenizer.enable_padding(length=8)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
