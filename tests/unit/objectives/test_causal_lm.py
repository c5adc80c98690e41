"""The causal LM objective against PyTorch's mean cross-entropy and hand-computed weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpu_train.objectives.causal_lm import CausalLm


class Table(nn.Module):
    """Logits by token, and a record of what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 10))
        self.seen: tuple[Tensor, Tensor | None] | None = None

    def forward(self, tokens: Tensor, positions: Tensor, segment_ids: Tensor | None) -> Tensor:
        self.seen = positions, segment_ids
        return self.table[tokens]


BATCH = {"tokens": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": torch.tensor([[2, 3, -100], [-100, -100, -100]])}


def test_sum_over_weight_is_pytorchs_mean_over_valid_labels() -> None:
    model = Table()
    result = CausalLm().loss(model, BATCH)
    mean = F.cross_entropy(model.table[BATCH["tokens"]].flatten(0, 1), BATCH["labels"].flatten())
    assert result.weight == 2
    torch.testing.assert_close(result.total / result.weight, mean)


def test_a_batch_without_valid_labels_has_zero_loss_and_gradient() -> None:
    model = Table()
    batch = {**BATCH, "labels": torch.full((2, 3), -100)}
    result = CausalLm().loss(model, batch)
    result.total.backward()
    assert result.weight == 0
    assert result.total == 0
    assert model.table.grad is not None
    assert not model.table.grad.any()


def test_positions_default_to_the_index_in_the_row_and_are_passed_on() -> None:
    model = Table()
    CausalLm().loss(model, BATCH)
    assert model.seen is not None
    assert model.seen[0].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert model.seen[1] is None
    positions, segments = torch.tensor([[0, 1, 0], [0, 1, 2]]), torch.tensor([[0, 0, 1], [0, 0, 0]])
    CausalLm().loss(model, {**BATCH, "positions": positions, "segment_ids": segments})
    assert model.seen[0] is positions
    assert model.seen[1] is segments
