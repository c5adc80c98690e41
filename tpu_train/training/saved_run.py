"""A run folder as others read it: its configuration, its checkpoints' contents and their weights."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tpu_train.config.convert import convert, plain
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.schema import DecoderModel, Run
from tpu_train.execution.checkpoint_io import read_array, saved_specs
from tpu_train.training.checkpoints import Checkpoints
from tpu_train.training.weights import WeightSource, WeightSpec

_WEIGHTS = ("params", "frozen")
# Entry of a checkpoint's meta: the shapes of parameters that are stored longer than they are.
SHAPES = "shapes"


class SavedRun:
    """A run folder.

    Args:
        folder: of the run.

    Raises:
        ValueError: it is none, or its configuration cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = Checkpoints(folder)
        file = folder / "config.yaml"
        try:
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{folder} is not a run folder: {file} cannot be read: {error.strerror}") from error
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{file}: not valid YAML: {str(error).splitlines()[0]}") from error
        run, problems = convert(Run, tree)
        if problems:
            raise ConfigError([Problem(f"{file}: {problem.place}", problem.message) for problem in problems])
        self.run: Run = run

    def newest(self) -> int:
        """The newest whole checkpoint's step.

        Raises:
            ValueError: there is none.
        """
        step = self.checkpoints.newest_whole()
        if step is None:
            raise ValueError(f"{self.folder} has no whole checkpoint")
        return step

    def step(self, wanted: int | None) -> int:
        """A step that is there and whole; None for the newest.

        Raises:
            ValueError: it is not.
        """
        return self.newest() if wanted is None else self.checkpoints.require(wanted)

    def weights(self, step: int) -> WeightSource:
        """The model's weights at a step, by name."""
        path = self.checkpoints.path(step)
        specs, shapes = saved_specs(path), self.checkpoints.meta(step).get(SHAPES, {})
        places = {name: part for part in _WEIGHTS for name in specs.get(part, {})}
        found = {name: _spec(specs[part][name], shapes.get(name)) for name, part in places.items()}
        return WeightSource(str(path), found, lambda name: read_array(path, (places[name], name), found[name]))

    def check_fits(self, model: DecoderModel) -> None:
        """Compares the saved model's sizes with another's.

        Raises:
            ConfigError: with each that differs.
        """
        saved, wanted = plain(self.run.model), plain(model)
        free = ("seq_len", "dropout", "init_std")
        problems = [
            Problem(f"model.{key}", f"model.{key} is {wanted.get(key)!r}, in {self.folder} it is {saved.get(key)!r}")
            for key in sorted(saved.keys() | wanted.keys())
            if key not in free and saved.get(key) != wanted.get(key)
        ]
        if problems:
            raise ConfigError(problems)

    def describe(self, step: int) -> dict[str, Any]:
        """Step, data position, and dtype, shape and sha256 of every tensor of a checkpoint."""
        path = self.checkpoints.path(step)
        meta = self.checkpoints.meta(step)
        tensors = dict(_tensors(path, saved_specs(path), meta.get(SHAPES, {})))
        kept = {name: value for name, value in meta.items() if name not in ("config", SHAPES)}
        return {"run_dir": str(self.folder), "steps": self.checkpoints.steps(), **kept, "tensors": tensors}


def _spec(saved: Any, shape: Sequence[int] | None) -> WeightSpec:
    """Of a tensor as the model has it; `shape` where that is not what was stored."""
    return WeightSpec(tuple(saved.shape if shape is None else shape), str(saved.dtype))


def _tensors(
    path: Path, specs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], names: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, spec in sorted(specs.items()):
        if isinstance(spec, Mapping):
            yield from _tensors(path, spec, shapes, (*names, name))
        else:
            yield ".".join((*names, name)), _tensor(path, (*names, name), _spec(spec, shapes.get(name)))


def _tensor(path: Path, names: tuple[str, ...], spec: Any) -> dict[str, Any]:
    array = read_array(path, names, spec)
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }
