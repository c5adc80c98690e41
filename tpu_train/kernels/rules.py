"""What can be wrong with kernels, found before anything starts."""

import dataclasses

from tpu_train.config.problems import Problem
from tpu_train.config.schema import Run
from tpu_train.kernels.build import model_tree, swaps
from tpu_train.kernels.choose import REFERENCE, choose
from tpu_train.kernels.platform import known_platform
from tpu_train.kernels.swap import rewrite


def rules(run: Run) -> list[Problem]:
    """Kernels that cannot run here or not with these shapes, and swaps that match nothing."""
    chosen = choose(run, known_platform(run))
    if chosen.problems:
        return list(chosen.problems)
    own = [kernel.name == "custom" for kernel in (chosen.attention, chosen.moe)]
    if not any(own):
        return []
    # Others are made of classes that import JAX, and fit every model that they are chosen for.
    only_own = dataclasses.replace(
        chosen, attention=chosen.attention if own[0] else REFERENCE, moe=chosen.moe if own[1] else REFERENCE
    )
    try:
        rewrite(model_tree(run.model), swaps(only_own))
    except ValueError as error:
        return [Problem("kernels", str(error), ("model",))]
    return []
