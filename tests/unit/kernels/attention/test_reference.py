"""The definition itself: against the models' attention, and against cases done by hand."""

import numpy as np
import pytest
import torch

from tpu_train.kernels.attention.cases import CASES, SMALL, Case
from tpu_train.kernels.attention.reference import reference_attention
from tpu_train.models.attention import ScaledDotProductAttention


@pytest.mark.parametrize("case", [case for case in SMALL if case.window is None and case.dtype == "float32"], ids=str)
def test_without_a_window_it_is_the_models_attention(case: Case) -> None:
    query, key, value, _ = (torch.from_numpy(x) for x in case.arrays())
    segments = case.segment_ids()
    ids = None if segments is None else torch.from_numpy(segments)
    model = ScaledDotProductAttention()(query, key, value, query_segment_ids=ids, key_segment_ids=ids)
    torch.testing.assert_close(reference_attention(query, key, value, ids, ids), model)


def test_equal_scores_give_the_mean_of_the_tokens_seen() -> None:
    query, key = torch.zeros(1, 2, 5, 8), torch.zeros(1, 1, 5, 8)
    value = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])[:, None].expand(1, 1, 5, 8)
    ids = torch.tensor([[1, 1, 1, 2, 2]])

    def seen(ids: torch.Tensor | None, window: int | None) -> list[float]:
        return reference_attention(query, key, value, ids, ids, window=window)[0, 1, :, 0].tolist()

    assert seen(None, None) == pytest.approx([1, 1.5, 7 / 3, 15 / 4, 31 / 5])
    assert seen(None, 2) == pytest.approx([1, 1.5, 3, 6, 12])
    assert seen(None, 1) == pytest.approx([1, 2, 4, 8, 16])
    assert seen(ids, None) == pytest.approx([1, 1.5, 7 / 3, 8, 12])
    assert seen(ids, 2) == pytest.approx([1, 1.5, 3, 8, 12])


def test_consecutive_query_heads_share_a_key_head() -> None:
    value = torch.arange(2.0).reshape(1, 2, 1, 1).expand(1, 2, 4, 8)
    out = reference_attention(torch.zeros(1, 6, 4, 8), torch.zeros(1, 2, 4, 8), value)
    assert out[0, :, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_cases_are_whole_and_have_names_of_their_own() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
    for case in CASES:
        segments = case.segment_ids()
        if segments is not None:
            assert segments.shape == (case.batch, case.seq_len)
            assert np.all(np.diff(segments) >= 0)
    covered = {(case.num_heads, case.num_kv_heads) for case in CASES}
    assert {(32, 8), (8, 2), (4, 4)} <= covered
