"""Every shipped choice and recipe composes, passes the rules, and gives exactly the values of its golden copy.

`golden/default.txt` is the whole default config, a line per leaf. `golden/GROUP/CHOICE.txt` is what that choice changes
in it: `- ` lines go, `+ ` lines come. After an intended change write them anew and review the difference:

    UPDATE_GOLDEN=1 pytest tests/unit/config/test_golden.py
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml

from tpu_train.checking import check
from tpu_train.config.compose import Composed, compose
from tpu_train.config.convert import plain
from tpu_train.config.sources import SearchPath, description, shipped_dir

GOLDEN = Path(__file__).with_name("golden")
UPDATE = "UPDATE_GOLDEN=1 pytest tests/unit/config/test_golden.py"
UPDATING = bool(os.environ.get("UPDATE_GOLDEN"))
GROUPS = SearchPath().groups()
CHOICES = [(group, choice) for group, choices in GROUPS.items() for choice in choices]
# What a choice does not run without; relative, so that no machine's paths enter the golden copies.
NEEDED = {
    ("data", "text"): ["data.path=corpus"],
    ("data", "hf"): ["data.dataset=corpus"],
    ("tokenizer", "file"): ["tokenizer.path=tokenizer.json"],
    ("parallelism", "fsdp_2d"): ["runtime.devices=2"],
    ("parallelism", "fsdp_tp"): ["runtime.devices=2"],
    ("parallelism", "fsdp_ep"): ["runtime.devices=2", "model=qwen3_moe_debug"],
    ("kernels", "tpu"): ["runtime.platform=tpu", "training.seq_len=1024"],
    ("kernels/attention", "splash"): ["runtime.platform=tpu", "training.seq_len=1024"],
    ("kernels/attention", "custom"): [
        "kernels.attention.component=tpu_train.models.attention.ScaledDotProductAttention"
    ],
    ("kernels/moe", "custom"): ["kernels.moe.component=tpu_train.models.moe.GroupedProduct", "model=qwen3_moe_debug"],
}
SAME = "# The default config.\n"


@pytest.fixture(autouse=True)
def needed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the words of NEEDED name."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("text")
    model = tokenizers.models.WordLevel({"</s>": 0, "text": 1}, unk_token="</s>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf as (dotted key, value as YAML)."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
        yield key, text.removesuffix("\n").removesuffix("\n...")


def flat(composed: Composed) -> dict[str, str]:
    return {key: f"{key}: {value}" for key, value in leaves(plain(composed.run))}


def difference(default: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The lines that differ, those of one key together, in the order of the default config."""
    lines = []
    for key in [*default, *(key for key in other if key not in default)]:
        if default.get(key) != other.get(key):
            lines += [f"{sign} {config[key]}" for sign, config in (("-", default), ("+", other)) if key in config]
    return "".join(f"{line}\n" for line in lines) or SAME


def compare(name: str, text: str) -> None:
    """Compare with a golden copy, or write it."""
    file = GOLDEN / f"{name}.txt"
    if UPDATING:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.is_file(), f"golden/{name}.txt is missing; write it with {UPDATE}"
    assert text == file.read_text(encoding="utf-8"), f"golden/{name}.txt differs; if intended, {UPDATE}"


@pytest.fixture(scope="module")
def default() -> dict[str, str]:
    return flat(compose([]))


def test_the_default_config_is_its_golden_copy(default: dict[str, str]) -> None:
    compare("default", "".join(f"{line}\n" for line in default.values()))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_shipped_choice_passes_the_rules_and_is_its_golden_copy(
    group: str, choice: str, default: dict[str, str]
) -> None:
    composed = compose([f"{group}={choice}", *NEEDED.get((group, choice), [])])
    assert composed.choices[group] == choice
    assert check(composed.run, composed.sources) == []
    compare(f"{group}/{choice}", difference(default, flat(composed)))


def test_every_shipped_yaml_is_a_choice_with_a_description() -> None:
    files = [file for choices in GROUPS.values() for file in choices.values()]
    assert sorted([*files, shipped_dir() / "config.yaml"]) == sorted(shipped_dir().rglob("*.yaml"))
    assert [file for file in files if not description(file)] == []


def test_every_golden_copy_is_of_a_shipped_choice() -> None:
    known = {GOLDEN / "default.txt", *(GOLDEN / group / f"{choice}.txt" for group, choice in CHOICES)}
    found = {path for path in GOLDEN.rglob("*") if path.is_file()}
    if UPDATING:
        for orphan in found - known:
            orphan.unlink()
        found &= known
    assert found == known
    assert len(found) == 62


def test_a_missing_golden_copy_names_the_command_that_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "UPDATING", False)
    with pytest.raises(
        AssertionError, match=r"golden/model/none\.txt is missing; write it with UPDATE_GOLDEN=1 pytest"
    ):
        compare("model/none", SAME)


def test_a_difference_is_shown_key_by_key() -> None:
    default = {"a": "a: 1", "b": "b: 2", "c": "c: 3"}
    assert difference(default, {"a": "a: 1", "b": "b: 4", "d": "d: 5"}) == "- b: 2\n+ b: 4\n- c: 3\n+ d: 5\n"
    assert difference(default, default) == SAME
    nested = {"a": {"b": 1e-8, "c": {}, "d": ["x", "y"], "e": None, "f": "null"}}
    assert dict(leaves(nested)) == {"a.b": "1.0e-08", "a.c": "{}", "a.d": "[x, y]", "a.e": "null", "a.f": "'null'"}
