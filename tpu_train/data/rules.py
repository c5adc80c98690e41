"""What can be wrong between the data, the tokenizer and the model, found before anything starts.

Key idea: the rules call what the run would call, short of reading the data.
"""

from tpu_train.config import schema
from tpu_train.config.problems import Problem
from tpu_train.data.sources import find_files
from tpu_train.data.tokenizers import build_tokenizer


def rules(run: schema.Run) -> list[Problem]:
    """Problems of data and tokenizer, placed by dotted key."""
    return _tokenizer_problems(run) + _data_problems(run.data)


def _tokenizer_problems(run: schema.Run) -> list[Problem]:
    try:
        tokenizer = build_tokenizer(run.tokenizer)
    except ValueError as error:
        return [Problem("tokenizer.path", str(error), ("tokenizer",))]
    if tokenizer.vocab_size <= run.model.vocab_size:
        return []
    message = (
        f"{run.model.vocab_size} is smaller than the vocabulary of tokenizer={run.tokenizer.name}, "
        f"{tokenizer.vocab_size}; set model.vocab_size={tokenizer.vocab_size} or choose another tokenizer"
    )
    return [Problem("model.vocab_size", message, ("tokenizer",))]


def _data_problems(data: schema.StdlibData | schema.TextData | schema.SyntheticData) -> list[Problem]:
    if not isinstance(data, schema.TextData):
        return []
    try:
        find_files(data.path)
    except ValueError as error:
        return [Problem("data.path", str(error))]
    return []
