"""Reads the command line's overrides and judges each against the groups and the schema, before anything is composed.

Hydra stops at the first error, names no place, and lets a typo behind `+` through. Key idea: Hydra's own parser says
what a word means, so quoting works as Hydra documents it; what the word may mean is decided here.
"""

import dataclasses
import re
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString

from tpu_train.config import reflect
from tpu_train.config.convert import unknown_key
from tpu_train.config.problems import Problem

OPTIONS = ("--config-dir", "--json", "--multirun", "--help")
_HYDRA_OPTIONS = {  # of Hydra's own command line, and what does the same here
    **dict.fromkeys(("cfg", "c", "resolve", "package", "p", "info", "i"), "the composed config: tpu-train show"),
    **dict.fromkeys(("config-path", "cp", "config_dir", "cd"), "a folder of your own YAML: --config-dir DIR"),
    **dict.fromkeys(("config-name", "cn"), "a file of overrides is a choice of recipe: recipe=NAME"),
    **dict.fromkeys(("hydra-help", "run", "r", "shell-completion", "sc"), "tpu-train --help"),
}


@dataclasses.dataclass(frozen=True)
class Word:
    """One override: the word as typed, and Hydra's reading of it.

    Attributes:
        place: where it was said, for messages.
        parsed: Hydra's reading; of one job of a sweep, with the one value of that job.
    """

    place: str
    parsed: Override

    @property
    def assignment(self) -> str:
        """The word as `KEY=VALUE`, without Hydra's prefixes."""
        return str(self.parsed.input_line).lstrip("+")

    @property
    def key(self) -> str:
        """The group or the dotted key that the word is about."""
        return self.parsed.key_or_group

    def leaves(self) -> Iterable[tuple[str, Any]]:
        """The dotted keys that the word sets, with their values; a mapping sets several."""
        yield from _leaves(self.key, self.parsed.value())


@dataclasses.dataclass(frozen=True)
class Judged:
    """Words after a look at each.

    Attributes:
        choices: sound choices of groups.
        values: words that set values, to be judged against the schema of the chosen groups.
        hydra: words about `hydra.*`, to be judged against Hydra's own schema.
        problems: what is wrong with the others.
    """

    choices: list[Word]
    values: list[Word]
    hydra: list[Word]
    problems: list[Problem]


def place(text: str) -> str:
    """A command-line word as messages show it."""
    return f"command line '{text}'"


def quoted(text: str) -> str:
    """A string as a value of an override, in quotes where it would be read as something else without."""
    if re.fullmatch(r"[\w./-]*[/A-Za-z_][\w./-]*", text) and parse_one(f"key={text}", "").parsed.value() == text:
        return text
    return QuotedString(text, Quote.single).with_quotes()


def parse_one(text: str, where: str) -> Word:
    """One word by Hydra's parser.

    Raises:
        Exception: it is not an override; Hydra's parser has several kinds of error.
    """
    return Word(where, OverridesParser.create().parse_override(text))


def parse(texts: Sequence[str], root: type) -> tuple[list[Word], list[Problem]]:
    """Parse words with Hydra's parser; words that look like options get the override that was meant."""
    words, problems = [], []
    waiting = list(texts)
    while waiting:
        text = waiting.pop(0)
        if text.startswith("-"):
            value = waiting.pop(0) if "=" not in text and waiting and "=" not in waiting[0] else None
            problems.append(_option(text, value, root))
            continue
        try:
            words.append(parse_one(text, place(text)))
        except Exception as error:
            known = (text.partition("=")[0].lstrip("+~"),)
            problems.append(Problem(place(text), _unparsed(text, error), known))
    return words, problems


def _unparsed(text: str, error: Exception) -> str:
    """Why a word is no override, and what to do."""
    key, equals, value = text.partition("=")
    lines = str(error).splitlines() or [type(error).__name__]
    if called := re.match(r"\w+ while evaluating '(.*?)': (.*)", lines[0], re.DOTALL):
        known = f"; functions: {lines[1].partition(': ')[2]}" if lines[1:] and "Unknown function" in lines[0] else ""
        return f"{called[1]} cannot be evaluated: {called[2]}{known}; quote it for a string: \"{key}='{called[1]}'\""
    unquoted = re.sub(r"'(\\.|[^'\\])*'|\"(\\.|[^\"\\])*\"", "", value)
    special = " ".join(dict.fromkeys(re.findall(r"[^\w\s./+-]", unquoted)))
    why, hint = lines[0].rstrip("."), "an override is KEY=VALUE"
    if equals and not re.fullmatch(r"[\w./@+-]+", key.lstrip("+~")):
        why = f"{key!r} is no key"
    elif value.startswith("~"):
        why, hint = "~ stands for nothing here", f"write {key}=$HOME{value[1:]}"
    elif re.search(r"['\"]", unquoted):
        why, hint = "a quote is not closed", f"\\' is a quote inside of quotes: \"{key}='it\\'s'\""
    elif equals and special:
        why, hint = f"{special} has a meaning of its own", f"quote special characters: \"{key}='a b, c'\""
    return f"not an override ({why}); {hint}"


def _option(text: str, value: str | None, root: type) -> Problem:
    """A word with dashes that is none of our options."""
    name, _, given = text.lstrip("-").partition("=")
    given = given or value or "..."
    where = place(text if value is None else f"{text} {value}")
    if text in OPTIONS:
        return Problem(where, f"an option and not an override; write {text} before --")
    message = f"there is no option {text.partition('=')[0]!r}"
    if instead := _HYDRA_OPTIONS.get(name):
        return Problem(where, f"{message}; {instead}")
    keys = [dotted for dotted, *_ in reflect.walk(root)]
    plain = [option.lstrip("-") for option in OPTIONS]
    meant = name.replace("-", "_")
    option = None if any(key.rpartition(".")[2] == meant for key in keys) else reflect.nearest(name, plain)
    if option:
        return Problem(where, f"{message}; nearest is '--{option}'")
    if key := reflect.nearest(meant, keys):
        return Problem(where, f"{message}; keys are set without dashes: {key}={given}", (key,))
    return Problem(where, f"{message}; options: {', '.join(OPTIONS)}")


def judge_forms(words: Sequence[Word], groups: Mapping[str, Mapping[str, Path]], root: type) -> Judged:
    """Tell choices of groups, values and Hydra's own settings apart, and judge all that needs no composition."""
    judged = Judged([], [], [], [])
    seen: dict[str, str] = {}
    for word in words:
        dotted = word.key.replace("/", ".")
        message = _form(word, groups, root) or _separators(word, groups, root)
        if message is None and word.key in groups:
            message = _choice(word, groups[word.key], seen, reflect.has(root, dotted))
            seen.setdefault(word.key, word.place)
        if message is not None:
            near = reflect.nearest(word.key, groups) if "/" in word.key or word.key not in groups else None
            judged.problems.append(Problem(word.place, message, (dotted, *([near.replace("/", ".")] if near else []))))
        elif word.parsed.is_hydra_override():
            judged.hydra.append(word)
        else:
            (judged.choices if word.key in groups else judged.values).append(word)
    sound = {word.key for word in judged.choices}
    broken = [word.key.replace("/", ".") for word in words if word.key in groups and word.key not in sound]
    # What a refused choice would have allowed is not known: its fields are judged after it is corrected.
    judged.values[:] = [word for word in judged.values if not any(within(word.key, section) for section in broken)]
    return judged


def within(key: str, section: str) -> bool:
    """Whether a dotted key is a section or lies inside it."""
    return key == section or key.startswith(f"{section}.")


def _form(word: Word, groups: Mapping[str, Any], root: type) -> str | None:
    """What is wrong with a word whatever it sets."""
    key, parsed = word.key, word.parsed
    if parsed.package is not None:
        return f"{key}@{parsed.package} places a group elsewhere, which no stage reads; write {key}=..."
    if parsed.is_delete():
        return _removed(key, groups, root)
    if parsed.is_sweep_override():
        if parsed.is_hydra_override():
            return f"{key} is a setting of the sweep itself and takes one value"
        received = str(parsed.input_line).partition("=")[2]
        hints = []
        kinds = [member for kind in _kinds(root, key) for member in reflect.members(kind)]
        if any(typing.get_origin(kind) is tuple for kind in kinds):
            hints.append(f"; write a list as {key}=[a,b]")
        if str in kinds or not kinds:
            hints.append(f"; write a string with a comma as \"{key}='a,b'\"")
        return f"{received} is a sweep, which runs with -m{''.join(hints)}"
    if wrong := _odd_key(key, None if parsed.is_sweep_override() else parsed.value()):
        at, name = wrong
        shown = "null" if name is None else str(name).lower() if isinstance(name, bool) else str(name)
        return f"{at} has the key {shown}, which is no name; write {at}.{shown}=..."
    return None


def _removed(key: str, groups: Mapping[str, Any], root: type) -> str:
    """What to do instead of removing something."""
    kinds = _kinds(root, key)
    if key in groups:
        return f"{key} cannot be removed, a choice is needed; choices: {', '.join(groups[key])}"
    if kinds and all(reflect.is_optional(kind) for kind in kinds):
        return f"{key} cannot be removed, every key is needed; write {key}=null for none"
    if kinds or key.startswith(("hydra.", "hydra/")):
        return f"{key} cannot be removed, every key is needed"
    if any(reflect.entries(kind) for kind in _kinds(root, key.rpartition(".")[0])):
        return f"{key} cannot be removed; leave the entry out where it is given"
    near = reflect.nearest(key, [*groups, *(known for known, *_ in reflect.walk(root))])
    return f"there is no key {key!r}{f'; nearest is {near!r}' if near else ''}; keys cannot be removed"


def _kinds(root: type, key: str) -> list[Any]:
    """The types that a key has by the choices of groups."""
    return [reflect.hints(section)[name] for dotted, section, name in reflect.walk(root) if dotted == key]


def _odd_key(at: str, value: Any) -> tuple[str, Any] | None:
    """The first key of a mapping that is no string, with where it stands."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(name, str):
            return at, name
        if found := _odd_key(f"{at}.{name}", inner):
            return found
    return None


def _separators(word: Word, groups: Mapping[str, Any], root: type) -> str | None:
    """What is wrong with the dots and slashes of a key: slashes name a group, dots a key."""
    key = word.key
    if key in groups or word.parsed.is_hydra_override():
        return None
    slashed, dotted = key.replace(".", "/"), key.replace("/", ".")
    value = word.assignment.partition("=")[2]
    if slashed in groups:
        return f"{key} is a group; choose with {slashed}={value}; choices: {', '.join(groups[slashed])}"
    if "/" not in key:
        return None
    if reflect.has(root, dotted):
        return f"{key} is not a group; set the key with {dotted}={value}"
    near = reflect.nearest(key, groups)
    return f"there is no group {key!r}{f'; nearest is {near!r}' if near else ''}; groups: {', '.join(groups)}"


def _choice(word: Word, choices: Mapping[str, Path], seen: Mapping[str, str], usual: bool) -> str | None:
    """What is wrong with the choice of a group; `usual` groups have a choice by default."""
    group, value = word.key, word.parsed.value()
    if group in seen:
        return f"{group} is chosen twice, also by {seen[group]}; keep one"
    if isinstance(value, Mapping):
        return f"{group} is a group; set its keys one by one as {group.replace('/', '.')}.KEY=VALUE"
    if usual and (word.parsed.is_add() or word.parsed.is_force_add()):
        return f"{group} is already chosen; write {group}={value} without +"
    return None if isinstance(value, str) and value in choices else _no_choice(group, value, choices)


def _no_choice(group: str, value: Any, choices: Mapping[str, Path]) -> str:
    shown = "null" if value is None else str(value)
    if shown in choices:
        return f"{group}={shown} is no name but a value; quote it: \"{group}='{shown}'\""
    folder = next(iter(choices.values())).parent
    if (folder / f"{shown}.yml").is_file():
        return f"{group} has no choice {shown!r}: {folder / shown}.yml is not read, rename it to {shown}.yaml"
    near = reflect.nearest(shown, choices)
    hint = f"; nearest is {near!r}" if near else ""
    return f"{group} has no choice {shown!r}{hint}; choices: {', '.join(choices)}"


def judge_values(
    words: Sequence[Word], base: Mapping[str, Any], root: type, groups: Collection[str]
) -> tuple[list[Word], list[Problem]]:
    """Judge the words that set values against the schema of the chosen groups.

    Args:
        words: from `judge_forms`.
        base: the config composed of the chosen groups, unresolved.
        root: the schema.
        groups: for the hint at a misspelt group.

    Returns:
        The sound words and the problems.
    """
    sound, problems = [], []
    for word in words:
        found = [problem for key, _ in word.leaves() if (problem := _key(word, key, base, root, groups))]
        problems += found
        if not found:
            sound.append(word)
    return sound, problems


def _key(word: Word, key: str, base: Mapping[str, Any], root: type, groups: Collection[str]) -> Problem | None:
    """What is wrong with setting a dotted key."""
    kind: Any = root
    value: Any = base
    path: list[str] = []
    for name in key.split("."):
        at = ".".join(path)
        if path and reflect.entries(kind):
            return None  # the user's own entries
        if not reflect.is_section(kind):
            message = f"{at} has no keys of its own, it is {reflect.describe(kind)}; write {at}=..."
            return Problem(word.place, message, (at,))
        if path and value is None and not isinstance(word.parsed.value(), Mapping):
            message = f"{at} is null here; set all of its keys at once: {at}={{{', '.join(_names(kind))}}}"
            return Problem(word.place, message, (at,))
        section = reflect.section_of(kind, value) or reflect.members(kind)[0]
        if name not in reflect.hints(section):
            return _no_key(word, key, ".".join([*path, name]), kind, section, root, base, groups)
        tag = reflect.tag(section)
        if tag and name == tag[0] and (group := at.replace(".", "/")) in groups:
            return Problem(word.place, f"{key} follows from the choice of {group}; choose with {group}=...", (at,))
        path.append(name)
        kind = reflect.hints(section)[name]
        value = value.get(name) if isinstance(value, Mapping) else None
    message = _section_value(word, key, kind, groups)
    if message is None and word.parsed.is_add() and not reflect.entries(kind):
        message = f"{key} exists; write {word.assignment} without +"
    return Problem(word.place, message, (key,)) if message else None


def _no_key(
    word: Word, key: str, dotted: str, kind: Any, section: type, root: type, base: Any, groups: Collection[str]
) -> Problem:
    """A key that the schema does not have, with what was probably meant."""
    everywhere = [known for known, *_ in reflect.walk(root, base)]
    if "." in dotted:
        return unknown_key(kind, section, dotted, word.place, everywhere)
    near = reflect.nearest(key, [*groups, *everywhere])
    hint = f"nearest is {near!r}" if near else f"keys: {', '.join(reflect.hints(root))}"
    return Problem(word.place, f"there is no key {key!r}; {hint}", (near.replace("/", "."),) if near else ())


def _section_value(word: Word, key: str, kind: Any, groups: Collection[str]) -> str | None:
    """What is wrong with giving a whole section one value; only null, where that is allowed, is right."""
    value = word.parsed.value()
    if key == word.key and reflect.entries(kind) and isinstance(value, list):  # OmegaConf does not merge it
        return f"{key} is {value}, expected {reflect.describe(kind)}"
    off = key == word.key and value is None and reflect.is_optional(kind)
    if off or not reflect.is_section(kind):
        return None
    slashed = key.replace(".", "/")
    inner = [f"{slashed}/{name}" if f"{slashed}/{name}" in groups else f"{key}.{name}" for name in _names(kind)]
    return f"{key} is a section; set {', '.join(inner)}"


def _names(kind: Any) -> list[str]:
    return list(reflect.hints(reflect.members(kind)[0]))


def _leaves(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value
