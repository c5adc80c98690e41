"""Shipped models against published parameter counts and FLOPs (DESIGN.md section 5)."""

import dataclasses
import functools
import re

import pytest
import torch
import yaml

from tests.unit.models.model_sizes import CONF, PARAMETERS, SHIPPED, shipped_sizes, shipped_tree, small_tree
from tpu_train.config import schema
from tpu_train.models.counting import attention_width, matmul_parameters
from tpu_train.models.node import node

SCHEMAS = {"llama3": schema.Llama3Model, "qwen3": schema.Qwen3Model, "qwen3_moe": schema.Qwen3MoeModel}


@functools.cache
def build_on_meta(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return shipped_tree(name).build()


def test_every_yaml_is_listed_here():
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == sorted(SHIPPED)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name):
    model = build_on_meta(name)
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_yaml_has_exactly_the_keys_of_the_schema(name):
    sizes = shipped_sizes(name)
    assert set(sizes) == {field.name for field in dataclasses.fields(SCHEMAS[sizes["family"]])}
    if sizes.get("rope_scaling"):
        assert set(sizes["rope_scaling"]) == {field.name for field in dataclasses.fields(schema.RopeScaling)}


@pytest.mark.parametrize("name", SHIPPED)
def test_yaml_opens_with_its_description(name):
    assert re.match(r"# \S.*\.\n", (CONF / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_yaml_brings_its_precision(name):
    """The package is spelled out: within `model`, Hydra would look for `model.precision`."""
    precision = "fp32" if name.endswith("_debug") else "bf16_mixed"
    defaults = yaml.safe_load((CONF / f"{name}.yaml").read_text())["defaults"]
    assert defaults == [{"override /precision@_global_.precision": precision}]


@pytest.mark.parametrize("name", SHIPPED)
def test_model_holds_no_storage_on_meta(name):
    model = build_on_meta(name)
    assert all(weight.is_meta for weight in model.parameters())
    assert not list(model.buffers())


@pytest.mark.parametrize("name", SHIPPED)
def test_node_paths_are_module_paths(name):
    nodes = {path for path, _ in shipped_tree(name).walk()}
    assert nodes | {"layers"} == {path for path, _ in build_on_meta(name).named_modules()}


@pytest.mark.parametrize("name", ["llama3_debug", "qwen3_debug", "qwen3_moe_debug"])
def test_debug_models_hold_the_byte_vocabulary_and_stay_small(name):
    assert shipped_sizes(name)["vocab_size"] >= 258
    assert sum(weight.numel() for weight in build_on_meta(name).parameters()) < 3e6


@pytest.mark.parametrize(
    ("name", "seq_len", "full", "causal"),
    [
        ("llama3_8b", 8192, 57_912_852_480, 51_470_401_536),
        ("qwen3_30b", 8192, 37_577_293_824, 27_913_617_408),
        ("qwen3_235b", 4096, 167_255_212_032, 148_330_512_384),
    ],
)
def test_flops_are_the_published_ones(name, seq_len, full, causal):
    model = build_on_meta(name)
    matmul_flops, attention_flops = 6 * matmul_parameters(model), 12 * attention_width(model) * seq_len
    assert matmul_flops + attention_flops == full
    assert matmul_flops + attention_flops // 2 == causal


def test_tied_projection_is_counted_and_lookup_is_not():
    tied, untied = (build_on_meta(name) for name in ("llama3_1b", "llama3_8b"))
    norms = (2 * 16 + 1) * 2048
    assert matmul_parameters(tied) == PARAMETERS["llama3_1b"] - norms
    norms = (2 * 32 + 1) * 4096
    assert matmul_parameters(untied) == PARAMETERS["llama3_8b"] - norms - 128256 * 4096


def test_swapped_block_is_counted_as_it_is():
    tree = small_tree()
    square = node(torch.nn.Linear, in_features=48, out_features=48)
    swapped = tree.rewrite(lambda path, _: square if path.endswith(".feed_forward") else None)
    removed = matmul_parameters(tree.build()) - matmul_parameters(swapped.build())
    assert removed == 3 * (3 * 48 * 64 - 48 * 48)
