"""What a TAB offers: commands, options, groups, choices, keys and values, each with its help.

Knows the command line's grammar and no shell (`shells` does). Key idea: everything comes from the schema and the names
of YAML files, so an answer needs neither Hydra nor torch and is there at once.
"""

import dataclasses
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from tpu_train.config import reflect
from tpu_train.config.schema import Run
from tpu_train.config.sources import SearchPath, description

Candidate = tuple[str, str]  # a word, and its help
CONFIG_DIR = "--config-dir"


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        help: one line.
        values: what may follow it, () when that is the user's own; None for a flag, which nothing follows.
    """

    help: str
    values: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: one line.
        options: by name, each spelling on its own.
        topics: whether a group or a key may be named alone, as in `show optimizer`.
    """

    help: str
    options: Mapping[str, Option]
    topics: bool = False


def complete(words_before: Sequence[str], incomplete: str, commands: Mapping[str, Command]) -> list[Candidate]:
    """The words that a begun word may become.

    Args:
        words_before: the words between the program and the begun one.
        incomplete: the begun word up to the cursor, "" for a new one.
        commands: by name; "" is the command line without one.

    Returns:
        The candidates, most general first. One that ends in `=` or `.` goes on, others are whole words. None where the
        word is a path or a value of the user's own.
    """
    named = bool(words_before) and words_before[0] in commands
    command = commands[words_before[0] if named else ""]
    words = list(words_before[named:])
    if words and (option := command.options.get(words[-1])) and option.values is not None:
        return _matching(((value, "") for value in option.values), incomplete)
    if incomplete.startswith("-"):
        return _matching(((name, o.help) for name, o in command.options.items() if name not in words), incomplete)
    plain, folder = _plain(words, command.options)
    line = _Line(plain, SearchPath(folder))
    if command.topics and "=" not in incomplete and all("=" in word for word in plain):
        return line.topics(incomplete)
    found = [] if words_before else [(name, c.help) for name, c in commands.items() if name]
    return _matching(found, incomplete) + line.overrides(incomplete)


def _matching(candidates: Iterable[Candidate], incomplete: str) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate[0].startswith(incomplete)]


def _plain(words: Sequence[str], options: Mapping[str, Option]) -> tuple[list[str], Path | None]:
    """The words that are neither options nor their values, and the folder of the user's YAML."""
    plain, folder, rest = list[str](), None, iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            plain.append(word)
        elif name in options and options[name].values is not None:
            value = value if equals else next(rest, "")
            folder = value if name == CONFIG_DIR else folder
    path = Path(os.path.expandvars(folder)).expanduser() if folder else None
    return plain, path.resolve() if path and path.is_dir() else None


class _Line:
    """What the overrides of a command line leave to be said.

    Args:
        words: the overrides and topics that are there.
        search: where YAML is.
    """

    def __init__(self, words: Sequence[str], search: SearchPath) -> None:
        self._groups = search.groups()
        self._given = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
        chosen: dict[str, Any] = {}  # what is chosen on the line fixes the members of unions
        for group, files in self._groups.items():
            if (file := files.get(self._given.get(group, ""))) and isinstance(content := _content(file), Mapping):
                *outer, name = group.split("/")
                section = chosen
                for part in outer:
                    section = section.setdefault(part, {})
                section[name] = content
        self._keys: dict[str, list[tuple[type, str]]] = {}
        for dotted, section, name in reflect.walk(Run, chosen):
            self._keys.setdefault(dotted, []).append((section, name))

    def topics(self, incomplete: str) -> list[Candidate]:
        """Groups and keys by themselves; keys inside a section once something is typed."""
        names = [name for name in dict.fromkeys([*self._groups, *self._keys]) if incomplete or "." not in name]
        return _matching(((name, self._doc(name)) for name in names), incomplete)

    def overrides(self, incomplete: str) -> list[Candidate]:
        """`GROUP=`, `KEY=` and the sections that lead to keys, one dot at a time; after `=` the values."""
        word = incomplete.lstrip("+")
        sign = incomplete.removesuffix(word)
        found = self._assignments(word) if "=" in word else [*self._group_names(), *self._key_names(word)]
        return [(f"{sign}{name}", doc) for name, doc in _matching(found, word)]

    def _group_names(self) -> Iterator[Candidate]:
        for group in self._groups:
            if group not in self._given:
                yield f"{group}=", self._doc(group)

    def _key_names(self, word: str) -> Iterator[Candidate]:
        section = word.rpartition(".")[0]
        found: dict[str, str] = {}
        for key in self._keys:
            if not key.startswith(word) or key in self._given or not self._settable(key):
                continue
            start = len(section) + 1 if section else 0
            name = key[:start] + key[start:].partition(".")[0]
            if name in self._groups and name != word:
                continue  # `opt` becomes `optimizer=` at once; `optimizer` may still become `optimizer.lr`
            deeper = name != key or self._is_dictionary(key)
            found.setdefault(f"{name}{'.' if deeper else '='}", self._doc(name))
        yield from found.items()

    def _assignments(self, word: str) -> Iterator[Candidate]:
        key, _, value = word.partition("=")
        before, comma, _ = value.rpartition(",")  # of a sweep, the value after the last comma
        for choice, doc in self._values(key):
            if choice not in before.split(","):
                yield f"{key}={before}{comma}{choice}", doc

    def _values(self, key: str) -> Iterator[Candidate]:
        if key in self._groups:
            for choice, file in self._groups[key].items():
                yield choice, _description(file)
            return
        values: list[str] = []
        for kind in self._kinds(key) if self._settable(key) else ():
            members = reflect.members(kind)
            for member in members:
                values += typing.get_args(member) if typing.get_origin(member) is Literal else ()
            values += ("true", "false") if members == (bool,) else ()
            # Alone it would be put in at once, where a string may be a path that the shell completes.
            values += ("null",) if reflect.is_optional(kind) and str not in members else ()
        yield from ((value, "") for value in dict.fromkeys(values))

    def _kinds(self, key: str) -> list[Any]:
        return [reflect.hints(section)[name] for section, name in self._keys.get(key, ())]

    def _settable(self, key: str) -> bool:
        """Whether a key takes a value: no section does, except null, and a union's tag follows from its group."""
        owners = self._keys.get(key, ())
        tagged = any((tag := reflect.tag(section)) and tag[0] == name for section, name in owners)
        kinds = self._kinds(key)
        return not tagged and any(reflect.is_optional(kind) or not reflect.is_section(kind) for kind in kinds)

    def _is_dictionary(self, key: str) -> bool:
        return any(typing.get_origin(member) is dict for kind in self._kinds(key) for member in reflect.members(kind))

    def _doc(self, name: str) -> str:
        """The schema's line about a key or group; of a group that is no key, its choices."""
        owners = self._keys.get(name.replace("/", "."))
        if not owners:
            return ", ".join(self._groups.get(name, ()))
        metadata = reflect.field_of(*owners[0]).metadata
        return metadata["doc"] + (f" In {metadata['unit']}." if metadata.get("unit") else "")


def _content(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError):
        return None  # a broken file is the run's to tell


def _description(file: Path) -> str:
    try:
        return description(file)
    except (OSError, UnicodeError):
        return ""
