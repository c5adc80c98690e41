"""What the user's files choose in their defaults lists, followed before Hydra does.

Key idea: Hydra stops at the first entry that it does not find and names no line. Following the entries from file to
file tells of all of them, and which choice of the command line cannot be composed because of them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpu_train.config import reflect
from tpu_train.config.problems import Problem
from tpu_train.config.sources import Document, SearchPath, shipped_dir


@dataclasses.dataclass(frozen=True)
class Reached:
    """What a file leads to.

    Attributes:
        problems: what keeps it from being composed.
        sections: dotted groups whose choice it makes.
    """

    problems: tuple[Problem, ...] = ()
    sections: tuple[str, ...] = ()


def reach(file: Path, search: SearchPath, above: tuple[Path, ...] = ()) -> Reached:
    """Follows the defaults lists from a file on; shipped files are sound, and end it."""
    if file.is_relative_to(shipped_dir()) and above:
        return Reached()
    document = search.read(file)
    problems = [] if document.loads else list(document.problems)
    sections = []
    groups = search.groups()
    for keywords, path, where in _entries(document):
        group, _, choice = path.rpartition("/")
        if group.startswith("hydra"):
            continue
        if "override" in keywords:
            sections.append(group.replace("/", "."))
        found = search.find(path)
        if found is None:
            if "optional" not in keywords:
                problems.append(Problem(where, _missing(group, choice, groups)))
        elif found in (file, *above):
            problems.append(Problem(where, f"{path} is taken in by itself; leave the entry out"))
        else:
            inner = reach(found, search, (*above, file))
            problems += inner.problems
            sections += inner.sections
    return Reached(tuple(dict.fromkeys(problems)), tuple(sections))


def _entries(document: Document) -> Iterator[tuple[list[str], str, str]]:
    """The entries of a defaults list as (keywords, `model/wide`, `file:line`)."""
    told = {problem.place for problem in document.problems}
    for written, choice, where in document.defaults():
        if where in told or "${" in f"{written}{choice}":  # of the wrong form, or Hydra's to resolve
            continue
        *keywords, group = written.split() or [""]
        group = group.partition("@")[0]
        path = f"{group}/{choice}" if group else choice.partition("@")[0]
        if not path.startswith("/"):
            path = f"{document.group}/{path}"
        yield keywords, path.lstrip("/").removesuffix(".yaml"), where


def _missing(group: str, choice: str, groups: Mapping[str, Mapping[str, Path]]) -> str:
    if group in groups:
        near = reflect.nearest(choice, groups[group])
        hint = f"; nearest is {near!r}" if near else ""
        return f"{group} has no choice {choice!r}{hint}; choices: {', '.join(groups[group])}"
    near = reflect.nearest(group, groups)
    hint = f"; nearest is {near!r}" if near else ""
    return f"there is no group {group!r}{hint}; groups: {', '.join(groups)}"
