"""A sweep is refused for what is wrong with any of its values, before a job starts."""

from pathlib import Path

import pytest

from tpu_train.config.compose import compose
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
        ("training.steps=range(1,5,0)", "training.steps cannot be enumerated: range() arg 3 must not be zero"),
        ("training.steps=range(1.0,5,0)", "training.steps cannot be enumerated: Invalid range values"),
        ("training.steps=range(1,1000000000)", "training.steps has more than 1,000 values; take fewer"),
        ("optimizer.lr=range(0,1,1e-9)", "optimizer.lr has more than 1,000 values; take fewer"),
        ("training.seed=1,2,1", "training.seed has 1 twice in this sweep; keep one"),
        ("hydra.run.dir=a", "hydra.run.dir is one folder and each job needs its own; set hydra.sweep.dir"),
        ("hydra.sweep.dir=", "hydra.sweep.dir is empty; give a folder for the sweep"),
        ("hydra.sweep.subdir=", "hydra.sweep.subdir is '', expected a folder inside of the sweep's"),
        ("hydra.sweep.subdir=.", "hydra.sweep.subdir is '.', expected a folder inside of the sweep's"),
        ("hydra.sweep.subdir=a/../../x", "expected a folder inside of the sweep's"),
        ("hydra.sweep.subdir=/x", "hydra.sweep.subdir is '/x', expected a folder inside of the sweep's"),
        ("hydra.sweep.subdir=${nope}", "hydra.sweep.subdir does not resolve: Interpolation key 'nope' not found"),
        ("hydra.launcher._target_=nope.Nope", "which is no launcher; choices: basic, process"),
        ("hydra.sweeper._target_=nope", "which is no sweeper; choices: basic, optuna"),
        ("hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size is 0, expected an integer of at least 1"),
        ("hydra.sweeper.max_batch_size=-1", "hydra.sweeper.max_batch_size is -1, expected an integer of at least 1"),
        ("hydra.verbose=5", "hydra.verbose is 5, expected true, false, or a list of names of loggers"),
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


def test_settings_in_yaml_that_no_job_can_have_are_refused_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "hydra/launcher").mkdir(parents=True)
    (tmp_path / "hydra/launcher/mine.yaml").write_text("n_jobs: 2\n")
    recipe = tmp_path / "recipe/mine.yaml"
    for body, message in {
        "run: {dir: zz}": "hydra.run.dir is one folder and each job needs its own",
        "sweeper: {params: {run_dir: 'a,b'}}": "run_dir is one folder and each job needs its own",
        "callbacks: {a: {_target_: nope.Nope}}": "hydra.callbacks.a has the class 'nope.Nope' (_target_), which cannot",
        "callbacks: {a: {}}": "hydra.callbacks.a has the class null (_target_), which cannot be used",
    }.items():
        recipe.write_text(f"# @package _global_\nhydra:\n  {body}\n")
        (only,) = places("recipe=mine", "training.seed=1,2", config_dir=tmp_path)
        assert only.startswith(f"{recipe}:3: {message}")
    (only,) = places("hydra/launcher=mine", config_dir=tmp_path)
    assert only.startswith(f"{tmp_path}/hydra/launcher/mine.yaml:1: hydra/launcher has the class null")
    assert only.endswith("choices: basic, process")


def test_a_mode_in_yaml_does_not_reach_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    planned = plan(["recipe=mine", "training.seed=1,2"], tmp_path)
    assert planned.job_words == ("hydra.mode=RUN",)
    assert not compose(["recipe=mine", *planned.job_words], tmp_path).hydra.multirun


def test_of_a_key_given_twice_the_last_counts_and_each_is_judged() -> None:
    assert plan(["training.seed=1,2,3", "training.seed=4,5"], None).num_jobs == 2
    (only,) = places("training.seed=1,abc", "training.seed=4,5")
    assert "training.seed is 'abc', expected an integer" in only


def test_too_many_jobs_are_refused_and_many_values_are_judged_each() -> None:
    (only,) = places("training.seed=range(0,90)", "training.log_every=range(1,90)")
    assert only.endswith("the sweep has 8,010 jobs, more than 1,000")
    values = ",".join(["abc" if value == 51 else str(value) for value in range(130)])
    (only,) = places(f"training.seed={values}")
    assert only.endswith("training.seed is 'abc', expected an integer")


@pytest.mark.parametrize(
    ("words", "for_hydra"),
    [
        (["logging.metadata={a: 1}", "training.seed=1,2"], ("++logging.metadata={a: 1}", "training.seed=1,2")),
        (["model=llama3_8b,llama3_debug", "model.rope_scaling=null"], (None, "++model.rope_scaling=null")),
        (["training.max_time=1h,2h"], ("++training.max_time=1h,2h",)),
        (["training.max_grad_norm=1.0,null"], ("++training.max_grad_norm=1.0,null",)),
        (["optimizer.lr=1e-3,2e-3", "optimizer.no_decay=[norm]"], ("optimizer.lr=1e-3,2e-3", None)),
    ],
)
def test_what_hydra_would_not_merge_is_forced(words: list[str], for_hydra: tuple[str | None, ...]) -> None:
    planned = plan(words, None).words
    assert [given for given, wanted in zip(planned, for_hydra, strict=True) if wanted not in (None, given)] == []


def test_values_that_do_not_go_together_refuse_the_sweep() -> None:
    (only,) = places("training.batch_per_device=8,6", "training.grad_accumulation=2,4")
    assert "training.grad_accumulation is 4, which does not divide the global batch of 6" in only


@pytest.mark.parametrize("text", ["a/b", "a b", "it's", "5", "a,b", "x=y", "runs/2026-12-01", "null", "a\\b", "${x}"])
def test_a_quoted_string_is_read_as_itself(text: str) -> None:
    assert parse_one(f"key={quoted(text)}", "").parsed.value() == text
