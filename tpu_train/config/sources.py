"""Where values come from: the folders that are searched for YAML, and the file and line of each key in one.

Key idea: Hydra forgets files when it merges them, so each merged file is read once more as YAML nodes, whose marks
have the lines.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import yaml


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
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
        if line and not line.startswith("#"):
            break
    return ""


def lines(file: Path, package: str) -> Iterable[tuple[str, int]]:
    """Every key of a YAML file as (dotted key in the composed config, line from 1 on), sections included.

    Args:
        file: the YAML.
        package: dotted key that the file's content is placed under, "" for the root.
    """
    with file.open(encoding="utf-8") as stream:
        root = yaml.compose(stream, Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        yield from _lines(root, package)


def _lines(node: yaml.MappingNode, prefix: str) -> Iterable[tuple[str, int]]:
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode) or (not prefix and name.value == "defaults"):
            continue
        dotted = f"{prefix}.{name.value}" if prefix else name.value
        yield dotted, name.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, dotted)
