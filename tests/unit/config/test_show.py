"""The views of `tpu-train show`."""

from pathlib import Path

import pytest
import yaml

from tpu_train.config import show
from tpu_train.config.compose import compose
from tpu_train.config.convert import plain
from tpu_train.config.problems import ConfigError


def test_whole_config_is_yaml_that_reads_back_equal() -> None:
    composed = compose(["optimizer.lr=1e-5", "model=llama3_8b"])
    data, text = show.whole(composed)
    assert yaml.safe_load(text) == data["config"] == plain(composed.run)
    assert "  lr: 1.0e-05" in text
    assert "# command line 'optimizer.lr=1e-5'" in text


def test_group_lists_its_choices_with_one_line_each() -> None:
    data, text = show.topic("optimizer", compose(["optimizer=sgd"]), None)
    assert data["choices"] == [
        {"name": "adamw", "description": "AdamW with decoupled weight decay.", "chosen": False},
        {"name": "sgd", "description": "SGD with momentum.", "chosen": True},
    ]
    assert "* sgd    SGD with momentum." in text


def test_key_is_explained() -> None:
    data, text = show.topic("training.on_nan", compose([]), None)
    assert data["type"] == "stop or skip"
    assert data["value"] == "stop"
    assert data["source"].startswith("conf/config.yaml:")
    assert "stop or skip" in text
    data, text = show.topic("training.seq_len", compose(["training.seq_len=64"]), None)
    assert data == {
        "key": "training.seq_len",
        "doc": "Length of a sequence.",
        "type": "an integer",
        "unit": "tokens",
        "allowed": "a number of at least 1",
        "default": 256,  # qwen3_debug's own
        "value": 64,
        "source": "command line 'training.seq_len=64'",
    }
    assert "  unit     tokens\n  allowed  a number of at least 1\n  default  256\n  value    64  # command" in text
    data, text = show.topic("data.path", compose(["data=text"], complete=False), None)
    assert "default" not in data
    assert "none yet; it is required" in text


def test_key_of_a_choice_not_made_says_which() -> None:
    data, text = show.topic("optimizer.momentum", compose([]), None)
    assert data["only_with"] == "sgd"
    assert "with sgd" in text
    assert data["default"] == 0.9  # of conf/optimizer/sgd.yaml


def test_broken_file_that_nobody_chose_keeps_no_key_from_being_explained(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, text in enumerate(["a: [\n", "- 1\n", "5\n", "a: !x 1\n"]):
        (tmp_path / f"data/{number}.yaml").write_text(text)
    (tmp_path / "data/latin.yaml").write_bytes(b"a: \xff\n")
    data, _ = show.topic("data.path", compose([], tmp_path), tmp_path)
    assert data["only_with"] == "text"


def test_section_lists_its_keys() -> None:
    data, text = show.topic("training", compose([]), None)
    assert "training.steps" in [key["key"] for key in data["keys"]]
    assert "Length of the run." in text


def test_unknown_topic_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"'training.stpes': is neither a group nor a key; nearest is 'training.steps'"
    ):
        show.topic("training.stpes", compose([]), None)
