"""Plain mappings become dataclasses, or every reason why not is told at once."""

import dataclasses
import math
from typing import Any, Literal

import pytest

from tpu_train.config import schema
from tpu_train.config.convert import convert, plain
from tpu_train.config.fields import above, at_least, between, key, not_empty

ADAMW = {
    "name": "adamw",
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "no_decay": ["norm"],
}
OPTIMIZER = schema.AdamW | schema.Sgd


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = key("Size.", rule=at_least(1))


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner | None = key("Inner.", default=None)
    names: tuple[str, ...] = key("Names.", default=())
    on: Literal["stop", "skip"] = key("On.", default="stop")


def messages(kind: Any, value: Any) -> list[str]:
    _, problems = convert(kind, value)
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 5, 5),
        (int, 1e3, 1000),
        (int, 5.0, 5),
        (float, 1, 1.0),
        (float, 2.5, 2.5),
        (float, "1e-4", 1e-4),
        (float, "-1.5E+3", -1500.0),
        (float | None, None, None),
        (bool, True, True),
        (str, "a", "a"),
        (str | None, None, None),
        (tuple[int, ...], [1, 2.0], (1, 2)),
        (Literal["a", "b"], "b", "b"),
    ],
)
def test_value_that_fits_is_converted(kind: Any, value: Any, expected: Any) -> None:
    converted, problems = convert(kind, value)
    assert not problems
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, 5.5, "5.5, expected an integer"),
        (int, True, "true, expected an integer"),
        (int, "5", "'5', expected an integer"),
        (int, "", "'', expected an integer"),
        (int, None, "null, expected an integer"),
        (int, math.inf, "inf, expected an integer"),
        (float, False, "false, expected a number"),
        (float, "abc", "'abc', expected a number"),
        (float, "nan", "'nan', expected a number"),
        (float | None, "None", "'None', expected a number or null; write null for none"),
        (bool, 1, "1, expected true or false"),
        (bool, "yes", "'yes', expected true or false; write true"),
        (bool, "off", "'off', expected true or false; write false"),
        (str, 5, "5, expected a string; quote it"),
        (tuple[str, ...], "norm", "'norm', expected a list, each element a string"),
        (tuple[str, ...], {"a": 1}, "expected a list"),
        (Literal["stop", "skip"], "stp", "'stp', expected stop or skip; nearest is 'stop'"),
        (Literal["stop", "skip"], 3, "3, expected stop or skip"),
        (Inner, [1], "[1], expected a section with the keys size"),
        (Inner, None, "null, expected a section"),
    ],
)
def test_value_that_does_not_fit_is_refused(kind: Any, value: Any, message: str) -> None:
    (only,) = messages(kind, value)
    assert message in only


def test_all_problems_are_told_at_once() -> None:
    value = ADAMW | {"lr": "high", "beta1": 1.0, "epss": 1, "no_decay": ["norm", 3]}
    del value["eps"]
    told = "\n".join(messages(OPTIMIZER, value))
    assert "lr: lr is 'high', expected a number" in told
    assert "beta1 is 1.0, expected a number from 0 up to, not including, 1" in told
    assert "there is no key 'epss'; nearest is 'eps'; keys: name, lr, beta1" in told
    assert "eps is missing, expected a number" in told
    assert "no_decay[1] is 3, expected a string" in told
    assert len(told.splitlines()) == 5


def test_union_is_told_apart_by_its_tag() -> None:
    converted, problems = convert(OPTIMIZER, ADAMW)
    assert not problems
    assert converted == schema.AdamW(
        name="adamw", lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, no_decay=("norm",)
    )
    assert plain(converted) == ADAMW


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ADAMW | {"name": "adamx"}, "name is 'adamx', expected adamw or sgd; nearest is 'adamw'"),
        ({"lr": 1}, "name is missing, expected adamw or sgd"),
        (ADAMW | {"name": ["adamw"]}, "expected adamw or sgd"),
        (ADAMW | {"momentum": 0.9}, "there is no key 'momentum'; only sgd has it; keys: "),
    ],
)
def test_wrong_tag_or_key_of_another_member_is_one_problem(value: Any, message: str) -> None:
    (only,) = messages(OPTIMIZER, value)
    assert message in only


def test_nested_problem_has_its_place() -> None:
    converted, problems = convert(Outer, {"inner": {"size": 0}}, place=lambda at: f"<{at}>")
    assert converted == Outer(inner=Inner(size=1))  # a placeholder, for rules about other keys
    assert [str(p) for p in problems] == ["<inner.size>: inner.size is 0, expected a number of at least 1"]


def test_missing_value_is_required_and_skipped_key_is_silent() -> None:
    assert messages(Inner, {"size": "???"}) == ["size: size is required and has no value; give one with size=..."]
    assert convert(Inner, {"size": "???"}, skip={"size"}) == (Inner(size=1), [])


def test_defaults_of_the_schema_apply() -> None:
    assert convert(Outer, {}) == (Outer(), [])
    assert convert(Outer, {"inner": {"size": 2}, "names": ["a"]}) == (Outer(inner=Inner(2), names=("a",)), [])


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (at_least(1), [1, 2.5], [0, -1, math.nan, math.inf]),
        (above(0), [1e-9], [0, -1, math.nan, math.inf]),
        (between(0, 1), [0, 0.5], [1, -0.1, math.nan, math.inf]),
        (not_empty, ["a", (1,)], ["", ()]),
    ],
)
def test_rules_hold_for_what_they_allow(rule: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(rule.holds(value) for value in good)
    assert not any(rule.holds(value) for value in bad)


@pytest.mark.parametrize("text", ["1_", "_1", "1__0", "1_e-3", "1_.5", "\uff11", "1e", "e5", "."])
def test_what_python_does_not_read_as_a_number_is_refused(text: str) -> None:
    converted, (problem,) = convert(float, text)
    assert converted == 1.0
    assert "expected a number" in problem.message


@pytest.mark.parametrize("text", ["1_000", "1e-4", "1_0.5e3", ".5", "5.", "-1e3"])
def test_what_yaml_leaves_a_string_is_read_as_python_reads_it(text: str) -> None:
    assert convert(float, text) == (float(text), [])
