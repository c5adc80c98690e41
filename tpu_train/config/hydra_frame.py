"""Hydra set up for this program: our folders, our launcher, and its errors as problems with a place.

Key idea: Hydra stops at its first error and names no line; the file that it names, or that no longer parses, is read
again for the place.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, cast

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf.errors import OmegaConfBaseException

from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.sources import Document, SearchPath, shipped_dir

PRIMARY = "config"
# What Hydra raises for users' mistakes; the plain ones where it did not expect them.
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeError, RecursionError)
ERRORS += (ValueError, TypeError, AttributeError, AssertionError, KeyError)


class _UserFolder(SearchPathPlugin):
    """Puts the user's folder before ours; Hydra's own `hydra.searchpath` only appends."""

    folder: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra for each new search path."""
        if self.folder is not None:
            search_path.prepend("user", f"file://{self.folder}", "main")


@contextlib.contextmanager
def hydra_on(config_dir: Path | None) -> Iterator[ConfigLoaderImpl]:
    """Hydra, set up for the shipped YAML and the user's folder.

    Args:
        config_dir: a resolved path.
    """
    if _UserFolder not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(_UserFolder)
    _UserFolder.folder = config_dir
    try:
        with hydra.initialize_config_dir(str(shipped_dir()), job_name="tpu-train", version_base="1.3"):
            yield cast("ConfigLoaderImpl", GlobalHydra.instance().config_loader())
    finally:
        _UserFolder.folder = None


@contextlib.contextmanager
def hydra_reporting(search: SearchPath, problems: Sequence[Problem]) -> Iterator[ConfigLoaderImpl]:
    """Hydra on a search path; its errors become problems, after those that are known already."""
    try:
        with hydra_on(search.user) as loader:
            yield loader
    except ConfigError:
        raise
    except ERRORS as error:
        raise ConfigError([*problems, *_problems_of(error, search)]) from error


def documents(defaults: Iterable[ResultDefault], search: SearchPath) -> Iterator[tuple[Document, str]]:
    """Every YAML that is merged, with the dotted key that it is merged under."""
    for item in defaults:
        if item.config_path and (file := search.find(item.config_path)):
            yield search.read(file), "" if item.package in (None, "_global_") else str(item.package)


def _problems_of(error: BaseException, search: SearchPath) -> list[Problem]:
    """Hydra's, OmegaConf's or YAML's error as problems: the innermost cause that says where."""
    chain, cause = [error], error
    while cause := cause.__cause__ or cause.__context__:
        chain.append(cause)
    for cause in chain:
        if isinstance(cause, (yaml.YAMLError, UnicodeError)):
            return _unreadable(search) or [Problem("config", f"not valid YAML: {cause}")]
        if isinstance(cause, OSError) and cause.filename:
            return [Problem(str(cause.filename), f"cannot be read: {cause.strerror}")]
    text = reason(error)
    places = []
    if (inside := re.match(r"In '(.+?)': ", text)) and (file := search.find(inside[1])):
        text = text[inside.end() :]
        document = search.read(file)
        places = [document.entry_of_defaults(text), document.place]
    places += [document.entry_of_defaults(text) for document in _users(search)]
    if misplaced := re.match(r"Could not override '(\w+)@", text):
        text += f" Write override /{misplaced[1]}@_global_.{misplaced[1]}: CHOICE"
    return [Problem(next((place for place in places if place), "config"), text)]


def reason(error: BaseException) -> str:
    """What an error of Hydra's says, on one line."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and text.startswith("Error merging"):
        text = str(cause).splitlines()[0]
    return text.partition(" Config search path:")[0] or type(error).__name__


def _users(search: SearchPath) -> list[Document]:
    return [search.read(file) for file in sorted(search.user.rglob("*.yaml"))] if search.user else []


def _unreadable(search: SearchPath) -> list[Problem]:
    """What is wrong with the user's files that no word chose, but a defaults list did."""
    return [problem for document in _users(search) if not document.loads for problem in document.problems]
