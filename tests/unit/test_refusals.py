"""Whatever is typed ends in a run or in problems with their places, never in a traceback."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.training.test_train_command import tpu_train
from tpu_train import cli
from tpu_train.config import reflect
from tpu_train.config.problems import ConfigError
from tpu_train.config.schema import Run
from tpu_train.config.sources import SearchPath
from tpu_train.sweeps.plan import plan

# Words that are wrong each for itself, and what is said of them.
WRONG = {
    "training.stpes=5": "there is no key 'training.stpes'; nearest is 'training.steps'",
    "+training.foo=1": "there is no key 'training.foo'",
    "++training.log_evry=1": "there is no key 'training.log_evry'; nearest is 'training.log_every'",
    "+hydra.foo=1": "there is no key 'hydra.foo' that takes effect",
    "++hydra.sweep.dri=x": "nearest is 'hydra.sweep.dir'",
    "model=qwen3_debgu": "model has no choice 'qwen3_debgu'; nearest is 'qwen3_debug'",
    "+optimizer=adamx": "optimizer is already chosen; write optimizer=adamx without +",
    "kernels.attention=splash": "kernels.attention is a group; choose with kernels/attention=splash",
    "--batch-per-device=5": "there is no option '--batch-per-device'; keys are set without dashes: "
    "training.batch_per_device=5",
    "training.steps=5.5": "training.steps is 5.5, expected an integer",
    "training.seed=abc": "training.seed is 'abc', expected an integer",
    "training.seq_len=": "training.seq_len is '', expected an integer",
    "training.log_every=-1": "training.log_every is -1, expected a number of at least 1",
    "training.grad_accumulation=0": "training.grad_accumulation is 0, expected a number of at least 1",
    "training.max_grad_norm=None": "expected a number or null; write null for none",
    "mode.check_graph=yes": "mode.check_graph is 'yes', expected true or false; write true",
    "logging.tensorboard.enabled=on": "expected true or false; write true",
    "validation.steps=010": "YAML reads leading zeros as an octal number, write 10",
    "training.inject_inf_at_step=1:30": "YAML reads colons as a number of base sixty",
    "run_dir=${nope}": "does not resolve: Interpolation key 'nope' not found",
    "runtime.platform=tpus": "expected one of auto, cpu, tpu, gpu; nearest is 'tpu'",
    "runtime.devices=1,2": "1,2 is a sweep, which runs with -m",
    "schedule=cosine": "",
    "schedule=linear": "schedule is chosen twice, also by command line 'schedule=cosine'; keep one",
    "~tokenizer": "tokenizer cannot be removed",
    "logging.wandb.project='a": "not an override",
}


def test_one_command_tells_of_everything_that_is_wrong_with_it(tmp_path: Path) -> None:
    done = tpu_train(*WRONG, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    expected = [(f"command line '{word}': ", message) for word, message in WRONG.items() if message]
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected), done.stderr
    for line, (place, message) in zip(lines, expected, strict=True):
        assert line.startswith(place)
        assert message in line
    assert list(tmp_path.iterdir()) == []


def test_values_that_clash_are_told_beside_a_typo(tmp_path: Path) -> None:
    words = ["training.batch_per_device=4", "training.global_batch_size=8", "optimizer.lrr=1", "data=text"]
    done = tpu_train("check", *words, cwd=tmp_path)
    assert done.returncode == 2
    first, second, third = done.stderr.splitlines()
    assert first.startswith("command line 'training.global_batch_size=8': training.global_batch_size is 8 and")
    assert second.startswith("command line 'optimizer.lrr=1': there is no key 'optimizer.lrr'; nearest is")
    assert third.startswith("conf/data/text.yaml:3: data.path is required and has no value")


def test_a_users_folder_works_from_elsewhere_and_its_typo_has_a_line(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "recipe").mkdir()
    shipped = SearchPath().find("model/qwen3_debug")
    assert shipped
    model = own / "model/mine.yaml"
    model.write_text(shipped.read_text().replace("num_layers: 4", "num_layers: 3"))
    recipe = own / "recipe/mine.yaml"
    recipe.write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /model: mine\n  - override /schedule: constant\n"
        "training:\n  steps: 7\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = tpu_train("check", "recipe=mine", "--config-dir", "../own", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    recipe.write_text(recipe.read_text().replace("steps: 7", "stpes: 7"))
    model.write_text(model.read_text() + "num_layerz: 3\n")
    done = tpu_train("recipe=mine", "--config-dir", "../own", cwd=elsewhere)
    assert done.returncode == 2
    told = done.stderr.splitlines()
    assert len(told) == 2
    assert any(line.startswith(f"{recipe}:7: there is no key 'training.stpes'; nearest is") for line in told)
    length = len(model.read_text().splitlines())
    assert any(line.startswith(f"{model}:{length}: there is no key 'model.num_layerz'") for line in told)
    assert list(elsewhere.iterdir()) == []


KEYS = [dotted for dotted, *_ in reflect.walk(Run)]
GROUPS = {group: list(choices) for group, choices in SearchPath().groups().items()}
HYDRA = ["hydra.run.dir", "hydra.sweep.dir", "hydra.launcher.n_jobs", "hydra.job.env_set.A", "hydra.verbose", "hydra.x"]
HYDRA += ["hydra.mode", "hydra.job.name", "hydra.sweeper.params", "hydra.sweep", "hydra", "hydra/launcher", "hydra/x"]
VALUES = [
    "",
    "1",
    "0",
    "-1",
    "5.5",
    "1e3",
    "1e400",
    "nan",
    "null",
    "None",
    "true",
    "yes",
    "010",
    "1:30",
    "abc",
    "[1,2]",
]
VALUES += [
    "{a: 1}",
    "{}",
    "[]",
    "1,2",
    "a b",
    "'a b'",
    "'",
    '"',
    "${model.dim}",
    "${x}",
    "${",
    "}",
    "$",
    "\\",
    "a=b",
    "~",
]
VALUES += [
    "choice(1,2)",
    "range(1,3)",
    "glob(*)",
    "interval(0,1)",
    "int('x')",
    "float(1)",
    "sort(2,1)",
    "tag(a,b)",
    "9" * 30,
]
VALUES += ["basic", "???", "é", "\t", "a\nb", "@x", "#", "%", "{a:{b:1}}", "[[1],[2]]", "shuffle(1,2)", "0x10", "1_000"]

CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large)
names = st.sampled_from([*KEYS, *GROUPS, *HYDRA]) | st.text("abc./_@:", max_size=8)
values = st.sampled_from([*VALUES, *(choice for choices in GROUPS.values() for choice in choices)])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
words = st.tuples(st.sampled_from(["", "", "", "+", "++", "~", "-", "--"]), names, st.just("="), values | texts).map(
    "".join
)
lines = st.lists(words | texts, min_size=1, max_size=4)


@given(line=lines)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=CHECKS)
def test_no_word_ends_in_a_traceback(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--", *line])
    printed = capsys.readouterr()
    assert ended.value.code in (0, 2)
    assert (ended.value.code == 2) == bool(printed.err)
    assert "Traceback" not in printed.err


@given(line=lines)
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=CHECKS)
def test_no_sweep_ends_in_a_traceback(line: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        plan(line, None)


@pytest.mark.full
@given(line=lines)
@settings(max_examples=3000, deadline=None, suppress_health_check=CHECKS)
def test_no_word_of_many_ends_in_a_traceback(line: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--", *line])
    capsys.readouterr()
    assert ended.value.code in (0, 2)
