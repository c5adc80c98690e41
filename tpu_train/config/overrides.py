"""Reads the command line's overrides and judges each against the groups and the schema, before anything is composed.

Hydra stops at the first error, names no place, and lets a typo behind `+` through. Key idea: Hydra's own parser says
what a word means, so quoting works as Hydra documents it; what the word may mean is decided here.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from tpu_train.config import reflect
from tpu_train.config.convert import unknown_key
from tpu_train.config.problems import Problem


@dataclasses.dataclass(frozen=True)
class Word:
    """One override: the word as typed, and Hydra's reading of it."""

    text: str
    parsed: Override

    @property
    def assignment(self) -> str:
        """The word without Hydra's prefixes."""
        return self.text.lstrip("+")

    @property
    def key(self) -> str:
        """The group or the dotted key that the word is about."""
        return self.parsed.key_or_group

    def leaves(self) -> Iterable[tuple[str, Any]]:
        """The dotted keys that the word sets, with their values; a mapping sets several."""
        yield from _leaves(self.key, self.parsed.value())


def place(text: str) -> str:
    """A command-line word as messages show it."""
    return f"command line '{text}'"


def parse(texts: Sequence[str]) -> tuple[list[Word], list[Problem]]:
    """Parse words with Hydra's parser."""
    parser = OverridesParser.create()
    words, problems = [], []
    for text in texts:
        try:
            words.append(Word(text, parser.parse_override(text)))
        except HydraException as error:
            why = str(error).splitlines()[0].rstrip(".")
            hint = "; an override is KEY=VALUE" if "=" not in text else "; quote special characters: \"key='a b, c'\""
            problems.append(Problem(place(text), f"not an override ({why}){hint}"))
    return words, problems


def judge_groups(
    words: Sequence[Word], groups: Mapping[str, Iterable[str]], root: type
) -> tuple[list[Word], list[Word], list[Problem]]:
    """Tell choices of groups from values, and judge all that needs no composition.

    Returns:
        The sound choices, the words that set values and are still to be judged, and the problems.
    """
    choices, values, problems, seen = [], [], [], dict[str, str]()
    for word in words:
        message = _form(word) or _separators(word.key, groups, root)
        if message is None and word.key in groups:
            message = _choice(word, list(groups[word.key]), seen)
            seen[word.key] = word.text
            if message is None:
                choices.append(word)
        elif message is None:
            values.append(word)
        if message is not None:
            problems.append(Problem(place(word.text), message))
    broken = {w.key for w in words if w.key in groups} - {w.key for w in choices}
    # What a refused choice would have allowed is unknown: its fields are judged after it is corrected.
    return choices, [w for w in values if w.key.partition(".")[0] not in broken], problems


def _form(word: Word) -> str | None:
    """What is wrong with a word whatever it sets."""
    key, parsed = word.key, word.parsed
    if parsed.is_hydra_override():
        return f"{key} has no effect on a single run; leave it out (folders of YAML: --config-dir, the run's: run_dir)"
    if parsed.package is not None:
        return f"{key}@{parsed.package} places a group elsewhere, which no stage reads; write {key}=..."
    if parsed.is_delete():
        return f"{key} cannot be removed, every key is needed; write {key}=null where it may be off"
    if parsed.is_sweep_override():
        received = word.text.partition("=")[2]
        return f"{received} is a sweep; write a list as {key}=[a,b], a string with a comma as \"{key}='a,b'\""
    return None


def _separators(key: str, groups: Mapping[str, Iterable[str]], root: type) -> str | None:
    """What is wrong with the dots and slashes of a key: slashes name a group, dots a key."""
    if key in groups:
        return None
    if key.replace(".", "/") in groups:
        return f"{key} is a group; choose with {key.replace('.', '/')}=..."
    if "/" in key:
        dotted = key.replace("/", ".")
        known = [name for name, *_ in reflect.walk(root)]
        if dotted in known:
            return f"{key} is not a group; set the key with {dotted}=..."
        near = reflect.nearest(key, groups)
        return (
            f"there is no group {key!r}" + (f"; nearest is {near!r}" if near else "") + f"; groups: {', '.join(groups)}"
        )
    return None


def _choice(word: Word, choices: list[str], seen: Mapping[str, str]) -> str | None:
    """What is wrong with the choice of a group."""
    group, value = word.key, word.parsed.value()
    if word.key in seen:
        return f"{group} is chosen twice, also by {seen[group]!r}; keep one"
    if isinstance(value, Mapping):
        return f"{group} is a group; set its keys one by one as {group}.KEY=VALUE"
    if word.parsed.is_add() or word.parsed.is_force_add():
        return f"{group} is already chosen; write {group}={value} without +"
    if not isinstance(value, str) or value not in choices:
        near = reflect.nearest(str(value), choices)
        hint = f"; nearest is {near!r}" if near else ""
        return f"{group} has no choice {'null' if value is None else str(value)!r}{hint}; choices: {', '.join(choices)}"
    return None


def judge_values(
    words: Sequence[Word], base: Mapping[str, Any], root: type, groups: Mapping[str, Iterable[str]]
) -> tuple[list[Word], list[Problem]]:
    """Judge the words that set values against the schema of the chosen groups.

    Args:
        words: from `judge_groups`.
        base: the config composed of the chosen groups, unresolved.
        root: the schema.
        groups: for the hint at a misspelt group.

    Returns:
        The sound words and the problems.
    """
    sound, problems = [], []
    for word in words:
        messages = [m for key, _ in word.leaves() if (m := _key(word, key, base, root, groups)) is not None]
        problems += [Problem(place(word.text), message) for message in messages]
        if not messages:
            sound.append(word)
    return sound, problems


def _key(word: Word, key: str, base: Mapping[str, Any], root: type, groups: Mapping[str, Iterable[str]]) -> str | None:
    """What is wrong with setting a dotted key."""
    kind: Any = root
    value: Any = base
    path: list[str] = []
    for name in key.split("."):
        at = ".".join(path)
        if not reflect.is_section(kind):
            return f"{at} has no keys of its own, it is {reflect.describe(kind)}; write {at}=..."
        if path and value is None and not isinstance(word.parsed.value(), Mapping):
            return f"{at} is null here; set all of its keys at once: {at}={{{', '.join(_names(kind))}}}"
        section = reflect.section_of(kind, value) or reflect.members(kind)[0]
        if name not in reflect.hints(section):
            everywhere = [dotted for dotted, *_ in reflect.walk(root, base)]
            if path:
                return unknown_key(kind, section, ".".join([*path, name]), everywhere)
            near = reflect.nearest(key, [*groups, *everywhere])
            hint = f"nearest is {near!r}" if near else f"keys: {', '.join(reflect.hints(root))}"
            return f"there is no key {key!r}; {hint}"
        tag = reflect.tag(section)
        if tag and name == tag[0] and at in groups:
            return f"{key} follows from the choice of {at}; choose with {at}=... ({', '.join(groups[at])})"
        path.append(name)
        kind = reflect.hints(section)[name]
        value = value.get(name) if isinstance(value, Mapping) else None
    return _section_value(word, key, kind)


def _section_value(word: Word, key: str, kind: Any) -> str | None:
    """What is wrong with giving a whole section one value; only null, where that is allowed, is right."""
    off = key == word.key and word.parsed.value() is None and reflect.is_optional(kind)
    if off or not reflect.is_section(kind):
        return None
    return f"{key} is a section; set its keys: " + ", ".join(f"{key}.{name}" for name in _names(kind))


def _names(kind: Any) -> list[str]:
    return list(reflect.hints(reflect.members(kind)[0]))


def _leaves(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value
