"""Hydra's own settings (`hydra.sweep.dir`, `hydra/sweeper`, ...): which exist, which take effect, and what they say.

Key idea: Hydra's schema is open behind `+`, and most of it is about the application frame that this program replaces.
A setting is judged against Hydra's dataclasses, and one that nothing here reads is refused with what to use instead.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from hydra._internal.utils import _locate
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tpu_train.config import reflect
from tpu_train.config.convert import convert, show
from tpu_train.config.fields import at_least, key
from tpu_train.config.overrides import Word
from tpu_train.config.problems import Problem

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
LAUNCHER = "hydra_plugins.tpu_train.ProcessLauncher"

GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler", "hydra/callbacks")
_SWEEP_KEYS = ("sweep.dir", "sweep.subdir", "sweeper", "launcher", "callbacks")
_JOB_KEYS = ("mode", "run.dir", "job.name", "job.env_set", "job.config", "verbose")
_INSTEAD = {
    "searchpath": "folders of YAML are given by --config-dir DIR",
    "job.chdir": "a run stays in the folder it was started in",
    "job.env_copy": "jobs inherit the environment",
    "output_subdir": "the resolved config is config.yaml in the run folder",
    "job_logging": "a run logs to log.txt in its folder",
    "hydra_logging": "a run logs to log.txt in its folder",
}


@dataclasses.dataclass(frozen=True)
class ProcessLauncherConfig:
    """The launcher that runs each job of a sweep as a process of its own."""

    _target_: str = key("The launcher's class.", default=LAUNCHER)
    n_jobs: int = key("Jobs that run side by side.", rule=at_least(1), unit="jobs", default=1)


@dataclasses.dataclass(frozen=True)
class HydraSettings:
    """What is taken from `hydra.*`.

    Attributes:
        multirun: whether `hydra.mode` asks for a sweep.
        run_dir: `hydra.run.dir` where somebody set it.
        environment: variables to set before devices are opened (`hydra.job.env_set`).
        verbose: loggers to show in full (`hydra.verbose`): all of them, none, or these.
        sweep_dir: `hydra.sweep.dir`, the folder of a sweep.
        sweep_dir_given: whether the user asked for it.
        sweep_subdir: `hydra.sweep.subdir` of the first job; None where it does not resolve.
        sweep_params: `hydra.sweeper.params`, keys and the values to sweep over as on the command line.
        places: where keys below `hydra.` were set.
        enumerates: whether the sweeper runs every combination, so that all jobs are known before the first.
    """

    multirun: bool = False
    run_dir: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verbose: bool | tuple[str, ...] = False
    sweep_dir: str = ""
    sweep_dir_given: bool = False
    sweep_subdir: str | None = None
    sweep_params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    enumerates: bool = True


def judge_choice(word: Word, options: Iterable[str], multirun: bool) -> Problem | None:
    """What is wrong with choosing one of Hydra's groups; `options` are the choices that Hydra knows for it."""
    options, value = list(options), word.parsed.value()
    if word.key not in GROUPS:
        near = reflect.nearest(word.key, GROUPS)
        hint = f"; nearest is {near!r}" if near else ""
        return Problem(word.place, f"{word.key} is not a group of Hydra's that takes effect here{hint}")
    if not isinstance(value, str) or value not in options:
        near = reflect.nearest(str(value), options)
        hint = f"; nearest is {near!r}" if near else ""
        return Problem(word.place, f"{word.key} has no choice {show(value)}{hint}; choices: {', '.join(options)}")
    return None if multirun else Problem(word.place, f"{word.key} takes effect in a sweep only; add -m")


def judge_key(dotted: str, hydra: DictConfig) -> str | None:
    """What is wrong with a key below `hydra.`, by Hydra's own schema; `hydra` is its composed section."""
    inner = dotted.removeprefix("hydra.")
    known = [*_SWEEP_KEYS, *_JOB_KEYS]
    if not any(inner == name or inner.startswith(f"{name}.") or name.startswith(f"{inner}.") for name in known):
        for name, instead in _INSTEAD.items():
            if inner == name or inner.startswith(f"{name}."):
                return f"{dotted} has no effect: {instead}"
        near = reflect.nearest(inner, known)
        hint = f"; nearest is 'hydra.{near}'" if near else ""
        return f"there is no key {dotted!r} that takes effect{hint}; keys: {', '.join(f'hydra.{k}' for k in known)}"
    node: Any = hydra
    path = ["hydra"]
    for name in inner.split("."):
        if not isinstance(node, DictConfig):
            return f"{'.'.join(path)} has no keys of its own; write {'.'.join(path)}=..."
        if node._is_none() or _is_open(node, path):
            return None
        if name not in node and not (OmegaConf.is_missing(node, name) or name in _fields(node)):
            near = reflect.nearest(name, [str(known) for known in node])
            hint = f"; nearest is {'.'.join([*path, near])!r}" if near else ""
            return f"there is no key {'.'.join([*path, name])!r}{hint}; keys: {', '.join(map(str, node))}"
        node = node._get_node(name)
        path.append(name)
    return None


def judge_word(word: Word, hydra: DictConfig, multirun: bool) -> Problem | None:
    """What is wrong with setting a key below `hydra.` on the command line."""
    message = judge_key(word.key, hydra)
    if message is None:
        inner = word.key.removeprefix("hydra.")
        if not multirun and any(inner == name or inner.startswith(f"{name}.") for name in _SWEEP_KEYS):
            message = f"{word.key} takes effect in a sweep only; add -m"
        elif isinstance(node := _node(hydra, inner), DictConfig) and node._is_none():
            message = (
                f"{word.key} is null here, and Hydra fills a section in YAML only; set it in your own by --config-dir"
            )
        else:
            message = judge_value(word.key, word.parsed.value(), hydra)
    return Problem(word.place, message) if message else None


def judge_value(dotted: str, value: Any, hydra: DictConfig) -> str | None:
    """What is wrong with a value below `hydra`, by Hydra's own schema; mappings are for their keys to be judged."""
    inner = dotted.partition(".")[2]
    node = _node(hydra, inner) if inner else hydra
    if inner.startswith("sweeper.params."):
        wrong = isinstance(value, (list, Mapping)) or value is None
        return f"{dotted} is {show(value)}, expected the values in one string, as '1,2'" if wrong else None
    if isinstance(node, DictConfig) and node._is_none():
        return None if isinstance(value, Mapping) else f"{dotted} is a section, not {show(value)}"
    if isinstance(node, DictConfig) and not isinstance(value, Mapping):
        return f"{dotted} is a section, not {show(value)}; set its keys one by one"
    if inner == "verbose":
        names = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
        if not (names or isinstance(value, (bool, str))):
            return f"{dotted} is {show(value)}, expected true, false, or a list of names of loggers"
    if isinstance(value, Mapping) or not inner:
        return _wrong_key(dotted, value)
    return _wrong_type(dotted, value, hydra)


def _wrong_key(dotted: str, value: Any) -> str | None:
    wrong = [name for name in value if not isinstance(name, str)] if isinstance(value, Mapping) else []
    return f"{dotted} has the key {show(wrong[0])}, and keys are names" if wrong else None


def judge_values(
    hydra: DictConfig, sources: Mapping[str, str], problems: list[Problem], multirun: bool = False
) -> HydraSettings:
    """Reads the composed `hydra` section; what is wrong with its values joins the problems."""

    def place(key: str) -> str:
        return sources.get(key, "")

    if OmegaConf.select(hydra, "launcher._target_") == LAUNCHER:
        launcher = OmegaConf.to_container(hydra.launcher)
        for problem in convert(ProcessLauncherConfig, launcher)[1]:
            dotted = f"hydra.launcher.{problem.place}"
            problems.append(Problem(place(dotted) or dotted, f"hydra.launcher.{problem.message}"))
    run_dir = place("hydra.run.dir") and _resolved(hydra, "run.dir", place, problems)
    params = _resolved(hydra, "sweeper.params", place, problems) or {}
    environment = _resolved(hydra, "job.env_set", place, problems) or {}
    verbose = hydra.verbose
    if isinstance(verbose, str):
        verbose = (verbose,)
    settings = HydraSettings(
        multirun=hydra.mode is not None and hydra.mode.name == "MULTIRUN",
        run_dir=run_dir or None,
        environment={str(name): str(value) for name, value in environment.items()},
        verbose=verbose if isinstance(verbose, bool) else tuple(map(str, verbose or ())),
        sweep_dir_given=not place("hydra.sweep.dir").startswith("conf/"),
        sweep_dir=str(_resolved(hydra, "sweep.dir", place, problems) or ""),
        sweep_subdir=_first_subdir(hydra, place, problems) if multirun else None,
        sweep_params={str(name): str(value) for name, value in params.items()},
        places={key: source for key, source in sources.items() if key.startswith("hydra.")},
        enumerates=OmegaConf.select(hydra, "sweeper._target_") == _BASIC_SWEEPER,
    )
    if multirun:
        problems += _judge_sweep(hydra, settings)
    return settings


def inside(folder: str) -> bool:
    """Whether a path is below what it is relative to."""
    path = Path(folder)
    return bool(folder.strip()) and not path.is_absolute() and path != Path() and ".." not in path.parts


def _first_subdir(hydra: DictConfig, place: Callable[[str], str], problems: list[Problem]) -> str | None:
    """The folder of job 0 in the sweep's; the others differ in what they refer to, and not in how."""
    config = cast("DictConfig", copy.deepcopy(hydra._get_root()))
    with open_dict(config):
        config.hydra.job.num, config.hydra.job.id = 0, "0"
    HydraConfig.instance().set_config(config)  # ${hydra:job.num} reads from there
    subdir = _resolved(config.hydra, "sweep.subdir", place, problems)
    return None if subdir is None else str(subdir)


def _judge_sweep(hydra: DictConfig, settings: HydraSettings) -> list[Problem]:
    """What is wrong with the settings of a sweep."""

    def problem(key: str, message: str) -> Problem:
        return Problem(settings.places.get(key, key), f"{key} {message}")

    found = []
    if not settings.sweep_dir.strip():
        found.append(problem("hydra.sweep.dir", "is empty; give a folder for the sweep"))
    if settings.sweep_subdir is not None and not inside(settings.sweep_subdir):
        message = f"is {settings.sweep_subdir!r}, expected a folder inside of the sweep's, such as ${{hydra.job.num}}"
        found.append(problem("hydra.sweep.subdir", message))
    if settings.run_dir is not None:
        found.append(problem("hydra.run.dir", "is one folder and each job needs its own; set hydra.sweep.dir"))
    batch = OmegaConf.select(hydra, "sweeper.max_batch_size")
    if batch is not None and batch < 1:
        found.append(problem("hydra.sweeper.max_batch_size", f"is {batch}, expected an integer of at least 1, or null"))
    for group, kind in (("launcher", Launcher), ("sweeper", Sweeper)):
        classes = {f"{known.__module__}.{known.__qualname__}" for known in Plugins.instance().discover(kind)}
        target = OmegaConf.select(hydra, f"{group}._target_")
        if target not in classes:
            below = [key for key in settings.places if key.startswith(f"hydra.{group}.")]
            place = settings.places.get(f"hydra.{group}._target_") or (settings.places[below[0]] if below else "sweep")
            names = [name.removesuffix(".yaml") for name in ConfigStore.instance().list(f"hydra/{group}")]
            message = f"hydra/{group} has the class {show(target)} (_target_), which is no {group}; choices: "
            found.append(Problem(place, message + ", ".join(names)))
    for name, callback in (hydra.callbacks or {}).items():
        target = callback.get("_target_") if isinstance(callback, DictConfig) else None
        try:
            _locate(str(target))
        except Exception as error:  # an import may fail in any way
            key = f"hydra.callbacks.{name}"
            why = " ".join(str(error).split())
            place = settings.places.get(f"{key}._target_") or settings.places.get(key, key)
            found.append(Problem(place, f"{key} has the class {show(target)} (_target_), which cannot be used: {why}"))
    return found


def _node(hydra: DictConfig, inner: str) -> Any:
    """What stands at a key or at the nearest section above it that is null; interpolations stay as they are."""
    node: Any = hydra
    for name in inner.split("."):
        if not isinstance(node, DictConfig) or node._is_none():
            break
        node = node._get_node(name, validate_access=False)
    return node


def _resolved(hydra: DictConfig, inner: str, place: Callable[[str], str], problems: list[Problem]) -> Any:
    try:
        value = OmegaConf.select(hydra, inner)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        dotted = f"hydra.{inner}"
        why = "it refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        problems.append(Problem(place(dotted) or dotted, f"{dotted} does not resolve: {why}"))
        return None


def _is_open(node: DictConfig, path: list[str]) -> bool:
    """Whether a section takes the user's own keys: a dictionary of Hydra's schema, not a plugin's configuration."""
    if path[1:2] and path[1] in ("launcher", "sweeper") and len(path) == 2:
        return False
    return not dataclasses.is_dataclass(OmegaConf.get_type(node))


def _fields(node: DictConfig) -> set[str]:
    kind = OmegaConf.get_type(node)
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


def _wrong_type(dotted: str, value: Any, hydra: DictConfig) -> str | None:
    trial = OmegaConf.create({"hydra": None})
    trial.hydra = hydra.copy()
    try:
        OmegaConf.update(trial, dotted, value, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        return f"{dotted} is {show(value)}: {str(error).splitlines()[0]}"
    return None
