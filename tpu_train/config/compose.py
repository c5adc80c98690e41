"""From command-line words to a checked `Run`: Hydra composes, everything wrong is reported at once.

Key idea: composition happens twice. First with the choices of groups only, which fixes the schema that each other word
is judged against (`momentum` exists for one optimizer, not for another); then with all sound words. A refused word
does not hide what is wrong elsewhere.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tpu_train.config import overrides as override_words
from tpu_train.config import reflect
from tpu_train.config.convert import MISSING, convert
from tpu_train.config.overrides import Word
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.schema import Run
from tpu_train.config.sources import SearchPath, lines, shipped_dir

_PRIMARY = "config"


@dataclasses.dataclass(frozen=True)
class Composed:
    """A configuration and where it came from.

    Attributes:
        run: the values.
        choices: the chosen member of each group.
        sources: where the value of each dotted key was set: `conf/model/x.yaml:3` or `command line 'a.b=c'`.
    """

    run: Run
    choices: dict[str, str]
    sources: dict[str, str]


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """Compose and convert the configuration.

    Args:
        overrides: command-line words.
        config_dir: a folder of the user's own YAML, searched before the shipped one.

    Raises:
        ConfigError: with every problem that was found.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError([Problem(f"--config-dir {config_dir}", "is not a folder; give one that holds YAML by group")])
    search = SearchPath(config_dir and config_dir.resolve())
    groups = search.groups()
    words, problems = override_words.parse(overrides)
    chosen, rest, refused = override_words.judge_groups(words, groups, Run)
    problems += refused
    with _hydra(search, problems):
        choices = _group_words(chosen)
        config = hydra.compose(_PRIMARY, choices)
        tree = cast("dict[str, Any]", OmegaConf.to_container(config))
        values, refused = override_words.judge_values(rest, tree, Run, groups)
        problems += refused
        if values:
            # The words are judged already; `++` also sets keys that no YAML names.
            config = hydra.compose(_PRIMARY, [*choices, *(f"++{word.assignment}" for word in values)])
        made, sources = _origins(search, choices)
    sources |= {key: override_words.place(word.text) for word in values for key, _ in word.leaves()}

    def place(key: str) -> str:
        return sources.get(key) or (place(key.rpartition(".")[0]) if key else f"conf/{_PRIMARY}.yaml")

    unresolved: dict[str, str] = {}
    tree = _resolve(config, "", unresolved)
    problems += [Problem(place(key), f"{key} {message}") for key, message in unresolved.items()]
    run, wrong = convert(Run, tree, place, skip=unresolved)
    if problems := problems + wrong:
        order = {override_words.place(text): index for index, text in enumerate(overrides)}
        raise ConfigError(sorted(problems, key=lambda problem: order.get(problem.place, len(order))))
    return Composed(run, made, {key: source for key, source in sources.items() if _is_leaf(tree, key)})


class _UserFolder(SearchPathPlugin):
    """Puts the user's folder before ours; Hydra's own `hydra.searchpath` only appends."""

    folder: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra for each new search path."""
        if self.folder is not None:
            search_path.prepend("user", f"file://{self.folder}", "main")


@contextlib.contextmanager
def _hydra(search: SearchPath, problems: Sequence[Problem]) -> Iterator[None]:
    """Hydra on a search path; its errors become problems, after those that are known already."""
    if _UserFolder not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(_UserFolder)
    _UserFolder.folder = search.user
    try:
        with hydra.initialize_config_dir(str(shipped_dir()), job_name="tpu-train", version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeError) as error:
        raise ConfigError([*problems, _problem(error, search)]) from error
    finally:
        _UserFolder.folder = None


def _group_words(chosen: Sequence[Word]) -> list[str]:
    """The choices of groups as Hydra wants them: with `+` where the defaults list does not have the group."""
    if all(word.key in reflect.hints(Run) for word in chosen):
        return [word.assignment for word in chosen]
    usual = GlobalHydra.instance().config_loader().compute_defaults_list(_PRIMARY, [], RunMode.RUN)
    known = usual.overrides.known_choices
    return [word.assignment if word.key in known else f"+{word.assignment}" for word in chosen]


def _origins(search: SearchPath, choices: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The choice of each group, and where YAML sets each key; a section's origin is the file that should fill it."""
    defaults = GlobalHydra.instance().config_loader().compute_defaults_list(_PRIMARY, choices, RunMode.RUN)
    sources: dict[str, str] = {}
    files: dict[str, str] = {}
    for item in defaults.defaults:
        if item.config_path and (file := search.find(item.config_path)):
            package = "" if item.package in (None, "_global_") else item.package
            sources |= {key: f"{search.name(file)}:{line}" for key, line in lines(file, package)}
            files |= {package: search.name(file)} if package else {}
    known = defaults.overrides.known_choices
    made = {group: choice for group, choice in known.items() if choice and not group.startswith("hydra/")}
    return made, sources | files


def _problem(error: BaseException, search: SearchPath) -> Problem:
    """Hydra's, OmegaConf's or YAML's error as one problem: the innermost cause that says where."""
    chain, cause = [error], error
    while cause := cause.__cause__ or cause.__context__:
        chain.append(cause)
    for cause in chain:
        if isinstance(cause, yaml.MarkedYAMLError) and cause.problem_mark:
            mark = cause.problem_mark
            place = f"{search.name(Path(mark.name))}:{mark.line + 1}"
            return Problem(place, f"not valid YAML: {cause.problem}")
        if isinstance(cause, OSError) and cause.filename:
            return Problem(str(cause.filename), f"cannot be read: {cause.strerror}")
        if isinstance(cause, UnicodeError):
            return Problem(_undecodable(search), f"cannot be read: {cause}")
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = text.partition(" Config search path:")[0]
    place = "config"
    if (inside := re.match(r"In '(.+?)': ", text)) and (file := search.find(inside[1])):
        place, text = search.name(file), text[inside.end() :]
    if misplaced := re.match(r"Could not override '(\w+)@", text):
        text += f" Write override /{misplaced[1]}@_global_.{misplaced[1]}: CHOICE"
    return Problem(place, text or type(error).__name__)


def _undecodable(search: SearchPath) -> str:
    """The YAML that is not UTF-8; the error itself does not say."""
    for folder in search.folders:
        for file in sorted(folder.rglob("*.yaml")):
            try:
                file.read_text(encoding="utf-8")
            except UnicodeError:
                return search.name(file)
    return "config"


def _resolve(node: Any, at: str, unresolved: dict[str, str]) -> Any:
    """A config as plain values, each interpolation resolved on its own so that one failure does not hide others."""
    if isinstance(node, ListConfig):
        return [_resolve_at(node, index, f"{at}[{index}]", unresolved) for index in range(len(node))]
    if isinstance(node, DictConfig):
        keys = [str(key) for key in node]
        return {key: _resolve_at(node, key, f"{at}.{key}" if at else key, unresolved) for key in keys}
    return node


def _resolve_at(node: Any, key: Any, at: str, unresolved: dict[str, str]) -> Any:
    if OmegaConf.is_missing(node, key):
        return MISSING
    try:
        return _resolve(node[key], at, unresolved)
    except OmegaConfBaseException as error:
        raw = OmegaConf.to_container(node, resolve=False)[key]  # pyright: ignore
        unresolved[at] = f"is {raw!r}, which does not resolve: {str(error).splitlines()[0]}"
        return MISSING


def _is_leaf(tree: Mapping[str, Any], key: str) -> bool:
    value: Any = tree
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return not isinstance(value, Mapping)
