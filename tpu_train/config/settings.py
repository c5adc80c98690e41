"""Settings of a command that takes no configuration: `KEY=VALUE` words judged against one dataclass of the schema."""

from collections.abc import Sequence
from typing import Any

from tpu_train.config import overrides, reflect
from tpu_train.config.compose import in_order
from tpu_train.config.convert import MISSING, convert, unknown_key
from tpu_train.config.problems import ConfigError, Problem


def parse_settings(kind: type, words: Sequence[str]) -> Any:
    """Convert words to a dataclass of the schema.

    Raises:
        ConfigError: with every problem.
    """
    parsed, problems = overrides.parse(words, kind)
    places: dict[str, str] = {}
    tree: dict[str, Any] = dict.fromkeys(_required(kind), MISSING)
    for word in parsed:
        if word.key not in reflect.hints(kind):
            problems.append(unknown_key(kind, kind, word.key, word.place))
        elif word.key in places:
            problems.append(Problem(word.place, f"{word.key} is given twice, also by {places[word.key]}; keep one"))
        elif word.parsed.is_sweep_override():
            problems.append(Problem(word.place, f"a value with a comma needs quotes: \"{word.key}='a, b'\""))
        else:
            places[word.key], tree[word.key] = word.place, word.parsed.value()
    known = [key for problem in problems for key in problem.keys]
    settings, wrong = convert(kind, tree, lambda key: places.get(key, "command line"), skip=known)
    if problems := [*problems, *wrong]:
        raise ConfigError(in_order(problems, words))
    return settings


def _required(kind: type) -> list[str]:
    return [name for name in reflect.hints(kind) if not reflect.has_default(kind, name)]
