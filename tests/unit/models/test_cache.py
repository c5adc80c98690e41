"""Decoding with the cache equals recomputation without."""

import pytest
import torch
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.models.model_sizes import small_model
from tpu_train.models.cache import KVCache

CASES = pytest.mark.parametrize("family", ["llama3", "qwen3"])


def arange(start: int, stop: int, rows: int = 1) -> torch.Tensor:
    return torch.arange(start, stop).expand(rows, stop - start)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def prompt():
    return torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(5))


@CASES
def test_greedy_decoding_equals_recomputation(family, prompt):
    model = small_model(family)
    cache = model.empty_cache(batch_size=2, num_slots=16)
    tokens, logits = prompt, model(prompt, arange(0, 6, 2), cache=cache)
    for length in range(6, 16):
        recomputed = model(tokens, arange(0, length, 2))
        close(logits[:, -1], recomputed[:, -1])
        assert torch.equal(logits[:, -1].argmax(-1), recomputed[:, -1].argmax(-1))
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        logits = model(tokens[:, -1:], arange(length, length + 1, 2), cache=cache)
    assert cache.cursor == 16


def test_prompt_in_pieces_equals_prompt_at_once(prompt):
    model, cache = small_model(), small_model().empty_cache(batch_size=2, num_slots=9)
    pieces = [model(prompt[:, a:b], arange(a, b, 2), cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
    close(torch.cat(pieces, dim=1), model(prompt, arange(0, 6, 2)))


def test_left_padding_by_segment_equals_no_padding(prompt):
    model = small_model()
    padding = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    cache = model.empty_cache(batch_size=2, num_slots=8)
    model(prompt, positions, padding, cache)
    step = model(torch.tensor([[11], [12]]), torch.tensor([[6], [4]]), torch.ones(2, 1, dtype=torch.int64), cache)
    for row, start in ((0, 0), (1, 2)):
        tokens = torch.cat([prompt[row : row + 1, start:], torch.tensor([[11 + row]])], dim=1)
        close(step[row, -1], model(tokens, arange(0, tokens.shape[1]))[0, -1])


def test_forward_replaces_tensors_and_mutates_none(prompt):
    model = small_model()
    cache = model.empty_cache(batch_size=2, num_slots=8)
    before = (cache.keys, cache.values, cache.segment_ids)
    copies = [tensor.clone() for tensor in (*before[0], *before[1], before[2])]
    model(prompt, arange(0, 6, 2), torch.ones_like(prompt), cache)
    assert all(torch.equal(a, b) for a, b in zip(copies, (*before[0], *before[1], before[2]), strict=True))
    assert cache.keys is not before[0]
    assert cache.keys[2].abs().sum() > 0
    assert cache.segment_ids.tolist() == [[1] * 6 + [0] * 2] * 2


@CASES
def test_one_captured_step_serves_every_position(family, prompt):
    model = small_model(family)

    def step(weights, token, position, state):
        cache = KVCache(*state)
        logits = functional_call(model, weights, (token, position), {"cache": cache})
        return logits, (cache.keys, cache.values, cache.segment_ids, cache.cursor)

    weights = dict(model.named_parameters())
    cache = model.empty_cache(batch_size=2, num_slots=12)
    model(prompt, arange(0, 6, 2), cache=cache)
    state = (cache.keys, cache.values, cache.segment_ids, torch.tensor(cache.cursor))
    graph = make_fx(step, tracing_mode="fake")(weights, prompt[:, :1], arange(6, 7, 2), state)
    ops = {n.target for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    assert not [op for op in ops if op._schema.is_mutable]

    tokens = prompt
    for length in range(6, 11):
        token = torch.randint(97, (2, 1), generator=torch.Generator().manual_seed(length))
        tokens = torch.cat([tokens, token], dim=1)
        logits, state = graph(weights, token, arange(length, length + 1, 2), state)
        close(logits[:, -1], model(tokens, arange(0, length + 1, 2))[:, -1])
    assert state[-1].item() == 11


def test_cache_follows_dtype_and_device():
    model = small_model().bfloat16()
    cache = model.empty_cache(batch_size=1, num_slots=4, dtype=torch.bfloat16)
    assert model(torch.ones(1, 2, dtype=torch.int64), arange(0, 2), cache=cache).dtype == torch.bfloat16
    assert model.empty_cache(batch_size=1, num_slots=4, device="meta").values[0].is_meta


def test_too_many_tokens_are_refused(prompt):
    model = small_model()
    cache = model.empty_cache(batch_size=2, num_slots=8)
    model(prompt, arange(0, 6, 2), cache=cache)
    with pytest.raises(ValueError, match="6 tokens do not fit after 6 of 8 slots"):
        model(prompt, arange(6, 12, 2), cache=cache)
