"""Fields of the schema: one line of documentation and the rule of its value, kept beside the field."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal

FloatName = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy.

    Attributes:
        allowed: what is allowed, in words, for messages and for `tpu-train show KEY`.
        holds: whether a value is allowed.
    """

    allowed: str
    holds: Callable[[Any], bool]


def key(doc: str, *, rule: Rule | None = None, unit: str | None = None, **default: Any) -> Any:
    """A dataclass field with its documentation (meaning, when it is ignored), its unit and the rule of its value.

    Args:
        doc: one line; the command line's help and the docs are generated from it.
        rule: checked for values that are not None.
        unit: of a quantity, in the plural: tokens, steps, ...
        default: `default=...` as in `dataclasses.field`; without it the key is required.
    """
    return dataclasses.field(metadata={"doc": doc, "rule": rule, "unit": unit}, **default)


def at_least(low: float) -> Rule:
    """Numbers from `low` on."""
    return Rule(f"a number of at least {low}", lambda value: value >= low and math.isfinite(value))


def above(low: float) -> Rule:
    """Numbers greater than `low`."""
    return Rule(f"a number greater than {low}", lambda value: value > low and math.isfinite(value))


def between(low: float, high: float) -> Rule:
    """Numbers in [low, high)."""
    return Rule(f"a number from {low} up to, not including, {high}", lambda value: low <= value < high)


axis_size = Rule("-1 or a number of at least 1", lambda value: value == -1 or value >= 1)
not_empty = Rule("something that is not empty", bool)

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)min)?(?:(\d+)s)?")


def duration_seconds(text: str) -> int | None:
    """Seconds of `1h30min`, `10min`, `90s`; None for what is no duration, and for none at all."""
    match = _DURATION.fullmatch(text)
    hours, minutes, seconds = (int(part or 0) for part in (match.groups() if match else ()) or (0, 0, 0))
    return 3600 * hours + 60 * minutes + seconds or None


duration = Rule("a duration such as 90s, 10min or 1h30min", lambda value: duration_seconds(value) is not None)
steps_or_duration = Rule(
    "a number of steps of at least 1, or a duration such as 90s, 10min or 1h30min",
    lambda value: value >= 1 if isinstance(value, int) else duration_seconds(value) is not None,
)
step_or_mode = Rule(
    "auto, never, or a step of at least 0",
    lambda value: value >= 0 if isinstance(value, int) else value in ("auto", "never"),
)
