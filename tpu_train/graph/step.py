"""The training step as one function of the state: forward, loss, backward, clipping, update.

Key idea: everything a step does is plain PyTorch on a dict of tensors, so one capture holds it all. Gradient
accumulation is a `loop` whose body is traced once, so the graph does not grow with it. On a mesh the step is what one
device does with its shards and its part of the batch; `Parametrization` has the collectives.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tpu_train.graph.capture import Tree, link_backward_to_source
from tpu_train.lowering.intrinsics import loop
from tpu_train.objectives.base import Batch, Objective
from tpu_train.optim.optimizer import Optimizer
from tpu_train.sharding.parametrization import Parametrization

Tensors = Mapping[str, Tensor]

# What a process may want of all, in rising order: a checkpoint, or a checkpoint and the end.
NOTHING, SAVE, STOP = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What a training step does besides loss and update.

    Attributes:
        grad_accumulation: microbatches per step.
        max_grad_norm: global norm above which gradients are scaled down; None: off.
        halt_on_nonfinite: after a step of non-finite loss or gradient no later step changes the weights either, so that
            the steps already under way when the host finds out do no harm.
        inject_inf_at_step: that step (from 1) has an infinite loss, to rehearse the above; None: off.
    """

    grad_accumulation: int = 1
    max_grad_norm: float | None = None
    halt_on_nonfinite: bool = True
    inject_inf_at_step: int | None = None


@dataclasses.dataclass(frozen=True)
class _Microbatch:
    loss: Tensor
    grads: tuple[Tensor, ...]
    metrics: Mapping[str, Tensor]


def make_train_step(
    model: nn.Module,
    objective: Objective,
    optimizer: Optimizer,
    decay: Mapping[str, bool],
    parallel: Parametrization,
    settings: StepSettings = StepSettings(),
) -> Callable[..., Tree]:
    """`step(state, batch, lr, ask=None) -> {"state": ..., "metrics": ...}`, to be captured.

    `state` holds `params`, `frozen`, `buffers` (name to tensor), `optimizer` (slot to name to tensor), `updates` (0-d
    int32, applied updates), `step` (0-d int32, finished steps), `seed` and `halted` (0-d bool). `batch` is a dict of
    tensors; with accumulation their leading dimension is the microbatches'. `lr` is 0-d float32, `ask` int32 [1],
    what this device's process wants of all: `NOTHING`, `SAVE` or `STOP`.

    Metrics: `loss` (mean over the step's valid targets), `grad_norm` (global, before clipping), `weight` (valid
    targets), `finite` (whether the update was sound), `asked` (the most that any process wants), and what the
    objective reports.

    Args:
        model: its parameters are replaced by the state's; may be on meta.
        decay: parameter name to whether weight decay applies.
        parallel: how the model is laid over devices.
    """

    def step(state: Tree, batch: Batch, lr: Tensor, ask: Tensor | None = None) -> Tree:
        model.train()
        # Before the loop: each microbatch is divided by the weight of them all, on all devices, so that no split of
        # the batch changes the sum, whatever the number of valid targets of a part.
        weight = parallel.data_sum(objective.weight(batch), "weight")
        number = state["step"] + 1
        scale = 1 / weight.clamp(min=1)
        if settings.inject_inf_at_step is not None:
            scale = torch.where(number == settings.inject_inf_at_step, torch.inf, scale)
        micro = _accumulate(model, objective, state, batch, scale, parallel, settings)
        grads = parallel.sum_gradients(dict(zip(sorted(state["params"]), micro.grads, strict=True)))
        loss = parallel.data_sum(micro.loss, "loss")
        grad_norm = parallel.global_norm(grads)
        if settings.max_grad_norm is not None:
            grads = clip(grads, grad_norm, settings.max_grad_norm)
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        sound = finite & ~state["halted"]
        new = _update(state, grads, optimizer, decay, lr, sound)
        new["step"] = number
        new["halted"] = state["halted"] | ~finite if settings.halt_on_nonfinite else state["halted"]
        sums = {name: parallel.data_sum(value, name) for name, value in micro.metrics.items()}
        metrics = {**objective.report(sums, weight)}
        metrics |= {"loss": loss, "grad_norm": grad_norm, "weight": weight, "finite": finite}
        if ask is not None:
            metrics["asked"] = parallel.largest(ask[0], "ask")
        return {"state": {**state, **new}, "metrics": metrics}

    return step


def make_eval_step(model: nn.Module, objective: Objective, parallel: Parametrization) -> Callable[..., Tree]:
    """`evaluate(params, frozen, buffers, batch) -> {"total": ..., "weight": ...}`: sums over the batch, no dropout."""

    def evaluate(params: Tensors, frozen: Tensors, buffers: Tensors, batch: Batch) -> Tree:
        model.eval()
        with parallel.running(model, {**params, **frozen}, buffers):
            result = objective.loss(model, batch)
        return {"total": parallel.data_sum(result.total, "loss"), "weight": parallel.data_sum(result.weight, "weight")}

    return evaluate


def clip(grads: Tensors, norm: Tensor, max_norm: float) -> dict[str, Tensor]:
    """Gradients scaled to a global norm of at most `max_norm`; the formula of torch.nn.utils.clip_grad_norm_."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return {name: grad * factor.to(grad.dtype) for name, grad in grads.items()}


def _accumulate(
    model: nn.Module,
    objective: Objective,
    state: Tree,
    batch: Batch,
    scale: Tensor,
    parallel: Parametrization,
    settings: StepSettings,
) -> _Microbatch:
    """Loss and gradients of the whole step's batch."""
    names, count = sorted(state["params"]), settings.grad_accumulation
    params = [state["params"][name] for name in names]
    if count == 1:
        return _micro_step(model, objective, state, params, batch, scale, parallel)

    fields = sorted(batch)
    metric_names: list[str] = []

    fixed = {part: sorted(state[part]) for part in ("frozen", "buffers")}

    def body(*tensors: Tensor) -> list[Tensor]:
        """Carry: gradients in float32. Sliced: the microbatch. Stacked: loss and metrics."""
        values = iter(tensors)
        sums = [next(values) for _ in names]
        micro_batch = {field: next(values) for field in fields}
        micro_params = [next(values) for _ in names]
        rest = {part: {name: next(values) for name in fixed[part]} for part in fixed}
        micro_state, micro_scale = {**state, **rest}, next(values)
        micro = _micro_step(model, objective, micro_state, micro_params, micro_batch, micro_scale, parallel)
        metric_names[:] = sorted(micro.metrics)
        carried = [total + grad for total, grad in zip(sums, micro.grads, strict=True)]
        return [*carried, micro.loss, *(micro.metrics[name] for name in metric_names)]

    zeros = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    slices = [batch[name] for name in fields]
    consts = [*params, *(state[part][name] for part in fixed for name in fixed[part]), scale]
    grads, stacked = loop(body, zeros, slices, consts)
    loss, *metrics = (values.sum(0) for values in stacked)
    return _Microbatch(loss, tuple(grads), dict(zip(metric_names, metrics, strict=True)))


def _micro_step(
    model: nn.Module,
    objective: Objective,
    state: Tree,
    params: Sequence[Tensor],
    batch: Batch,
    scale: Tensor,
    parallel: Parametrization,
) -> _Microbatch:
    names = sorted(state["params"])
    leaves = [p.detach().requires_grad_() for p in params]
    weights = {**dict(zip(names, leaves, strict=True)), **state["frozen"]}
    with torch.enable_grad():
        with parallel.running(model, weights, state["buffers"]) as dropped:
            result = objective.loss(model, batch)
            metrics = dict(result.metrics)
            if dropped:
                metrics["router_dropped"] = torch.stack(dropped).sum().float()
        loss = result.total * scale
        link_backward_to_source(loss)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    unused = [name for name, grad in zip(names, grads, strict=True) if grad is None]
    if unused:
        raise ValueError(f"the loss does not depend on {', '.join(unused)}; freeze them or use them")
    return _Microbatch(
        loss.detach(),
        tuple(grad for grad in grads if grad is not None),
        {name: value.detach() for name, value in metrics.items()},
    )


def _update(
    state: Tree, grads: Tensors, optimizer: Optimizer, decay: Mapping[str, bool], lr: Tensor, sound: Tensor
) -> dict[str, Tree]:
    """New parameters, optimizer state and number of updates; the old ones where the step is not sound."""
    count = state["updates"] + 1
    params: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in state["optimizer"]}
    for name, param in state["params"].items():
        old = {slot: values[name] for slot, values in state["optimizer"].items()}
        new_param, new = optimizer.update(param, grads[name], old, lr=lr, count=count, decay=decay[name])
        params[name] = torch.where(sound, new_param, param)
        for slot, value in new.items():
            slots[slot][name] = torch.where(sound, value, old[slot])
    return {"params": params, "optimizer": slots, "updates": torch.where(sound, count, state["updates"])}
