"""Reads the schema: the keys of a section, their types in words, and which member of a union a value belongs to.

Three stages need this (conversion, judging of overrides, `tpu-train show`), and all must agree on what a key is.
Key idea: a union of sections is told apart by the one field that is a `Literal` of a single word (its tag).
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@functools.cache
def hints(section: type) -> dict[str, Any]:
    """The type of each key of a section."""
    resolved = typing.get_type_hints(section)
    return {field.name: resolved[field.name] for field in dataclasses.fields(section)}


def field_of(section: type, name: str) -> dataclasses.Field[Any]:
    """The dataclass field of a key."""
    return next(field for field in dataclasses.fields(section) if field.name == name)


def has_default(section: type, name: str) -> bool:
    """Whether a key may be left out."""
    return field_of(section, name).default is not dataclasses.MISSING


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a type: of a union its members without None, of any other type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(member for member in typing.get_args(kind) if member is not types.NoneType)
    return (kind,)


def is_optional(kind: Any) -> bool:
    """Whether null is allowed."""
    return types.NoneType in typing.get_args(kind)


def entries(kind: Any) -> Any:
    """The type of the values of a dictionary, whose keys are the user's own; None for every other type."""
    (member, *others) = members(kind)
    return typing.get_args(member)[1] if typing.get_origin(member) is dict and not others else None


def is_section(kind: Any) -> bool:
    """Whether values are mappings with keys of their own."""
    return all(dataclasses.is_dataclass(member) for member in members(kind))


def tag(section: type) -> tuple[str, str] | None:
    """The field that tells a section from the others of its union, and its value: ("name", "adamw")."""
    for name, kind in hints(section).items():
        if typing.get_origin(kind) is Literal and len(typing.get_args(kind)) == 1:
            return name, typing.get_args(kind)[0]
    return None


def tags(kind: Any) -> tuple[str, dict[str, type]]:
    """The tag field of a union of sections, and its members by tag."""
    found = [(tag(member), member) for member in members(kind)]
    names = {pair[0] for pair, _ in found if pair}
    assert len(names) == 1, f"members of {kind} need one common tag field"
    return names.pop(), {pair[1]: member for pair, member in found if pair}


def section_of(kind: Any, value: Any) -> type | None:
    """The section that a value belongs to; None when it is not a mapping or its tag is none of the union's."""
    if len(members(kind)) == 1:
        return members(kind)[0]
    name, by_tag = tags(kind)
    chosen = value.get(name) if isinstance(value, Mapping) else None
    return by_tag.get(chosen) if isinstance(chosen, str) else None


def describe(kind: Any) -> str:
    """A type in words, as messages and help show it."""
    if is_optional(kind):
        return " or ".join([*map(describe, members(kind)), "null"])
    if is_section(kind):
        return "a section with the keys " + ", ".join(dict.fromkeys(n for m in members(kind) for n in hints(m)))
    if len(members(kind)) > 1:
        return ", ".join(map(describe, members(kind)))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(arguments) if len(arguments) < 3 else "one of " + ", ".join(arguments)
    if origin is tuple:
        return f"a list, each element {describe(arguments[0])}"
    return f"entries of your own, each {describe(arguments[1])}" if origin is dict else _NAMES[kind]


def walk(kind: Any, value: Any = None, prefix: str = "") -> Iterable[tuple[str, type, str]]:
    """Every key below a section as (dotted key, section that declares it, name), sections included.

    Args:
        kind: the type of the section, a union included.
        value: picks the member of each union, at any depth; a union without a value gives the keys of all members.
        prefix: dotted key of the section itself, "" for the root.
    """
    chosen = section_of(kind, value)
    for section in [chosen] if chosen else members(kind):
        for name, inner in hints(section).items():
            dotted = f"{prefix}.{name}" if prefix else name
            yield dotted, section, name
            if is_section(inner):
                yield from walk(inner, value.get(name) if isinstance(value, Mapping) else None, dotted)


def has(root: Any, dotted: str) -> bool:
    """Whether some choice of groups gives a schema a key."""
    return any(known == dotted for known, *_ in walk(root))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like a word; of dotted keys, one that ends in it comes first."""
    choices = list(choices)
    if same := [choice for choice in choices if choice.lower() == word.lower()]:
        return same[0]
    word = word.lower()
    tails: dict[str, str] = {}
    for choice in choices:
        tails.setdefault(choice.rpartition(".")[2], choice)
    if word in tails:
        return tails[word]
    if close := difflib.get_close_matches(word, choices, n=1):
        return close[0]
    close = difflib.get_close_matches(word.rpartition(".")[2], tails, n=1)
    return tails[close[0]] if close else None
