"""What a sweep will run, judged before its first job starts.

Key idea: a sweep is refused for what is wrong with any of its values. Every value is judged by itself, and beside the
first of all others; where the sweeper runs every combination and these are not too many, each of them is judged too.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from tpu_train.checking import judge
from tpu_train.config import reflect
from tpu_train.config.compose import Composed, in_order
from tpu_train.config.convert import MISSING, plain
from tpu_train.config.convert import judge as judge_value
from tpu_train.config.overrides import Word, parse, parse_one, within
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.schema import Run
from tpu_train.config.sources import SearchPath

_MOST_JUDGED = 100  # combinations; at 0.15 s each, what a person waits for
_MOST_JOBS = 1000  # Hydra composes each before the first starts


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sweep that may start.

    Attributes:
        words: the overrides as Hydra wants them.
        composed: the configuration of the first job.
        job_words: the overrides of Hydra's own settings that concern each job.
        num_jobs: combinations; None where the sweeper draws jobs.
    """

    words: tuple[str, ...]
    composed: Composed
    job_words: tuple[str, ...]
    num_jobs: int | None


def plan(overrides: Sequence[str], config_dir: Path | None) -> Plan:
    """Judge a sweep.

    Args:
        overrides: command-line words, sweeps among them.
        config_dir: a folder of the user's own YAML.

    Raises:
        ConfigError: with every problem of every value.
    """
    words, problems = parse(overrides, Run)
    groups = SearchPath(config_dir and config_dir.resolve()).groups()
    values = _values(words, groups, problems)
    judges = _Judge(config_dir, problems)
    composed = judges.judge([several[0] for several in values])
    from_yaml = [
        _parameter(key, text, composed.hydra.places.get(f"hydra.sweeper.params.{key}", key), judges.problems)
        for key, text in composed.hydra.sweep_params.items()
        if key not in [word.key for word in words]
    ]
    parameters = [word for word in from_yaml if word]
    values += _values(parameters, groups, judges.problems)
    shared = [word for word in (*words, *parameters) if word.key == "run_dir"]
    judges.problems += [Problem(word.place, _SHARED) for word in shared]
    if composed.hydra.enumerates:
        judges.problems += [problem for word in (*words, *parameters) if (problem := _interval(word))]
    keys = [several[0].key for several in values]
    last = [several for index, several in enumerate(values) if several[0].key not in keys[index + 1 :]]
    judges.judge_each([several for several in values if several not in last or _many(last)], composed)
    num_jobs = math.prod(map(len, last))
    if composed.hydra.enumerates and num_jobs > _MOST_JOBS:
        several = [chosen[0].place for chosen in last if len(chosen) > 1]
        judges.problems.append(Problem(several[-1], f"the sweep has {num_jobs:,} jobs, more than {_MOST_JOBS:,}"))
    else:
        for combination in _combinations(last, composed.hydra.enumerates):
            judges.judge(combination)
    if judges.problems:
        raise ConfigError(in_order(judges.problems, overrides))
    about_jobs = ("hydra.job.env_set", "hydra.verbose")
    job_words = [f"++{word.assignment}" for word in words if any(within(word.key, key) for key in about_jobs)]
    if composed.hydra.multirun:  # by a YAML that each job reads too
        job_words.append("hydra.mode=RUN")
    by_key = {several[0].key: several for several in last}
    for_hydra = tuple(_for_hydra(word, by_key.get(word.key, ()), groups, composed.defaults) for word in words)
    return Plan(for_hydra, composed, tuple(job_words), num_jobs if composed.hydra.enumerates else None)


_SHARED = "run_dir is one folder and each job needs its own; set hydra.sweep.dir"


def _many(values: Sequence[Sequence[Word]]) -> bool:
    return sum(map(len, values)) > _MOST_JUDGED


class _Judge:
    """Judges combinations, each once; their problems are collected."""

    def __init__(self, config_dir: Path | None, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        self._config_dir = config_dir
        self._known: dict[tuple[str, ...], Composed] = {}

    def judge(self, words: Sequence[Word]) -> Composed:
        name = tuple(word.assignment for word in words)
        if name not in self._known:
            try:
                self._known[name], found = judge(words, self._config_dir, multirun=True)
            except ConfigError as error:
                raise ConfigError([*self.problems, *error.problems]) from error
            self.problems += found
        return self._known[name]

    def judge_each(self, values: Sequence[Sequence[Word]], composed: Composed) -> None:
        """Judges each value by itself, where it is replaced by a later word or there are too many to compose."""
        base = plain(composed.run)
        for word in itertools.chain.from_iterable(values):
            self.problems += judge_value(Run, base, word.key, word.parsed.value(), word.place)


def _combinations(values: Sequence[Sequence[Word]], enumerates: bool) -> Iterator[list[Word]]:
    """What is judged: every value beside the first of the others, and all combinations where these are few."""
    first = [several[0] for several in values]
    for position, several in enumerate(values):
        step = math.ceil(sum(map(len, values)) / _MOST_JUDGED)  # of very many, some that lie evenly among them
        for value in [*several[::step], several[-1]]:
            yield [*first[:position], value, *first[position + 1 :]]
    if enumerates and math.prod(map(len, values)) <= _MOST_JUDGED:
        yield from map(list, itertools.product(*values))


def _values(words: Sequence[Word], groups: Mapping[str, Any], problems: list[Problem]) -> list[list[Word]]:
    """The values of each word, each as a word of its own with the place of the whole."""
    found = []
    for word in words:
        if not word.parsed.is_sweep_override() or word.parsed.is_hydra_override():
            found.append([word])
            continue
        key, about = word.parsed.get_key_element(), (word.key.replace("/", "."),)
        try:
            texts = list(itertools.islice(_texts(word.parsed, groups), _MOST_JOBS + 1))
        except (ValueError, HydraException) as error:
            problems.append(Problem(word.place, f"{word.key} cannot be enumerated: {error}", about))
            continue
        twice = next((text for index, text in enumerate(texts) if text in texts[:index]), None)
        if not texts:
            problems.append(Problem(word.place, f"{word.key} has no value in this sweep", about))
        elif twice is not None:
            problems.append(Problem(word.place, f"{word.key} has {twice} twice in this sweep; keep one", about))
        elif len(texts) > _MOST_JOBS:
            problems.append(Problem(word.place, f"{word.key} has more than {_MOST_JOBS:,} values; take fewer", about))
        else:
            found.append([parse_one(f"{key}={text}", word.place) for text in texts])
    return found


def _texts(parsed: Override, groups: Mapping[str, Any]) -> Iterator[str]:
    value = parsed._value
    if isinstance(value, Glob):
        yield from value.filter(list(groups.get(parsed.key_or_group, ())))
    elif isinstance(value, IntervalSweep):
        yield from dict.fromkeys((str(value.start), str(value.end)))  # what lies between is drawn by the sweeper
    elif isinstance(value, RangeSweep) and not value.shuffle:
        yield from map(str, value.range())  # one by one: a range may be endless
    else:
        yield from parsed.sweep_string_iterator()


def _parameter(key: str, text: str, place: str, problems: list[Problem]) -> Word | None:
    """An entry of `hydra.sweeper.params` as a word."""
    try:
        return parse_one(f"{key}={text}", place)
    except Exception as error:
        problems.append(Problem(place, f"not an override ({str(error).splitlines()[0]})"))
        return None


def _interval(word: Word) -> Problem | None:
    if not word.parsed.is_interval_sweep():
        return None
    message = f"{word.key} is an interval, which this sweeper cannot enumerate; list values, or choose a sweeper that "
    return Problem(word.place, message + "searches: hydra/sweeper=optuna with hydra-optuna-sweeper installed")


def _for_hydra(word: Word, values: Sequence[Word], groups: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """A word as Hydra wants it: `+` for a group without a default choice, `++` for what it would not merge."""
    if word.key in groups:
        usual = reflect.has(Run, word.key.replace("/", "."))
        return word.assignment if usual else f"+{word.assignment}"
    if "/" in word.key:
        return word.assignment
    known: Any = defaults
    for name in word.key.split("."):
        known = known.get(name, MISSING) if isinstance(known, Mapping) else MISSING
    given = [known, *(value.parsed.value() for value in values)]
    # A sweeper that reports keys shows them as they are given here, so plainly where that works.
    return word.assignment if all(map(_is_plain, given)) else f"++{word.assignment}"


def _is_plain(value: Any) -> bool:
    return value is not None and value is not MISSING and not isinstance(value, Mapping)
