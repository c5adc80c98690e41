"""Schedules against tables computed by hand."""

import pytest

from tpu_train.config import schema
from tpu_train.optim.schedules import Schedule, schedule


def table(config: Schedule, steps: int, lr: float = 8.0, upto: int | None = None) -> list[float]:
    rate = schedule(config, lr, steps)
    return [rate(step) for step in range(upto or steps)]


def constant(warmup: int) -> Schedule:
    return schema.ConstantSchedule(name="constant", warmup_steps=warmup)


def cosine(warmup: int, ratio: float) -> Schedule:
    return schema.CosineSchedule(name="cosine", warmup_steps=warmup, min_ratio=ratio)


def linear(warmup: int, ratio: float) -> Schedule:
    return schema.LinearSchedule(name="linear", warmup_steps=warmup, min_ratio=ratio)


def wsd(warmup: int, decay: int, ratio: float) -> Schedule:
    return schema.WarmupStableDecaySchedule(
        name="warmup_stable_decay", warmup_steps=warmup, decay_steps=decay, min_ratio=ratio
    )


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        (constant(0), 3, [8, 8, 8]),
        (constant(1), 3, [8, 8, 8]),
        (constant(4), 6, [2, 4, 6, 8, 8, 8]),
        (constant(4), 2, [2, 4]),
        # (1 + cos(pi p)) / 2 at p = 1/4, 1/2, 3/4 is 0.8535534, 0.5, 0.1464466
        (cosine(0, 0.0), 5, [8, 6.828427, 4, 1.171573, 0]),
        (cosine(1, 0.0), 5, [8, 6.828427, 4, 1.171573, 0]),
        (cosine(2, 0.0), 6, [4, 8, 6.828427, 4, 1.171573, 0]),
        (cosine(2, 0.5), 4, [4, 8, 6, 4]),
        (linear(0, 0.0), 5, [8, 6, 4, 2, 0]),
        (linear(2, 0.25), 5, [4, 8, 6, 4, 2]),
        (linear(4, 0.0), 4, [2, 4, 6, 8]),
        (linear(8, 0.0), 4, [1, 2, 3, 4]),
        (linear(0, 0.5), 1, [8]),
        (linear(0, 0.5), 2, [8, 4]),
        (wsd(2, 2, 0.0), 7, [4, 8, 8, 8, 8, 4, 0]),
        (wsd(2, 4, 0.5), 7, [4, 8, 8, 7, 6, 5, 4]),
        (wsd(2, 0, 0.5), 4, [4, 8, 8, 8]),
        (wsd(4, 4, 0.0), 5, [2, 4, 4, 2, 0]),
    ],
)
def test_rates_equal_hand_computed(config: Schedule, steps: int, expected: list[float]) -> None:
    assert table(config, steps) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("config", [constant(5), cosine(5, 0.1), linear(5, 0.1), wsd(5, 5, 0.1)])
def test_first_rate_is_positive_and_last_holds(config: Schedule) -> None:
    rates = table(config, 20, upto=25)
    assert rates[0] == pytest.approx(8 / 5)
    assert max(rates) == pytest.approx(8)
    assert rates[19] == pytest.approx(8 if config.name == "constant" else 0.8)
    assert rates[20:] == [rates[19]] * 5
