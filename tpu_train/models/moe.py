"""Mixture-of-experts feed-forward layer: top-k router, dropless dispatch, stacked experts.

Key idea: assignments of tokens to experts are sorted by expert, so that each expert multiplies a contiguous group of
rows, whatever its size, and none is dropped. Rows are read at the sorting permutation on the way in and at its inverse
on the way out, in the backward as well: nothing is ever scattered, and no shape depends on a value.

What the routers did reaches the objective through `collect_routing`, opened around the call of the model; the layer
keeps nothing. The sums depend on the layer's input only, so a forward that is run again for the backward, after the
collector was closed, computes the same and is not counted twice.

Letters of its own: R rows (B * S tokens), A = R * top_k assignments, E experts.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Routing:
    """What one layer's router did with the rows of one call, all of them, those without a target too.

    Attributes:
        counts: int32 [E], assignments that each expert computed.
        probabilities: float32 [E], sums over the rows of the router's probabilities; has a gradient.
        num_rows: R.
        top_k: assignments of a row.
        aux_loss_coef: what the load-balancing loss is multiplied by; 0.0: off.
    """

    counts: Tensor
    probabilities: Tensor
    num_rows: int
    top_k: int
    aux_loss_coef: float


_collected: contextvars.ContextVar[list[Routing] | None] = contextvars.ContextVar("collected_routing", default=None)


@contextlib.contextmanager
def collect_routing() -> Iterator[list[Routing]]:
    """Inside, every MoE layer that is called appends its `Routing` to the list; run the backward outside."""
    found: list[Routing] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def load_balancing_loss(layers: Sequence[Routing]) -> Tensor:
    """Auxiliary loss of Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6), 0-d float32.

    E times the sum over experts of the fraction of assignments per row times the mean probability, both over the rows
    of all layers together, as `load_balancing_loss_func` of `transformers` has it. It is top_k where all are balanced.
    """
    num_rows = sum(layer.num_rows for layer in layers)
    counts = torch.stack([layer.counts for layer in layers]).sum(0).float()
    probabilities = torch.stack([layer.probabilities for layer in layers]).sum(0)
    return len(counts) * (counts / num_rows * (probabilities / num_rows)).sum()


class Assignments(NamedTuple):
    """A router's choice.

    Attributes:
        experts: int [R, top_k], most probable first.
        weights: float32 [R, top_k], what each expert's output is multiplied by.
        counts: int32 [E], assignments per expert.
        probabilities: float32 [R, E].
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    probabilities: Tensor


class Router(nn.Module):
    """Chooses the `top_k` most probable experts of each row; of equally probable ones those of lower index."""

    def __init__(self, dim: int, num_experts: int, top_k: int, norm_topk_prob: bool, init_std: float):
        """Makes the weight [E, D].

        Args:
            dim: D.
            num_experts: E.
            top_k: experts per row.
            norm_topk_prob: whether the weights of a row's experts are divided by their sum.
            init_std: standard deviation of initial weights.
        """
        super().__init__()
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew, in place."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, x: Tensor) -> Assignments:
        """The choice for rows [R, D]; logits and softmax are float32 (or wider), whatever the dtype of `x`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        probabilities = F.linear(x.to(wide), self.weight.to(wide)).softmax(-1)
        # A stable sort and not topk, which promises nothing about ties.
        experts = (-probabilities.detach()).sort(dim=-1, stable=True).indices[:, : self.top_k]
        # Chosen by comparison, because a gather's derivative is a scatter.
        chosen = experts[..., None] == torch.arange(probabilities.shape[1], device=x.device)
        weights = torch.where(chosen, probabilities[:, None], 0.0).sum(-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return Assignments(experts, weights, chosen.sum((0, 1), dtype=torch.int32), probabilities)


class GroupedProduct(nn.Module):
    """Each row times the matrix of its group: the reference, which multiplies all rows with all matrices."""

    def forward(self, x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
        """Multiplies consecutive groups of rows.

        Args:
            x: [A, in], the rows of group 0 first.
            weight: [E, out, in].
            group_sizes: int32 [E], rows per group, any of them 0; their sum is at most A.

        Returns:
            [A, out]; zeros in rows behind the last group.
        """
        ends = group_sizes.cumsum(0)
        group = (torch.arange(len(x), device=x.device)[:, None] >= ends).sum(1, keepdim=True)
        out = x.new_zeros(len(x), weight.shape[1])
        for i, matrix in enumerate(weight.unbind(0)):
            out = torch.where(group == i, F.linear(x, matrix), out)
        return out


class Experts(nn.Module):
    """Gated feed-forward layers (see `FeedForward`), one per group of rows, their matrices stacked."""

    def __init__(self, num_experts: int, dim: int, ffn_dim: int, init_std: float, down_init_std: float):
        """Makes `gate` and `up` [E, F, D] and `down` [E, D, F]; the spread of the latter is an argument of its own."""
        super().__init__()
        self.init_std = init_std
        self.down_init_std = down_init_std
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        if not self.gate.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew, in place."""
        nn.init.normal_(self.gate, std=self.init_std)
        nn.init.normal_(self.up, std=self.init_std)
        nn.init.normal_(self.down, std=self.down_init_std)

    def forward(self, x: Tensor, group_sizes: Tensor, product: nn.Module) -> Tensor:
        """Maps rows sorted by expert, [A, D] to [A, D]; `product` is as `GroupedProduct`."""
        hidden = F.silu(product(x, self.gate, group_sizes)) * product(x, self.up, group_sizes)
        return product(hidden, self.down, group_sizes)


class MoeFeedForward(nn.Module):
    """Sums each row's experts, weighted by the router; see the top of the file."""

    def __init__(self, router: nn.Module, experts: nn.Module, core: nn.Module, aux_loss_coef: float = 0.0):
        """Takes the children.

        Args:
            router: as `Router`.
            experts: as `Experts`.
            core: as `GroupedProduct`.
            aux_loss_coef: passed on with the `Routing`; the layer's output does not depend on it.
        """
        super().__init__()
        self.router = router
        self.experts = experts
        self.core = core
        self.aux_loss_coef = aux_loss_coef

    @property
    def top_k(self) -> int:
        """Experts per row."""
        return cast(int, self.router.top_k)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, S, D] to [B, S, D]."""
        rows = x.flatten(0, 1)
        chosen: Assignments = self.router(rows)
        num_rows, top_k = chosen.experts.shape
        self._record(chosen, num_rows, top_k)
        permutation = chosen.experts.flatten().sort(stable=True).indices
        inverse = permutation.sort().indices
        grouped = permute(rows, permutation, inverse, top_k)
        grouped = self.experts(grouped, chosen.counts, self.core)
        outputs = unpermute(grouped, permutation, inverse).unflatten(0, (num_rows, top_k))
        return (outputs * chosen.weights[..., None]).sum(1).to(x.dtype).view_as(x)

    def _record(self, chosen: Assignments, num_rows: int, top_k: int) -> None:
        # Computed with and without a collector, so that remat saves the same tensors when it runs the forward again.
        sums = chosen.probabilities.sum(0)
        found = _collected.get()
        if found is not None:
            found.append(Routing(chosen.counts, sums, num_rows, top_k, self.aux_loss_coef))


def permute(x: Tensor, permutation: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Row of each assignment in the order of the permutation: [R, D] to [A, D].

    Args:
        x: [R, D]; its row r belongs to the assignments r * top_k to (r + 1) * top_k - 1.
        permutation: int [A], assignments by their new places.
        inverse: int [A], new places by assignments.
        top_k: A / R.
    """
    return _Permute.apply(x, permutation, inverse, top_k)  # type: ignore[return-value]


def unpermute(x: Tensor, permutation: Tensor, inverse: Tensor) -> Tensor:
    """Rows [A, D] back in the order of the assignments; arguments as of `permute`."""
    return _Unpermute.apply(x, permutation, inverse)  # type: ignore[return-value]


class _Permute(torch.autograd.Function):
    """Its derivative reads at the inverse and adds the `top_k` gradients of a row; PyTorch's own would scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Tensor, inverse: Tensor, top_k: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, permutation // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    """Its derivative reads at the permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(permutation)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (permutation,) = ctx.saved_tensors
        return grad.index_select(0, permutation), None, None
