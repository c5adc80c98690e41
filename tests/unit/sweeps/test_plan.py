"""A sweep is refused for what is wrong with any of its values, before a job starts."""

from pathlib import Path

import pytest

from tpu_train.config.overrides import parse_one, quoted
from tpu_train.config.problems import ConfigError
from tpu_train.sweeps.plan import plan


def places(*words: str, config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(words, config_dir)
    return str(caught.value).splitlines()


def test_words_reach_hydra_as_it_wants_them() -> None:
    planned = plan(["model=llama3_debug,qwen3_debug", "+recipe=smoke", "training.steps=5", "run_dir=null"][:3], None)
    assert planned.words == ("model=llama3_debug,qwen3_debug", "+recipe=smoke", "training.steps=5")
    assert plan(["+logging.metadata.a=1,2", "hydra.verbose=true"], None).job_words == ("++hydra.verbose=true",)
    assert plan(["+logging.metadata.a=1,2"], None).words == ("++logging.metadata.a=1,2",)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer.lr=1e-3,abc", "optimizer.lr is 'abc', expected a number"),
        ("optimizer.lr=1e-3,-1", "optimizer.lr is -1, expected a number of at least 0"),
        ("training.stpes=1,2", "nearest is 'training.steps'"),
        ("optimizer=adamw,sdg", "optimizer has no choice 'sdg'; nearest is 'sgd'"),
        ("model=glob(qwenx*)", "model has no value in this sweep"),
        ("training.steps=range(3,3)", "training.steps has no value in this sweep"),
        ("training.grad_accumulation=1,3", "training.grad_accumulation is 3, which does not divide"),
        ("optimizer.lr=interval(0,1)", "this sweeper cannot enumerate; list values, or choose a sweeper that searches"),
        ("run_dir=a", "run_dir is one folder and each job needs its own; set hydra.sweep.dir"),
        ("hydra.launcher.n_jobs=0", "hydra.launcher.n_jobs is 0, expected a number of at least 1"),
        ("hydra.launcher.n_jobs=two", "hydra.launcher.n_jobs is 'two', expected an integer"),
        ("hydra.launcher.n_jbs=2", "there is no key 'hydra.launcher.n_jbs'; nearest is 'hydra.launcher.n_jobs'"),
        ("hydra.launcher.n_jobs=1,2", "hydra.launcher.n_jobs is a setting of the sweep itself and takes one value"),
        ("hydra/sweeper=optna", "hydra/sweeper has no choice 'optna'; nearest is 'optuna'; choices: basic, optuna"),
        ("hydra.sweeper.params={optimizer.lr: '1,2'}", "is null here, and Hydra fills a section in YAML only"),
    ],
)
def test_what_is_wrong_with_one_value_refuses_the_sweep(word: str, message: str) -> None:
    (only,) = places(word)
    assert message in only
    assert only.startswith("command line")


def test_all_that_is_wrong_is_told_once_in_order() -> None:
    told = places("optimizer.lr=abc,1e-3,xyz", "training.stpes=1", "model=llama3_debug,qwen3_debgu")
    assert [line.partition(";")[0] for line in told] == [
        "command line 'optimizer.lr=abc,1e-3,xyz': optimizer.lr is 'abc', expected a number",
        "command line 'optimizer.lr=abc,1e-3,xyz': optimizer.lr is 'xyz', expected a number",
        "command line 'training.stpes=1': there is no key 'training.stpes'",
        "command line 'model=llama3_debug,qwen3_debgu': model has no choice 'qwen3_debgu'",
    ]


def test_parameters_in_yaml_are_judged_as_words(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    recipe = tmp_path / "recipe/mine.yaml"
    text = (
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optimizer.lr: '1,x'\n      optimizer.lrr: '1,2'\n"
    )
    recipe.write_text(text)
    told = sorted(places("recipe=mine", config_dir=tmp_path))
    assert [line.partition(";")[0] for line in told] == [
        f"{recipe}:5: optimizer.lr is 'x', expected a number",
        f"{recipe}:6: there is no key 'optimizer.lrr'",
    ]
    assert places("recipe=mine", "optimizer.lr=1", config_dir=tmp_path) == told[1:]  # a word replaces a parameter
    recipe.write_text(text.replace("1,x", "1,").replace("lrr", "weight_decay"))
    (only,) = places("recipe=mine", config_dir=tmp_path)
    assert only.startswith(f"{recipe}:5: not an override")


def test_values_that_do_not_go_together_refuse_the_sweep() -> None:
    (only,) = places("training.batch_per_device=8,6", "training.grad_accumulation=2,4")
    assert "training.grad_accumulation is 4, which does not divide the global batch of 6" in only


@pytest.mark.parametrize("text", ["a/b", "a b", "it's", "5", "a,b", "x=y", "runs/2026-12-01", "null", "a\\b", "${x}"])
def test_a_quoted_string_is_read_as_itself(text: str) -> None:
    assert parse_one(f"key={quoted(text)}", "").parsed.value() == text
