"""The strict step from plain nested mappings to the schema's frozen dataclasses, and back.

Hydra composes untyped YAML, so this is where a key must exist and a value must fit. Key idea: every problem is
collected, none is raised; a value that cannot be converted becomes `_BROKEN` and its section is not built.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Literal

from tpu_train.config import reflect
from tpu_train.config.fields import Rule
from tpu_train.config.problems import Problem

MISSING = "???"  # OmegaConf's mark of a value that the user must give
_BROKEN: Any = object()
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")  # YAML 1.1 leaves `1e-4` a string


def convert(
    kind: Any, value: Any, place: Callable[[str], str] = lambda key: key, skip: Container[str] = ()
) -> tuple[Any, list[Problem]]:
    """Convert a plain value to a type of the schema.

    Args:
        kind: a dataclass of the schema, or the type of one of its fields.
        value: nested mappings, lists and scalars; "???" marks a missing value.
        place: from a dotted key to where its value was set, for the problems.
        skip: dotted keys whose problem is known already.

    Returns:
        The value, None when there are problems, and all problems.
    """
    converter = _Converter(place, skip)
    converted = converter.any(kind, value, "")
    return (None if converted is _BROKEN or converter.problems else converted), converter.problems


def plain(value: Any) -> Any:
    """Turn dataclasses back into mappings, and tuples into lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


class _Converter:
    def __init__(self, place: Callable[[str], str], skip: Container[str]) -> None:
        self.problems: list[Problem] = []
        self._place = place
        self._skip = skip

    def _refuse(self, key: str, message: str) -> Any:
        if key not in self._skip:
            self.problems.append(Problem(self._place(key), message))
        return _BROKEN

    def _expected(self, kind: Any, value: Any, key: str) -> Any:
        return self._refuse(key, f"{key} is {show(value)}, expected {reflect.describe(kind)}{_hint(kind, value)}")

    def any(self, kind: Any, value: Any, key: str) -> Any:
        if isinstance(value, str) and value == MISSING:
            return self._refuse(key, f"{key} is required and has no value; give one with {key}=...")
        if value is None and reflect.is_optional(kind):
            return None
        if reflect.is_section(kind):
            return self._section(kind, value, key)
        return self._leaf(kind, value, key)

    def _leaf(self, kind: Any, value: Any, key: str) -> Any:
        member, *others = reflect.members(kind)
        if others:
            return value if type(value) in (member, *others) else self._expected(kind, value, key)
        if value == "None" and reflect.is_optional(kind):
            return self._expected(kind, value, key)
        if typing.get_origin(member) is tuple:
            return self._tuple(kind, member, value, key)
        if element := reflect.entries(member):
            return self._entries(kind, element, value, key)
        converted = _scalar(member, value)
        return self._expected(kind, value, key) if converted is _BROKEN else converted

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
            if name in value:
                return self.any(choices, value[name], dotted)  # refuses it, with the choices
            return self._refuse(dotted, f"{dotted} is missing, expected {reflect.describe(choices)}")
        fields = {field.name: field for field in dataclasses.fields(section)}
        for name in value:
            if name not in fields:
                self._unknown(kind, section, str(name), key)
        made = {}
        for name, inner in reflect.hints(section).items():
            dotted = f"{key}.{name}" if key else name
            if name in value:
                made[name] = self._ruled(fields[name].metadata["rule"], self.any(inner, value[name], dotted), dotted)
            elif fields[name].default is dataclasses.MISSING:
                made[name] = self._refuse(dotted, f"{dotted} is missing, expected {reflect.describe(inner)}")
        return _BROKEN if _BROKEN in made.values() else section(**made)

    def _ruled(self, rule: Rule | None, value: Any, key: str) -> Any:
        if rule is None or value is None or value is _BROKEN or rule.holds(value):
            return value
        return self._refuse(key, f"{key} is {show(value)}, expected {rule.allowed}")

    def _unknown(self, kind: Any, section: type, name: str, key: str) -> None:
        dotted = f"{key}.{name}" if key else name
        self._refuse(dotted, unknown_key(kind, section, dotted))


def unknown_key(kind: Any, section: type, dotted: str, elsewhere: Iterable[str] = ()) -> str:
    """The message for a key that a section does not have.

    Args:
        kind: the declared type of the section, possibly a union.
        section: the member of it that the value belongs to.
        dotted: the unknown key, with its section's.
        elsewhere: dotted keys of other sections; one of the same name is named when nothing nearer is.
    """
    parent, _, name = dotted.rpartition(".")
    known = [f"{parent}.{own}" if parent else own for own in reflect.hints(section)]
    owners = [m for m in reflect.members(kind) if m is not section and name in reflect.hints(m)]
    namesakes = [key for key in elsewhere if key.rpartition(".")[2] == name and not owners]
    parts = [f"there is no key {dotted!r}"]
    if near := reflect.nearest(name, known) or next(iter(namesakes), None):
        parts.append(f"nearest is {near!r}")
    if owners:
        parts.append(f"only {', '.join((reflect.tag(m) or ('', m.__name__))[1] for m in owners)} has it")
    parts.append(f"keys{f' of {parent}' * bool(parent)}: {', '.join(reflect.hints(section))}")
    return "; ".join(parts)


def show(value: Any) -> str:
    """A received value as YAML would write it, so that a string and a number can be told apart."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r}"


def _hint(kind: Any, value: Any) -> str:
    """What to do about a value of the wrong type, where the mistake is a common one."""
    member = None if reflect.is_section(kind) else reflect.members(kind)[0]
    if value == "None" and reflect.is_optional(kind):
        return "; write null for none"
    if typing.get_origin(member) is Literal and isinstance(value, str):
        near = reflect.nearest(value, typing.get_args(member))
        return f"; nearest is {near!r}" if near else ""
    if member is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"; quote it in YAML, or on the command line as \"'{value}'\""
    if kind is bool and value in ("yes", "no", "on", "off"):
        return f"; write {'true' if value in ('yes', 'on') else 'false'}"
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
        return float(value)
    return value if isinstance(value, kind) else _BROKEN
