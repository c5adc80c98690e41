"""Fields that do not fit together are refused."""

import pytest

from tpu_train.config.compose import compose
from tpu_train.config.rules import global_batch_size, rules


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["training.batch_per_device=null"], "training.batch_per_device", "neither training.batch_per_device nor"),
        (
            ["training.global_batch_size=8", "training.batch_per_device=8"],
            "training.global_batch_size",
            "they exclude each other",
        ),
        (["training.grad_accumulation=3"], "training.grad_accumulation", "does not divide the global batch of 8"),
        (["model.num_kv_heads=3"], "model.num_kv_heads", "does not divide model.num_heads, 8"),
        (["model=qwen3_moe_debug", "model.top_k=9"], "model.top_k", "model.top_k is 9, more than model.num_experts, 8"),
        (["model.head_dim=33"], "model.head_dim", "need an even number"),
        (["optimizer.no_decay=[norms]"], "optimizer.no_decay", "has 'norms'; allowed are norm, bias, embedding"),
        (
            ["schedule=warmup_stable_decay", "training.steps=79"],
            "schedule.decay_steps",
            "20 + 60, more than training.steps, 79",
        ),
        (["training.inject_inf_at_step=301"], "training.inject_inf_at_step", "after the last step"),
        (["runtime.devices=2"], "runtime.devices", "runtime.devices is 2, but parallelism=single uses one"),
        (
            ["runtime.coordinator=a:1", "runtime.num_processes=2", "runtime.process_id=0"],
            "parallelism",
            "parallelism is single, one device, and there are 2 processes; choose another, for instance fsdp",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(words: list[str], key: str, message: str) -> None:
    (problem,) = rules(compose(words).run)
    assert problem.place == key
    assert message in problem.message


@pytest.mark.parametrize(
    "words",
    [
        ["training.steps=5"],  # fewer than the warm-up
        ["training.batch_per_device=null", "training.global_batch_size=6", "training.grad_accumulation=3"],
        ["schedule=warmup_stable_decay", "training.steps=80"],
        ["training.inject_inf_at_step=300"],
        ["optimizer.no_decay=[]"],
        ["model=qwen3_moe_debug", "model.top_k=8"],
    ],
)
def test_fields_that_fit_are_let_through(words: list[str]) -> None:
    assert rules(compose(words).run) == []


def test_global_batch_is_given_or_per_device() -> None:
    assert global_batch_size(compose(["training.batch_per_device=4"]).run) == 4
    words = ["training.batch_per_device=null", "training.global_batch_size=6"]
    assert global_batch_size(compose(words).run) == 6
