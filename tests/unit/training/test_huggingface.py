"""Hugging Face folders, made by transformers and read by it: bits, logits, refusals, memory."""

import dataclasses
import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from tests.unit.runs import LLAMA3, QWEN3, QWEN3_MOE, build_torch_model
from tpu_train.config import schema
from tpu_train.config.compose import compose
from tpu_train.data.tokenizers import FileTokenizer
from tpu_train.training import huggingface_files
from tpu_train.training.huggingface import check_fits, parameter_shapes, read_folder, write_folder
from tpu_train.training.huggingface_names import hf_name
from tpu_train.training.weights import WeightSource, WeightSpec

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough for every block to matter
    "bos_token_id": None,
    "eos_token_id": None,
}
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama3_untied_scaled": (LlamaForCausalLM, {"rope_parameters": SCALED}),
    "llama3_tied": (LlamaForCausalLM, {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3_tied": (Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3_untied": (Qwen3ForCausalLM, {"head_dim": 16, "eos_token_id": [5, 7]}),
    "qwen3_moe": (Qwen3MoeForCausalLM, {"head_dim": 16, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_tied_not_normalized": (Qwen3MoeForCausalLM, {**EXPERTS, "tie_word_embeddings": True}),
}


def make_reference(
    name: str = "llama3_untied_scaled", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random model of transformers', norms included."""
    kind, sizes = CASES[name]
    config = kind.config_class(**{**SIZES, **sizes, **changes})
    torch.manual_seed(0)
    model = kind(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.15)
    return model


def make_folder(folder: Path, name: str = "llama3_untied_scaled", **changes: Any) -> Path:
    make_reference(name, **changes).save_pretrained(folder)
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Changes the tensors of a folder of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    return file


def bits(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensor.view(torch.uint8) for name, tensor in tensors.items()}


def logits(model: Any) -> Tensor:
    tokens = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens, position_ids=torch.arange(64).expand(2, 64)).logits


def load(folder: Path) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model.eval()


def refused(folder: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(folder))) as error:
        read_folder(folder)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("name", list(CASES))
def test_folder_read_and_written_again_is_the_same_model_bit_for_bit(
    tmp_path: Path, name: str, shard_size: str, dtype: torch.dtype
) -> None:
    reference = make_reference(name, dtype)
    reference.save_pretrained(tmp_path / "in", max_shard_size=shard_size)
    folder = read_folder(tmp_path / "in")
    assert folder.dtype == str(dtype).removeprefix("torch.")
    shard_bytes = 5 * 10**9 if shard_size == "5GB" else 20_000
    write_folder(tmp_path / "out", folder.model, folder.source, eos_ids=folder.eos_ids, shard_bytes=shard_bytes)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (shard_size != "5GB")
    before, after = bits(tmp_path / "in"), bits(tmp_path / "out")
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) != folder.model.tie_embeddings
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    exported, original = load(tmp_path / "out"), load(tmp_path / "in")
    assert exported.dtype == dtype
    assert exported.generation_config.eos_token_id == reference.config.eos_token_id
    assert torch.equal(logits(exported), logits(original))


@pytest.mark.parametrize("name", list(CASES))
def test_logits_of_a_read_folder_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = read_folder(make_folder(tmp_path, name))
    model = build_torch_model(folder.model, {tensor: folder.source.load(tensor) for tensor in folder.source.specs})
    tokens = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(1))
    expected = logits(load(tmp_path))
    with torch.no_grad():
        actual = model(tokens, torch.arange(64).expand(2, 64))
    assert expected.std() > 0.5  # so that 1e-5 absolute is 1e-5 of a logit
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [LLAMA3, QWEN3], ids=["llama3", "qwen3"])
def test_names_are_those_of_transformers(model: Any) -> None:
    reference = make_reference("llama3_untied_scaled" if model is LLAMA3 else "qwen3_tied")
    assert {hf_name(name) for name in parameter_shapes(model)} == {name for name, _ in reference.named_parameters()}


def test_experts_are_a_tensor_each_in_a_folder_and_one_parameter_here(tmp_path: Path) -> None:
    reference = make_reference("qwen3_moe")
    reference.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    folder = read_folder(tmp_path)
    assert isinstance(folder.model, schema.Qwen3MoeModel)
    assert (folder.model.num_experts, folder.model.top_k, folder.model.ffn_dim) == (5, 2, 24)
    for here, there in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        stack = folder.source.load(f"layers.1.feed_forward.experts.{here}")
        assert stack.shape == folder.source.specs[f"layers.1.feed_forward.experts.{here}"].shape
        for expert in range(5):
            tensor = stored[f"model.layers.1.mlp.experts.{expert}.{there}.weight"]
            assert torch.equal(torch.from_numpy(stack[expert]), tensor)
    router = folder.source.load("layers.1.feed_forward.router.weight")
    assert torch.equal(torch.from_numpy(router), stored["model.layers.1.mlp.gate.weight"])


def test_experts_of_several_dtypes_become_the_widest(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    make_reference("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({name: t[name].float() + 1e-3}))
    source, expected = read_folder(tmp_path).source, load_file(tmp_path / "model.safetensors")[name]
    assert source.specs["layers.0.feed_forward.experts.up"].dtype == "float32"
    assert source.specs["layers.0.feed_forward.experts.gate"].dtype == "bfloat16"
    stack = source.load("layers.0.feed_forward.experts.up")
    assert stack.dtype == np.float32
    assert torch.equal(torch.from_numpy(stack[3]), expected)


def test_each_stack_is_loaded_once_and_alone(tmp_path: Path) -> None:
    make_reference("qwen3_moe").save_pretrained(tmp_path / "in")
    folder = read_folder(tmp_path / "in")
    loaded: list[str] = []

    def load_counted(name: str) -> np.ndarray:
        loaded.append(name)
        return folder.source.load(name)

    write_folder(tmp_path / "out", folder.model, WeightSource("counted", folder.source.specs, load_counted))
    assert sorted(loaded) == sorted(folder.source.specs)


def test_an_expert_that_is_missing_or_too_many_is_named(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{prefix}.5.up_proj.weight"] = tensors.pop(f"{prefix}.4.up_proj.weight")
        tensors[f"{prefix}.2.down_proj.weight"] = torch.ones(24, 48)

    make_reference("qwen3_moe").save_pretrained(tmp_path)
    file = edit_tensors(tmp_path, edit)
    assert refused(tmp_path).splitlines() == [
        f"{file}: tensor {prefix}.4.up_proj.weight is missing, expected one of shape [24, 48]",
        f"{file}: tensor {prefix}.2.down_proj.weight has shape [24, 48], expected [48, 24] by config.json",
        f"{file}: tensor {prefix}.5.up_proj.weight is unexpected, the model of config.json has none of that name",
    ]


def test_specs_are_those_of_the_loaded_arrays(tmp_path: Path) -> None:
    reference = make_reference().bfloat16()
    reference.model.norm.float()
    reference.lm_head.half()
    reference.save_pretrained(tmp_path)
    source = read_folder(tmp_path).source
    for name, spec in source.specs.items():
        array = source.load(name)
        assert WeightSpec(array.shape, array.dtype.name) == spec
    assert {spec.dtype for spec in source.specs.values()} == {"float32", "bfloat16"}
    head = source.load("output.weight")
    assert source.specs["output.weight"].dtype == "float32"
    assert torch.equal(torch.from_numpy(head), reference.lm_head.weight.float())
    write_folder(tmp_path / "out", read_folder(tmp_path).model, source)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written["model.norm.weight"].dtype == torch.float32
    assert written["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("said", "stored", "expected"),
    [
        ("bfloat16", torch.float32, "bfloat16"),
        ("float16", torch.float16, "float32"),
        (None, torch.float32, "float32"),
        (None, torch.bfloat16, "bfloat16"),
    ],
)
def test_dtype_is_what_the_configuration_says_else_that_of_the_tensors(
    tmp_path: Path, said: str | None, stored: torch.dtype, expected: str
) -> None:
    make_reference(dtype=stored).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": said}))
    assert read_folder(tmp_path).dtype == expected


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_dtype_asked_for_is_rounded_to_as_torch_does(tmp_path: Path, dtype: str, torch_dtype: torch.dtype) -> None:
    reference = make_reference()
    reference.save_pretrained(tmp_path / "in")
    folder = read_folder(tmp_path / "in")
    write_folder(tmp_path / "out", folder.model, folder.source, dtype)
    written = load_file(tmp_path / "out/model.safetensors")
    for name, parameter in reference.named_parameters():
        assert torch.equal(written[name], parameter.to(torch_dtype)), name
    assert load(tmp_path / "out").dtype == torch_dtype


def test_one_tensor_at_a_time_is_in_memory_and_files_stay_below_their_size(tmp_path: Path) -> None:
    folder = read_folder(make_folder(tmp_path / "in"))
    alive, most = weakref.WeakSet(), 0

    class Counted(np.ndarray):
        __hash__ = object.__hash__  # type: ignore[assignment]

    def load_counted(name: str) -> np.ndarray:
        nonlocal most
        array = folder.source.load(name).view(Counted)
        alive.add(array)
        most = max(most, len(alive))
        return array

    source = WeightSource("counted", folder.source.specs, load_counted)
    write_folder(tmp_path / "out", folder.model, source, shard_bytes=25_000)
    assert most == 1
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) == 7
    assert max(sizes) < 25_000 + 2_000  # and the header
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in load(tmp_path / "in").parameters())


def test_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    folder = read_folder(make_folder(tmp_path / "in"))

    def fail(name: str) -> np.ndarray:
        if name == "norm.weight":
            raise OSError("read error")
        return folder.source.load(name)

    with pytest.raises(OSError, match="read error"):
        write_folder(tmp_path / "out", folder.model, WeightSource("broken", folder.source.specs, fail))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_only_an_empty_folder_is_written_to(tmp_path: Path) -> None:
    folder = read_folder(make_folder(tmp_path / "in"))
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", folder.model, folder.source)
    with pytest.raises(ValueError, match="out: is not empty; choose another folder"):
        write_folder(tmp_path / "out", folder.model, folder.source)
    with pytest.raises(ValueError, match=r"config\.json: is a file; choose another folder"):
        write_folder(tmp_path / "out/config.json", folder.model, folder.source)


def test_weights_that_are_not_the_models_are_not_written(tmp_path: Path) -> None:
    specs = {name: WeightSpec(shape, "float32") for name, shape in parameter_shapes(LLAMA3).items()}
    del specs["norm.weight"]
    specs |= {"extra.weight": WeightSpec((3,), "float32"), "output.weight": WeightSpec((3, 64), "float32")}
    specs |= {"layers.1.feed_forward.up.weight": WeightSpec((96, 64), "int8")}
    with pytest.raises(
        ValueError, match=r"runs/a: tensor norm\.weight is missing, expected one of shape \[64\]"
    ) as error:
        write_folder(tmp_path / "out", LLAMA3, WeightSource("runs/a", specs, lambda _: np.zeros(3)))
    assert str(error.value).splitlines()[1:] == [
        "runs/a: tensor layers.1.feed_forward.up.weight has dtype int8, expected one of float32, bfloat16",
        "runs/a: tensor output.weight has shape [3, 64], expected [320, 64] by the model's configuration",
        "runs/a: tensor extra.weight is unexpected, the model has none of that name",
    ]
    assert not (tmp_path / "out").exists()


def test_reach_is_that_of_the_configuration_or_as_given(tmp_path: Path) -> None:
    folder = read_folder(make_folder(tmp_path / "in"))
    write_folder(tmp_path / "own", folder.model, folder.source)
    write_folder(tmp_path / "given", folder.model, folder.source, max_positions=folder.max_positions * 2)
    assert load(tmp_path / "own").config.max_position_embeddings == 512
    assert load(tmp_path / "given").config.max_position_embeddings == 1024


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=90, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    path = tmp_path / "tokenizer" / "own.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("name", ["llama3_untied_scaled", "qwen3_tied"])
def test_tokenizer_goes_along_and_its_end_of_document_too(
    tmp_path: Path, tokenizer_path: Path, name: str, configured: bool
) -> None:
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 77}
    if configured:
        tokenizer_path.with_name("tokenizer_config.json").write_text(json.dumps(content))
        tokenizer_path.with_name("special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    folder = read_folder(make_folder(tmp_path / "in", name))
    assert folder.tokenizer_path is None
    write_folder(tmp_path / "out", folder.model, folder.source, tokenizer_path=tokenizer_path)
    assert (tmp_path / "out/special_tokens_map.json").exists() == configured
    ours, theirs = FileTokenizer(tokenizer_path), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "The lazy dog <|endoftext|> jumps."
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text).tolist()
    assert theirs.decode(ours.encode("the fox jumps")) == "the fox jumps"
    assert theirs.eos_token_id == ours.eos_id
    again = read_folder(tmp_path / "out")
    assert again.eos_ids == (ours.eos_id,)
    assert again.tokenizer_path == tmp_path / "out/tokenizer.json"
    assert load(tmp_path / "out").generation_config.eos_token_id == ours.eos_id


def test_unusable_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = read_folder(make_folder(tmp_path / "in"))
    with pytest.raises(ValueError, match=r"none\.json: no such file"):
        write_folder(tmp_path / "out", folder.model, folder.source, tokenizer_path=tmp_path / "none.json")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_all_wrong_tensors_are_told_at_once(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors["model.norm.weight"] = torch.ones(47)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(64, 48, dtype=torch.int8)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(64, 48)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    file = edit_tensors(make_folder(tmp_path), edit)
    assert refused(tmp_path).splitlines() == [
        f"{file}: tensor model.layers.0.mlp.up_proj.weight has dtype I8, expected one of F32, BF16, F16",
        f"{file}: tensor model.norm.weight has shape [47], expected [48] by config.json",
        f"{file}: tensor lm_head.weight is missing, expected one of shape [97, 48], because config.json does not have "
        "tie_word_embeddings=true",
        f"{file}: tensor model.layers.2.mlp.up_proj.weight is unexpected, the model of config.json has none of that "
        "name",
    ]


def test_of_many_wrong_tensors_ten_are_named_and_the_others_counted(tmp_path: Path) -> None:
    make_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    lines = refused(tmp_path).splitlines()
    assert len(lines) == 11
    assert "tensor model.layers.2.input_layernorm.weight is missing, expected one of shape [48]" in lines[0]
    assert lines[10] == "and 8 more"


def test_rotary_frequencies_of_old_conversions_are_ignored(tmp_path: Path) -> None:
    edit_tensors(
        make_folder(tmp_path), lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    assert "inv_freq" not in " ".join(read_folder(tmp_path).source.specs)


@pytest.mark.parametrize("rows", [1, 10**6])
def test_tied_embeddings_may_be_stored_twice_but_not_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(huggingface_files, "_COMPARED_BYTES", rows * 48 * 4)
    make_folder(tmp_path, "llama3_tied")
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "output.weight" not in read_folder(tmp_path).source.specs
    file = edit_tensors(tmp_path, lambda t: t["lm_head.weight"][96, 47].add_(1e-3))
    assert refused(tmp_path) == (
        f"{file}: tensor lm_head.weight differs from model.embed_tokens.weight, expected the same values because "
        "tie_word_embeddings is true; set it to false in config.json to use both"
    )
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(3)}))
    assert "lm_head.weight differs" in refused(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-10],
        lambda data: data[:4],
        lambda _: b"",
        lambda _: b"\xff" * 100,
        lambda data: data[:300],
    ],
    ids=["end", "start", "empty", "garbage", "header"],
)
def test_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = make_folder(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert re.match(f"{file}: not a complete safetensors file: .*; download or write it again", refused(tmp_path))


def sharded(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of several files, and its index."""
    make_reference().save_pretrained(folder, max_shard_size="20KB")
    path = folder / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


def test_index_that_names_missing_files_is_refused(tmp_path: Path) -> None:
    path, index = sharded(tmp_path)
    names = sorted(set(index["weight_map"].values()))
    (tmp_path / names[1]).unlink()
    (tmp_path / names[3]).unlink()
    assert refused(tmp_path) == f"{path}: 2 of {len(names)} files are missing: {names[1]}, {names[3]}"


def test_tensor_that_its_file_lacks_is_named_with_that_file(tmp_path: Path) -> None:
    _, index = sharded(tmp_path)
    file = tmp_path / index["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert refused(tmp_path) == f"{file}: tensor model.norm.weight is missing, expected one of shape [48]"


def test_of_a_tensor_in_two_files_the_index_decides(tmp_path: Path) -> None:
    _, index = sharded(tmp_path)
    names, home = sorted(set(index["weight_map"].values())), index["weight_map"]["model.norm.weight"]
    expected = read_folder(tmp_path).source.load("norm.weight")
    for name in (names[0], names[-1]):
        if name != home:
            tensors = load_file(tmp_path / name)
            save_file({**tensors, "model.norm.weight": torch.zeros(48)}, tmp_path / name, {"format": "pt"})
    np.testing.assert_array_equal(read_folder(tmp_path).source.load("norm.weight"), expected)


@pytest.mark.parametrize("content", [{}, {"weight_map": ["a"]}, {"weight_map": {"model.norm.weight": 3}}])
def test_index_without_files_is_refused(tmp_path: Path, content: Any) -> None:
    path, _ = sharded(tmp_path)
    path.write_text(json.dumps(content))
    assert refused(tmp_path) == f"{path}: no weight_map of tensors to files; download it again"


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "model.safetensors").unlink()
    message = f"{tmp_path}: neither model.safetensors nor model.safetensors.index.json is there"
    assert refused(tmp_path) == message
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert refused(tmp_path) == f"{message}; pytorch_model.bin is not read, convert it to safetensors"


def test_folder_that_is_none_or_empty_is_refused(tmp_path: Path) -> None:
    assert "none: no such folder; expected one with config.json" in refused(tmp_path / "none")
    assert "config.json: no such file; expected a folder with config.json" in refused(tmp_path)


def suggestions(problems: list[Any]) -> Iterator[str]:
    for problem in problems:
        found = re.search(r"; set (model\..*)$", problem.message)
        assert found, problem
        assert found[1].startswith(f"{problem.place}=")
        yield found[1]


@pytest.mark.parametrize(
    ("source", "choice"),
    [
        (LLAMA3, "llama3_debug"),
        (QWEN3, "qwen3_8b"),
        (dataclasses.replace(QWEN3_MOE, router_aux_loss_coef=0.1), "qwen3_30b"),
    ],
    ids=["llama3", "qwen3", "qwen3_moe"],
)
def test_every_key_that_does_not_fit_is_told_with_the_word_that_makes_it_fit(source: Any, choice: str) -> None:
    run = compose([f"model={choice}"]).run
    problems = check_fits(source, run.model)
    places = [problem.place.removeprefix("model.") for problem in problems]
    assert {"dim", "head_dim", "ffn_dim"} <= set(places)
    assert not {"init_std", "dropout", "seq_len", "router_aux_loss_coef"} & set(places)
    assert f"model.dim is {run.model.dim}, but the weights to start from have {source.dim}" in problems[0].message
    assert check_fits(source, compose([f"model={choice}", *suggestions(problems)]).run.model) == []


def test_model_of_another_family_does_not_fit() -> None:
    (problem,) = check_fits(LLAMA3, QWEN3)
    assert str(problem) == (
        "model.family: model.family is qwen3, but the weights to start from are of llama3; choose a model of that "
        "family with model=..."
    )


def test_frequency_scaling_that_differs_does_not_fit() -> None:
    plain = schema.Llama3Model(**{**vars(LLAMA3), "rope_scaling": None})
    (problem,) = check_fits(plain, LLAMA3)
    assert problem.message.endswith("have null; set model.rope_scaling=null")
    (problem,) = check_fits(LLAMA3, plain)
    run = compose(["model=llama3_8b", *suggestions([problem])]).run
    assert run.model == schema.Llama3Model(**{**vars(run.model), "rope_scaling": LLAMA3.rope_scaling})
