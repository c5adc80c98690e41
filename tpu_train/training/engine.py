"""A run's programs and its state: initialize, train step, evaluate, over one set of buffers."""

from collections.abc import Mapping

import numpy as np
from torch import nn

from tpu_train.config.schema import Run
from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import Tree, capture
from tpu_train.graph.initialization import capture_initialization
from tpu_train.graph.step import StepSettings, make_eval_step, make_train_step
from tpu_train.optim.build import build_optimizer, decay_mask
from tpu_train.training.build import DTYPES, build_model, build_objective
from tpu_train.training.weights import WeightSpec


class Engine:
    """The programs of a run in `mode=graph`.

    Args:
        run: the configuration.
        runtime: the devices.
        model: the module to train, on any device, the values of its parameters unused; None builds the configured one.
    """

    def __init__(self, run: Run, runtime: Runtime, model: nn.Module | None = None) -> None:
        self._run = run
        self._runtime = runtime
        self.model = build_model(run.model) if model is None else model
        self._optimizer = build_optimizer(run.optimizer)
        objective = build_objective(run.objective)
        compute_dtype = DTYPES[run.precision.compute]
        decay = decay_mask(self.model, run.optimizer.no_decay)
        settings = StepSettings(
            compute_dtype=compute_dtype,
            grad_accumulation=run.training.grad_accumulation,
            max_grad_norm=run.training.max_grad_norm,
            halt_on_nonfinite=run.training.on_nan == "stop",
            inject_inf_at_step=run.training.inject_inf_at_step,
        )
        step = make_train_step(self.model, objective, self._optimizer, decay, settings)
        evaluate = make_eval_step(self.model, objective, compute_dtype)
        lowering = LoweringOptions(run.precision.matmul, run.mode.check_graph)
        self.train_step = Program(
            "train_step",
            lambda inputs: capture("train_step", step, inputs, run.mode.passes),
            lowering,
            donated=("state",),
            key_inputs=("state.seed", "state.step"),
        )
        self.evaluate = Program(
            "evaluate", lambda inputs: capture("evaluate", evaluate, inputs, run.mode.passes), lowering
        )
        self.initialize = Program(
            "initialize",
            lambda _: capture_initialization(self.model, DTYPES[run.precision.param]),
            lowering,
            key_inputs=("seed",),
        )

    def initial_state(self) -> Tree:
        """The state before the first step, on the devices; see `graph.step.make_train_step` for its parts."""
        params = self.initialize(seed=self._runtime.put(np.int32(self._run.training.seed)))
        return self.state_from(params)

    def state_from(self, params: Tree) -> Tree:
        """The state before the first step with these weights, device arrays by full name.

        Parameters of the module that do not require gradients are frozen: no gradient, no moments.
        """
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                raise ValueError(f"buffer {name} has no values on the meta device; build the model on the CPU")
        trainable = {name for name, param in self.model.named_parameters() if param.requires_grad}
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
            **self._runtime.put(numbers),
        }

    def state_spec(self) -> Tree:
        """Shapes and dtypes of the state, for reading it from disk."""
        dtype = self._run.precision.param
        specs = {name: WeightSpec(tuple(p.shape), dtype) for name, p in self.model.named_parameters()}
        trainable = {name for name, param in self.model.named_parameters() if param.requires_grad}
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

    def step(self, state: Tree, batch: Mapping[str, np.ndarray], lr: float) -> tuple[Tree, Tree]:
        """Starts one step and returns the new state and metrics without waiting; `state` is gone afterwards."""
        inputs = self._runtime.put({"batch": batch, "lr": np.float32(lr)})
        result = self.train_step(state=state, **inputs)
        return result["state"], result["metrics"]

    def compile_step(self, state: Tree, batch: Mapping[str, np.ndarray]) -> None:
        """Compiles the step for this batch's shape, so that the first step's time is a step's time."""
        self.train_step.compiled(state=state, **self._runtime.put({"batch": batch, "lr": np.float32(0)}))

    def held_out_sums(self, state: Tree, batch: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """Loss summed over a batch's valid targets, and their number."""
        weights = {name: state[name] for name in ("params", "frozen", "buffers")}
        result = self._runtime.fetch(self.evaluate(batch=self._runtime.put(batch), **weights))
        return float(result["total"]), float(result["weight"])
