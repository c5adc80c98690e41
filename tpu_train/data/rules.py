"""What can be wrong between the data, the tokenizer and the model, found before anything starts.

Key idea: the rules call what the run would call, short of reading the data and of asking the network.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from tpu_train.config import schema
from tpu_train.config.problems import Problem
from tpu_train.data import huggingface
from tpu_train.data.files import DataFile, file_system, find_files, is_url
from tpu_train.data.tokenizers import build_tokenizer

# What reads files of a kind, beyond Python itself.
LIBRARIES = {".parquet": "pyarrow", ".jsonl.zst": "zstandard"}


def rules(run: schema.Run) -> list[Problem]:
    """Problems of data and tokenizer, placed by dotted key."""
    return [*_tokenizer_problems(run), *_data_problems(run.data)]


def _tokenizer_problems(run: schema.Run) -> Iterator[Problem]:
    try:
        tokenizer = build_tokenizer(run.tokenizer)
    except ValueError as error:
        yield Problem("tokenizer.path", str(error), ("tokenizer",))
        return
    if tokenizer.vocab_size > run.model.vocab_size:
        message = (
            f"{run.model.vocab_size} is smaller than the vocabulary of tokenizer={run.tokenizer.name}, "
            f"{tokenizer.vocab_size}; set model.vocab_size={tokenizer.vocab_size} or choose another tokenizer"
        )
        yield Problem("model.vocab_size", message, ("tokenizer",))


def _data_problems(
    data: schema.StdlibData | schema.TextData | schema.HuggingFaceData | schema.SyntheticData,
) -> Iterator[Problem]:
    match data:
        case schema.TextData():
            yield from _path_problems("data.path", data.path)
            if data.held_out_path is not None:
                yield from _path_problems("data.held_out_path", data.held_out_path)
        case schema.HuggingFaceData():
            yield from _hugging_face_problems(data)
        case _:
            pass


def _path_problems(key: str, path: str) -> Iterator[Problem]:
    try:
        files: list[DataFile] = []
        if is_url(path):
            file_system(path)
        else:
            files = find_files(path)
    except (ValueError, OSError) as error:
        yield Problem(key, str(error))
        return
    for suffix, library in LIBRARIES.items():
        used = next((file.path for file in files if file.name.endswith(suffix)), None)
        if used is not None and importlib.util.find_spec(library) is None:
            yield Problem(key, f"{used}: reading {suffix} needs the library {library}: pip install {library}")


def _hugging_face_problems(data: schema.HuggingFaceData) -> Iterator[Problem]:
    if not huggingface.is_installed():
        yield Problem("data", huggingface.MISSING)
    path = Path(data.dataset).expanduser()
    # A name on the hub is `name` or `owner/name`; anything else can only be a folder.
    only_a_path = data.dataset.startswith(("~", ".", os.sep)) or data.dataset.count("/") > 1
    if only_a_path and not path.is_dir():
        yield Problem("data.dataset", f"{data.dataset}: no such folder")
