"""Tensors in the safetensors files of a Hugging Face folder, read and written one at a time.

Key idea: headers say everything but the values, so a folder is judged and a folder is laid out without loading any;
values then pass through memory one tensor after the other, whatever the size of a file.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tpu_train.training.huggingface_config import read_json
from tpu_train.training.weights import WeightSource, WeightSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_CODES = {"float32": "F32", "bfloat16": "BF16"}
# What a stored tensor is loaded as: no run computes in float16, and float32 holds its values.
LOADED_AS = {"F32": "float32", "BF16": "bfloat16", "F16": "float32"}
_COMPARED_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, by its header; the dtype is safetensors' code."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def load(self) -> np.ndarray:
        """Its values, in the dtype of `LOADED_AS`."""
        with _opened(self.file) as opened:
            tensor = opened.get_tensor(self.name)
        if tensor.dtype == torch.bfloat16:  # NumPy has none that torch would give; the bits are the same
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.float().numpy()


@dataclasses.dataclass(frozen=True)
class StoredTensors:
    """The tensors of a folder.

    Attributes:
        tensors: what is there, by Hugging Face's names.
        claimed: files by what the index says that they hold.
        place: the file, or the index.
    """

    tensors: Mapping[str, StoredTensor]
    claimed: Mapping[str, Path]
    place: Path


def list_tensors(folder: Path) -> StoredTensors:
    """Reads the headers of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Raises:
        ValueError: a file is missing or not complete.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return StoredTensors({tensor.name: tensor for tensor in _headers(single)}, {}, single)
    if not index.is_file():
        others = [path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern)]
        also = f"; {sorted(others)[0]} is not read, convert it to safetensors" if others else ""
        raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX} is there{also}")
    claimed = _claims(index)
    files = sorted(set(claimed.values()))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{index}: {len(missing)} of {len(files)} files are missing: {listing(missing)}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        # Where two files have one tensor, the index decides.
        tensors |= {t.name: t for t in _headers(file) if t.name not in tensors or claimed.get(t.name) == file}
    return StoredTensors(tensors, claimed, index)


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two matrices have the same values and dtype, compared some rows at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype) or len(first.shape) != 2:
        return False
    with _opened(first.file) as one, _opened(second.file) as other:
        left, right = one.get_slice(first.name), other.get_slice(second.name)
        step = max(1, _COMPARED_BYTES // max(1, 4 * first.shape[1]))
        starts = range(0, first.shape[0], step)
        return all(torch.equal(left[start : start + step], right[start : start + step]) for start in starts)


def write_tensors(folder: Path, source: WeightSource, dtype: str | None, shard_bytes: int) -> None:
    """Writes `model.safetensors`, or numbered files and an index where that would be larger than `shard_bytes`.

    Args:
        folder: that exists.
        source: the values, by their names in the files.
        dtype: of the files; None for each tensor's own.
        shard_bytes: most bytes of values in a file; a larger tensor has a file of its own.
    """
    specs = {name: WeightSpec(spec.shape, dtype or spec.dtype) for name, spec in source.specs.items()}
    shards = _split(specs, shard_bytes)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = folder / (SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        _write_file(file, {name: specs[name] for name in shard}, source)
        weight_map |= dict.fromkeys(shard, file.name)
    if len(shards) > 1:
        total = {
            "total_parameters": sum(int(np.prod(spec.shape)) for spec in specs.values()),
            "total_size": sum(map(_num_bytes, specs.values())),
        }
        write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as people read it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def listing(items: Sequence[str], separator: str = ", ") -> str:
    """The first ten, and how many more."""
    more = [f"and {len(items) - 10} more"] if len(items) > 10 else []
    return separator.join([*items[:10], *more])


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file: {error}; download or write it again") from error


def _headers(file: Path) -> Iterator[StoredTensor]:
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            header = opened.get_slice(name)
            yield StoredTensor(file, name, tuple(header.get_shape()), header.get_dtype())


def _claims(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: no weight_map of tensors to files; download it again")
    return {name: index.parent / file for name, file in weight_map.items()}


def _num_bytes(spec: WeightSpec) -> int:
    return int(np.prod(spec.shape)) * NUMPY_DTYPES[spec.dtype].itemsize


def _split(specs: Mapping[str, WeightSpec], shard_bytes: int) -> list[list[str]]:
    """Names by file, in their order."""
    shards: list[list[str]] = []
    free = 0
    for name, spec in specs.items():
        if not shards or _num_bytes(spec) > free:
            shards.append([])
            free = shard_bytes
        shards[-1].append(name)
        free -= _num_bytes(spec)
    return shards


def _write_file(file: Path, specs: Mapping[str, WeightSpec], source: WeightSource) -> None:
    """Writes one file as huggingface.co/docs/safetensors has it: header size, header, values.

    The library's own writer wants all values of a file in memory.
    """
    ordered = sorted(specs.items(), key=lambda item: -NUMPY_DTYPES[item[1].dtype].itemsize)  # keeps values aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no file without it
    end = 0
    for name, spec in ordered:
        start, end = end, end + _num_bytes(spec)
        header[name] = {"dtype": _CODES[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, spec in ordered:
            array = source.load(name)
            assert array.shape == spec.shape, name
            out.write(np.ascontiguousarray(array, NUMPY_DTYPES[spec.dtype]).view(np.uint8).data)
            del array  # before the next is loaded
