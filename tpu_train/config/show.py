"""What `tpu-train show` prints: the composed config with its sources, a group's choices, or what a key means.

Key idea: each view is made as plain data first (`--json` prints that), and as text from it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tpu_train.config import reflect
from tpu_train.config.compose import Composed
from tpu_train.config.convert import plain
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.schema import Run
from tpu_train.config.sources import SearchPath, description

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
        found = [_key(key, *known[key], composed) for key in keys]
        width = max(map(len, keys))
        return {"section": name, "keys": found}, "\n".join(f"{key['key']:<{width}}  {key['doc']}" for key in found)
    found = _key(name, *known[name], composed)
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
    return {"group": name, "choices": choices}, "\n".join([*lines, "", f"* is chosen; choose with {name}=CHOICE"])


def _key(dotted: str, section: type, field: str, composed: Composed) -> dict[str, Any]:
    """What there is to know of one key; without a value when it belongs to a choice that is not made."""
    metadata = reflect.field_of(section, field).metadata
    found: dict[str, Any] = {"key": dotted, "doc": metadata["doc"]}
    found["type"] = reflect.describe(reflect.hints(section)[field])
    if metadata["rule"]:
        found["allowed"] = metadata["rule"].allowed
    value: Any = plain(composed.run)
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            owner = reflect.tag(section)
            return found | {"only_with": owner[1] if owner else section.__name__}
        value = value[name]
    return found | {"value": value, "source": composed.sources.get(dotted, "the schema's default")}


def _labels(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "meaning", found["doc"]
    yield "type", found["type"]
    if "allowed" in found:
        yield "allowed", found["allowed"]
    if "value" in found:
        yield "value", f"{_scalar(found['value'])}  # {found['source']}"
    else:
        yield "only", f"with {found['only_with']}"
