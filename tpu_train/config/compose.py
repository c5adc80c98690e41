"""From command-line words to a `Run`: Hydra composes, everything wrong is reported at once.

Key idea: composition happens twice. First with the choices of groups only, which fixes the schema that each other word
is judged against (`momentum` exists for one optimizer, not for another); then with all sound words. A refused word
does not hide what is wrong elsewhere.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tpu_train.config import hydra_settings, reflect
from tpu_train.config import overrides as override_words
from tpu_train.config.convert import MISSING, convert, judge
from tpu_train.config.doubts import is_text
from tpu_train.config.hydra_frame import ERRORS, PRIMARY, documents, hydra_reporting, reason
from tpu_train.config.hydra_settings import HydraSettings
from tpu_train.config.overrides import Word
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.reach import reach
from tpu_train.config.rules import EXCLUSIVE
from tpu_train.config.schema import Run
from tpu_train.config.sources import Document, SearchPath, shipped_dir


@dataclasses.dataclass(frozen=True)
class Composed:
    """A configuration and where it came from.

    Attributes:
        run: the values.
        choices: the chosen member of each group.
        sources: where the value of each dotted key was set: `conf/model/x.yaml:3` or `command line 'a.b=c'`.
        defaults: the values, plain, before the command line set any of them.
        hydra: what of Hydra's own settings concerns a single run.
        words: the command-line words that it was composed of.
        config_dir: the user's folder of YAML.
    """

    run: Run
    choices: dict[str, str]
    sources: dict[str, str]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hydra: HydraSettings = dataclasses.field(default_factory=HydraSettings)
    words: tuple[str, ...] = ()
    config_dir: Path | None = None

    def command(self, run_dir: Path) -> str:
        """The command that continues the run in a folder."""
        words = [word for word in self.words if word.lstrip("+").partition("=")[0] not in ("run_dir", "hydra.run.dir")]
        folder = ["--config-dir", str(self.config_dir)] if self.config_dir else []
        return shlex.join(["tpu-train", *words, f"run_dir={override_words.quoted(str(run_dir))}", *folder])


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
    search = SearchPath(config_dir and config_dir.resolve())
    try:
        _judge_folder(config_dir, search)
        composed, problems = _draft(words, search, multirun)
    except ConfigError as error:
        if search.user is None:
            raise
        return _beside(error.problems, words, search, multirun)
    return dataclasses.replace(composed, config_dir=config_dir), problems


def _judge_folder(config_dir: Path | None, search: SearchPath) -> None:
    """Refuses a folder of the user's that gives nothing to be composed, and choices of its own that cannot be."""
    if config_dir is None:
        return
    place = f"--config-dir {config_dir}"
    if not config_dir.is_dir():
        raise ConfigError([Problem(place, "is not a folder; give one that holds YAML by group")])
    if not any(
        file.is_relative_to(config_dir.resolve()) for files in search.groups().values() for file in files.values()
    ):
        message = f"holds no YAML by group; a choice NAME of recipe is {config_dir}/recipe/NAME.yaml"
        raise ConfigError([Problem(place, message)])
    if usual := reach(shipped_dir() / f"{PRIMARY}.yaml", search).problems:  # files that replace shipped ones
        raise ConfigError(usual)


def _beside(
    known: Sequence[Problem], words: Sequence[Word], search: SearchPath, multirun: bool
) -> tuple[Composed, list[Problem]]:
    """What is wrong besides a folder of the user's that cannot be composed: the words, judged by shipped YAML."""
    shipped = SearchPath().groups()
    own, chosen = search.groups(), set[str]()
    for document in map(search.read, search.user.rglob("*.yaml") if search.user else ()):
        chosen |= {group.split()[-1].strip("/").replace("/", ".") for group, *_ in document.defaults() if group}

    def waits(word: Word) -> bool:
        """Whether what a word means depends on the folder."""
        if word.key in own or word.key in shipped:
            return str(word.parsed.value()) not in shipped.get(word.key, {})
        return any(override_words.within(word.key, section) for section in chosen)

    sections = {word.key.replace("/", ".") for word in words if word.key in shipped and waits(word)}
    chosen |= sections
    try:
        composed, found = _draft([word for word in words if not waits(word)], SearchPath(), multirun)
    except ConfigError as error:
        raise ConfigError([*known, *error.problems]) from error
    told = {str(problem) for problem in known}
    found = [problem for problem in found if str(problem) not in told and not problem.missing]
    everything = tuple(reflect.hints(Run))  # no rule is asked: what the values were to be is not known
    return composed, [*(dataclasses.replace(problem, keys=everything) for problem in known), *found]


def _draft(words: Sequence[Word], search: SearchPath, multirun: bool) -> tuple[Composed, list[Problem]]:
    """As `draft`, for a folder that gives something."""
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
        _judge_merging(files, hydra_choices, problems)
        config = hydra.compose(PRIMARY, choices, return_hydra_config=True)
        base = cast("dict[str, Any]", OmegaConf.to_container(config))
        values, refused = override_words.judge_values(judged.values, base, Run, groups)
        problems += [*refused, *_judge_replaced(values, base)]
        hydra_values = []
        for word in hydra_words:
            if problem := hydra_settings.judge_word(word, config.hydra, multirun):
                problems.append(problem)
            else:
                hydra_values.append(word)
        starting = _resolve(config, "", {})
        config, refused = _with_values(config, choices, [*values, *hydra_values])
        problems += refused
    sources |= {key: word.place for word in (*values, *hydra_values) for key, _ in word.leaves()}
    sections = {package: document.place for document, package in files if package}
    made = {group: str(choice) for group, choice in defaults.overrides.known_choices.items() if choice}
    known = _judge_choices_in_yaml(files, groups)
    problems += known
    composed = _converted(
        config, sources, sections, problems, [key for problem in known for key in problem.keys], multirun
    )
    if len(chosen) < len(judged.choices):  # a recipe that cannot be read may have given what is missing
        problems[:] = [problem for problem in problems if not problem.missing]
    return dataclasses.replace(
        composed,
        choices={group: choice for group, choice in made.items() if not group.startswith("hydra/")},
        defaults=starting,
        words=tuple(str(word.parsed.input_line) for word in words),
    ), problems


def _judge_replaced(values: Sequence[Word], base: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with values that a later word of the same key replaces."""
    replaced = [word for index, word in enumerate(values) if word.key in [later.key for later in values[index + 1 :]]]
    return [problem for word in replaced for problem in judge(Run, base, word.key, word.parsed.value(), word.place)]


def _with_values(config: DictConfig, choices: Sequence[str], words: Sequence[Word]) -> tuple[DictConfig, list[Problem]]:
    """The config with the values of words that are judged already; `++` also sets keys that no YAML names."""

    def composed(some: Sequence[Word]) -> DictConfig:
        return hydra.compose(PRIMARY, [*choices, *(f"++{word.assignment}" for word in some)], return_hydra_config=True)

    if not words:
        return config, []
    try:
        return composed(words), []
    except ERRORS:
        sound, problems = [], []
        for word in words:  # which of them OmegaConf does not merge
            try:
                composed([word])
                sound.append(word)
            except ERRORS as error:
                problems.append(Problem(word.place, f"{word.key} cannot be set: {reason(error)}", (word.key,)))
        return composed(sound), problems


def _judge_choices_in_yaml(
    files: Sequence[tuple[Document, str]], groups: Mapping[str, Mapping[str, Path]]
) -> list[Problem]:
    """Choices that the user's YAML makes as if they were keys: `optimizer: sgd`, `optimizer: {name: sgd}`."""
    problems = []
    for document, package in files:
        if document.place.startswith("conf/"):
            continue
        for key, where, node in document.nodes(package):
            parent = key.rpartition(".")[0]
            for section, message in ((key, "is a group"), (parent, f"follows from the choice of {parent}")):
                group = section.replace(".", "/")
                tag = key.rpartition(".")[2] if section == parent else None
                if group not in groups or document.group == group or not isinstance(node, yaml.ScalarNode):
                    continue
                if tag in _tags(section) if tag else is_text(node):
                    choice = node.value if node.value in groups[group] else "CHOICE"
                    hint = f"choose in the defaults list: - override /{group}: {choice}"
                    hint += f"; choices: {', '.join(groups[group])}" if choice == "CHOICE" else ""
                    problems.append(Problem(where, f"{key} {message}; {hint}", (section,)))
    return problems


def _tags(section: str) -> set[str]:
    """The names of the fields that tell the choices of a section apart."""
    declared = [(owner, name) for dotted, owner, name in reflect.walk(Run) if dotted == section]
    kinds = [member for owner, name in declared for member in reflect.members(reflect.hints(owner)[name])]
    return {found[0] for kind in kinds if dataclasses.is_dataclass(kind) and (found := reflect.tag(kind))}  # pyright: ignore


def _readable(
    judged: override_words.Judged, groups: Mapping[str, Mapping[str, Path]], search: SearchPath
) -> list[Word]:
    """The choices whose files can be read; the problems of the others join, and values of their groups wait."""
    sound = []
    for word in judged.choices:
        reached = reach(groups[word.key][str(word.parsed.value())], search)
        if not reached.problems:
            sound.append(word)
            continue
        section = word.key.replace("/", ".")
        # What a recipe sets is not known: no rule is asked.
        about = (section,) if reflect.has(Run, section) else tuple(reflect.hints(Run))
        judged.problems.extend(dataclasses.replace(problem, keys=about) for problem in reached.problems)
        waiting = (section, *reached.sections)
        judged.values[:] = [
            value for value in judged.values if not any(override_words.within(value.key, part) for part in waiting)
        ]
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


def _judge_merging(files: Sequence[tuple[Document, str]], hydra_choices: list[str], problems: list[Problem]) -> None:
    """Judges what Hydra would stop at while it merges users' files: keys of its own, lists in a section's place.

    Raises:
        ConfigError: nothing can be composed.
    """
    written = [line for document, package in files for line in document.nodes(package)]
    written = [line for line in written if not line[1].startswith("conf/")]
    kinds = {dotted: reflect.hints(section)[name] for dotted, section, name in reflect.walk(Run)}
    wrong = []
    for key, where, node in written:
        kind = kinds.get(key)
        if isinstance(node, yaml.SequenceNode) and kind and (reflect.is_section(kind) or reflect.entries(kind)):
            wrong.append(Problem(where, f"{key} is a list, expected {reflect.describe(kind)}"))
    if about_hydra := [line for line in written if f"{line[0]}.".startswith("hydra.")]:
        schema = hydra.compose(PRIMARY, hydra_choices, return_hydra_config=True).hydra
        for key, where, node in about_hydra:
            value = yaml.SafeLoader("").construct_document(node)
            unknown = hydra_settings.judge_key(key, schema) if key != "hydra" else None
            if text := unknown or hydra_settings.judge_value(key, value, schema):
                wrong.append(Problem(where, text))
    if wrong:
        raise ConfigError([*problems, *wrong])


def _converted(
    config: DictConfig,
    sources: dict[str, str],
    sections: Mapping[str, str],
    problems: list[Problem],
    skip: Sequence[str],
    multirun: bool,
) -> Composed:
    """The composed config as a `Run`; what is wrong joins the problems, save with sections that are to be skipped."""

    def place(key: str) -> str:
        key = re.sub(r"\[.*", "", key)  # of an item of a list, that of the list
        if here := sources.get(key) or sections.get(key):
            return here
        below = [where for known, where in sources.items() if known.startswith(f"{key}.")]
        if key and below:
            return below[-1]
        return place(key.rpartition(".")[0]) if key else f"conf/{PRIMARY}.yaml"

    unresolved: dict[str, str] = {}
    tree = _resolve(config, "", unresolved)
    problems += [Problem(place(key), f"{key} {message}", (key,)) for key, message in unresolved.items()]
    for pair in EXCLUSIVE:
        _yield_default(tree, pair, sources)
    run, wrong = convert(Run, tree, place, skip=[*unresolved, *skip])
    problems += wrong
    settings = hydra_settings.judge_values(config.hydra, sources, problems, multirun)
    if settings.run_dir is not None and not multirun:
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
        keys = [key for key in node if isinstance(key, str) and (at or key != "hydra")]  # others are refused already
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
