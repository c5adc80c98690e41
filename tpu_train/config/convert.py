"""The strict step from plain nested mappings to the schema's frozen dataclasses, and back.

Hydra composes untyped YAML, so this is where a key must exist and a value must fit. Key idea: every problem is
collected, none is raised. A value that cannot be converted is replaced by one of its type, so that the rules can still
be asked about everything else.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from tpu_train.config import reflect
from tpu_train.config.fields import Rule
from tpu_train.config.problems import Problem

NULL_WORDS = ("None", "none")  # Python's null, which YAML reads as a string
MISSING = "???"  # OmegaConf's mark of a value that the user must give
_BROKEN: Any = object()
# YAML 1.1 leaves `1e-4` a string.
_NUMBER = re.compile(r"[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_OFF = ("disabled", "never", "none")  # what choices call what a person calls off


def convert(
    kind: Any, value: Any, place: Callable[[str], str] = lambda key: key, skip: Collection[str] = ()
) -> tuple[Any, list[Problem]]:
    """Convert a plain value to a type of the schema.

    Args:
        kind: a dataclass of the schema, or the type of one of its fields.
        value: nested mappings, lists and scalars; "???" marks a missing value.
        place: from a dotted key to where its value was set, for the problems.
        skip: dotted keys and sections whose problem is known already.

    Returns:
        The value and all problems. What a problem names stands in the value as a placeholder of the right type.
    """
    converter = _Converter(place, skip)
    return converter.any(kind, value, ""), converter.problems


def judge(root: type, base: Any, key: str, value: Any, place: str) -> list[Problem]:
    """What is wrong with one value of a key, whatever the others are.

    Args:
        root: the schema.
        base: plain values, for the members of unions.
        key: dotted.
        value: plain; what refers to other keys is not judged.
        place: for the problems.
    """
    if isinstance(value, str) and "${" in value:
        return []
    declared = {dotted: (section, name) for dotted, section, name in reflect.walk(root, base)}
    converter = _Converter(lambda _: place, ())
    if key in declared:
        section, name = declared[key]
        converter.ruled(reflect.field_of(section, name).metadata["rule"], reflect.hints(section)[name], value, key)
    elif (parent := key.rpartition(".")[0]) in declared:
        section, name = declared[parent]
        if element := reflect.entries(reflect.hints(section)[name]):
            converter.any(element, value, key)
    return converter.problems


def plain(value: Any) -> Any:
    """Turn dataclasses back into mappings, and tuples into lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


class _Converter:
    def __init__(self, place: Callable[[str], str], skip: Collection[str]) -> None:
        self.problems: list[Problem] = []
        self._place = place
        self._skip = skip

    def _skips(self, key: str) -> bool:
        return any(key == known or key.startswith(f"{known}.") for known in self._skip)

    def _refuse(self, kind: Any, key: str, message: str, about: str | None = None) -> Any:
        if not self._skips(key):
            # Of an item of a list, the list is what is not known.
            self.problems.append(Problem(self._place(key), message, (re.sub(r"\[.*", "", about or key),)))
        return _placeholder(kind)

    def _expected(self, kind: Any, value: Any, key: str) -> Any:
        return self._refuse(kind, key, f"{key} is {show(value)}, expected {reflect.describe(kind)}{_hint(kind, value)}")

    def any(self, kind: Any, value: Any, key: str) -> Any:
        if isinstance(value, str) and value == MISSING:
            if not self._skips(key):
                message = f"{key} is required and has no value; give one with {key}=..."
                self.problems.append(Problem(self._place(key), message, (key,), missing=True))
            return _placeholder(kind)
        if value is None and reflect.is_optional(kind):
            return None
        if reflect.is_section(kind):
            return self._section(kind, value, key)
        return self._leaf(kind, value, key)

    def _leaf(self, kind: Any, value: Any, key: str) -> Any:
        member, *others = reflect.members(kind)
        if others:
            return self._one_of((member, *others), kind, value, key)
        if value in NULL_WORDS and reflect.is_optional(kind):
            return self._expected(kind, value, key)
        if typing.get_origin(member) is tuple:
            return self._tuple(kind, member, value, key)
        if element := reflect.entries(member):
            return self._entries(kind, element, value, key)
        converted = _scalar(member, value)
        return self._expected(kind, value, key) if converted is _BROKEN else converted

    def _one_of(self, members: Sequence[Any], kind: Any, value: Any, key: str) -> Any:
        if float not in members and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, float) and not math.isfinite(value):
            return self._refuse(kind, key, f"{key} is {show(value)}, expected a finite number")
        return value if type(value) in members else self._expected(kind, value, key)

    def _tuple(self, kind: Any, member: Any, value: Any, key: str) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return self._expected(kind, value, key)
        element = typing.get_args(member)[0]
        return tuple(self.any(element, item, f"{key}[{index}]") for index, item in enumerate(value))

    def _entries(self, kind: Any, element: Any, value: Any, key: str) -> Any:
        if not isinstance(value, Mapping):
            return self._expected(kind, value, key)
        return {str(name): self.any(element, item, f"{key}.{name}") for name, item in value.items()}

    def _section(self, kind: Any, value: Any, key: str) -> Any:
        if not isinstance(value, Mapping):
            return self._expected(kind, value, key)
        section = reflect.section_of(kind, value)
        if section is None:
            name, by_tag = reflect.tags(kind)
            dotted = f"{key}.{name}" if key else name
            choices = Literal[tuple(by_tag)]
            message = f"{dotted} is missing, expected {reflect.describe(choices)}"
            if name in value:
                given = value[name]
                message = f"{dotted} is {show(given)}, expected {reflect.describe(choices)}{_hint(choices, given)}"
            self._refuse(choices, dotted, message, about=key)  # the whole section is not known
            return _placeholder(kind)
        fields = {field.name: field for field in dataclasses.fields(section)}
        for name in value:
            if name not in fields:
                self._unknown(kind, section, str(name), key)
        made = {}
        for name, inner in reflect.hints(section).items():
            dotted = f"{key}.{name}" if key else name
            if name in value:
                made[name] = self.ruled(fields[name].metadata["rule"], inner, value[name], dotted)
            elif fields[name].default is dataclasses.MISSING:
                made[name] = self._refuse(inner, dotted, f"{dotted} is missing, expected {reflect.describe(inner)}")
        return section(**made)

    def ruled(self, rule: Rule | None, kind: Any, value: Any, key: str) -> Any:
        known = len(self.problems)
        converted = self.any(kind, value, key)
        if rule is None or converted is None or len(self.problems) > known or self._skips(key):
            return converted
        if not rule.holds(converted):
            return self._refuse(kind, key, f"{key} is {show(value)}, expected {rule.allowed}")
        return converted

    def _unknown(self, kind: Any, section: type, name: str, key: str) -> None:
        dotted = f"{key}.{name}" if key else name
        if self._skips(dotted):
            return
        if "." in name:
            nested = ": {".join(name.split("."))
            message = f"there is no key {name!r}; in YAML dots do not nest, write {nested}: ...{'}' * name.count('.')}"
            self.problems.append(Problem(self._place(dotted), message, (dotted,)))
        else:
            self.problems.append(unknown_key(kind, section, dotted, self._place(dotted)))


def unknown_key(kind: Any, section: type, dotted: str, place: str, elsewhere: Iterable[str] = ()) -> Problem:
    """The problem of a key that a section does not have.

    Args:
        kind: the declared type of the section, possibly a union.
        section: the member of it that the value belongs to.
        dotted: the unknown key, with its section's.
        place: where it was set.
        elsewhere: dotted keys of other sections; one of the same name is named when nothing nearer is.
    """
    parent, _, name = dotted.rpartition(".")
    known = [f"{parent}.{own}" if parent else own for own in reflect.hints(section)]
    owners = [m for m in reflect.members(kind) if m is not section and name in reflect.hints(m)]
    namesakes = [key for key in elsewhere if key.rpartition(".")[2] == name and not owners]
    parts = [f"there is no key {dotted!r}"]
    near = reflect.nearest(name, known) or next(iter(namesakes), None)
    if near:
        parts.append(f"nearest is {near!r}")
    if owners:
        parts.append(f"only {', '.join((reflect.tag(m) or ('', m.__name__))[1] for m in owners)} has it")
    parts.append(f"keys{f' of {parent}' * bool(parent)}: {', '.join(reflect.hints(section))}")
    return Problem(place, "; ".join(parts), (near,) if near else ())


def _placeholder(kind: Any) -> Any:
    """Some value of a type, where the one that was given is refused."""
    member = reflect.members(kind)[0]
    if reflect.is_optional(kind):
        return None
    if dataclasses.is_dataclass(member):
        assert isinstance(member, type)
        return member(**{name: _placeholder(inner) for name, inner in reflect.hints(member).items()})
    origin = typing.get_origin(member)
    return typing.get_args(member)[0] if origin is Literal else (origin or member)(*[1] * (member in (int, float)))


def show(value: Any) -> str:
    """A received value as YAML would write it, so that a string and a number can be told apart."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r}"


def _hint(kind: Any, value: Any) -> str:
    """What to do about a value of the wrong type, where the mistake is a common one."""
    member = None if reflect.is_section(kind) else reflect.members(kind)[0]
    if reflect.is_optional(kind) and value in NULL_WORDS:
        return "; write null for none"
    if typing.get_origin(member) is Literal and isinstance(value, str):
        choices = typing.get_args(member)
        off = next((choice for choice in choices if choice in _OFF), None) if value in ("off", "no", "none") else None
        near = off or reflect.nearest(value, choices)
        return f"; nearest is {near!r}" if near else ""
    if member is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"; quote it in YAML, or on the command line as \"'{value}'\""
    if member in (int, float) and isinstance(value, str):
        return _number_hint(value)
    if kind is bool and value in ("yes", "no", "on", "off"):
        return f"; write {'true' if value in ('yes', 'on') else 'false'}"
    return ""


def _number_hint(text: str) -> str:
    """What to do about a string that YAML 1.1 or a person reads as a number."""
    if re.fullmatch(r"[-+]?0\d+", text, re.ASCII):
        return f"; YAML reads leading zeros as an octal number, write {int(text)}"
    if re.fullmatch(r"\d+(:[0-5]?\d)+", text):
        return "; YAML reads colons as a number of base sixty, write it in decimal"
    return ""


def _scalar(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in typing.get_args(kind) else _BROKEN
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else _BROKEN
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    if kind is float and isinstance(value, int):
        return float(value) if abs(value) < 2**1000 else _BROKEN
    return value if isinstance(value, kind) else _BROKEN
