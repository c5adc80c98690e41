"""The command line: `tpu-train [COMMAND] [OVERRIDE]... [OPTIONS]`; no command means `train`.

Only typer is imported here, everything else inside the commands: `tpu-train --help` must answer at once, and torch
alone takes seconds to import. Exit codes: 0 done, 1 failed while running, 2 refused before anything started, 130
interrupted.
"""

import contextlib
import difflib
import enum
import io
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from typer.models import CommandInfo, OptionInfo

if TYPE_CHECKING:
    from tpu_train.config.completion import Command
    from tpu_train.config.compose import Composed
    from tpu_train.config.problems import ConfigError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # 75, preempted, comes from the run

app = typer.Typer(
    add_completion=False,  # ours, see config/shells.py
    rich_markup_mode=None,  # with it, --help imports rich
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# `--steps=5` reaches the overrides and is told apart there, beside everything else that is wrong.
_UNKNOWN = {"ignore_unknown_options": True}

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="OVERRIDE", help="GROUP=CHOICE or KEY=VALUE, as Hydra has them.")
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[GROUP|KEY] OVERRIDE", help="What to show; without: everything.")
]
Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What the command is to do.")]


def _folder(text: str) -> Path:
    if not text.strip():
        raise typer.BadParameter("is empty; give a folder of YAML by group")
    return Path(text)


ConfigDir = Annotated[
    Path | None,
    typer.Option("--config-dir", metavar="DIR", parser=_folder, help="Your own YAML by group, searched first."),
]
Multirun = Annotated[
    bool, typer.Option("-m", "--multirun", help="Run every combination of KEY=A,B,... as a job of its own.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else on stderr.")]


class Shell(enum.StrEnum):
    """A shell that completion exists for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def _install_completion(shell: Shell | None) -> None:
    if shell:
        from tpu_train.config import shells

        print(f"completion for {shell} is in {shells.install(shell)}; a new {shell} has it")  # noqa: T201
        raise typer.Exit


def _show_completion(shell: Shell | None) -> None:
    if shell:
        from tpu_train.config import shells

        print(shells.SCRIPTS[shell], end="")  # noqa: T201
        raise typer.Exit


COMPLETION = ("--install-completion", "--show-completion")
Install = Annotated[
    Shell | None,
    typer.Option(
        COMPLETION[0],
        callback=_install_completion,
        is_eager=True,
        help="Let TAB complete in a shell; without a name: in $SHELL.",
    ),
]
Show = Annotated[
    Shell | None,
    typer.Option(
        COMPLETION[1], callback=_show_completion, is_eager=True, help="Print the script that would be installed."
    ),
]


@app.callback()
def _root(install_completion: Install = None, show_completion: Show = None) -> None:
    """Train PyTorch models on TPUs from YAML. Without a command: train."""


@app.command(context_settings=_UNKNOWN)
def train(
    overrides: Overrides = None, multirun: Multirun = False, config_dir: ConfigDir = None, as_json: Json = False
) -> None:
    """Compose the config, check it, and train."""
    words = overrides or []

    def tell_others(refused: "ConfigError") -> None:
        from tpu_train.training import refusal

        refusal.tell_others(refused, words, config_dir)

    with _refusals(as_json):
        if multirun or any(word.lstrip("+") == "hydra.mode=MULTIRUN" for word in words):
            raise typer.Exit(_sweep(words, config_dir, as_json))
        with _refusals(as_json, tell_others):
            composed = _checked(words, config_dir)
        if composed.hydra.multirun:
            raise typer.Exit(_sweep(words, config_dir, as_json))
        # What the run prints is its log; with --json stdout is kept for the object.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            code = _train(composed)
    if as_json:
        _print({"exit_code": code})
    raise typer.Exit(code)


@app.command(context_settings=_UNKNOWN)
def check(
    overrides: Overrides = None, multirun: Multirun = False, config_dir: ConfigDir = None, as_json: Json = False
) -> None:
    """Check the config, or with -m a whole sweep, and count what the model has and needs; no device is used."""
    with _refusals(as_json):
        if multirun:
            from tpu_train.sweeps.plan import plan

            planned = plan(overrides or [], config_dir)
            composed, jobs = planned.composed, {"jobs": planned.num_jobs} if planned.num_jobs else {}
        else:
            composed, jobs = _checked(overrides, config_dir), {}
        from tpu_train.checking import measure

        found = {"model": composed.choices["model"], **measure(composed.run), **jobs}
    shown = {name: value if isinstance(value, str) else format(value, ",") for name, value in found.items()}
    text = "\n".join(f"{name.replace('_', ' '):<24}{value:>24}" for name, value in shown.items())
    _print(found if as_json else text)


@app.command(context_settings=_UNKNOWN)
def show(words: Words = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Show the config with its sources, a GROUP's choices, what a KEY means, or the step's collectives: graph."""
    with _refusals(as_json):
        from tpu_train.config import show as views
        from tpu_train.config.compose import compose

        topics = [word for word in words or [] if not _is_override(word)]
        overrides = [word for word in words or [] if _is_override(word)]
        if len(topics) > 1:
            _refuse([(f"{topics[1]!r}", f"a second thing to show, beside {topics[0]!r}; show one at a time")], as_json)
        if topics == ["checkpoint"] and any(word.startswith("run_dir=") for word in overrides):
            _show_checkpoint(overrides, as_json)
            return
        if topics == ["graph"]:
            _show_graph(overrides, config_dir, as_json)
            return
        composed = compose(overrides, config_dir, complete=not topics)
        found, text = views.topic(topics[0], composed, config_dir) if topics else views.whole(composed)
    _print(found if as_json else text)


@app.command(context_settings=_UNKNOWN)
def generate(settings: Settings = None, as_json: Json = False) -> None:
    """Continue a prompt with the weights of a run folder: run_dir=... prompt=..."""
    with _refusals(as_json):
        from tpu_train.config.command_settings import GenerateSettings
        from tpu_train.config.settings import parse_settings

        parsed = parse_settings(GenerateSettings, settings or [])
        from tpu_train.training.commands import generate as run

        found, text = run(parsed)
    _print(found if as_json else text)


@app.command("export", context_settings=_UNKNOWN)
def export(settings: Settings = None, as_json: Json = False) -> None:
    """Write the weights of a run folder as a Hugging Face folder: run_dir=... hf_dir=..."""
    with _refusals(as_json):
        from tpu_train.config.command_settings import ExportSettings
        from tpu_train.config.settings import parse_settings

        parsed = parse_settings(ExportSettings, settings or [])
        from tpu_train.training.commands import export as run

        found = run(parsed)
    _print(found if as_json else f"step {found['step']} is in {found['hf_dir']}")


@app.command("import", context_settings=_UNKNOWN)
def import_(settings: Settings = None, as_json: Json = False) -> None:
    """Make a run folder of a Hugging Face folder's weights: hf_dir=... run_dir=..."""
    with _refusals(as_json):
        from tpu_train.config.command_settings import ImportSettings
        from tpu_train.config.settings import parse_settings

        parsed = parse_settings(ImportSettings, settings or [])
        from tpu_train.training.commands import import_ as run

        found = run(parsed)
    _print(found if as_json else f"{found['parameters']:,} parameters are in {found['run_dir']}")


def _show_checkpoint(words: list[str], as_json: bool) -> None:
    from tpu_train.config.command_settings import CheckpointSettings
    from tpu_train.config.settings import parse_settings

    parsed = parse_settings(CheckpointSettings, words)
    from tpu_train.training.commands import describe_checkpoint

    found, text = describe_checkpoint(parsed)
    _print(found if as_json else text)


def _show_graph(overrides: list[str], config_dir: Path | None, as_json: bool) -> None:
    composed = _checked(overrides, config_dir)
    from tpu_train.training.graph_view import describe_graph

    found, text = describe_graph(composed.run)
    _print(found if as_json else text)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; always ends in SystemExit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    try:
        if instruction := os.environ.get("_TPU_TRAIN_COMPLETE"):
            from tpu_train.config import shells

            with _output():
                print(shells.answer(instruction.removeprefix("complete_"), os.environ, _grammar()), end="")  # noqa: T201
            raise SystemExit
        _refuse_values_of_flags(words)
        # A command ends by typer.Exit, whose code comes back, or by SystemExit.
        code = app(args=_with_command(words), prog_name="tpu-train", standalone_mode=False)
    except _UsageError as error:  # pyright: ignore[reportGeneralTypeIssues]
        _refuse([_misuse(error)], _wants_json(words))
    except KeyboardInterrupt:
        code = _interrupted()
    with _output():
        pass  # what is still buffered
    raise SystemExit(code or 0)


# Of whichever click this typer has; the base of all that it says of a command line.
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _misuse(error: Exception) -> tuple[str, str]:
    """What typer says of a command line as a place and a message: `Option '--config-dir' requires an argument.`"""
    text = error.format_message().rstrip(".")  # pyright: ignore
    if match := re.match(r"(?:Option|Invalid value for) '([^']*)':? (.*)", text, re.DOTALL):
        return f"command line '{match[1].partition(' ')[0]}'", match[2]
    return "command line", text


def _wants_json(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--json" for word in words)


def _refuse_values_of_flags(words: Sequence[str]) -> None:
    told = []
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and name in ("-m", "--multirun", "--json"):
            told.append((f"command line '{word}'", f"{name} takes no value; write {name}"))
    if told:
        _refuse(told, _wants_json(words))


def _prepare_streams() -> None:
    """Streams that take every character, and do not lead to one another where one is closed."""
    if sys.stdout is None or sys.stderr is None:  # pyright: ignore
        # Opened for the life of the process: else the next file would get the number of the closed stream.
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """What is printed to stdout; where it cannot be, because nobody reads or a disk is full, that is the failure."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _give_up(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            _tell(f"tpu-train: failed: cannot write the output: {error.strerror}")
        raise SystemExit(FAILED) from None


def _tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:  # nowhere is left to say it
        _give_up(sys.stderr)


def _give_up(stream: TextIO) -> None:
    """Leads a stream that cannot be written to nowhere: what is still buffered would fail again at the exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _with_command(words: list[str]) -> list[str]:
    """The words with their command first: `train` where none is given."""
    commands = [_name(command) for command in app.registered_commands]
    first = words[0] if words else ""
    if first in commands or first in ("-h", "--help"):
        return words
    if first.partition("=")[0] in COMPLETION:
        return words if words[1:] or "=" in first else [first, Path(os.environ.get("SHELL", "")).name]
    if not first or first.startswith("-") or _is_override(first):
        for before, word in itertools.pairwise(words):
            if word in commands and before != "--config-dir":
                _refuse([(f"{word!r}", f"a command comes first: tpu-train {word} ...")], _wants_json(words))
        return ["train", *words]
    if hint := _meant_for_show(first):
        _refuse([(f"{first!r}", f"not a command; {hint}")], _wants_json(words))
    near = difflib.get_close_matches(first, commands, n=1)
    hint = f"; nearest is {near[0]!r}" if near else ""
    message = f"not a command{hint}; commands: {', '.join(commands)}; an override is KEY=VALUE"
    _refuse([(f"{first!r}", message)], _wants_json(words))


def _meant_for_show(word: str) -> str | None:
    """What to do about a group or a key that stands where a command is expected."""
    from tpu_train.config import reflect
    from tpu_train.config.schema import Run
    from tpu_train.config.sources import SearchPath

    if word in SearchPath().groups():
        return f"choose with {word}=CHOICE; the choices: tpu-train show {word}"
    if reflect.has(Run, word):
        return f"set it with {word}=VALUE; what it means: tpu-train show {word}"
    return None


def _grammar() -> "dict[str, Command]":
    """The commands and their options, as completion knows them; "" is the command line without a command."""
    from tpu_train.config.completion import Command, Option

    def options(function: Callable[..., Any]) -> dict[str, Option]:
        found = {name: Option("Show help and exit.") for name in ("-h", "--help")}
        for annotation in function.__annotations__.values():
            for option in getattr(annotation, "__metadata__", ()):
                if isinstance(option, OptionInfo):
                    kind = annotation.__origin__
                    values = None if kind is bool else tuple(Shell) if kind == Shell | None else ()
                    # Inside Annotated there is no default, and typer keeps the first name in its place.
                    names = (option.default, *(option.param_decls or ()))
                    found |= {name: Option(option.help or "", values) for name in names if isinstance(name, str)}
        return found

    functions = {_name(command): command.callback for command in app.registered_commands if command.callback}
    commands = {
        name: Command((function.__doc__ or "").splitlines()[0], options(function), function is show)
        for name, function in functions.items()
    }
    return {"": Command("", {**options(_root), **options(train)}), **commands}


def _name(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or command.callback.__name__


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith(("~", "+"))


def _checked(overrides: Sequence[str] | None, config_dir: Path | None) -> "Composed":
    """Compose and check.

    Raises:
        ConfigError: with all problems.
    """
    from tpu_train.checking import compose_checked

    return compose_checked(overrides or [], config_dir)


def _sweep(words: Sequence[str], config_dir: Path | None, as_json: bool) -> int:
    """Run a sweep and print how its jobs ended; gives the exit code."""
    from tpu_train.sweeps.sweep import print_table, sweep

    result = sweep(words, config_dir)
    if as_json:
        _print(result.as_dict())
    else:
        with _output():
            print_table(result)
    return result.exit_code


def _train(composed: "Composed") -> int:
    """Train; whatever goes wrong ends in an exit code and a readable last line."""
    from tpu_train.config.problems import ConfigError

    os.environ.update(composed.hydra.environment)  # before jax is imported, which reads it
    try:
        from tpu_train.training.failures import RunFailed
        from tpu_train.training.trainer import train as run_training
    except KeyboardInterrupt:
        return _interrupted()
    try:
        return run_training(composed)
    except ConfigError:
        raise  # found late, but before the run started
    except KeyboardInterrupt:
        return _interrupted()
    except RunFailed as failed:  # its traceback is in the run's log
        print(f"tpu-train: failed: {failed}", file=sys.stderr)  # noqa: T201
        return FAILED
    except Exception as error:  # there is no run folder yet
        traceback.print_exc()
        lines = str(error).strip().splitlines() or ["no message"]
        print(f"tpu-train: failed: {type(error).__name__}: {lines[0]}", file=sys.stderr)  # noqa: T201
        return FAILED


def _interrupted() -> int:
    _tell("tpu-train: interrupted")
    return INTERRUPTED


@contextlib.contextmanager
def _refusals(as_json: bool, then: "Callable[[ConfigError], None]" = lambda _: None) -> Iterator[None]:
    """A refused config ends with exit 2 and all of its problems, one per line; an interrupt with exit 130.

    Args:
        as_json: whether stdout gets the problems as an object.
        then: called when they are shown.
    """
    from tpu_train.config.problems import ConfigError

    try:
        yield
    except ConfigError as error:
        try:
            _refuse([(problem.place, problem.message) for problem in error.problems], as_json)
        finally:
            then(error)
    except KeyboardInterrupt:  # typer would end in silence
        raise SystemExit(_interrupted()) from None


def _refuse(problems: Sequence[tuple[str, str]], as_json: bool) -> NoReturn:
    for place, message in problems:
        _tell(f"{place}: {message}")
    if as_json:
        _print({"problems": [{"place": place, "message": message} for place, message in problems]})
    raise SystemExit(REFUSED)


def _print(found: dict[str, Any] | str) -> None:
    """One object, or text, on stdout."""
    with _output():
        print(found if isinstance(found, str) else json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
