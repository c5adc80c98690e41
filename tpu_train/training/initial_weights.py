"""The weights that a new run starts from, where `checkpoint.init_from` names some."""

from pathlib import Path

import numpy as np

from tpu_train.config.problems import ConfigError
from tpu_train.config.schema import Run
from tpu_train.training.huggingface import check_fits, read_folder
from tpu_train.training.saved_run import SavedRun
from tpu_train.training.weights import WeightSource, load_as


def initial_weights(run: Run) -> dict[str, np.ndarray] | None:
    """All weights by name in the dtype of `precision.param`; None for random ones.

    Raises:
        ValueError: the folder has no weights, or ones of another model.
    """
    if run.checkpoint.init_from is None:
        return None
    source = weight_source(run, Path(run.checkpoint.init_from).expanduser())
    return {name: load_as(source, name, run.precision.param) for name in source.specs}


def weight_source(run: Run, folder: Path) -> WeightSource:
    """The weights of a Hugging Face folder or of a run folder's newest checkpoint.

    Raises:
        ValueError: it is neither, or its model is another one.
        ConfigError: likewise, with each size that differs.
    """
    if (folder / "config.json").is_file():
        found = read_folder(folder)
        if problems := check_fits(found.model, run.model):
            raise ConfigError(problems)
        return found.source
    saved = SavedRun(folder)
    source = saved.weights(saved.newest())
    saved.check_fits(run.model)
    return source
