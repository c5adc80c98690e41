"""Where values come from: the folders that are searched for YAML, and the file and line of each key in one.

Key idea: Hydra forgets files when it merges them. So each merged file is read once more as YAML nodes, which have the
lines and the words as written.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from tpu_train.config.doubts import doubts
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

    def read(self, file: Path) -> "Document":
        """Reads one of the files; never raises."""
        around = [folder for folder in self.folders if file.is_relative_to(folder)]
        folder = max(around, key=lambda folder: len(folder.parts))  # the user's may have the shipped one inside
        group = file.parent.relative_to(folder).as_posix()
        return _read(file, self.name(file), "" if group == "." else group)

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
        group: that it is a choice of, "" for none.
    """

    place: str
    root: yaml.MappingNode | None = None
    problems: tuple[Problem, ...] = ()
    loads: bool = True
    group: str = ""

    def nodes(self, package: str) -> Iterator[tuple[str, str, yaml.Node]]:
        """Every key as (dotted key in the composed config, `file:line`, value), sections included.

        Args:
            package: dotted key that the file's content is placed under, "" for the root.
        """
        if self.root is not None:
            top = [pair for pair in self.root.value if pair[0].value != "defaults"]
            yield from _nodes(top, package, self.place)

    def lines(self, package: str) -> Iterator[tuple[str, str]]:
        """Every key with its place, as `nodes`."""
        return ((key, where) for key, where, _ in self.nodes(package))

    def defaults(self) -> Iterator[tuple[str, str, str]]:
        """The entries of the defaults list as (keywords and group as written, choice, `file:line`).

        `_self_` is left out; an entry without a group has "" for it.
        """
        for name, value in self.root.value if self.root else ():
            if name.value != "defaults" or not isinstance(value, yaml.SequenceNode):
                continue
            for entry in value.value:
                where = f"{self.place}:{entry.start_mark.line + 1}"
                if isinstance(entry, yaml.ScalarNode):
                    pairs = [("", entry)]
                else:
                    pairs = _choices(entry)
                for group, choice in pairs:
                    if isinstance(choice, yaml.ScalarNode) and choice.value != "_self_":
                        yield group, choice.value, where

    def entry_of_defaults(self, words: str) -> str | None:
        """The place of the first entry of the defaults list whose group or choice is among words."""
        for group, choice, where in self.defaults():
            parts = [*(word.lstrip("/") for word in group.split()[-1:]), choice.lstrip("/")]
            if any(part and re.search(rf"(?<!\w){re.escape(part)}(?!\w)", words) for part in parts):
                return where
        return None


def _choices(entry: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    """The group and each choice of an entry `GROUP: CHOICE` or `GROUP: [CHOICE, CHOICE]`."""
    for name, value in entry.value if isinstance(entry, yaml.MappingNode) else ():
        if isinstance(name, yaml.ScalarNode):
            yield from ((name.value, item) for item in (value.value if value.id == "sequence" else [value]))


def _read(file: Path, place: str, group: str) -> Document:
    def refused(where: str, message: str) -> Document:
        return Document(place, None, (Problem(where, message),), False, group)

    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        return refused(f"{place}{line}", f"not valid YAML: {error.problem}")
    except (yaml.YAMLError, UnicodeError) as error:
        return refused(place, f"cannot be read: {str(error).splitlines()[0]}")
    except RecursionError:
        return refused(place, "cannot be read: lists or mappings are nested too deeply")
    except OSError as error:
        return refused(place, f"cannot be read: {error.strerror}")
    found = list(doubts(root or yaml.MappingNode("tag:yaml.org,2002:map", []), text, group))
    problems = tuple(Problem(f"{place}:{doubt.line}", doubt.message) for doubt in found)
    mapping = root if isinstance(root, yaml.MappingNode) else None
    return Document(place, mapping, problems, all(doubt.loads for doubt in found), group)


def _nodes(
    pairs: Sequence[tuple[yaml.Node, yaml.Node]], prefix: str, place: str
) -> Iterator[tuple[str, str, yaml.Node]]:
    for name, value in sorted(pairs, key=lambda pair: pair[0].value != "<<"):  # what is merged in comes first
        if name.tag.endswith(":merge"):
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(merged, yaml.MappingNode):
                    yield from _nodes(merged.value, prefix, place)
        elif isinstance(name, yaml.ScalarNode):
            dotted = f"{prefix}.{name.value}" if prefix else name.value
            yield dotted, f"{place}:{name.start_mark.line + 1}", value
            if isinstance(value, yaml.MappingNode):
                yield from _nodes(value.value, dotted, place)
