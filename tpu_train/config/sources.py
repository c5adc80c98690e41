"""Where values come from: the folders that are searched for YAML, and the file and line of each key in one.

Key idea: Hydra forgets files when it merges them, and reads YAML 1.1, where `010` is eight and `yes` is true. So each
merged file is read once more as YAML nodes, which have the lines and the words as written.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from tpu_train.config.problems import Problem


def shipped_dir() -> Path:
    """The folder of the YAML that comes with the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"  # in a wheel it lies inside the package, in a checkout beside it
    return installed if installed.is_dir() else package.parent / "conf"


@dataclasses.dataclass(frozen=True)
class SearchPath:
    """The folders of YAML, the user's own before the shipped one."""

    user: Path | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders in the order of search."""
        return (*([self.user] if self.user else []), shipped_dir())

    def find(self, config_path: str) -> Path | None:
        """The file of `model/qwen3_debug`: the first folder that has one wins."""
        candidates = (folder / f"{config_path}.yaml" for folder in self.folders)
        return next((file for file in candidates if file.is_file()), None)

    def name(self, file: Path) -> str:
        """A file as messages show it: shipped ones from `conf/` on, others by their path."""
        return f"conf/{file.relative_to(shipped_dir())}" if file.is_relative_to(shipped_dir()) else str(file)

    def groups(self) -> dict[str, dict[str, Path]]:
        """The groups and, of each, the choices with their files."""
        found: dict[str, dict[str, Path]] = {}
        for folder in reversed(self.folders):  # the first folder's files replace the others'
            for file in sorted(folder.rglob("*.yaml")):
                group = file.parent.relative_to(folder).as_posix()
                if group != ".":
                    found.setdefault(group, {})[file.stem] = file
        return {group: dict(sorted(choices.items())) for group, choices in sorted(found.items())}


def description(file: Path) -> str:
    """The comment in a YAML's first line that is not Hydra's package directive."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
        if line and not line.startswith("#"):
            break
    return ""


@dataclasses.dataclass(frozen=True)
class Document:
    """One YAML file as it was written.

    Attributes:
        place: the file as messages show it.
        root: the top mapping; None for an empty file or one that is something else.
        problems: what keeps it from being read, and what YAML 1.1 would read otherwise than it looks.
        loads: whether Hydra can read it all the same.
    """

    place: str
    root: yaml.MappingNode | None = None
    problems: tuple[Problem, ...] = ()
    loads: bool = True

    def lines(self, package: str) -> Iterator[tuple[str, str]]:
        """Every key as (dotted key in the composed config, `file:line`), sections included.

        Args:
            package: dotted key that the file's content is placed under, "" for the root.
        """
        if self.root is not None:
            yield from _lines(self.root, package, self.place)

    def entry_of_defaults(self, words: str) -> str:
        """The place of the first entry of the defaults list whose group or choice is among words; else the file."""
        for name, value in self.root.value if self.root else ():
            if name.value != "defaults" or not isinstance(value, yaml.SequenceNode):
                continue
            for entry in value.value:
                if any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", words) for part in _parts(entry)):
                    return f"{self.place}:{entry.start_mark.line + 1}"
        return self.place


def read(file: Path, place: str) -> Document:
    """Reads a file as nodes; never raises."""
    try:
        with file.open(encoding="utf-8") as stream:
            root = yaml.compose(stream, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        return Document(place, None, (Problem(f"{place}{line}", f"not valid YAML: {error.problem}"),), False)
    except (yaml.YAMLError, UnicodeError) as error:
        return Document(place, None, (Problem(place, f"cannot be read: {str(error).splitlines()[0]}"),), False)
    except OSError as error:
        return Document(place, None, (Problem(place, f"cannot be read: {error.strerror}"),), False)
    if root is None:
        return Document(place)
    found = list(_doubtful(root, []))
    problems = tuple(Problem(f"{place}:{doubt.node.start_mark.line + 1}", doubt.message) for doubt in found)
    mapping = root if isinstance(root, yaml.MappingNode) else None
    return Document(place, mapping, problems, all(doubt.loads for doubt in found))


@dataclasses.dataclass(frozen=True)
class _Doubt:
    """What a person and YAML 1.1 may read differently, or what cannot be loaded at all."""

    node: yaml.Node
    message: str
    loads: bool


def _lines(node: yaml.MappingNode, prefix: str, place: str) -> Iterator[tuple[str, str]]:
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode) or (not prefix and name.value == "defaults"):
            continue
        dotted = f"{prefix}.{name.value}" if prefix else name.value
        yield dotted, f"{place}:{name.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, dotted, place)


def _parts(entry: yaml.Node) -> list[str]:
    """The group and the choice that an entry of a defaults list names."""
    scalars = [entry] if isinstance(entry, yaml.ScalarNode) else []
    if isinstance(entry, yaml.MappingNode):
        scalars = [scalar for pair in entry.value for scalar in pair if isinstance(scalar, yaml.ScalarNode)]
    return [scalar.value.removeprefix("override ").strip().lstrip("/") for scalar in scalars if scalar.value]


def _doubtful(node: yaml.Node, above: list[yaml.Node]) -> Iterable[_Doubt]:
    """Every doubt about a node and what lies below it."""
    if any(node is ancestor for ancestor in above):
        yield _Doubt(node, "an alias that stands inside of what it names", False)
    elif isinstance(node, yaml.ScalarNode):
        if message := _doubtful_scalar(node):
            yield _Doubt(node, message, True)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _doubtful(item, [*above, node])
    else:
        seen: dict[str, int] = {}
        for name, value in node.value:
            word = name.value if isinstance(name, yaml.ScalarNode) else ""
            if word in seen:
                yield _Doubt(name, f"duplicate key {word}: line {seen[word]} has it too; keep one", False)
            elif word:
                seen[word] = name.start_mark.line + 1
            yield from _doubtful(name, [*above, node])
            yield from _doubtful(value, [*above, node])


def _doubtful_scalar(node: yaml.ScalarNode) -> str | None:
    text = node.value
    if node.style is not None:  # quoted: a string for everybody
        return None
    if re.fullmatch(r"[-+]?0[\d_]*\d", text):
        octal = re.fullmatch(r"[-+]?0[0-7_]+", text)
        reading = f"{int(text.replace('_', ''), 8)}, an octal number, in YAML" if octal else "a string in YAML"
        return f"{text} is {reading} and {int(text)} elsewhere; write {int(text)}, or '{text}' for a string"
    if node.tag.endswith((":int", ":float")) and ":" in text:
        seconds = yaml.safe_load(text)
        return f"{text} is {seconds}, a number of base sixty, in YAML; write {seconds}, or '{text}' for a string"
    if node.tag.endswith(":bool") and text.lower() not in ("true", "false"):
        truth = str(yaml.safe_load(text)).lower()
        return f"{text} is {truth} in YAML and a string elsewhere; write {truth}, or '{text}' for a string"
    return None
