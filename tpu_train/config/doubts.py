"""What is wrong with one YAML file before anybody asks what its keys mean.

Key idea: Hydra reads YAML 1.1, where `010` is eight and `yes` is true, and fails without a line on a defaults list of
the wrong form. The nodes of a file have the lines and the words as written, so all of that is judged on them.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

import yaml

from tpu_train.config import reflect
from tpu_train.config.schema import Run

_KINDS = {"int": "a number", "float": "a number", "bool": "true or false", "null": "null", "timestamp": "a date"}
_MERGE = "tag:yaml.org,2002:merge"


@dataclasses.dataclass(frozen=True)
class Doubt:
    """What a person and YAML 1.1 may read differently, or what cannot be loaded at all.

    Attributes:
        line: from 1 on.
        message: what is wrong and what to do.
        loads: whether Hydra can read the file all the same.
    """

    line: int
    message: str
    loads: bool = False


def is_text(node: yaml.Node) -> bool:
    """Whether a node is a string."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"


def doubts(root: yaml.Node, text: str, group: str) -> Iterator[Doubt]:
    """Everything doubtful about a file.

    Args:
        root: its nodes.
        text: of the file.
        group: that it is a choice of, "" for none.
    """
    yield from _header(text, group)
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else repr(root.value)
        yield Doubt(_line(root), f"the file is {what}, expected lines of KEY: VALUE")
        return
    yield from _values(root, [])
    for name, value in root.value:
        if name.value == "defaults":
            yield from _defaults(value, group)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def headers(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines `# @...` that a file begins with, as Hydra finds them: line and words, without signs."""
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*#\s*@", line):
            yield number, line.strip().lstrip("#").split()
        elif line.strip():
            return


def _header(text: str, group: str) -> Iterator[Doubt]:
    """The line that says where a file's keys go: a choice that is no section of the schema must place them itself."""
    found = list(headers(text))
    own = group.replace("/", ".")
    if group and not group.startswith("hydra/") and not reflect.has(Run, own):
        if [words for _, words in found] != [["@package", "_global_"]]:
            message = f"the first line of a file of {group} must be `# @package _global_`"
            yield Doubt(found[0][0] if found else 1, message)
        return
    for number, words in found:
        if len(words) != 2 or words[0] != "@package":
            yield Doubt(number, "a line `# @` at the top is Hydra's: write `# @package _global_`, or leave it out")
        elif group and words[1] not in ("_global_", "_group_", own):
            yield Doubt(number, f"@package {words[1]} places the keys where no stage reads them; leave the line out")


def _values(node: yaml.Node, above: list[yaml.Node]) -> Iterable[Doubt]:
    """Every doubt about a node and what lies below it."""
    if any(node is ancestor for ancestor in above):
        yield Doubt(_line(node), "an alias that stands inside of what it names")
    elif tag := _explicit_tag(node):
        yield Doubt(_line(node), f"the tag {tag} is not read; write the value without it, a string in quotes")
    elif isinstance(node, yaml.ScalarNode):
        if node.tag.endswith(":value"):
            yield Doubt(_line(node), "= is no value in YAML; write '=' for a string")
        elif message := _scalar(node):
            yield Doubt(_line(node), message, loads=True)
        elif message := _interpolation(node.value):
            yield Doubt(_line(node), message)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _values(item, [*above, node])
    else:
        yield from _mapping(node, above)


def _mapping(node: yaml.Node, above: list[yaml.Node]) -> Iterable[Doubt]:
    seen: dict[str, int] = {}
    for name, value in node.value:
        word = name.value if isinstance(name, yaml.ScalarNode) else ""
        if name.tag == _MERGE and not _mergeable(value):
            yield Doubt(_line(name), "<< takes in a mapping or a list of mappings; write the name of one as *NAME")
        elif not is_text(name) and name.tag != _MERGE:
            yield _key(name)
        elif word in seen:
            yield Doubt(_line(name), f"duplicate key {word}: line {seen[word]} has it too; keep one")
        elif _explicit_tag(name):
            yield from _values(name, above)
        seen.setdefault(word, _line(name))
        yield from _values(value, [*above, node])


def _mergeable(value: yaml.Node) -> bool:
    merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
    return all(isinstance(node, yaml.MappingNode) for node in merged)


def _key(name: yaml.Node) -> Doubt:
    if not isinstance(name, yaml.ScalarNode):
        return Doubt(_line(name), "a key is a name, and here is a list or a mapping; quote braces and brackets")
    kind = _KINDS.get(name.tag.rpartition(":")[2], f"a {name.tag}")
    shown = name.value or "nothing"
    return Doubt(
        _line(name), f"the key {shown} is {kind} in YAML, and keys are names; write '{name.value}' for a string"
    )


def _explicit_tag(node: yaml.Node) -> str | None:
    """A tag that was written (`!!int`) and is another than the value has without."""
    resolver = yaml.SafeLoader("")
    if isinstance(node, yaml.ScalarNode):
        usual = resolver.resolve(yaml.ScalarNode, node.value, (node.style is None, node.style is not None))
    else:
        usual = resolver.resolve(type(node), None, True)
    if node.tag == usual:
        return None
    return node.tag.replace("tag:yaml.org,2002:", "!!")


def _interpolation(text: str) -> str | None:
    if "${" not in text:
        return None
    from omegaconf import grammar_parser  # completion reads files too, and must be there at once
    from omegaconf.errors import GrammarParseError

    try:
        grammar_parser.parse(text)
    except GrammarParseError:
        return f"{text!r} is not a reference; write ${{KEY}} for the value of another key"
    return None


def _scalar(node: yaml.ScalarNode) -> str | None:
    text = node.value
    if node.style is not None:  # quoted: a string for everybody
        return None
    if re.fullmatch(r"[-+]?0[\d_]*\d", text, re.ASCII):
        octal = re.fullmatch(r"[-+]?0[0-7_]+", text)
        reading = f"{int(text.replace('_', ''), 8)}, an octal number, in YAML" if octal else "a string in YAML"
        plain = int(text.replace("_", ""))
        return f"{text} is {reading} and {plain} elsewhere; write {plain}, or '{text}' for a string"
    if node.tag.endswith((":int", ":float")) and ":" in text:
        seconds = yaml.safe_load(text)
        return f"{text} is {seconds}, a number of base sixty, in YAML; write {seconds}, or '{text}' for a string"
    if node.tag.endswith(":bool") and text.lower() not in ("true", "false"):
        truth = str(yaml.safe_load(text)).lower()
        return f"{text} is {truth} in YAML and a string elsewhere; write {truth}, or '{text}' for a string"
    return None


def _defaults(node: yaml.Node, group: str) -> Iterator[Doubt]:
    """The form of a defaults list; what its entries name is judged where all files are known."""
    example = "- override /GROUP: CHOICE"
    if not isinstance(node, yaml.SequenceNode):
        what = "a mapping" if isinstance(node, yaml.MappingNode) else "empty" if not node.value else repr(node.value)
        yield Doubt(_line(node), f"defaults is {what}, expected a list with a line `{example}` for each choice")
        return
    for entry in node.value:
        if isinstance(entry, yaml.MappingNode) and len(entry.value) == 1:
            ((name, value),) = entry.value
            message = _entry(name, value, group)
        elif isinstance(entry, yaml.MappingNode):
            message = f"an entry of defaults has one choice; write a line `{example}` for each"
        elif is_text(entry):
            message = f"{entry.value!r} names no choice; write `{example}`" if " " in entry.value.strip() else None
        else:
            shown = "a list" if isinstance(entry, yaml.SequenceNode) else entry.value or "empty"
            message = f"an entry of defaults is {shown}, expected `{example}`"
        if message:
            yield Doubt(_line(entry), message)


def _entry(name: yaml.Node, value: yaml.Node, group: str) -> str | None:
    """What is wrong with the form of `- KEYWORDS GROUP: CHOICE`."""
    if not is_text(name):
        return "an entry of defaults names a group, as in `- override /GROUP: CHOICE`"
    *keywords, path = name.value.split() or [""]
    meant = path.lstrip("/").partition("@")[0]
    section = meant.replace("/", ".")
    known = bool(group) and reflect.has(Run, section)
    shown = value.value if isinstance(value, yaml.ScalarNode) else "CHOICE"
    for word in keywords:
        if word not in ("override", "optional"):
            return f"{word!r} is no word of a defaults list; write `- override /{meant}: {shown}`"
    if known and meant == group and "override" not in keywords:
        return f"a file of {group} takes another one in by `- {shown}`"
    if known and ("override" not in keywords or not path.startswith("/")):
        return f"{meant} is chosen already; write `- override {path if path[:1] == '/' else '/' + path}: {shown}`"
    items = value.value if isinstance(value, yaml.SequenceNode) else [value]
    for item in items:
        if not is_text(item):
            written = item.value if isinstance(item, yaml.ScalarNode) else "a mapping or a list"
            return f"the choice of {meant} is {written or 'empty'}, expected a name; quote one that looks like a number"
    return None
