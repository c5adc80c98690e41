"""From command-line words to a `Run`: Hydra composes, everything wrong is reported at once.

Key idea: composition happens twice. First with the choices of groups only, which fixes the schema that each other word
is judged against (`momentum` exists for one optimizer, not for another); then with all sound words. A refused word
does not hide what is wrong elsewhere.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tpu_train.config import hydra_settings, reflect
from tpu_train.config import overrides as override_words
from tpu_train.config.convert import MISSING, convert
from tpu_train.config.hydra_frame import PRIMARY, documents, hydra_reporting
from tpu_train.config.hydra_settings import HydraSettings
from tpu_train.config.overrides import Word
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.rules import EXCLUSIVE
from tpu_train.config.schema import Run
from tpu_train.config.sources import Document, SearchPath, read


@dataclasses.dataclass(frozen=True)
class Composed:
    """A configuration and where it came from.

    Attributes:
        run: the values.
        choices: the chosen member of each group.
        sources: where the value of each dotted key was set: `conf/model/x.yaml:3` or `command line 'a.b=c'`.
        defaults: the values, plain, before the command line set any of them.
        hydra: what of Hydra's own settings concerns a single run.
    """

    run: Run
    choices: dict[str, str]
    sources: dict[str, str]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hydra: HydraSettings = dataclasses.field(default_factory=HydraSettings)


def compose(overrides: Sequence[str], config_dir: Path | None = None, complete: bool = True) -> Composed:
    """Compose and convert the configuration.

    Args:
        overrides: command-line words.
        config_dir: a folder of the user's own YAML, searched before the shipped one.
        complete: whether required values must be there; else they are placeholders.

    Raises:
        ConfigError: with every problem that was found.
    """
    words, problems = override_words.parse(overrides, Run)
    composed, more = draft(words, config_dir)
    problems = [problem for problem in (*problems, *more) if complete or not problem.missing]
    if problems:
        raise ConfigError(in_order(problems, overrides))
    return composed


def in_order(problems: Iterable[Problem], overrides: Sequence[str]) -> list[Problem]:
    """Problems in the order of the words they are about, those of files last."""
    order = {override_words.place(text): index for index, text in enumerate(overrides)}
    return sorted(problems, key=lambda problem: order.get(problem.place, len(order)))


def draft(words: Sequence[Word], config_dir: Path | None, multirun: bool = False) -> tuple[Composed, list[Problem]]:
    """Compose what is sound, for the rules to be asked about.

    Args:
        words: parsed, without sweeps.
        config_dir: a folder of the user's own YAML.
        multirun: whether settings of a sweep take effect.

    Returns:
        The configuration, with placeholders for refused values, and every problem that was found.

    Raises:
        ConfigError: nothing could be composed.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError([Problem(f"--config-dir {config_dir}", "is not a folder; give one that holds YAML by group")])
    search = SearchPath(config_dir and config_dir.resolve())
    groups = search.groups()
    judged = override_words.judge_forms(words, groups, Run)
    problems = judged.problems
    chosen = _readable(judged, groups, search)
    with hydra_reporting(search, problems) as loader:
        hydra_choices, hydra_words = _hydra_words(judged.hydra, loader, multirun, problems)
        choices = [*_group_words(chosen, loader), *hydra_choices]
        defaults = loader.compute_defaults_list(PRIMARY, choices, RunMode.RUN)
        files = list(documents(defaults.defaults, search))
        problems += dict.fromkeys(problem for document, _ in files for problem in document.problems)
        sources = {key: where for document, package in files for key, where in document.lines(package)}
        _judge_hydra_yaml(files, hydra_choices, problems)
        config = hydra.compose(PRIMARY, choices, return_hydra_config=True)
        base = cast("dict[str, Any]", OmegaConf.to_container(config))
        values, refused = override_words.judge_values(judged.values, base, Run, groups)
        problems += refused
        hydra_values = []
        for word in hydra_words:
            if problem := hydra_settings.judge_word(word, config.hydra, multirun):
                problems.append(problem)
            else:
                hydra_values.append(word)
        starting = _resolve(config, "", {})
        if values or hydra_values:
            # The words are judged already; `++` also sets keys that no YAML names.
            texts = [f"++{word.assignment}" for word in (*values, *hydra_values)]
            config = hydra.compose(PRIMARY, [*choices, *texts], return_hydra_config=True)
    sources |= {key: word.place for word in (*values, *hydra_values) for key, _ in word.leaves()}
    sections = {package: document.place for document, package in files if package}
    made = {group: str(choice) for group, choice in defaults.overrides.known_choices.items() if choice}
    composed = _converted(config, sources, sections, problems)
    return dataclasses.replace(
        composed,
        choices={group: choice for group, choice in made.items() if not group.startswith("hydra/")},
        defaults=starting,
    ), problems


def _readable(
    judged: override_words.Judged, groups: Mapping[str, Mapping[str, Path]], search: SearchPath
) -> list[Word]:
    """The choices whose files can be read; the problems of the others join, and values of their groups wait."""
    sound = []
    for word in judged.choices:
        file = groups[word.key][str(word.parsed.value())]
        document = read(file, search.name(file))
        if document.loads:
            sound.append(word)
            continue
        section = word.key.replace("/", ".")
        judged.problems.extend(dataclasses.replace(problem, keys=(section,)) for problem in document.problems)
        judged.values[:] = [value for value in judged.values if not override_words.within(value.key, section)]
    return sound


def _hydra_words(
    words: Sequence[Word], loader: ConfigLoaderImpl, multirun: bool, problems: list[Problem]
) -> tuple[list[str], list[Word]]:
    """The choices of Hydra's own groups as Hydra wants them, and the words that set its keys."""
    choices, values = [], []
    for word in words:
        if "/" not in word.key:
            values.append(word)
        elif problem := hydra_settings.judge_choice(word, loader.get_group_options(word.key), multirun):
            problems.append(problem)
        else:
            choices.append(word.assignment)
    if not choices:
        return [], values
    usual = loader.compute_defaults_list(PRIMARY, [], RunMode.RUN).overrides.known_choices
    return [word if word.partition("=")[0] in usual else f"+{word}" for word in choices], values


def _judge_hydra_yaml(files: Sequence[tuple[Document, str]], hydra_choices: list[str], problems: list[Problem]) -> None:
    """Judges the keys below `hydra` of users' files; Hydra itself would stop at the first that it does not have.

    Raises:
        ConfigError: there are such keys, so nothing can be composed.
    """
    written = [line for document, package in files for line in document.lines(package)]
    written = [(key, where) for key, where in written if key.startswith("hydra.") and not where.startswith("conf/")]
    if not written:
        return
    schema = hydra.compose(PRIMARY, hydra_choices, return_hydra_config=True).hydra
    wrong = [Problem(where, text) for key, where in written if (text := hydra_settings.judge_key(key, schema))]
    if wrong:
        raise ConfigError([*problems, *wrong])


def _converted(
    config: DictConfig, sources: dict[str, str], sections: Mapping[str, str], problems: list[Problem]
) -> Composed:
    """The composed config as a `Run`; what is wrong joins the problems."""

    def place(key: str) -> str:
        here = sources.get(key) or sections.get(key)
        return here or (place(key.rpartition(".")[0]) if key else f"conf/{PRIMARY}.yaml")

    unresolved: dict[str, str] = {}
    tree = _resolve(config, "", unresolved)
    problems += [Problem(place(key), f"{key} {message}", (key,)) for key, message in unresolved.items()]
    for pair in EXCLUSIVE:
        _yield_default(tree, pair, sources)
    run, wrong = convert(Run, tree, place, skip=unresolved)
    problems += wrong
    settings = hydra_settings.judge_values(config.hydra, sources, problems)
    if settings.run_dir is not None:
        if run.run_dir is not None:
            also = sources["hydra.run.dir"]
            problems.append(Problem(place("run_dir"), f"run_dir is given, and hydra.run.dir by {also}; keep one"))
        run = dataclasses.replace(run, run_dir=settings.run_dir)
        sources["run_dir"] = sources["hydra.run.dir"]
    leaves = {key: source for key, source in sources.items() if _is_leaf(tree, key)}
    return Composed(run, {}, leaves, hydra=settings)


def _yield_default(tree: Mapping[str, Any], pair: tuple[str, str], sources: dict[str, str]) -> None:
    """Of two keys that exclude each other, the primary config's value yields to one that was set on purpose."""
    values = [_at(tree, key) for key in pair]
    usual = [sources.get(key, "").startswith(f"conf/{PRIMARY}.yaml:") for key in pair]
    if None in values or usual[0] == usual[1]:
        return
    yielding, wanted = pair if usual[0] else pair[::-1]
    section, _, name = yielding.rpartition(".")
    _at(tree, section)[name] = None
    sources[yielding] = f"put aside by {sources.get(wanted, wanted)}"


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _group_words(chosen: Sequence[Word], loader: ConfigLoaderImpl) -> list[str]:
    """The choices of groups as Hydra wants them: with `+` where the defaults list does not have the group."""
    if all(reflect.has(Run, word.key.replace("/", ".")) for word in chosen):
        return [word.assignment for word in chosen]
    usual = loader.compute_defaults_list(PRIMARY, [], RunMode.RUN).overrides.known_choices
    return [word.assignment if word.key in usual else f"+{word.assignment}" for word in chosen]


def _resolve(node: Any, at: str, unresolved: dict[str, str]) -> Any:
    """A config as plain values, each interpolation resolved on its own so that one failure does not hide others."""
    if isinstance(node, ListConfig):
        return [_resolve_at(node, index, f"{at}[{index}]", unresolved) for index in range(len(node))]
    if isinstance(node, DictConfig):
        keys = [str(key) for key in node if at or key != "hydra"]
        return {key: _resolve_at(node, key, f"{at}.{key}" if at else key, unresolved) for key in keys}
    return node


def _resolve_at(node: Any, key: Any, at: str, unresolved: dict[str, str]) -> Any:
    if OmegaConf.is_missing(node, key):
        return MISSING
    try:
        return _resolve(node[key], at, unresolved)
    except (OmegaConfBaseException, RecursionError) as error:
        raw = OmegaConf.to_container(node, resolve=False)[key]  # pyright: ignore
        why = "it refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        unresolved[at] = f"is {raw!r}, which does not resolve: {why}"
        return MISSING


def _is_leaf(tree: Mapping[str, Any], key: str) -> bool:
    value: Any = tree
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return not value or not isinstance(value, Mapping)
