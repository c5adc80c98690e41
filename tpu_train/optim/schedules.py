"""Learning rates over steps, in plain Python: the rate enters the captured step as an input.

Key idea: a schedule is a factor in [0, 1] of the peak rate, by step. Steps count from 0, the first update's. With W
warm-up steps and N steps in all:

* warm-up, steps 0 to W-1: (step + 1) / W. The first rate is positive, and step W-1 has the peak.
* a decay over the whole run starts from the peak at step max(W, 1) - 1 and reaches `min_ratio` at step N-1. Where W is
  N or more, no step is left to decay in and the run is all warm-up.
* warmup_stable_decay decays over its last D steps: step N-1-D is the last one at the peak, step N-1 has `min_ratio`.
  Where warm-up and decay overlap the lower of the two rates holds.
* after step N-1 the rate stays where it ended.
"""

import math
from collections.abc import Callable

from tpu_train.config import schema

Schedule = schema.ConstantSchedule | schema.CosineSchedule | schema.LinearSchedule | schema.WarmupStableDecaySchedule
Rate = Callable[[int], float]


def schedule(config: Schedule, lr: float, steps: int) -> Rate:
    """The learning rate as a function of the step, by the conventions above.

    Args:
        config: which schedule, and its numbers.
        lr: the peak rate.
        steps: updates in the whole run (N).
    """
    match config:
        case schema.ConstantSchedule():
            return lambda step: lr * warmup(step, config.warmup_steps)
        case schema.CosineSchedule():
            return lambda step: lr * cosine(step, steps, config.warmup_steps, config.min_ratio)
        case schema.LinearSchedule():
            return lambda step: lr * linear(step, steps, config.warmup_steps, config.min_ratio)
        case schema.WarmupStableDecaySchedule():
            return lambda step: (
                lr
                * min(warmup(step, config.warmup_steps), final_decay(step, steps, config.decay_steps, config.min_ratio))
            )


def warmup(step: int, warmup_steps: int) -> float:
    """A line up to 1, then 1."""
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def cosine(step: int, steps: int, warmup_steps: int, min_ratio: float) -> float:
    """Warm-up, then half a cosine from 1 down to `min_ratio`."""
    progress = _decay_progress(step, steps, warmup_steps)
    return warmup(step, warmup_steps) * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def linear(step: int, steps: int, warmup_steps: int, min_ratio: float) -> float:
    """Warm-up, then a line from 1 down to `min_ratio`."""
    progress = _decay_progress(step, steps, warmup_steps)
    return warmup(step, warmup_steps) * (1 - (1 - min_ratio) * progress)


def final_decay(step: int, steps: int, decay_steps: int, min_ratio: float) -> float:
    """1, then over the last `decay_steps` steps a line down to `min_ratio`."""
    decay_steps = min(decay_steps, steps - 1)  # the first step has the full rate
    if decay_steps == 0:
        return 1.0
    progress = (step - (steps - 1 - decay_steps)) / decay_steps
    return 1 - (1 - min_ratio) * min(max(progress, 0.0), 1.0)


def _decay_progress(step: int, steps: int, warmup_steps: int) -> float:
    """0 up to the step that has the peak, 1 at the last step."""
    start = max(warmup_steps, 1) - 1
    if step <= start:
        return 0.0
    return min((step - start) / max(steps - 1 - start, 1), 1.0)
