"""Stacked parameters against the tensors that a Hugging Face folder has of them.

Key idea: a model's weights and a folder's are both a `WeightSource`, by the names and shapes of each; one is made of
the other, so that whoever reads or writes knows of no stacks. A stack is one tensor of the model, and only one is in
memory.
"""

from collections.abc import Mapping

import numpy as np

from tpu_train.training.huggingface_files import LOADED_AS, NUMPY_DTYPES, StoredTensors
from tpu_train.training.huggingface_names import hf_tensors, is_stacked
from tpu_train.training.weights import WeightSource, WeightSpec

Shapes = Mapping[str, tuple[int, ...]]


def as_model_has(stored: StoredTensors, shapes: Shapes, place: str) -> WeightSource:
    """A folder's tensors as the parameters of these shapes; all that belong to one must be there and fit."""
    parts = {name: [stored.tensors[part] for part in hf_tensors(name, shape)] for name, shape in shapes.items()}

    def spec(name: str) -> WeightSpec:
        dtypes = {LOADED_AS[part.dtype] for part in parts[name]}
        return WeightSpec(tuple(shapes[name]), "float32" if "float32" in dtypes else dtypes.pop())

    specs = {name: spec(name) for name in shapes}

    def load(name: str) -> np.ndarray:
        if not is_stacked(name):
            return parts[name][0].load()
        stack = np.empty(specs[name].shape, NUMPY_DTYPES[specs[name].dtype])
        for expert, part in enumerate(parts[name]):
            stack[expert] = part.load()
        return stack

    return WeightSource(place, specs, load)


def as_folder_has(source: WeightSource, shapes: Shapes) -> WeightSource:
    """The parameters of these shapes as a folder's tensors, those of a stack one after the other."""
    specs: dict[str, WeightSpec] = {}
    origins: dict[str, tuple[str, int]] = {}
    for name, shape in shapes.items():
        for expert, (part, part_shape) in enumerate(hf_tensors(name, shape).items()):
            specs[part] = WeightSpec(part_shape, source.specs[name].dtype)
            origins[part] = name, expert
    kept: dict[str, np.ndarray] = {}  # the stack that is being written

    def load(part: str) -> np.ndarray:
        name, expert = origins[part]
        if name not in kept:
            kept.clear()
            if not is_stacked(name):
                return source.load(name)
            kept[name] = source.load(name)
        return kept[name][expert]

    return WeightSource(source.place, specs, load)
