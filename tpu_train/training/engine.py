"""A run's programs and its state: initialize, train step, evaluate, over one set of buffers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tpu_train.config.parallelism_schema import SingleParallelism
from tpu_train.config.problems import ConfigError
from tpu_train.config.schema import Run
from tpu_train.execution.checkpoint_io import restore
from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import Tree, capture
from tpu_train.graph.initialization import capture_initialization
from tpu_train.graph.step import StepSettings, make_eval_step, make_train_step
from tpu_train.kernels.build import loss_kernel, swaps
from tpu_train.kernels.choose import choose
from tpu_train.optim.build import build_optimizer, decay_mask
from tpu_train.sharding.layout import Layout
from tpu_train.sharding.mesh import MeshShape
from tpu_train.sharding.parametrization import Parametrization
from tpu_train.sharding.plan import NO_PLAN, Plan
from tpu_train.sharding.plans import PLANS
from tpu_train.sharding.rules import mesh_shape
from tpu_train.sharding.simple_fsdp import MixedPrecision
from tpu_train.training.build import DTYPES, build_model, build_objective
from tpu_train.training.leaves import BatchLayout, axes_of_parameter, leaf_axes
from tpu_train.training.weights import WeightSpec


class Engine:
    """The programs of a run in `mode=graph`, over the mesh that the run asks for.

    Args:
        run: the configuration.
        runtime: the devices.
        model: the module to train, on any device, the values of its parameters unused; None builds the configured one.
        plan: its sharding plan; None: that of the configured model, or none for a module given.

    Raises:
        ConfigError: a kernel cannot run on these devices.
        ValueError: the mesh does not fit the devices, or the plan the model.
    """

    def __init__(self, run: Run, runtime: Runtime, model: nn.Module | None = None, plan: Plan | None = None) -> None:
        self._run = run
        self._runtime = runtime
        if plan is None:
            plan = PLANS[run.model.family](run.model) if model is None else NO_PLAN
        self.kernels = choose(run, runtime.platform)
        if self.kernels.problems:
            raise ConfigError(self.kernels.problems)
        self.model = build_model(run.model, swaps=swaps(self.kernels)) if model is None else model
        self._optimizer = build_optimizer(run.optimizer)
        self.mesh = mesh_shape(run, len(runtime.devices), runtime.num_slices)
        self.parallel = build_parametrization(run, self.model, self.mesh, plan)
        kernel = loss_kernel(self.kernels)
        fused = None if kernel is None else self.parallel.linear_cross_entropy(kernel)
        self._objective = build_objective(run.objective, self.parallel.cross_entropy, fused)
        self._batches = BatchLayout(self._objective.sequence_dims)
        self._microbatches = BatchLayout(self._objective.sequence_dims, run.training.grad_accumulation)
        layouts = self.parallel.layouts
        self.placement = runtime.placement(self.mesh, leaf_axes(layouts, self._microbatches))
        decay = decay_mask(self.model, run.optimizer.no_decay)
        settings = StepSettings(
            grad_accumulation=run.training.grad_accumulation,
            max_grad_norm=run.training.max_grad_norm,
            halt_on_nonfinite=run.training.on_nan == "stop",
            inject_inf_at_step=run.training.inject_inf_at_step,
        )
        step = make_train_step(self.model, self._objective, self._optimizer, decay, self.parallel, settings)
        evaluate = make_eval_step(self.model, self._objective, self.parallel)
        lowering = LoweringOptions(run.precision.matmul, run.mode.check_graph)
        passes = [*run.mode.passes, *(["reshard_after_forward_pass"] if reshards(run) else [])]
        self.train_step = Program(
            "train_step",
            lambda inputs: capture("train_step", step, inputs, passes, self.mesh),
            lowering,
            placement=self.placement,
            donated=("state",),
            key_inputs=("state.seed", "state.step"),
        )
        self.evaluate = Program(
            "evaluate",
            lambda inputs: capture("evaluate", evaluate, inputs, run.mode.passes, self.mesh),
            lowering,
            placement=dataclasses.replace(self.placement, axes_of=leaf_axes(layouts, self._batches)),
        )
        stored = {name: layout.stored for name, layout in layouts.items()}
        self.initialize = Program(
            "initialize",
            lambda _: capture_initialization(self.model, DTYPES[run.precision.param], stored),
            lowering,
            # Its outputs are the parameters themselves.
            placement=dataclasses.replace(self.placement, axes_of=lambda name: axes_of_parameter(layouts, name)),
            whole=True,
            key_inputs=("seed",),
        )

    def initial_state(self) -> Tree:
        """The state before the first step, on the devices; see `graph.step.make_train_step` for its parts."""
        params = self.initialize(**self.placement.put({"seed": np.int32(self._run.training.seed)}))
        return self.state_from(params)

    def place(self, load: Callable[[str], np.ndarray]) -> Tree:
        """All parameters on the devices, one after the other: the host holds one at a time.

        Args:
            load: full name to the whole parameter, in the dtype that it is to have.
        """
        return {name: self._place(layout, load(name)) for name, layout in self.parallel.layouts.items()}

    def _place(self, layout: Layout, value: np.ndarray) -> Any:
        missing = [(0, stored - size) for size, stored in zip(value.shape, layout.stored, strict=True)]
        padded = np.pad(value, missing) if any(after for _, after in missing) else value
        return self.placement.put({layout.name: padded}, "state.params")[layout.name]

    def state_from(self, params: Tree) -> Tree:
        """The state before the first step with these weights, device arrays by full name as `place` gives them.

        Parameters of the module that do not require gradients are frozen: no gradient, no moments.
        """
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                raise ValueError(f"buffer {name} has no values on the meta device; build the model on the CPU")
        trainable = self._trainable()
        trained = {name: value for name, value in params.items() if name in trainable}
        numbers = {
            "buffers": {name: buffer.numpy() for name, buffer in self.model.named_buffers()},
            "seed": np.int32(self._run.training.seed),
            "updates": np.int32(0),
            "step": np.int32(0),
            "halted": np.bool_(False),
        }
        return {
            "params": trained,
            "frozen": {name: value for name, value in params.items() if name not in trainable},
            "optimizer": {slot: self._runtime.zeros_like(trained) for slot in self._optimizer.slots},
            **self.placement.put(numbers, "state"),
        }

    def state_spec(self) -> Tree:
        """Shapes and dtypes of the state as it is stored on the mesh."""
        dtype = self._run.precision.param
        specs = {name: WeightSpec(layout.stored, dtype) for name, layout in self.parallel.layouts.items()}
        trainable = self._trainable()
        trained = {name: spec for name, spec in specs.items() if name in trainable}
        buffers = {name: buffer.numpy() for name, buffer in self.model.named_buffers()}
        return {
            "params": trained,
            "frozen": {name: spec for name, spec in specs.items() if name not in trainable},
            "optimizer": dict.fromkeys(self._optimizer.slots, trained),
            "buffers": {name: WeightSpec(value.shape, value.dtype.name) for name, value in buffers.items()},
            **{name: WeightSpec((), "int32") for name in ("seed", "updates", "step")},
            "halted": WeightSpec((), "bool"),
        }

    def padded_shapes(self) -> dict[str, list[int]]:
        """The shapes of the parameters that are stored longer than they are."""
        layouts = self.parallel.layouts.values()
        return {layout.name: list(layout.shape) for layout in layouts if layout.stored != layout.shape}

    def restore(self, path: Path) -> Tree:
        """The state of a checkpoint, whatever mesh saved it."""
        return restore(path, self.state_spec(), lambda name: self.placement.sharding(f"state.{name}"))

    def _trainable(self) -> set[str]:
        return {name for name, param in self.model.named_parameters() if param.requires_grad}

    def step_specs(self, num_sequences: int, seq_len: int, fields: Sequence[str]) -> Tree:
        """Shapes and dtypes of what a step takes, of whole arrays."""
        count = self._microbatches.num_microbatches
        shape = (num_sequences, seq_len) if count == 1 else (count, num_sequences // count, seq_len)
        batch = {field: WeightSpec(shape, "int32") for field in fields}
        return {"state": self.state_spec(), "batch": batch, "lr": WeightSpec((), "float32")}

    def batch_rows(self, num_rows: int) -> slice:
        """Which of a batch's rows (or of a microbatch's) this process feeds."""
        return self.placement.own_rows(num_rows)

    def step(
        self, state: Tree, batch: Mapping[str, np.ndarray], lr: float, ask: int | None = None
    ) -> tuple[Tree, Tree]:
        """Starts one step and returns the new state and metrics without waiting; `state` is gone afterwards.

        Args:
            state: on the devices.
            batch: this process's rows, those of the first microbatch first.
            lr: the learning rate.
            ask: what this process wants of all, see `graph.step`; the metric `asked` tells it to all. None: no metric.
        """
        result = self.train_step(state=state, **self.step_inputs(batch, lr, ask))
        return result["state"], result["metrics"]

    def compile_step(self, state: Tree, batch: Mapping[str, np.ndarray], ask: int | None = None) -> None:
        """Compiles the step for this batch's shape, so that the first step's time is a step's time."""
        self.train_step.compiled(state=state, **self.step_inputs(batch, 0.0, ask))

    def held_out_sums(self, state: Tree, batch: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """Loss summed over the valid targets of a batch, of which this process has its rows, and their number."""
        weights = {name: state[name] for name in ("params", "frozen", "buffers")}
        batch = self._batches.put(self.evaluate.placement, batch)
        result = self._runtime.fetch(self.evaluate(batch=batch, **weights))
        return float(result["total"]), float(result["weight"])

    def step_inputs(self, batch: Mapping[str, np.ndarray], lr: float, ask: int | None = None) -> Tree:
        """What a step takes besides the state, on the devices; see `step`."""
        inputs = {"batch": self._microbatches.put(self.placement, batch), **self.placement.put({"lr": np.float32(lr)})}
        return inputs if ask is None else {**inputs, "ask": self.placement.fill("ask", np.int32(ask))}


def build_parametrization(run: Run, model: nn.Module, mesh: MeshShape, plan: Plan) -> Parametrization:
    """How a run's model is laid over its mesh."""
    compute = DTYPES[run.precision.compute]
    if isinstance(run.parallelism, SingleParallelism):
        return Parametrization(model, MixedPrecision(compute, torch.float32))
    precision = MixedPrecision(compute, DTYPES[run.parallelism.reduce])
    settings = run.parallelism
    return Parametrization(model, precision, mesh, plan, settings.replicate_below, settings.expert_bound)


def reshards(run: Run) -> bool:
    """Whether weights are gathered anew for the backward."""
    return not isinstance(run.parallelism, SingleParallelism) and run.parallelism.reshard_after_forward
