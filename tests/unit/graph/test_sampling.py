"""Prefill and decode against the model without a cache, and the draw against probabilities worked out by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.models.model_sizes import SMALL, small_model
from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import TensorSpec, Tree, capture, named_leaves
from tpu_train.graph.sampling import Method, draw_tokens, make_decode, make_prefill, next_logits
from tpu_train.models.decoder import Decoder

RUNTIME = Runtime("cpu")
CHECKED = LoweringOptions(check=True)
VOCAB = SMALL["vocab_size"]
ROOM = 6  # slots left after the prompts

# Logits of the probabilities 0.1, 0.4, 0.2, 0.3 and 0.
PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3, 0.0])
LOGITS = torch.from_numpy(PROBABILITIES).log().float()
GRID = (torch.arange(20_000) + 0.5) / 20_000


def shares(
    temperature: float = 1.0, top_p: float | None = None, logits: Tensor = LOGITS, uniforms: Tensor = GRID
) -> np.ndarray:
    """How often each token is drawn."""
    p = None if top_p is None else torch.tensor(top_p)
    tokens = draw_tokens(logits.expand(len(uniforms), -1), uniforms, torch.tensor(temperature), p)
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / len(uniforms)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("top_p", [None, 1.0])
def test_draws_follow_softmax_with_temperature(temperature: float, top_p: float | None) -> None:
    expected = PROBABILITIES ** (1 / temperature)
    np.testing.assert_allclose(shares(temperature, top_p), expected / expected.sum(), atol=2e-4)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-30, [0, 1, 0, 0, 0]),
        (0.39, [0, 1, 0, 0, 0]),
        (0.41, [0, 4 / 7, 0, 3 / 7, 0]),
        (0.69, [0, 4 / 7, 0, 3 / 7, 0]),
        (0.71, [0, 4 / 9, 2 / 9, 3 / 9, 0]),
        (0.91, [0.1, 0.4, 0.2, 0.3, 0]),
    ],
)
def test_the_nucleus_is_the_fewest_likeliest_tokens_that_reach_top_p(top_p: float, expected: list[float]) -> None:
    found = shares(top_p=top_p)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert ((found == 0) == (np.array(expected) == 0)).all()


def test_the_nucleus_is_that_of_the_probabilities_after_the_temperature() -> None:
    # At 0.5 the probabilities are 1, 16, 4 and 9 of 30.
    np.testing.assert_allclose(shares(0.5, 0.8), [0, 16 / 25, 0, 9 / 25, 0], atol=2e-4)
    np.testing.assert_allclose(shares(0.5, 0.85), [0, 16 / 29, 4 / 29, 9 / 29, 0], atol=2e-4)


def test_of_equally_likely_tokens_the_first_are_in_the_nucleus() -> None:
    np.testing.assert_allclose(shares(top_p=0.5, logits=torch.zeros(4)), [0.5, 0.5, 0, 0], atol=2e-4)


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_extreme_uniforms_temperatures_and_logits_draw_a_token_that_has_a_probability(top_p: float | None) -> None:
    extremes = torch.tensor([0.0, 2.0**-24, 1 - 2.0**-24])
    torch.manual_seed(0)
    logits = torch.randn(5000) * 3
    logits[[0, -1]] = -torch.inf
    assert shares(1.0, top_p, logits, extremes)[[0, -1]].tolist() == [0, 0]
    for size in (1.0, 1e30):
        cold = shares(1.2e-38, top_p, logits * size, extremes)
        assert cold[logits.argmax()] == 1


def test_the_compiled_draw_is_that_of_pytorch_and_its_numbers_are_uniform() -> None:
    def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, seed: Tensor) -> Tree:
        del seed
        uniforms = torch.rand(logits.shape[0])
        return {"uniforms": uniforms, "nucleus": draw_tokens(logits, uniforms, temperature, top_p)}

    program = Program("draw", lambda specs: capture("draw", draw, specs), CHECKED, key_inputs=("seed",))
    inputs = {
        "logits": LOGITS.expand(20_000, -1).numpy(),
        "temperature": np.float32(1.5),
        "top_p": np.float32(0.75),
        "seed": np.int32(3),
    }
    result = RUNTIME.fetch(program(**RUNTIME.put(inputs)))
    # At temperature 1.5 the first three have 0.83 and the first two 0.61.
    expected = PROBABILITIES ** (1 / 1.5) * [0, 1, 1, 1, 0]
    found = np.bincount(result["nucleus"], minlength=5) / 20_000
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.02)  # five standard deviations of 0.0035
    assert found[[0, 4]].tolist() == [0, 0]
    uniforms = torch.from_numpy(np.array(result["uniforms"]))
    in_torch = draw_tokens(LOGITS.expand(20_000, -1), uniforms, torch.tensor(1.5), torch.tensor(0.75))
    assert (in_torch.numpy() == result["nucleus"]).mean() > 0.999  # a uniform at a boundary may round either way


def params_of(model: Decoder) -> Tree:
    return RUNTIME.put({name: p.detach().numpy() for name, p in model.named_parameters()})


def prefilled(model: Decoder, tokens: np.ndarray, lengths: np.ndarray) -> Tree:
    function = make_prefill(model, tokens.shape[1] + ROOM, torch.float32)
    program = Program("prefill", lambda specs: capture("prefill", function, specs), CHECKED)
    return program(params=params_of(model), **RUNTIME.put({"tokens": tokens, "lengths": lengths}))


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_logits_with_the_cache_equal_those_without_for_prompts_of_different_lengths(family: str) -> None:
    model = small_model(family, tie_embeddings=family == "qwen3")

    def step(params: Tree, cache: Tree, token: Tensor, position: Tensor) -> Tree:
        logits, cache = next_logits(model, params, cache, token, position)
        return {"logits": logits, "cache": cache}

    program = Program("step", lambda specs: capture("step", step, specs), CHECKED, donated=("cache",))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, length + ROOM).astype(np.int32) for length in (0, 3, 8)]
    lengths = np.array([len(text) - ROOM for text in texts], np.int32)
    tokens = np.full((3, 8), VOCAB - 1, np.int32)  # padding is a token like any other
    for row, text, length in zip(tokens, texts, lengths, strict=True):
        row[8 - length :] = text[:length]
    cache, params = prefilled(model, tokens, lengths), params_of(model)
    for i in range(ROOM):
        token = np.array([text[length + i] for text, length in zip(texts, lengths, strict=True)])
        inputs = RUNTIME.put({"token": token.astype(np.int32), "position": lengths + np.int32(i)})
        result = program(params=params, cache=cache, **inputs)
        cache = result["cache"]
        for row, text, length in zip(RUNTIME.fetch(result["logits"]), texts, lengths, strict=True):
            known = torch.from_numpy(text[: length + i + 1]).long()[None]
            with torch.no_grad():
                expected = model(known, torch.arange(known.shape[1])[None])[0, -1]
            np.testing.assert_allclose(row, expected.numpy(), rtol=1e-5, atol=1e-5)
    assert program.compile_count == 1
    assert int(RUNTIME.fetch(cache["cursor"])) == 8 + ROOM


def test_prefill_does_not_compute_logits() -> None:
    model = small_model()
    params = {name: TensorSpec(tuple(p.shape), torch.float32) for name, p in model.named_parameters()}
    inputs = {"tokens": TensorSpec((2, 16), torch.int32), "lengths": TensorSpec((2,), torch.int32)}
    captured = capture("prefill", make_prefill(model, 20, torch.float32), {"params": params, **inputs})
    values = [n.meta.get("val") for n in captured.graph.graph.nodes if n.op == "call_function"]
    assert not [value for value in values if isinstance(value, Tensor) and value.shape[-1:] == (VOCAB,)]


def decode_inputs(model: Decoder, **controls: Any) -> Tree:
    tokens = np.zeros((2, 4), np.int32)
    carry = {"token": np.zeros(2, np.int32), "position": np.full(2, 4, np.int32), "step": np.int32(0)}
    numbers = {"seed": np.int32(0), "temperature": np.float32(1), "top_p": np.float32(0.9), **controls}
    rest = RUNTIME.put({"carry": carry, "controls": {"streams": np.array([0, 1], np.int32), **numbers}})
    return {"params": params_of(model), "cache": prefilled(model, tokens, np.full(2, 4, np.int32)), **rest}


def decode_program(model: Decoder, method: Method) -> Program:
    function = make_decode(model, method, 64)
    return Program(
        "decode",
        lambda specs: capture("decode", function, specs),
        CHECKED,
        donated=("cache",),
        key_inputs=("controls.seed", "carry.step"),
    )


def test_decode_updates_the_cache_in_place() -> None:
    model = small_model()
    inputs = decode_inputs(model)
    compiled = decode_program(model, "greedy").compiled(**inputs)
    num_bytes = sum(leaf.nbytes for _, leaf in named_leaves(inputs["cache"]))
    assert compiled.memory_analysis().alias_size_in_bytes == num_bytes


def test_rows_draw_by_their_streams_and_every_step_anew() -> None:
    # All weights 0: all tokens are as likely, and the token shows the random number.
    model = small_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    program = decode_program(model, "all")

    def draw(steps: int = 1, **controls: Any) -> list[list[int]]:
        inputs = decode_inputs(model, **controls)
        tokens = []
        for _ in range(steps):
            result = program(**inputs)
            inputs = {**inputs, **result}
            tokens.append(np.array(result["carry"]["token"]).tolist())
        return tokens

    first, second, third = draw(3)
    assert draw(3) == [first, second, third]
    assert len({*first, *second, *third}) >= 5  # of 97
    assert draw(streams=np.array([1, 0], np.int32)) == [first[::-1]]
    assert draw(streams=np.array([1, 1], np.int32)) == [[first[1]] * 2]
    assert draw(seed=np.int32(1)) != [first]
    assert program.compile_count == 1
