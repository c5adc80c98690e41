"""Who sees whom: causality, segments, and what the core is told."""

import pytest
import torch

from tests.unit.models.model_sizes import small_model
from tpu_train.models.attention import ScaledDotProductAttention

FAMILIES = ["llama3", "qwen3"]


@pytest.fixture
def tokens():
    return torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("segmented", [False, True])
def test_later_token_changes_no_earlier_logits(family, segmented, tokens):
    model, positions = small_model(family), torch.arange(20).expand(2, 20)
    segment_ids = torch.ones(2, 20, dtype=torch.int64) if segmented else None
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 97
    before, after = model(tokens, positions, segment_ids), model(changed, positions, segment_ids)
    assert torch.equal(before[:, :12], after[:, :12])
    assert (before[:, 12:] != after[:, 12:]).any(-1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_documents_alone(family, tokens):
    model, lengths = small_model(family), (7, 1, 12)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, 20)
    segment_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand(2, 20)
    packed = model(tokens, positions, segment_ids)
    alone = [model(part, torch.arange(part.shape[1]).expand_as(part)) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)


def test_each_row_has_its_own_segments(tokens):
    model, positions = small_model(), torch.arange(20).expand(2, 20)
    segment_ids = torch.stack([torch.arange(20) // 10, torch.arange(20) // 4])
    both = model(tokens, positions, segment_ids)
    rows = [model(tokens[i : i + 1], positions[:1], segment_ids[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(both, torch.cat(rows), rtol=1e-5, atol=1e-5)


def test_equal_segments_that_are_apart_see_each_other(tokens):
    """A segment is its id, not a run of tokens: padding in between does not split it."""
    model, segment_ids = small_model(), torch.zeros(2, 20, dtype=torch.int64)
    segment_ids[:, 5:8] = 9
    kept = torch.cat([torch.arange(5), torch.arange(8, 20)])
    positions = torch.arange(20).expand(2, 20)
    expected = model(tokens[:, kept], positions[:, kept])
    torch.testing.assert_close(model(tokens, positions, segment_ids)[:, kept], expected, rtol=1e-5, atol=1e-5)


def test_core_equals_a_hand_written_softmax():
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    key_of_query = torch.tensor([0, 0, 0, 1, 1, 1])
    scores = query @ key[:, key_of_query].transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ value[:, key_of_query]
    torch.testing.assert_close(ScaledDotProductAttention()(query, key, value), expected, rtol=1e-5, atol=1e-5)


def test_core_gets_no_mask_without_segments_and_cache(monkeypatch, tokens):
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: (calls.append((kwargs["is_causal"], kwargs["attn_mask"])), original(*args, **kwargs))[
            1
        ],
    )
    model, positions = small_model(num_layers=1), torch.arange(20).expand(2, 20)
    model(tokens, positions)
    model(tokens, positions, torch.zeros_like(tokens))
    assert calls[0] == (True, None)
    assert calls[1][0] is False
    assert calls[1][1].dtype == torch.bool
