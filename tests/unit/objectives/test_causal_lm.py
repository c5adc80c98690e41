"""The causal LM objective against PyTorch's mean cross-entropy and hand-computed weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.models.model_sizes import small_model
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


def moe_batch() -> dict[str, Tensor]:
    tokens = torch.randint(97, (4, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[3, 2:] = -100
    return {"tokens": tokens, "labels": labels}


def test_load_balancing_loss_is_added_in_training_times_coefficient_and_weight() -> None:
    losses = {}
    for coef in (0.0, 0.1):
        model = small_model("qwen3_moe", router_aux_loss_coef=coef)
        losses[coef] = CausalLm().loss(model.train(), moe_batch())
        assert CausalLm().loss(model.eval(), moe_batch()).total == losses[0.0].total
    off, on = losses[0.0], losses[0.1]
    assert on.weight == off.weight == 26
    assert (on.total - off.total).item() == pytest.approx(0.1 * on.metrics["router_aux_loss"].item(), rel=1e-4)
    assert on.metrics["router_aux_loss"] == off.metrics["router_aux_loss"]


def test_router_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    model, batch = small_model("qwen3_moe").train(), moe_batch()
    whole = CausalLm().loss(model, batch)
    parts = [CausalLm().loss(model, {name: x[rows] for name, x in batch.items()}) for rows in ([0, 1], [2, 3])]
    sums = {name: torch.stack([part.metrics[name] for part in parts]).sum(0) for name in whole.metrics}
    assert torch.equal(sums["router_counts"], whole.metrics["router_counts"])
    assert whole.metrics["router_counts"].sum(1).tolist() == [4 * 8 * 2] * 3
    report, expected = CausalLm().report(sums, whole.weight), CausalLm().report(whole.metrics, whole.weight)
    assert report.keys() == expected.keys()
    for name in ("router_load_max", "router_load_min", "router_dropped"):
        assert torch.equal(report[name], expected[name]), name
    # Each part has a load-balancing loss of its own, weighted by its labels.
    assert report["router_aux_loss"] == sums["router_aux_loss"] / 26


def test_reported_loads_are_those_of_hand_computed_counts() -> None:
    sums = {
        "router_counts": torch.tensor([[8.0, 0, 0, 0], [2, 2, 2, 2], [4, 2, 1, 1]]),
        "router_aux_loss": torch.tensor(30.0),
        "router_dropped": torch.tensor(0.0),
    }
    report = {name: value.item() for name, value in CausalLm().report(sums, torch.tensor(10.0)).items()}
    assert report == {
        "router_aux_loss": 3.0,
        "router_load_max": pytest.approx((4 + 1 + 2) / 3),
        "router_load_min": pytest.approx((0 + 1 + 0.5) / 3),
        "router_dropped": 0.0,
    }
    assert CausalLm().report({}, torch.tensor(10.0)) == {}
