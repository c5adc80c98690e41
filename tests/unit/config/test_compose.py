"""Command-line words and YAML become a `Run`, or all that is wrong with them is told with its place."""

import dataclasses
import re
from pathlib import Path

import pytest

from tpu_train.checking import check
from tpu_train.config import schema
from tpu_train.config.compose import compose
from tpu_train.config.problems import ConfigError
from tpu_train.config.sources import SearchPath, description

NEEDED = {("data", "text"): ["data.path='{folder}'"], ("tokenizer", "file"): ["tokenizer.path=t.json"]}
CHOICES = [(group, choice) for group, choices in SearchPath().groups().items() for choice in choices]


def problems(*words: str, config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words, config_dir)
    return str(caught.value).splitlines()


def test_default_recipe_is_a_debug_qwen3_on_the_standard_library() -> None:
    composed = compose([])
    assert composed.run.model == schema.Qwen3Model(**{**dataclasses.asdict(composed.run.model), "family": "qwen3"})
    assert isinstance(composed.run.data, schema.StdlibData)
    assert composed.run.training.seq_len == composed.run.model.seq_len
    assert composed.run.optimizer.no_decay == ("norm", "bias", "embedding")
    assert composed.choices["model"] == "qwen3_debug"
    assert not any(group.startswith("hydra") for group in composed.choices)
    assert check(composed.run, composed.sources) == []


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_shipped_choice_composes_and_passes_the_rules(group: str, choice: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    words = [word.format(folder=tmp_path) for word in NEEDED.get((group, choice), [])]
    composed = compose([f"{group}={choice}", *words])
    assert composed.choices[group] == choice
    # Rules of the tokenizer read its file, which there is none of here.
    assert [p for p in check(composed.run) if not p.place.startswith("tokenizer.")] == []


def test_every_shipped_yaml_is_a_choice_with_a_description() -> None:
    groups = SearchPath().groups()
    counts = {group: len(choices) for group, choices in groups.items()}
    assert counts == {
        "data": 3,
        "kernels/attention": 1,
        "logging": 1,
        "mode": 1,
        "model": 13,
        "objective": 1,
        "optimizer": 2,
        "parallelism": 1,
        "precision": 3,
        "runtime": 1,
        "schedule": 4,
        "tokenizer": 2,
    }
    folder = SearchPath().folders[0]
    files = [file for choices in groups.values() for file in choices.values()]
    assert sorted([*files, folder / "config.yaml"]) == sorted(folder.rglob("*.yaml"))
    assert [file for file in files if not description(file)] == []


def test_each_leaf_has_its_source() -> None:
    composed = compose(["optimizer=sgd", "training.steps=1e3", "model.dropout=0.1", "precision=bf16"])
    assert composed.run.training.steps == 1000
    assert composed.sources["training.steps"] == "command line 'training.steps=1e3'"
    assert composed.sources["model.dropout"] == "command line 'model.dropout=0.1'"
    assert re.fullmatch(r"conf/optimizer/sgd\.yaml:\d+", composed.sources["optimizer.momentum"])
    assert re.fullmatch(r"conf/precision/bf16\.yaml:2", composed.sources["precision.param"])
    assert re.fullmatch(r"conf/config\.yaml:\d+", composed.sources["run_dir"])
    assert "training" not in composed.sources


def test_several_typos_are_told_in_the_order_of_the_words() -> None:
    told = problems("training.stpes=5", "model=qwen3_debgu", "training.steps=5.5", "optimizer.momentum=0.9")
    assert told[0].startswith(
        "command line 'training.stpes=5': there is no key 'training.stpes'; nearest is 'training.steps'; keys of"
    )
    assert told[1].startswith(
        "command line 'model=qwen3_debgu': model has no choice 'qwen3_debgu'; nearest is 'qwen3_debug'; choices: ll"
    )
    assert told[2] == "command line 'training.steps=5.5': training.steps is 5.5, expected an integer"
    assert told[3].startswith(
        "command line 'optimizer.momentum=0.9': there is no key 'optimizer.momentum'; only sgd has"
    )
    assert len(told) == 4


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+training.foo=1", "there is no key 'training.foo'; keys of training: steps"),
        ("++training.foo=1", "there is no key 'training.foo'"),
        ("++a.b=1", "there is no key 'a.b'; keys: model"),
        ("~training.steps", "cannot be removed"),
        ("steps=5", "nearest is 'training.steps'"),
        ("training.lr=1", "nearest is 'optimizer.lr'"),
        ("optimzer=sgd", "nearest is 'optimizer'"),
        ("model/qwen=1", "there is no group 'model/qwen'; nearest is 'model'; groups: data"),
        ("optimizer/lr=1", "is not a group; set the key with optimizer.lr=..."),
        ("optimizer.name=sgd", "choose with optimizer=... (adamw, sgd)"),
        ("+optimizer=sgd", "already chosen; write optimizer=sgd without +"),
        ("optimizer=null", "has no choice 'null'; choices: adamw, sgd"),
        ("optimizer={lr: 1}", "set its keys one by one as optimizer.KEY=VALUE"),
        ("optimizer@other=sgd", "no stage reads; write optimizer=..."),
        ("training=fast", "is a section; set its keys: training.steps"),
        ("training={}", "is a section"),
        ("training={stpes: 5}", "there is no key 'training.stpes'"),
        ("training.steps.more=1", "has no keys of its own, it is an integer"),
        ("training.seed=1,2", "1,2 is a sweep; write a list as training.seed=[a,b]"),
        ("hydra.run.dir=x", "hydra.run.dir has no effect on a single run"),
        ("training", "an override is KEY=VALUE"),
        ("run_dir=a b='", "quote special characters"),
        ("training.seq_len=${nope}", "is '${nope}', which does not resolve: Interpolation key 'nope' not found"),
        ("run_dir=None", "write null for none"),
        ("training.steps=0", "training.steps is 0, expected a number of at least 1"),
        ("training.steps=", "training.steps is '', expected an integer"),
    ],
)
def test_word_that_means_nothing_is_refused(word: str, message: str) -> None:
    (only,) = problems(word)
    assert only.startswith(f"command line '{word}': ")
    assert message in only


def test_group_chosen_twice_is_refused() -> None:
    (only,) = problems("optimizer=sgd", "optimizer=adamw")
    assert "optimizer is chosen twice, also by 'optimizer=sgd'; keep one" in only


def test_section_that_is_null_takes_all_its_keys_at_once() -> None:
    (only,) = problems("model=llama3_debug", "model.rope_scaling=null", "model.rope_scaling.factor=8")
    assert "model.rope_scaling is null here" in only or "expected" in only
    keys = "{factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_positions: 64}"
    model = compose(["model=llama3_debug", f"model.rope_scaling={keys}"]).run.model
    assert isinstance(model, schema.Llama3Model)
    assert model.rope_scaling == schema.RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )


def test_required_value_is_asked_for() -> None:
    assert problems("data=text") == [
        "conf/data/text.yaml:3: data.path is required and has no value; give one with data.path=..."
    ]


def test_special_characters_are_quoted_as_hydra_documents() -> None:
    assert compose(["run_dir='a b,c=d'"]).run.run_dir == "a b,c=d"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "it's my, conf"  # a path that must be quoted
    (folder / "model").mkdir(parents=True)
    (folder / "recipe").mkdir()
    return folder


def test_users_model_and_recipe_are_found_first(user: Path) -> None:
    shipped = SearchPath().find("model/qwen3_debug")
    assert shipped
    (user / "model/qwen3_debug.yaml").write_text(shipped.read_text().replace("num_layers: 4", "num_layers: 3"))
    (user / "recipe/mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /optimizer: sgd\ntraining:\n  steps: 7\n"
    )
    composed = compose(["recipe=mine"], user)
    assert composed.run.model.num_layers == 3
    assert composed.choices["optimizer"] == "sgd"
    assert composed.sources["training.steps"] == f"{user}/recipe/mine.yaml:6"
    assert description(user / "recipe/mine.yaml") == "Mine."
    assert compose([]).run.model.num_layers == 4  # the folder is forgotten


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("family: qwen3\nnum_haeds: 4\n", ":2", "there is no key 'model.num_haeds'; nearest is 'model.num_heads'"),
        ("family: qwen3\ndim: wide\n", ":2", "model.dim is 'wide', expected an integer"),
        ("family: qwen3\n", "", "model.dim is missing, expected an integer"),
        ("family: qwen4\n", ":1", "model.family is 'qwen4', expected llama3 or qwen3; nearest is 'qwen3'"),
        ("dim: 3\n", "", "model.family is missing, expected llama3 or qwen3"),
        ("dim: 3\ndim: 4\n", ":2", "not valid YAML: found duplicate key dim"),
        ("a: [1\nb: 2\n", ":2", "not valid YAML"),
        ("- 1\n", "", "model is [1], expected a section"),
        ("defaults:\n  - nope\n", "", "Could not load 'model/nope'."),
        ("defaults:\n  - override /optimizer: sgd\n", "", "Write override /optimizer@_global_.optimizer: CHOICE"),
        ("family: \udcff\n", "", "cannot be read: 'utf-8' codec"),
    ],
)
def test_users_yaml_is_refused_with_file_and_line(user: Path, text: str, line: str, message: str) -> None:
    file = user / "model/mine.yaml"
    file.write_text(text, errors="surrogateescape")
    told = problems("model=mine", config_dir=user)
    assert any(problem.startswith(f"{file}{line}: ") and message in problem for problem in told), told


def test_config_dir_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert problems(config_dir=tmp_path / "no") == [
        f"--config-dir {tmp_path / 'no'}: is not a folder; give one that holds YAML by group"
    ]
