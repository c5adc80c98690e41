"""What `tpu-train show` prints: the composed config with its sources, a group's choices, or what a key means.

Key idea: each view is made as plain data first (`--json` prints that), and as text from it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tpu_train.config import reflect
from tpu_train.config.compose import Composed
from tpu_train.config.convert import MISSING, plain
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.schema import Run
from tpu_train.config.sources import SearchPath, description

_NOWHERE = object()
_WIDEST = 60  # columns before a trailing comment; longer lines push theirs out


def whole(composed: Composed) -> tuple[dict[str, Any], str]:
    """The composed config, as data and as YAML with each value's source."""
    config = plain(composed.run)
    rows = list(_rows(config, composed.sources, ""))
    width = min(_WIDEST, max(len(line) for line, source in rows if source))
    text = "\n".join(f"{line:<{width}}  # {source}" if source else line for line, source in rows)
    return {"config": config, "choices": composed.choices, "sources": composed.sources}, text


def topic(name: str, composed: Composed, config_dir: Path | None) -> tuple[dict[str, Any], str]:
    """A group, a section or a key, as data and as text.

    Raises:
        ConfigError: there is no such thing.
    """
    groups = SearchPath(config_dir and config_dir.resolve()).groups()
    if name in groups:
        return _group(name, groups[name], composed.choices.get(name))
    known = {dotted: (section, field) for dotted, section, field in reflect.walk(Run)}
    for dotted, section, field in reflect.walk(Run, plain(composed.run)):  # the chosen members describe their keys
        known[dotted] = (section, field)
    if name not in known:
        near = reflect.nearest(name, [*groups, *known])
        hint = f"; nearest is {near!r}" if near else ""
        raise ConfigError([Problem(repr(name), f"is neither a group nor a key{hint}; groups: {', '.join(groups)}")])
    keys = [dotted for dotted in known if dotted.rpartition(".")[0] == name]
    if keys:
        found = [_key(key, *known[key], composed, groups) for key in keys]
        width = max(map(len, keys))
        return {"section": name, "keys": found}, "\n".join(f"{key['key']:<{width}}  {key['doc']}" for key in found)
    found = _key(name, *known[name], composed, groups)
    return found, "\n".join([name, *(f"  {label:<8} {text}" for label, text in _labels(found))])


def _rows(config: Mapping[str, Any], sources: Mapping[str, str], at: str) -> Iterator[tuple[str, str]]:
    indent = "  " * (at.count(".") + 1 if at else 0)
    for name, value in config.items():
        dotted = f"{at}.{name}" if at else name
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:", ""
            yield from _rows(value, sources, dotted)
        else:
            yield f"{indent}{name}: {_scalar(value)}", sources.get(dotted, "the schema's default")


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _group(name: str, files: Mapping[str, Path], chosen: str | None) -> tuple[dict[str, Any], str]:
    choices = [{"name": c, "description": description(f), "chosen": c == chosen} for c, f in files.items()]
    width = max(map(len, files))
    lines = [f"{'*' if c['chosen'] else ' '} {c['name']:<{width}}  {c['description']}" for c in choices]
    hint = f"{'* is chosen; ' if chosen else ''}choose with {name}=CHOICE"
    return {"group": name, "choices": choices}, "\n".join([*lines, "", hint])


def _key(
    dotted: str, section: type, field: str, composed: Composed, groups: Mapping[str, Mapping[str, Path]]
) -> dict[str, Any]:
    """What there is to know of one key; without a value when it belongs to a choice that is not made."""
    metadata = reflect.field_of(section, field).metadata
    kind = reflect.hints(section)[field]
    found: dict[str, Any] = {"key": dotted, "doc": metadata["doc"], "type": reflect.describe(kind)}
    if metadata["unit"]:
        found["unit"] = metadata["unit"]
    if metadata["rule"]:
        found["allowed"] = metadata["rule"].allowed
    value, default = _at(plain(composed.run), dotted), _at(composed.defaults, dotted)
    if value is _NOWHERE:
        owner = reflect.tag(section)
        return found | {"only_with": owner[1] if owner else section.__name__} | _by_choice(dotted, groups)
    if default is _NOWHERE:  # no YAML has it
        default = reflect.field_of(section, field).default
    if default == MISSING and not composed.sources.get(dotted, "").startswith("command line"):
        return found
    if default not in (dataclasses.MISSING, MISSING):
        found["default"] = default
    return found | {"value": value, "source": composed.sources.get(dotted, "the schema's default")}


def _by_choice(dotted: str, groups: Mapping[str, Mapping[str, Path]]) -> dict[str, Any]:
    """What the choices of a key's group set it to, where that is one value."""
    group, _, name = dotted.rpartition(".")
    files = groups.get(group.replace(".", "/"), {})
    values = {choice: _at(_content(file), name) for choice, file in files.items()}
    values = {choice: value for choice, value in values.items() if value not in (_NOWHERE, MISSING)}
    return {"default": next(iter(values.values()))} if len({str(value) for value in values.values()}) == 1 else {}


def _content(file: Path) -> Mapping[str, Any]:
    """A choice's YAML; one that nobody chose may be broken."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _at(tree: Mapping[str, Any], dotted: str) -> Any:
    value: Any = tree
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _NOWHERE
        value = value[name]
    return value


def _labels(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "meaning", found["doc"]
    for label in ("type", "unit", "allowed"):
        if label in found:
            yield label, found[label]
    if "default" in found:
        yield "default", _scalar(found["default"])
    if "value" in found:
        yield "value", f"{_scalar(found['value'])}  # {found['source']}"
    elif "only_with" in found:
        yield "only", f"with {found['only_with']}"
    else:
        yield "value", "none yet; it is required"
