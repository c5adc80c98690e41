"""What `auto` takes, by platform and shape."""

import dataclasses

import pytest

from tests.unit.runs import LLAMA3, QWEN3_MOE, REFERENCE_KERNELS, make_run
from tpu_train.config import kernel_schema as schema
from tpu_train.kernels.choose import Platform, choose

AUTO = schema.Kernels(
    attention=schema.AutoAttention(name="auto"), loss=schema.AutoLoss(name="auto"), moe=schema.AutoMoe(name="auto")
)
LARGE = {"vocab_size": 151_936, "dim": 1024, "head_dim": 128}


@pytest.mark.parametrize(
    ("platform", "seq_len", "attention", "loss", "moe"),
    [
        ("tpu", 4096, "splash", "pallas", "pallas"),
        ("tpu", 100, "reference", "pallas", "pallas"),  # no block of 128 tokens divides it
        ("cpu", 2048, "blockwise", "blockwise", "ragged"),
        ("cpu", 256, "reference", "blockwise", "ragged"),
        ("gpu", 4096, "reference", "reference", "ragged"),
    ],
)
def test_auto(platform: Platform, seq_len: int, attention: str, loss: str, moe: str) -> None:
    model = dataclasses.replace(QWEN3_MOE, **LARGE)
    chosen = choose(make_run(model=model, kernels=AUTO, training={"seq_len": seq_len}), platform)
    assert (chosen.attention.name, chosen.loss.name, chosen.moe.name) == (attention, loss, moe)
    assert not chosen.problems
    taken = {"attention": attention, "loss": loss, "moe": moe}
    assert chosen.notes == tuple(f"kernels.{kind}=auto: {name}" for kind, name in taken.items())


def test_a_small_vocabulary_keeps_its_logits_on_a_cpu() -> None:
    assert choose(make_run(model=LLAMA3, kernels=AUTO), "cpu").loss.name == "reference"


def test_blocks_of_splash_are_the_largest_that_divide_the_sequence() -> None:
    model = dataclasses.replace(LLAMA3, **LARGE)
    for seq_len, block in ((4096, 1024), (1536, 512), (640, 128)):
        chosen = choose(make_run(model=model, kernels=AUTO, training={"seq_len": seq_len}), "tpu")
        assert chosen.attention.options["block_kv"] == block


def test_a_dense_model_has_no_experts_to_choose_for() -> None:
    kernels = dataclasses.replace(REFERENCE_KERNELS, moe=schema.GroupedMoe(name="grouped", implementation="pallas"))
    chosen = choose(make_run(model=LLAMA3, kernels=kernels), "cpu")
    assert (chosen.moe.name, chosen.problems) == ("reference", ())
