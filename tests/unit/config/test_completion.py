"""What a TAB offers, whatever the shell."""

from pathlib import Path

import pytest

from tpu_train.config.completion import Command, Option, complete

DIR = Option("Your own YAML.", ())
COMMANDS = {
    "": Command("", {"--config-dir": DIR, "--json": Option("One object."), "--shell": Option("", ("bash", "zsh"))}),
    "train": Command("Train.", {"--config-dir": DIR, "--json": Option("One object.")}),
    "show": Command("Show.", {"--config-dir": DIR}, topics=True),
}


def offered(line: str) -> list[str]:
    """The words offered at the end of a line."""
    *before, incomplete = line.split(" ")
    return [word for word, _ in complete(before, incomplete, COMMANDS)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mod", ["mode=", "model="]),
        ("tr", ["train", "training."]),
        ("train tr", ["training."]),
        ("kern", ["kernels=", "kernels/attention=", "kernels/loss=", "kernels/moe="]),
        ("optimizer", ["optimizer=", "optimizer."]),
        ("optimizer.mo", ["optimizer.momentum="]),  # of one member of the union only
        ("optimizer=sgd optimizer.b", []),
        ("optimizer=adamw optimizer.b", ["optimizer.beta1=", "optimizer.beta2="]),
        ("optimizer.na", []),  # follows from the group
        ("training.st", ["training.steps="]),
        ("training.steps=5 training.st", []),
        ("model=qwen3_debug mod", ["mode="]),
        ("run_d", ["run_dir="]),
        ("logging.", ["logging.wandb.", "logging.tensorboard.", "logging.metadata."]),
        ("model.rope_s", ["model.rope_scaling=", "model.rope_scaling."]),  # a section that may be null
        ("+rec", ["+recipe="]),
        ("++training.st", ["++training.steps="]),
        ("nope", []),
    ],
)
def test_commands_groups_and_keys(line: str, words: list[str]) -> None:
    assert offered(line) == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model=llama3_d", ["model=llama3_debug"]),
        ("optimizer=", ["optimizer=adamw", "optimizer=sgd"]),
        ("check=", []),
        ("kernels/attention=r", ["kernels/attention=reference"]),
        ("training.on_nan=", ["training.on_nan=stop", "training.on_nan=skip"]),
        ("mode.check_graph=t", ["mode.check_graph=true"]),
        ("training.max_grad_norm=", ["training.max_grad_norm=null"]),
        ("model=llama3_debug model.rope_scaling=", ["model.rope_scaling=null"]),
        ("training.steps=", []),
        ("run_dir=", []),  # may be null, and may be a path
        ("optimizer.name=", []),
        ("training=", []),
        ("train optimizer=adamw,", ["optimizer=adamw,sgd"]),
        ("+recipe=s", ["+recipe=smoke"]),
    ],
)
def test_choices_and_values(line: str, words: list[str]) -> None:
    assert offered(line) == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--", ["--config-dir", "--json", "--shell"]),
        ("model=qwen3_debug --json --", ["--config-dir", "--shell"]),
        ("show --", ["--config-dir"]),
        ("--shell ", ["bash", "zsh"]),
        ("--config-dir ", []),  # a path: the shell's own completion
        ("--config-dir model=x mod", ["mode=", "model="]),
    ],
)
def test_options_and_their_values(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_show_offers_groups_and_keys_as_words_until_it_has_one() -> None:
    assert offered("show opt")[:3] == ["optimizer", "optimizer.name", "optimizer.lr"]
    assert "training.steps" in offered("show tr")
    assert not [word for word in offered("show ") if "." in word or "=" in word]
    assert offered("show optimizer=sgd optimizer.m") == ["optimizer.momentum"]
    assert offered("show training training.st") == ["training.steps="]
    assert offered("show optimizer=s") == ["optimizer=sgd"]


def test_a_new_line_offers_every_command_group_and_section() -> None:
    words = offered("")
    assert words[:2] == ["train", "show"]
    assert {"model=", "kernels/attention=", "recipe=", "validation=", "training.", "run_dir="} < set(words)
    assert len(set(words)) == len(words)


def test_help_is_the_schemas_and_the_yamls() -> None:
    found = dict(complete([], "", COMMANDS))
    assert found["model="] == "The model."
    assert found["training."] == "The loop."
    assert found["recipe="] == "smoke"
    assert dict(complete([], "optimizer=", COMMANDS))["optimizer=sgd"] == "SGD with momentum."
    assert dict(complete([], "training.st", COMMANDS)) == {"training.steps=": "Length of the run. In optimizer steps."}


@pytest.mark.parametrize("form", ["--config-dir {}", "--config-dir={}", "show --config-dir {}"])
def test_users_groups_are_offered(form: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text("# @package _global_\n# Mine.\n")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/broken.yaml").write_bytes(b"name: [\xff\n")
    assert offered(f"{form.format(tmp_path)} recipe=") == ["recipe=mine", "recipe=smoke"]
    # A broken file is offered without help, and says nothing about the keys.
    assert offered(f"{form.format(tmp_path)} optimizer=br") == ["optimizer=broken"]
    assert offered(f"{form.format(tmp_path)} optimizer=broken training.st")[0].startswith("training.steps")


def test_a_folder_that_is_not_there_offers_what_is_shipped() -> None:
    assert offered("--config-dir nowhere recipe=") == ["recipe=smoke"]
