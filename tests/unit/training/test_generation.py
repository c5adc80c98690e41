"""Generated text against plain PyTorch without a cache; seeds, ends of documents, batches, prompts of all kinds."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from tests.unit.runs import LLAMA3, QWEN3, build_torch_model
from tpu_train.config.command_settings import GenerateSettings
from tpu_train.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer
from tpu_train.execution.program import LoweringOptions
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import Tree
from tpu_train.training.build import build_model
from tpu_train.training.generation import Generator, read_prompts

RUNTIME = Runtime("cpu")
BYTES = ByteTokenizer()
MODELS = {"llama3": LLAMA3, "qwen3": QWEN3}
# Shorter than their bucket, longer than the model's seq_len of 32, and a single token.
PROMPTS = ["def f(x):", "a", "for i in range(10):\n    print(i, i ** 2)"]


def settings(**changes: Any) -> GenerateSettings:
    return GenerateSettings(**{"run_dir": "run", "max_tokens": 12, **changes})


@functools.cache
def initial(family: str) -> tuple[Any, Tree]:
    """A model's configuration and weights large enough that no two logits tie."""
    config, rng = MODELS[family], np.random.default_rng(1)
    shapes = {name: p.shape for name, p in build_model(config).named_parameters()}
    params = {name: rng.normal(float(len(shape) == 1), 0.3, shape) for name, shape in shapes.items()}
    return config, RUNTIME.put({name: value.astype(np.float32) for name, value in params.items()})


def make_generator(family: str = "qwen3", tokenizer: Tokenizer = BYTES, **options: Any) -> Generator:
    config, params = initial(family)
    lowering = LoweringOptions(check=True)
    return Generator(
        config, params, RUNTIME, tokenizer, **{"compute_dtype": torch.float32, "lowering": lowering, **options}
    )


@pytest.fixture(scope="module")
def generator() -> Generator:
    return make_generator()


def recompute(family: str, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation up to EOS by a whole forward per token, which must not be near a tie."""
    config, params = initial(family)
    model = build_torch_model(config, RUNTIME.fetch(params)).eval()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > 1e-4
            ids.append(int(best.indices[0]))
    new = ids[len(prompt) :]
    return new[: new.index(BYTES.eos_id)] if BYTES.eos_id in new else new


@pytest.mark.parametrize("family", MODELS)
def test_greedy_text_equals_recomputation_without_a_cache(family: str) -> None:
    generator = make_generator(family)
    generated = generator.generate([*PROMPTS, ""], settings(temperature=0.0))
    assert [sample.prompt for sample in generated.samples] == [*PROMPTS, ""]
    # Without a BOS, an empty prompt is what follows an EOS.
    encoded = [*(list(prompt.encode()) for prompt in PROMPTS), [BYTES.eos_id]]
    for sample, ids in zip(generated.samples, encoded, strict=True):
        expected = recompute(family, ids, 12)
        assert list(sample.tokens) == expected
        assert sample.text == BYTES.decode(np.array(expected))
        assert sample.finished == ("length" if len(expected) == 12 else "eos")
    assert sum(len(sample.tokens) for sample in generated.samples) > 36
    assert generator.compile_counts == {"prefill": 1, "decode": 1}
    assert generated.prefill_tokens == sum(len(ids) - 1 for ids in encoded)
    num_ended = sum(sample.finished == "eos" for sample in generated.samples)
    assert generated.decode_tokens == sum(len(sample.tokens) for sample in generated.samples) + num_ended
    assert all(
        math.isfinite(rate) and rate > 0 for rate in (generated.prefill_tokens_per_s, generated.decode_tokens_per_s)
    )


def test_greedy_ignores_the_seed_and_is_any_temperature_that_float32_has_not(generator: Generator) -> None:
    expected = generator.generate(["x"], settings(temperature=0.0)).samples
    assert generator.generate(["x"], settings(temperature=0.0, seed=5, top_p=0.1)).samples == expected
    assert generator.generate(["x"], settings(temperature=1e-60)).samples == expected
    # So is the smallest nucleus.
    assert generator.generate(["x"], settings(top_p=1e-6)).samples == expected


def test_a_seed_repeats_a_text_whatever_else_is_in_the_batch(generator: Generator) -> None:
    alone = generator.generate(["x = 1"], settings(seed=7, top_p=0.95)).samples[0]
    again = generator.generate(["x = 1"], settings(seed=7, top_p=0.95)).samples[0]
    other = generator.generate(["x = 1"], settings(seed=8, top_p=0.95)).samples[0]
    batch = generator.generate([*PROMPTS, "x = 1"], settings(seed=7, top_p=0.95, num_samples=2)).samples
    assert alone == again == batch[6]
    assert [sample.prompt for sample in batch[::2]] == [*PROMPTS, "x = 1"]
    assert alone.text != other.text
    assert len({sample.text for sample in batch}) == 8


def test_programs_compile_once_per_shape_and_way_of_choosing(caplog: pytest.LogCaptureFixture) -> None:
    generator = make_generator()
    for changes in ({}, {"seed": 3}, {"temperature": 2.0}):
        generator.generate(["x"], settings(top_p=1.0, **changes))
    generator.generate(["x" * 17], settings(top_p=1.0))  # 16 tokens and the last
    assert generator.compile_counts == {"prefill": 1, "decode": 1}
    generator.generate(["x" * 18], settings(top_p=1.0))
    assert generator.compile_counts == {"prefill": 2, "decode": 2}
    generator.generate(["x"], settings(top_p=0.9))
    generator.generate(["x"], settings(top_p=0.8))
    assert generator.compile_counts == {"prefill": 2, "decode": 3}
    assert "compiles again" not in caplog.text


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_first_tokens_are_distributed_as_the_models_probabilities(generator: Generator, top_p: float) -> None:
    count = 2000
    samples = generator.generate(
        ["ab"], settings(max_tokens=1, num_samples=count, temperature=2.0, top_p=top_p)
    ).samples
    config, params = initial("qwen3")
    model = build_torch_model(config, RUNTIME.fetch(params))
    with torch.no_grad():
        logits = model(torch.tensor([list(b"ab")]), torch.arange(2)[None])[0, -1].double().numpy()
    probabilities = np.exp(logits / 2) / np.exp(logits / 2).sum()
    order = np.argsort(-probabilities)
    size = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    nucleus = order[: min(size, len(order))]
    expected = np.zeros_like(probabilities)
    expected[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    drawn = np.array([sample.tokens[0] if sample.tokens else BYTES.eos_id for sample in samples])
    assert set(drawn) <= set(nucleus)
    found = np.bincount(drawn, minlength=len(expected)) / count
    # A share's standard deviation is at most 0.0112; all 320 are below five of their own.
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected / count) + 1e-3).all()


def test_a_text_ends_before_eos_and_the_batch_with_its_last_text(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generator.generate(PROMPTS, settings(temperature=0.0, max_tokens=40)).samples
    first = plain[0].tokens
    stop = first[5]
    at = first.index(stop)
    ending = make_generator(eos_ids=(stop,))
    found = ending.generate(PROMPTS, settings(temperature=0.0, max_tokens=40)).samples
    assert found[0].finished == "eos"
    assert found[0].tokens == first[:at]
    for sample, whole in zip(found, plain, strict=True):
        assert sample.tokens == whole.tokens[: len(sample.tokens)]
        assert (sample.finished == "eos") == (stop in whole.tokens)
    fetches = []
    monkeypatch.setattr(RUNTIME, "fetch", lambda tree: fetches.append(tree) or Runtime.fetch(RUNTIME, tree))
    alone = ending.generate(PROMPTS[:1], settings(temperature=0.0, max_tokens=400))
    assert alone.samples == found[:1]
    assert alone.decode_tokens == at + 1
    assert len(fetches) == 1 + at + 1  # one waits for prefill


class BytesWithBos(ByteTokenizer):
    """Documents begin with id 256."""

    bos_id = 256

    def encode(self, text: str) -> np.ndarray:
        """`<bos>` is spelled out, as in a tokenizer.json."""
        rest = text.removeprefix("<bos>")
        return np.concatenate([np.full(int(rest != text), 256, np.int32), super().encode(rest)])


def test_a_prompt_begins_with_bos_where_documents_do() -> None:
    generator = make_generator(tokenizer=BytesWithBos())  # type: ignore[arg-type]
    samples = generator.generate(["", "ab", "<bos>ab"], settings(temperature=0.0)).samples
    assert list(samples[0].tokens) == recompute("qwen3", [256], 12)
    assert list(samples[1].tokens) == recompute("qwen3", [256, *b"ab"], 12)
    assert samples[2].tokens == samples[1].tokens


def test_the_space_before_a_continuation_is_kept(tmp_path: Path) -> None:
    words = {"</s>": 0, **{f"▁w{i}": i for i in range(1, 320)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "</s>"))  # pyright: ignore[reportCallIssue]
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = tokenizers.decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    generator = make_generator(tokenizer=FileTokenizer(tmp_path / "tokenizer.json"))
    (sample,) = generator.generate(["w3 w7"], settings(temperature=0.0, max_tokens=2)).samples
    assert sample.text == "".join(f" w{token}" for token in sample.tokens)


def test_bfloat16_computes_with_cast_weights_and_leaves_the_callers() -> None:
    config, params = initial("qwen3")
    generator = Generator(
        config, params, RUNTIME, BYTES, compute_dtype=torch.bfloat16, lowering=LoweringOptions(check=True)
    )
    sample = generator.generate(["ab"], settings(temperature=0.0, max_tokens=1)).samples[0]
    model = build_torch_model(config, RUNTIME.fetch(params)).bfloat16()
    with torch.no_grad():
        logits = model(torch.tensor([list(b"ab")]), torch.arange(2)[None])[0, -1].float()
    assert logits[sample.tokens[0]] >= logits.max() - 0.05 * logits.abs().max()
    assert {str(weight.dtype) for weight in params.values()} == {"float32"}


def test_another_models_tokenizer_is_refused() -> None:
    config = dataclasses.replace(QWEN3, vocab_size=200)
    with pytest.raises(ValueError, match="the tokenizer has 258 tokens and the model 200; use the tokenizer that"):
        Generator(config, {}, RUNTIME, BYTES, compute_dtype=torch.float32, lowering=LoweringOptions())


def test_prompts_are_the_one_given_or_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\r\n\nzwölf\u2028 \n".encode())
    assert read_prompts(settings(prompts_file=str(path))) == ["one", "", "zwölf\u2028 "]
    assert read_prompts(settings(prompt="a\nb")) == ["a\nb"]
    assert read_prompts(settings()) == [""]


def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"prompts\.txt is empty; write a prompt on each line"):
        read_prompts(settings(prompts_file=str(path)))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts\.txt: not UTF-8 text"):
        read_prompts(settings(prompts_file=str(path)))
    with pytest.raises(ValueError, match="prompt and prompts_file are both given; give one of them"):
        read_prompts(settings(prompt="a", prompts_file=str(path)))
    with pytest.raises(FileNotFoundError):
        read_prompts(settings(prompts_file=str(tmp_path / "none.txt")))
