"""A model over a mesh, as the training step sees it: shards in, usable weights out, gradients summed.

Key idea: on one device everything here is the identity, so there is one step for every layout. What is summed inside
the backward (the reduce-scatter over `fsdp`) comes from DTensor's derivative; what can wait until all microbatches are
through (copies of a parameter, the replica axis) is summed once a step.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module

from tpu_train.sharding.collectives import all_reduce, draws_split
from tpu_train.sharding.expert_parallel import over_experts
from tpu_train.sharding.layout import REPLICATE_BELOW, Layout, lay_out_model
from tpu_train.sharding.mesh import AXES, DATA_AXES, ONE_DEVICE, MeshShape
from tpu_train.sharding.plan import NO_PLAN, ModuleRule, Plan, find_rules
from tpu_train.sharding.simple_fsdp import MixedPrecision, gather_parameter
from tpu_train.sharding.tensor_parallel import (
    WRAPPERS,
    own_rows,
    select_heads,
    wrapped_forwards,
)
from tpu_train.sharding.vocabulary import LinearLogsumexp, linear_cross_entropy, vocabulary_cross_entropy

Tensors = Mapping[str, Tensor]


class Parametrization:
    """How a model's parameters become weights, and their gradients sums, on a mesh.

    Args:
        model: on any device.
        precision: dtypes of weights and of sums.
        mesh: its shape; one device by default.
        plan: the model's sharding plan.
        replicate_below: see `layout.lay_out`.
        expert_bound: see `expert_parallel.over_experts`.

    Raises:
        ValueError: the plan does not fit the model or the mesh.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: MixedPrecision,
        mesh: MeshShape = ONE_DEVICE,
        plan: Plan = NO_PLAN,
        replicate_below: int = REPLICATE_BELOW,
        expert_bound: float = 2.0,
    ) -> None:
        self.mesh = mesh
        self.precision = precision
        self.layouts = lay_out_model(model, mesh, plan, replicate_below)
        self._plan = plan
        rules = find_rules(plan.modules, [path for path, _ in model.named_modules()])
        self.regions: dict[str, ModuleRule] = {path: rule for path, rule in rules.items() if self._applies(rule)}
        self._expert_bound = expert_bound
        self._data_axes = mesh.real(DATA_AXES)

    @contextlib.contextmanager
    def running(self, model: nn.Module, shards: Tensors, buffers: Tensors) -> Iterator[list[Tensor]]:
        """Inside, the model computes with the weights of these shards, laid over the mesh.

        The list gets the number of tokens that found no room with their expert, of each layer that was called.
        """
        dropped: list[Tensor] = []
        wrappers = {path: self._wrapper(rule, dropped) for path, rule in self.regions.items()}
        weights = {name: self._weight(self.layouts[name], shard) for name, shard in shards.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_reparametrize_module(model, {**weights, **buffers}, tie_weights=True))
            stack.enter_context(wrapped_forwards(model, wrappers))
            stack.enter_context(draws_split(self._data_axes, self.mesh.real(("tensor",))))
            yield dropped

    @property
    def splits_vocabulary(self) -> bool:
        """Whether each device has logits of a part of the vocabulary."""
        return self.mesh.tensor > 1 and self._plan.vocabulary is not None

    def cross_entropy(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """Sum over rows, of the logits [R, V] that the model gives on this mesh; see `objectives.causal_lm`."""
        if not self.splits_vocabulary:
            return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
        return vocabulary_cross_entropy(logits, labels, ignore_index, self._vocab_size(), self.mesh)

    def linear_cross_entropy(self, kernel: LinearLogsumexp) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
        """The same of features [R, D] and the output weight, by a kernel that makes no logits."""

        def total(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
            vocab_size = self._vocab_size() if self.splits_vocabulary else weight.shape[0]
            return linear_cross_entropy(
                x, weight, labels, ignore_index, kernel=kernel, vocab_size=vocab_size, mesh=self.mesh
            )

        return total

    def data_sum(self, x: Tensor, label: str) -> Tensor:
        """The sum over all parts of the batch."""
        return all_reduce(x, self._data_axes, self.mesh.data_size, label)

    def sum_gradients(self, grads: Tensors) -> dict[str, Tensor]:
        """The gradients of the whole batch, of each device's shards, after the backward of all its microbatches."""
        return {name: self._sum_gradient(self.layouts[name], grad) for name, grad in grads.items()}

    def global_norm(self, grads: Tensors) -> Tensor:
        """Euclidean norm of all gradients together, 0-d float32, each element counted once."""
        squares: dict[tuple[str, ...], list[Tensor]] = {}
        for name, grad in grads.items():
            squares.setdefault(self.layouts[name].split_over, []).append(grad.float().square().sum())
        sums = [
            all_reduce(torch.stack(values).sum(), axes, self.mesh.size_of(axes), "grad_norm")
            for axes, values in squares.items()
        ]
        return torch.stack(sums).sum().sqrt()

    def largest(self, x: Tensor, label: str) -> Tensor:
        """The largest value on any device."""
        return all_reduce(x, self.mesh.real(AXES), self.mesh.size, label, "max")

    def _vocab_size(self) -> int:
        """Columns of the logits on all devices together, without padding."""
        assert self._plan.vocabulary is not None
        return self.layouts[self._plan.vocabulary].shape[0]

    def _applies(self, rule: ModuleRule) -> bool:
        return self.mesh.expert > 1 if rule == "experts" else self.mesh.tensor > 1

    def _wrapper(self, rule: ModuleRule, dropped: list[Tensor]) -> Callable[[nn.Module, str], Callable[..., Any]]:
        if rule == "experts":
            return lambda module, path: over_experts(module, path, self.mesh, self._expert_bound, dropped)
        return lambda module, path: WRAPPERS[rule](module, path, self.mesh)

    def _weight(self, layout: Layout, shard: Tensor) -> Tensor:
        weight = gather_parameter(shard, layout, self.precision)
        if layout.selection is not None:
            weight = select_heads(weight, layout.selection, self.mesh)
        return weight

    def _sum_gradient(self, layout: Layout, grad: Tensor) -> Tensor:
        if layout.summed_over:
            wide = grad.to(self.precision.reduce)
            total = all_reduce(wide, layout.summed_over, self.mesh.size_of(layout.summed_over), layout.name)
            grad = total.to(grad.dtype)
        dim = layout.tensor_dim
        if dim is not None and layout.stored[dim] != layout.shape[dim]:
            grad = grad * self._existing(layout, dim, grad).to(grad.dtype)
        return grad

    def _existing(self, layout: Layout, dim: int, grad: Tensor) -> Tensor:
        """1 where a gradient belongs to the parameter, 0 where to what it is padded with over `tensor`."""
        rows = own_rows(layout.shape[dim], grad.shape[dim], layout.axes[dim], self.mesh)
        return rows.reshape([-1 if i == dim else 1 for i in range(grad.ndim)])
