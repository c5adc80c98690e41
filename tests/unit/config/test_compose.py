"""Command-line words and YAML become a `Run`, or all that is wrong with them is told with its place."""

import dataclasses
import re
from pathlib import Path

import pytest

from tpu_train.checking import check, compose_checked
from tpu_train.config import schema
from tpu_train.config.compose import compose
from tpu_train.config.problems import ConfigError
from tpu_train.config.sources import SearchPath, description


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
        ("model/qwen=1", "there is no group 'model/qwen'; nearest is 'model'; groups: checkpoint"),
        ("optimizer/lr=1", "is not a group; set the key with optimizer.lr=1"),
        ("optimizer.name=sgd", "follows from the choice of optimizer; choose with optimizer=..."),
        ("+optimizer=sgd", "already chosen; write optimizer=sgd without +"),
        ("optimizer=null", "has no choice 'null'; choices: adamw, sgd"),
        ("optimizer={lr: 1}", "set its keys one by one as optimizer.KEY=VALUE"),
        ("optimizer@other=sgd", "no stage reads; write optimizer=..."),
        ("training=fast", "is a section; set training.steps, training.seq_len"),
        ("training={}", "is a section"),
        ("training={stpes: 5}", "there is no key 'training.stpes'"),
        ("training.steps.more=1", "has no keys of its own, it is an integer"),
        ("training.seed=1,2", "1,2 is a sweep, which runs with -m"),
        ("logging.wandb.tags=a,b", "a,b is a sweep, which runs with -m; write a list as logging.wandb.tags=[a,b]"),
        ("run_dir=a,b", "is a sweep, which runs with -m; write a string with a comma as \"run_dir='a,b'\""),
        ("+training.steps=5", "training.steps exists; write training.steps=5 without +"),
        (
            "kernels.attention=splash",
            "kernels.attention is a group; choose with kernels/attention=splash; choices: auto",
        ),
        ("kernels/attention=splish", "kernels/attention has no choice 'splish'; nearest is 'splash'; choices: auto"),
        (
            "kernels.attention.name=splash",
            "follows from the choice of kernels/attention; choose with kernels/attention",
        ),
        ("kernels=splash", "kernels has no choice 'splash'; choices: auto, reference, tpu"),
        ("mode.check_graph=yes", "mode.check_graph is 'yes', expected true or false; write true"),
        ("mode.check_graph=on", "mode.check_graph is 'on', expected true or false; write true"),
        ("mode.check_graph=1", "mode.check_graph is 1, expected true or false"),
        ("training.steps=-1", "training.steps is -1, expected a number of at least 1"),
        ("training.steps=5.5", "training.steps is 5.5, expected an integer"),
        ("training.steps=abc", "training.steps is 'abc', expected an integer"),
        ("training.steps=010", "is '010', expected an integer; YAML reads leading zeros as an octal number, write 10"),
        ("training.steps=1:30", "is '1:30', expected an integer; YAML reads colons as a number of base sixty"),
        ("training.steps=null", "training.steps is null, expected an integer"),
        ("training.max_grad_norm=None", "expected a number or null; write null for none"),
        ("optimizer.lr=" + "9" * 400, "expected a number"),
        ("logging.metadata=5", "logging.metadata is 5, expected entries of your own"),
        ("logging.metadata.a=[1]", "logging.metadata.a is [1], expected true or false, an integer, a number, a string"),
        ("training.seq_len=${training.seq_len}", "which does not resolve: Recursive interpolation detected"),
        ("run_dir=${oc.env:NO_SUCH_VARIABLE}", "does not resolve"),
        ("run_dir=${nope:}", "does not resolve: Unsupported interpolation type nope"),
        ("--steps=5", "there is no option '--steps'; keys are set without dashes: training.steps=5"),
        ("--cfg=job", "there is no option '--cfg'; the composed config: tpu-train show"),
        ("--jsn", "there is no option '--jsn'; nearest is '--json'"),
        ("+hydra.foo=1", "there is no key 'hydra.foo' that takes effect; keys: hydra.sweep.dir"),
        ("hydra.sweep.dri=x", "there is no key 'hydra.sweep.dri' that takes effect; nearest is 'hydra.sweep.dir'"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir takes effect in a sweep only; add -m"),
        ("hydra.run=x", "hydra.run is a section"),
        ("hydra.job.chdir=true", "hydra.job.chdir has no effect: a run stays in the folder it was started in"),
        ("hydra.searchpath=[a]", "hydra.searchpath has no effect: folders of YAML are given by --config-dir"),
        ("hydra/launcher=basic", "hydra/launcher takes effect in a sweep only; add -m"),
        ("hydra/job_logging=none", "hydra/job_logging is not a group of Hydra's that takes effect here"),
        ("hydra.run.dir=1,2", "hydra.run.dir is a setting of the sweep itself and takes one value"),
        ("training", "an override is KEY=VALUE"),
        ("run_dir=a b=c", "(= has a meaning of its own); quote special characters: \"run_dir='a b, c'\""),
        ("run_dir='a", "(a quote is not closed)"),
        ("run_dir=it's", "(a quote is not closed); \\' is a quote inside of quotes: \"run_dir='it\\'s'\""),
        ("run_dir=~/x", "~ stands for nothing here); write run_dir=$HOME/x"),
        ("training.steps=int(abc)", "int(abc) cannot be evaluated: invalid literal for int()"),
        ("run_dir=nope(1)", "nope(1) cannot be evaluated: Unknown function 'nope'; functions: bool,choice"),
        ("a b=5", "('a b' is no key); an override is KEY=VALUE"),
        ("logging.metadata={1: 1}", "logging.metadata has the key 1, which is no name; write logging.metadata.1=..."),
        ("logging.metadata={null: 1}", "logging.metadata has the key null, which is no name"),
        ("training={5: 3}", "training has the key 5, which is no name"),
        ("logging.metadata=[]", "logging.metadata is [], expected entries of your own"),
        ("logging.metadata={a: {b: 1}}", "logging.metadata.a is {'b': 1}, expected true or false, an integer"),
        ("logging.wandb.tags=[a,1]", "logging.wandb.tags[1] is 1, expected a string"),
        ("logging.metadata.a=nan", "logging.metadata.a is nan, expected a finite number"),
        ("logging.metadata.a=1e400", "logging.metadata.a is inf, expected a finite number"),
        ("logging.wandb.mode=off", "nearest is 'disabled'"),
        ("training.steps=1_", "training.steps is '1_', expected an integer"),
        ("optimizer.lr=1_e-3", "optimizer.lr is '1_e-3', expected a number"),
        ("optimizer.lr=\uff11", "not an override"),
        ("hydra.verbose=5", "hydra.verbose is 5, expected true, false, or a list of names of loggers"),
        ("hydra.verbose={a: 1}", "hydra.verbose is {'a': 1}, expected true, false"),
        ("hydra.verbose=[a,1]", "hydra.verbose is ['a', 1], expected true, false"),
        ("MODEL=qwen3_debug", "there is no key 'MODEL'; nearest is 'model'"),
        ("model=QWEN3_DEBUG", "nearest is 'qwen3_debug'"),
        ("Training.Steps=5", "nearest is 'training.steps'"),
        ("~x=5", "there is no key 'x'"),
        ("~training.stpes", "there is no key 'training.stpes'; nearest is 'training.steps'"),
        ("~run_dir", "write run_dir=null for none"),
        ("~optimizer", "a choice is needed; choices: adamw, sgd"),
        ("--json", "an option and not an override; write --json before --"),
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
    assert "optimizer is chosen twice, also by command line 'optimizer=sgd'; keep one" in only


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
        (
            "family: qwen4\n",
            ":1",
            "model.family is 'qwen4', expected one of llama3, qwen3, qwen3_moe; nearest is 'qwen3'",
        ),
        ("dim: 3\n", "", "model.family is missing, expected one of llama3, qwen3, qwen3_moe"),
        ("dim: 3\ndim: 4\n", ":2", "duplicate key dim: line 1 has it too; keep one"),
        ("a: [1\nb: 2\n", ":2", "not valid YAML"),
        ("- 1\n", ":1", "the file is a list, expected lines of KEY: VALUE"),
        ("family: qwen3\ndim: 010\n", ":2", "010 is 8, an octal number, in YAML and 10 elsewhere; write 10, or '010'"),
        ("family: qwen3\ndim: 1:30\n", ":2", "1:30 is 90, a number of base sixty, in YAML; write 90, or '1:30'"),
        ("family: qwen3\ntie_embeddings: yes\n", ":2", "yes is true in YAML and a string elsewhere; write true"),
        ("family: qwen3\ninit_std: ${nope}\n", ":2", "model.init_std is '${nope}', which does not resolve"),
        ("a: &a\n  b: *a\n", ":1", "an alias that stands inside of what it names"),
        ("defaults:\n  - nope\n", ":2", "model has no choice 'nope'; choices: llama3_1b"),
        ("defaults:\n  - override /optimizer: sgd\n", ":2", "Write override /optimizer@_global_.optimizer: CHOICE"),
        ("family: \udcff\n", "", "cannot be read: 'utf-8' codec"),
    ],
)
def test_users_yaml_is_refused_with_file_and_line(user: Path, text: str, line: str, message: str) -> None:
    file = user / "model/mine.yaml"
    file.write_text(text, errors="surrogateescape")
    told = problems("model=mine", "training.steps=x", config_dir=user)
    assert "command line 'training.steps=x': training.steps is 'x', expected an integer" in told or "defaults" in text
    assert any(problem.startswith(f"{file}{line}: ") and message in problem for problem in told), told


def test_config_dir_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert problems(config_dir=tmp_path / "no") == [
        f"--config-dir {tmp_path / 'no'}: is not a folder; give one that holds YAML by group"
    ]


def test_config_dir_without_groups_hides_no_word(tmp_path: Path) -> None:
    (tmp_path / "stray.yaml").write_text("a: 1")
    first, second = problems("training.stpes=1", config_dir=tmp_path)
    assert first.startswith("command line 'training.stpes=1': there is no key 'training.stpes'")
    assert second.startswith(f"--config-dir {tmp_path}: holds no YAML by group; a choice NAME of recipe is")
    first, second = problems("recipe=mine", "model=wide", "model.x=1", "optimizer.lrr=1", config_dir=tmp_path / "no")
    assert first.startswith("command line 'optimizer.lrr=1': there is no key")
    assert second.startswith(f"--config-dir {tmp_path / 'no'}: is not a folder")


def test_value_that_a_later_word_replaces_is_judged_too() -> None:
    assert compose(["training.steps=4", "training.steps=5"]).run.training.steps == 5
    (only,) = problems("training.steps=abc", "training.steps=5")
    assert only == "command line 'training.steps=abc': training.steps is 'abc', expected an integer"
    (only,) = problems("logging.metadata.a=[1]", "logging.metadata.a=5")
    assert only.startswith("command line 'logging.metadata.a=[1]': logging.metadata.a is [1]")


def test_choice_that_looks_like_a_number_is_quoted(user: Path) -> None:
    (user / "schedule").mkdir()
    (user / "schedule/5.yaml").write_text("name: constant\nwarmup_steps: 0\n")
    (only,) = problems("schedule=5", config_dir=user)
    assert "schedule=5 is no name but a value; quote it: \"schedule='5'\"" in only
    assert compose(["schedule='5'"], user).choices["schedule"] == "5"


def test_every_problem_of_a_users_yaml_is_told_at_once(user: Path) -> None:
    (user / "model/mine.yaml").write_text("family: qwen3\nnum_haeds: 4\ndim: 010\nvocab_size: many\n")
    (user / "optimizer").mkdir()
    (user / "optimizer/mine.yaml").write_text("name: adamw\nlr: 1\nlr: 2\n")
    told = problems("model=mine", "optimizer=mine", "optimizer.lr=x", "data=txt", config_dir=user)
    for expected in (
        "command line 'data=txt': data has no choice 'txt'; nearest is 'text'",
        f"{user}/optimizer/mine.yaml:3: duplicate key lr: line 2 has it too",
        f"{user}/model/mine.yaml:2: there is no key 'model.num_haeds'",
        f"{user}/model/mine.yaml:3: 010 is 8",
        f"{user}/model/mine.yaml:4: model.vocab_size is 'many'",
        f"{user}/model/mine.yaml: model.num_heads is missing",
    ):
        assert any(problem.startswith(expected) for problem in told), expected
    # What keys the refused optimizer has is not known, so its override is judged once the file is mended.
    assert not any("optimizer.lr=x" in problem for problem in told)


def test_users_yaml_of_hydra_is_judged_by_hydras_schema(user: Path) -> None:
    text = "# @package _global_\nhydra:\n  sweep:\n    dri: x\n  foo: 1\n  job_logging: {}\n"
    (user / "recipe/mine.yaml").write_text(text)
    told = problems("recipe=mine", "training.stpes=1", config_dir=user)
    file = user / "recipe/mine.yaml"
    assert [problem.partition(";")[0] for problem in told if problem.startswith(str(file))] == [
        f"{file}:4: there is no key 'hydra.sweep.dri' that takes effect",
        f"{file}:5: there is no key 'hydra.foo' that takes effect",
        f"{file}:6: hydra.job_logging has no effect: a run logs to log.txt in its folder",
    ]
    text = "# @package _global_\nhydra:\n  run:\n    dir: mine\n  job:\n    env_set: {A: b}\n  verbose: true\n"
    (user / "recipe/mine.yaml").write_text(text)
    composed = compose(["recipe=mine"], user)
    assert composed.run.run_dir == "mine"
    assert composed.sources["run_dir"] == f"{file}:4"
    assert composed.hydra.environment == {"A": "b"}
    assert composed.hydra.verbose is True


def test_yaml_file_of_the_wrong_ending_is_pointed_out(user: Path) -> None:
    (user / "model/mine.yaml").write_text("")
    (user / "model/other.yml").write_text("")
    shipped = SearchPath(user).groups()["model"]
    assert "mine" in shipped
    (only,) = problems("optimizer=other", config_dir=user)
    assert "has no choice 'other'; choices: adamw, sgd" in only


def test_run_dir_of_hydra_is_the_run_folder() -> None:
    composed = compose(["hydra.run.dir='a b'"])
    assert composed.run.run_dir == "a b"
    assert composed.sources["run_dir"] == "command line 'hydra.run.dir='a b''"
    (only,) = problems("hydra.run.dir=a", "run_dir=b")
    assert "run_dir is given, and hydra.run.dir by command line 'hydra.run.dir=a'; keep one" in only


def test_dictionaries_take_entries_of_ones_own() -> None:
    words = ["+logging.metadata.ticket=7", "++logging.metadata.cluster=v5p", "+hydra.job.env_set.A=b"]
    composed = compose(words)
    assert composed.run.logging.metadata == {"ticket": 7, "cluster": "v5p"}
    assert composed.hydra.environment == {"A": "b"}
    assert compose(["logging.metadata={a: true}"]).run.logging.metadata == {"a": True}


def test_batch_given_one_way_puts_the_default_of_the_other_aside(user: Path) -> None:
    training = compose(["training.global_batch_size=6"]).run.training
    assert (training.batch_per_device, training.global_batch_size) == (None, 6)
    (user / "recipe/mine.yaml").write_text("# @package _global_\ntraining:\n  global_batch_size: 6\n")
    composed = compose(["recipe=mine"], user)
    assert composed.run.training.batch_per_device is None
    assert composed.sources["training.batch_per_device"] == f"put aside by {user}/recipe/mine.yaml:3"
    both = compose(["training.global_batch_size=6", "training.batch_per_device=2"])
    (problem,) = check(both.run, both.sources)
    assert "training.global_batch_size is 6 and training.batch_per_device 2, and they exclude each" in problem.message


def test_rules_are_told_beside_refused_words_but_not_of_what_these_leave_unknown() -> None:
    def told(*words: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            compose_checked(words)
        return [problem.place for problem in caught.value.problems]

    divides = "command line 'training.grad_accumulation=3'"
    assert told("training.grad_accumulation=3", "optimizer.lrr=1") == [divides, "command line 'optimizer.lrr=1'"]
    # What the batch was meant to be is not known.
    wrong = "command line 'training.batch_per_device=x'"
    assert told("training.grad_accumulation=3", "training.batch_per_device=x") == [wrong]
    typo = "command line 'training.batch_per_devise=6'"
    assert told("training.grad_accumulation=3", "training.batch_per_devise=6") == [typo]


def test_option_with_a_value_of_its_own_is_one_problem() -> None:
    (only,) = problems("--steps", "5")
    assert only == (
        "command line '--steps 5': there is no option '--steps'; keys are set without dashes: training.steps=5"
    )
