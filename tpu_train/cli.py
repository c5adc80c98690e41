"""The command line: `tpu-train [COMMAND] [OVERRIDE]... [OPTIONS]`; no command means `train`.

Only typer is imported here, everything else inside the commands: `tpu-train --help` must answer at once, and torch
alone takes seconds to import. Exit codes: 0 done, 1 failed while running, 2 refused before anything started.
"""

import contextlib
import difflib
import itertools
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from tpu_train.config.compose import Composed

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # with it, --help imports rich
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="OVERRIDE", help="GROUP=CHOICE or KEY=VALUE, as Hydra has them.")
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[GROUP|KEY] OVERRIDE", help="What to show; without: everything.")
]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", metavar="DIR", help="Your own YAML by group, searched first.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else on stderr.")]


@app.callback()
def _root() -> None:
    """Train PyTorch models on TPUs from YAML. Without a command: train."""


@app.command()
def train(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Compose the config, check it, and train."""
    with _refusals(as_json):
        composed = _checked(overrides, config_dir)
        # What the run prints is its log; with --json stdout is kept for the object.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            code = _train(composed)
    if as_json:
        _print({"exit_code": code})
    raise typer.Exit(code)


@app.command()
def check(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Check the config and count what the model has and needs; no device is used."""
    with _refusals(as_json):
        composed = _checked(overrides, config_dir)
        from tpu_train.checking import measure

        found = {"model": composed.choices["model"], **measure(composed.run)}
    if as_json:
        _print(found)
        return
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<24}{value if isinstance(value, str) else format(value, ','):>24}")  # noqa: T201


@app.command()
def show(words: Words = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Show the composed config with its sources, the choices of a GROUP, or what a KEY means."""
    with _refusals(as_json):
        from tpu_train.config import show as views
        from tpu_train.config.compose import compose

        topics = [word for word in words or [] if not _is_override(word)]
        overrides = [word for word in words or [] if _is_override(word)]
        if len(topics) > 1:
            _refuse([(f"{topics[1]!r}", f"a second thing to show, beside {topics[0]!r}; show one at a time")], as_json)
        composed = compose(overrides, config_dir)
        found, text = views.topic(topics[0], composed, config_dir) if topics else views.whole(composed)
    if as_json:
        _print(found)
    else:
        print(text)  # noqa: T201


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; always ends in SystemExit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    app(args=_with_command(words), prog_name="tpu-train")
    raise AssertionError("typer exits")


def _with_command(words: list[str]) -> list[str]:
    """The words with their command first: `train` where none is given."""
    commands = [command.callback.__name__ for command in app.registered_commands if command.callback]
    first = words[0] if words else ""
    if first in commands or first in ("-h", "--help"):
        return words
    if not first or first.startswith("-") or _is_override(first):
        for before, word in itertools.pairwise(words):
            if word in commands and before != "--config-dir":
                _refuse([(f"{word!r}", f"a command comes first: tpu-train {word} ...")], "--json" in words)
        return ["train", *words]
    near = difflib.get_close_matches(first, commands, n=1)
    hint = f"; nearest is {near[0]!r}" if near else ""
    message = f"not a command{hint}; commands: {', '.join(commands)}; an override is KEY=VALUE"
    _refuse([(f"{first!r}", message)], "--json" in words)


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith(("~", "+"))


def _checked(overrides: Sequence[str] | None, config_dir: Path | None) -> "Composed":
    """Compose and check.

    Raises:
        ConfigError: with all problems.
    """
    from tpu_train.checking import check as check_rules
    from tpu_train.config.compose import compose
    from tpu_train.config.problems import ConfigError

    composed = compose(overrides or [], config_dir)
    if problems := check_rules(composed.run, composed.sources):
        raise ConfigError(problems)
    return composed


def _train(composed: "Composed") -> int:
    """Train; whatever goes wrong ends in an exit code and a readable last line."""
    from tpu_train.config.problems import ConfigError

    try:
        from tpu_train.training.trainer import train as run_training

        return run_training(composed)
    except ConfigError:
        raise  # found late, but before the run started
    except KeyboardInterrupt:
        print("tpu-train: interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or ["no message"]
        print(f"tpu-train: failed: {type(error).__name__}: {lines[0]}", file=sys.stderr)  # noqa: T201
        return FAILED


@contextlib.contextmanager
def _refusals(as_json: bool) -> Iterator[None]:
    """A refused config ends with exit 2 and all of its problems, one per line."""
    from tpu_train.config.problems import ConfigError

    try:
        yield
    except ConfigError as error:
        _refuse([(problem.place, problem.message) for problem in error.problems], as_json)


def _refuse(problems: Sequence[tuple[str, str]], as_json: bool) -> NoReturn:
    for place, message in problems:
        print(f"{place}: {message}", file=sys.stderr)  # noqa: T201
    if as_json:
        _print({"problems": [{"place": place, "message": message} for place, message in problems]})
    raise SystemExit(REFUSED)


def _print(found: dict[str, Any]) -> None:
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
