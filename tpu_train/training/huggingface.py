"""Hugging Face folders in and out, for the Llama 3, Qwen3 and Qwen3-MoE families.

Key idea: a folder is a schema model and a `WeightSource`, exactly what a checkpoint is; reading and writing go by the
model's own parameters, so that a tensor too many, too few or of another shape is known before any value is loaded.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tpu_train.config import schema
from tpu_train.config.convert import plain, show
from tpu_train.config.problems import Problem
from tpu_train.data.tokenizers import FileTokenizer
from tpu_train.training.build import build_model
from tpu_train.training.huggingface_config import Model, config_json, eos_json, read_config
from tpu_train.training.huggingface_files import (
    LOADED_AS,
    NUMPY_DTYPES,
    StoredTensors,
    are_equal,
    list_tensors,
    listing,
    write_json,
    write_tensors,
)
from tpu_train.training.huggingface_names import EMBEDDING, OUTPUT, hf_tensors, is_recomputed
from tpu_train.training.huggingface_stacks import as_folder_has, as_model_has
from tpu_train.training.weights import WeightSource, WeightSpec

SHARD_BYTES = 5 * 10**9
# Beside a tokenizer.json; what else a tokenizer has is in that file.
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Keys of the schema's model that say how it is trained, not what it computes.
_TRAINING_KEYS = ("init_std", "dropout", "seq_len", "router_aux_loss_coef")


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
    """A model of Hugging Face's.

    Attributes:
        model: its sizes; `seq_len` is at most that of the shipped models, `max_positions` is the model's own.
        dtype: float32 or bfloat16: what `config.json` says, else the widest of the tensors.
        source: its weights by this project's names, each in its own dtype; float16 as float32, which holds its values.
        eos_ids: tokens that end a text, most important first.
        max_positions: most tokens that the model is meant for.
        tokenizer_path: its `tokenizer.json`, if it has one.
    """

    model: Model
    dtype: str
    source: WeightSource
    eos_ids: tuple[int, ...]
    max_positions: int
    tokenizer_path: Path | None


def read_folder(hf_dir: Path) -> HuggingFaceFolder:
    """Reads `config.json` and the headers of the safetensors files; values are read when they are asked for.

    Raises:
        ValueError: a file cannot be used, the model is none of this project's, or tensors are missing, unexpected or
            of another shape or dtype; the message names the file, the key or tensor, what was found and what is
            expected.
    """
    if not hf_dir.is_dir():
        raise ValueError(f"{hf_dir}: no such folder; expected one with config.json and safetensors")
    config = read_config(hf_dir / "config.json")
    stored = list_tensors(hf_dir)
    shapes = parameter_shapes(config.model)
    problems = [*_tensor_problems(stored, shapes), *_tied_problems(stored, config.model)]
    if problems:
        raise ValueError(listing(problems, "\n"))
    source = as_model_has(stored, shapes, str(hf_dir))
    tokenizer = hf_dir / "tokenizer.json"
    return HuggingFaceFolder(
        model=config.model,
        dtype=config.dtype or _widest(source.specs),
        source=source,
        eos_ids=config.eos_ids,
        max_positions=config.max_positions,
        tokenizer_path=tokenizer if tokenizer.is_file() else None,
    )


def check_fits(source_model: Model, run_model: Model) -> list[Problem]:
    """Whether weights of one model are weights of another: all keys must agree but those about training.

    The vocabulary too: rows that are not there would have to be invented, and a run that wants more says so by a
    tokenizer that has more.
    """
    if source_model.family != run_model.family:
        message = f"model.family is {run_model.family}, but the weights to start from are of {source_model.family}"
        return [Problem("model.family", f"{message}; choose a model of that family with model=...")]
    problems = []
    for field in dataclasses.fields(run_model):
        ours, theirs = getattr(run_model, field.name), getattr(source_model, field.name)
        if ours != theirs and field.name not in _TRAINING_KEYS:
            place = f"model.{field.name}"
            message = f"{place} is {_word(ours)}, but the weights to start from have {_word(theirs)}"
            problems.append(Problem(place, f"{message}; set {place}={_word(theirs)}"))
    return problems


def write_folder(
    hf_dir: Path,
    model: Model,
    source: WeightSource,
    dtype: str | None = None,
    tokenizer_path: Path | None = None,
    *,
    eos_ids: Sequence[int] = (),
    max_positions: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that `transformers` loads; it appears under its name when it is complete.

    The output projection of tied embeddings is not written. Dropout has no counterpart and is left out.

    Args:
        hf_dir: folder to make; one that is there must be empty.
        model: what the weights are of.
        source: the weights.
        dtype: float32 or bfloat16, rounded to nearest; None for each tensor's own.
        tokenizer_path: a tokenizer.json, copied with what is beside it; None for the bytes tokenizer, which has none.
        eos_ids: tokens that end a text; if there are none, the tokenizer file's.
        max_positions: most tokens that the model is meant for; None for what the model says of itself.
        shard_bytes: size above which the weights become several files.

    Raises:
        ValueError: the folder is not empty, the weights are not those of the model, or the tokenizer is unusable.
    """
    hf_dir = hf_dir.resolve()
    if hf_dir.exists() and (not hf_dir.is_dir() or any(hf_dir.iterdir())):
        what = "is not empty" if hf_dir.is_dir() else "is a file"
        raise ValueError(f"{hf_dir}: {what}; choose another folder or move that one away")
    shapes = parameter_shapes(model)
    if problems := list(_source_problems(source, shapes)):
        raise ValueError(listing(problems, "\n"))
    ids = tuple(eos_ids) or (() if tokenizer_path is None else (FileTokenizer(tokenizer_path).eos_id,))
    partial = hf_dir.with_name(f".{hf_dir.name}.tpu-train-partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    try:
        config = config_json(model, dtype or _widest(source.specs), ids, max_positions or _reach(model))
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", {"eos_token_id": eos_json(ids)})
        if tokenizer_path is not None:
            _copy_tokenizer(tokenizer_path, partial)
        write_tensors(partial, as_folder_has(source, shapes), dtype, shard_bytes)
        partial.rename(hf_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters by full name, in the model's order."""
    return {name: tuple(parameter.shape) for name, parameter in build_model(model).named_parameters()}


def _tensor_problems(stored: StoredTensors, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    expected = {name: list(part) for stack, shape in shapes.items() for name, part in hf_tensors(stack, shape).items()}
    for name, shape in expected.items():
        tensor = stored.tensors.get(name)
        if tensor is None:
            place = stored.claimed.get(name, stored.place)
            untied = ", because config.json does not have tie_word_embeddings=true" if name == OUTPUT else ""
            yield f"{place}: tensor {name} is missing, expected one of shape {shape}{untied}"
        elif list(tensor.shape) != shape:
            yield f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, expected {shape} by config.json"
        elif tensor.dtype not in LOADED_AS:
            yield f"{tensor.file}: tensor {name} has dtype {tensor.dtype}, expected one of {', '.join(LOADED_AS)}"
    for name, tensor in stored.tensors.items():
        if name not in expected and name != OUTPUT and not is_recomputed(name):
            yield f"{tensor.file}: tensor {name} is unexpected, the model of config.json has none of that name"


def _tied_problems(stored: StoredTensors, model: Model) -> Iterator[str]:
    """An output projection beside tied embeddings is theirs once more, or it would be lost."""
    output, embedding = stored.tensors.get(OUTPUT), stored.tensors.get(EMBEDDING)
    if model.tie_embeddings and output and embedding and not are_equal(output, embedding):
        yield (
            f"{output.file}: tensor {OUTPUT} differs from {EMBEDDING}, expected the same values because "
            "tie_word_embeddings is true; set it to false in config.json to use both"
        )


def _source_problems(source: WeightSource, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name in shapes.keys() - source.specs.keys():
        yield f"{source.place}: tensor {name} is missing, expected one of shape {list(shapes[name])}"
    for name, spec in source.specs.items():
        if name not in shapes:
            yield f"{source.place}: tensor {name} is unexpected, the model has none of that name"
        elif tuple(spec.shape) != shapes[name]:
            found, expected = list(spec.shape), list(shapes[name])
            yield f"{source.place}: tensor {name} has shape {found}, expected {expected} by the model's configuration"
        elif spec.dtype not in NUMPY_DTYPES:
            yield f"{source.place}: tensor {name} has dtype {spec.dtype}, expected one of {', '.join(NUMPY_DTYPES)}"


def _widest(specs: Mapping[str, WeightSpec]) -> str:
    return "float32" if any(spec.dtype == "float32" for spec in specs.values()) else "bfloat16"


def _reach(model: Model) -> int:
    """Tokens that a model is meant for, as far as its configuration knows."""
    scaling = model.rope_scaling if isinstance(model, schema.Llama3Model) else None
    return max(model.seq_len, int(scaling.factor * scaling.original_max_positions) if scaling else 0)


def _copy_tokenizer(path: Path, folder: Path) -> None:
    """Copies a tokenizer under the names that `transformers` looks for."""
    import tokenizers

    shutil.copyfile(path, folder / "tokenizer.json")
    for name in _TOKENIZER_FILES:
        if path.with_name(name).is_file():
            shutil.copyfile(path.with_name(name), folder / name)
    config = folder / _TOKENIZER_FILES[0]
    if not config.is_file():  # then transformers knows no token that ends a document
        eos = tokenizers.Tokenizer.from_file(str(path)).id_to_token(FileTokenizer(path).eos_id)
        write_json(config, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos})


def _word(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, schema.RopeScaling):
        return "{" + ",".join(f"{key}:{item}" for key, item in plain(value).items()) + "}"
    return show(value)
