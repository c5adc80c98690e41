"""Hydra's own settings (`hydra.sweep.dir`, `hydra/sweeper`, ...): which exist, which take effect, and what they say.

Key idea: Hydra's schema is open behind `+`, and most of it is about the application frame that this program replaces.
A setting is judged against Hydra's dataclasses, and one that nothing here reads is refused with what to use instead.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
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
        elif isinstance(node, DictConfig) and not isinstance(word.parsed.value(), Mapping):
            message = f"{word.key} is a section; set its keys one by one"
        else:
            message = _wrong_type(word, hydra)
    return Problem(word.place, message) if message else None


def judge_values(hydra: DictConfig, sources: Mapping[str, str], problems: list[Problem]) -> HydraSettings:
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
    return HydraSettings(
        multirun=hydra.mode is not None and hydra.mode.name == "MULTIRUN",
        run_dir=run_dir or None,
        environment={str(name): str(value) for name, value in environment.items()},
        verbose=verbose if isinstance(verbose, bool) else tuple(map(str, verbose or ())),
        sweep_dir_given=not place("hydra.sweep.dir").startswith("conf/"),
        sweep_dir=str(_resolved(hydra, "sweep.dir", place, problems)),
        sweep_params={str(name): str(value) for name, value in params.items()},
        places={key: source for key, source in sources.items() if key.startswith("hydra.")},
        enumerates=OmegaConf.select(hydra, "sweeper._target_") == _BASIC_SWEEPER,
    )


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
    except OmegaConfBaseException as error:
        dotted = f"hydra.{inner}"
        problems.append(Problem(place(dotted) or dotted, f"{dotted} does not resolve: {str(error).splitlines()[0]}"))
        return None


def _is_open(node: DictConfig, path: list[str]) -> bool:
    """Whether a section takes the user's own keys: a dictionary of Hydra's schema, not a plugin's configuration."""
    if path[1:2] and path[1] in ("launcher", "sweeper") and len(path) == 2:
        return False
    return not dataclasses.is_dataclass(OmegaConf.get_type(node))


def _fields(node: DictConfig) -> set[str]:
    kind = OmegaConf.get_type(node)
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


def _wrong_type(word: Word, hydra: DictConfig) -> str | None:
    trial = OmegaConf.create({"hydra": None})
    trial.hydra = hydra.copy()
    try:
        OmegaConf.update(trial, word.key, word.parsed.value(), force_add=True)
    except OmegaConfBaseException as error:
        return f"{word.key} is {show(word.parsed.value())}: {str(error).splitlines()[0]}"
    return None
