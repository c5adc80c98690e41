"""YAML that cannot mean what it says is refused with file and line, whatever form the mistake has."""

from pathlib import Path

import pytest

from tpu_train.checking import compose_checked
from tpu_train.config.compose import compose
from tpu_train.config.problems import ConfigError
from tpu_train.config.sources import SearchPath

HEADER = "# @package _global_\n"
FIRST = "the first line of a file of recipe must be `# @package _global_`"


def told(text: str, folder: Path, *words: str) -> list[str]:
    """What is said of a recipe besides a word that is wrong for itself; places are relative to the folder."""
    (folder / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "recipe/m.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        compose_checked(["recipe=m", "training.stpes=1", *words], folder)
    lines = str(caught.value).replace(f"{folder}/recipe/", "").splitlines()
    assert lines.pop(0).startswith("command line 'training.stpes=1': there is no key 'training.stpes'; nearest is")
    return lines


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("logging:\n  metadata: {1: x}\n", 3, "the key 1 is a number in YAML, and keys are names; write '1'"),
        ("training: {5: 3}\n", 2, "the key 5 is a number"),
        ("training: {null: 3}\n", 2, "the key null is null"),
        ("on: 1\n", 2, "the key on is true or false"),
        ("training: {[a]: 3}\n", 2, "a key is a name, and here is a list or a mapping"),
        ("hydra: {job: {env_set: {1: 2}}}\n", 2, "the key 1 is a number"),
        ("defaults:\ntraining: {steps: 1}\n", 2, "defaults is empty, expected a list with a line `- override /GROUP"),
        ("defaults: 5\n", 2, "defaults is '5', expected a list"),
        ("defaults:\n  override /model: qwen3_debug\n", 3, "defaults is a mapping, expected a list"),
        ("defaults:\n  - 5\n", 3, "an entry of defaults is 5, expected `- override /GROUP: CHOICE`"),
        ("defaults:\n  - null\n", 3, "an entry of defaults is null"),
        ("defaults:\n  -\n", 3, "an entry of defaults is empty"),
        ("defaults:\n  - [a]\n", 3, "an entry of defaults is a list"),
        ("defaults:\n  - override /model: 5\n", 3, "the choice of model is 5, expected a name; quote one that"),
        ("defaults:\n  - override /model: null\n", 3, "the choice of model is null, expected a name"),
        ("defaults:\n  - override /model\n", 3, "'override /model' names no choice"),
        ("defaults:\n  - /data: text\n    /mode: graph\n", 3, "an entry of defaults has one choice; write a line"),
        ("defaults:\n  - /model: qwen3_debug\n", 3, "model is chosen already; write `- override /model: qwen3_debug`"),
        ("defaults:\n  - model: qwen3_debug\n", 3, "write `- override /model: qwen3_debug`"),
        ("defaults:\n  - override model: qwen3_debug\n", 3, "write `- override /model: qwen3_debug`"),
        ("defaults:\n  - overide /mode: graph\n", 3, "'overide' is no word of a defaults list; write `- override /m"),
        ("defaults:\n  - override /mode: grap\n", 3, "mode has no choice 'grap'; nearest is 'graph'; choices: graph"),
        ("defaults:\n  - override /mdoe: graph\n", 3, "there is no group 'mdoe'; nearest is 'mode'"),
        ("defaults:\n  - override /mode: ${nope}\n", 3, "Error resolving interpolation '${nope}'"),
        ("defaults:\n  - smok\n", 3, "recipe has no choice 'smok'; nearest is 'smoke'"),
        ("defaults:\n  - m\n", 3, "recipe/m is taken in by itself; leave the entry out"),
        ("hydra: null\n", 2, "hydra is a section, not null; set its keys one by one"),
        ("hydra: 5\n", 2, "hydra is a section, not 5"),
        ("hydra: {run: 5}\n", 2, "hydra.run is a section, not 5"),
        ("hydra: {sweep: [1]}\n", 2, "hydra.sweep is a section, not [1]"),
        ("hydra: {mode: x}\n", 2, "hydra.mode is 'x'"),
        ("hydra: {verbose: 5}\n", 2, "hydra.verbose is 5, expected true, false, or a list of names of loggers"),
        ("hydra.run.dir: x\n", 2, "in YAML dots do not nest, write hydra: {run: {dir: ...}}"),
        ("training: {steps: !!int abc}\n", 2, "the tag !!int is not read; write the value without it"),
        ("training:\n  steps: !foo 3\n", 3, "the tag !foo is not read"),
        ("run_dir: !!python/object/apply:os.getcwd []\n", 2, "the tag !!python/object/apply:os.getcwd is not read"),
        ("training: !!set {a, b}\n", 2, "the tag !!set is not read"),
        ("run_dir: =\n", 2, "= is no value in YAML; write '='"),
        ('run_dir: "${"\n', 2, "'${' is not a reference; write ${KEY}"),
        ("foo\n", 2, "the file is 'foo', expected lines of KEY: VALUE"),
        ("- a\n", 2, "the file is a list, expected lines of KEY: VALUE"),
        ("training:\n  <<: {sead: 5}\n", 3, "there is no key 'training.sead'; nearest is 'training.seed'"),
        ("training:\n  <<: 5\n", 3, "<< takes in a mapping or a list of mappings"),
        (
            "training.steps: 5\n",
            2,
            "there is no key 'training.steps'; in YAML dots do not nest, write training: {steps",
        ),
        ("optimizer: sgd\n", 2, "optimizer is a group; choose in the defaults list: - override /optimizer: sgd"),
        ("optimizer: {name: sgd}\n", 2, "optimizer.name follows from the choice of optimizer; choose in the defaults"),
        ("kernels: {attention: x}\n", 2, "- override /kernels/attention: CHOICE; choices: auto, blockwise"),
        ("logging:\n  metadata: [1]\n", 3, "logging.metadata is a list, expected entries of your own"),
        ("logging:\n  metadata: {a: .nan}\n", 3, "logging.metadata.a is nan, expected a finite number"),
        ("optimizer:\n  no_decay:\n    - norm\n    - 1\n", 3, "optimizer.no_decay[1] is 1, expected a string"),
        ("run_dir: " + "[" * 2000 + "]" * 2000 + "\n", None, "lists or mappings are nested too deeply"),
    ],
)
def test_recipe_is_refused_in_one_line_and_hides_nothing(body: str, line: int, message: str, tmp_path: Path) -> None:
    (only,) = told(HEADER + body, tmp_path)
    assert only.startswith(f"m.yaml:{line}: " if line else "m.yaml: ")
    assert message in only


@pytest.mark.parametrize(
    "text",
    [
        "",
        "training: {steps: 3}\n",
        "# Mine.\n# @package _global_\ntraining: {steps: 3}\n",
        "\ufeff# @package _global_\ntraining: {steps: 3}\n",
        "# @pakage _global_\ntraining: {steps: 3}\n",
        "# @package\ntraining: {steps: 3}\n",
        "# @package global\n",
        "# @package foo.bar\ntraining: {steps: 3}\n",
        "defaults:\n  - override /model: qwen3_debug\n",
    ],
)
def test_recipe_needs_its_first_line(text: str, tmp_path: Path) -> None:
    assert told(text, tmp_path) == [f"m.yaml:1: {FIRST}"]


def test_recipes_that_take_each_other_in_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/n.yaml").write_text(f"{HEADER}defaults:\n  - m\n")
    assert told(f"{HEADER}defaults:\n  - n\n", tmp_path) == [
        "n.yaml:3: recipe/m is taken in by itself; leave the entry out"
    ]


def test_words_that_a_broken_recipe_may_allow_are_not_judged(tmp_path: Path) -> None:
    text = f"{HEADER}defaults:\n  - override /optimizer: sgd\n  - override /mode: grap\n"
    (only,) = told(text, tmp_path, "optimizer.momentum=0.5", "training.grad_accumulation=3", "data=text")
    assert only.startswith("m.yaml:4: mode has no choice 'grap'")


def test_wrong_family_is_one_problem_and_no_rule_is_asked_of_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shipped = SearchPath().find("model/qwen3_debug")
    assert shipped
    for family in ("family: qwen4", "# none"):
        (tmp_path / "model/mine.yaml").write_text(shipped.read_text().replace("family: qwen3", family))
        with pytest.raises(ConfigError) as caught:
            compose_checked(["model=mine"], tmp_path)
        (only,) = caught.value.problems
        assert "expected one of llama3, qwen3, qwen3_moe" in only.message


def test_wrong_item_of_a_list_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_checked(["optimizer.no_decay=[norm,1]"])
    (only,) = caught.value.problems
    assert str(only).startswith("command line 'optimizer.no_decay=[norm,1]': optimizer.no_decay[1] is 1")


def test_file_that_replaces_a_shipped_one_and_is_broken_hides_no_word(tmp_path: Path) -> None:
    (tmp_path / "logging").mkdir()
    (tmp_path / "logging/default.yaml").write_text("wandb: [\n")
    with pytest.raises(ConfigError) as caught:
        compose_checked(["training.stpes=1"], tmp_path)
    first, second = map(str, caught.value.problems)
    assert "there is no key 'training.stpes'" in f"{first}{second}"
    assert f"{tmp_path}/logging/default.yaml:2: not valid YAML" in f"{first}\n{second}"


def test_what_is_sound_stays_sound(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/base.yaml").write_text(f"{HEADER}training: {{seed: 4}}\n")
    text = "defaults:\n  - base\n  - optional /experiment: nope\n  - override /optimizer: sgd\n"
    text += "training:\n  <<: [{steps: 9}]\n  log_every: !!int 2\nlogging:\n  metadata: {'1': x, a.b: 1}\n"
    (tmp_path / "recipe/m.yaml").write_text(HEADER + text)
    composed = compose(["recipe=m"], tmp_path)
    assert (composed.run.training.steps, composed.run.training.seed) == (9, 4)
    assert composed.sources["training.steps"] == f"{tmp_path}/recipe/m.yaml:7"
    assert composed.run.logging.metadata["1"] == "x"
