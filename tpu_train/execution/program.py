"""A function of PyTorch code that runs as one XLA program, captured and compiled once per shape.

Key idea: a call looks at its inputs' shapes; new ones are captured, lowered and compiled, and when that happens again
the log names the input that changed. Any function over the state takes this path: train, evaluate, initialize. On a
mesh what is captured is one device's part, and `shard_map` runs it on all; an initialization is captured whole, and the
compiler gives each device its part.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpu_train.execution.placement import Placement
from tpu_train.graph.capture import CapturedProgram, TensorSpec, Tree, map_leaves, named_leaves
from tpu_train.lowering import context
from tpu_train.lowering.context import MatmulPrecision
from tpu_train.lowering.dtypes import torch_dtype
from tpu_train.lowering.interpreter import needs_64_bit, to_jax
from tpu_train.sharding.layout import local_shape

log = logging.getLogger(__name__)

Signature = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class LoweringOptions:
    """How a graph becomes a JAX function.

    Attributes:
        matmul_precision: passes of float32 products on TPU.
        check: compare each node's shape and dtype with PyTorch's while lowering.
    """

    matmul_precision: MatmulPrecision = "default"
    check: bool = False


class Program:
    """One function, compiled per shape of its inputs.

    Args:
        name: for the log.
        capture: `capture(inputs)` of a tree of `TensorSpec` gives the captured function.
        lowering: how the graph becomes a JAX function.
        placement: devices, and where inputs and outputs lie on them; None: JAX's first device.
        whole: the captured function is of whole arrays, not of one device's part.
        donated: names of the inputs whose buffers the outputs take over; they are gone after a call.
        key_inputs: dotted names of 0-d integer inputs that the key of random draws is made of: the seed, then what is
            folded into it; empty where nothing draws.
    """

    def __init__(
        self,
        name: str,
        capture: Callable[[Mapping[str, Tree]], CapturedProgram],
        lowering: LoweringOptions = LoweringOptions(),
        *,
        placement: Placement | None = None,
        whole: bool = False,
        donated: Sequence[str] = (),
        key_inputs: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._capture = capture
        self._donated = tuple(donated)
        self._key_inputs = tuple(key_inputs)
        self._lowering = lowering
        self.placement = Placement(tuple(jax.devices()[:1])) if placement is None else placement
        self._whole = whole
        self._compiled: dict[Signature, Any] = {}
        self._last: Signature = ()
        self._donated_signature: Signature = ()

    @property
    def compile_count(self) -> int:
        """How many times the program was compiled: once per shape."""
        return len(self._compiled)

    def __call__(self, **inputs: Tree) -> Tree:
        """Runs on device arrays and returns device arrays without waiting for them."""
        compiled = self.compiled(**inputs)
        try:
            return compiled(*self._split(inputs))
        except TypeError as error:
            change = describe_change(self._donated_signature, _signature(self._split(inputs)[0]))
            raise TypeError(
                f"{self.name} was compiled for another state: {change}" if change else str(error)
            ) from error

    def compiled(self, **inputs: Tree) -> Any:
        """The `jax.stages.Compiled` for these inputs' shapes, a function of `_split(inputs)`; compiles new shapes."""
        # The donated inputs are this program's own outputs: their shapes follow from the first call's.
        donated, kept = self._split(inputs)
        signature = _signature(kept)
        if signature not in self._compiled:
            if self._compiled:
                log.warning("%s compiles again: %s", self.name, describe_change(self._last, signature))
            start = time.perf_counter()
            self._compiled[signature] = self.lower(**inputs).compile()
            log.info("%s: captured and compiled in %.1f s", self.name, time.perf_counter() - start)
            self._donated_signature = _signature(donated)
        self._last = signature
        return self._compiled[signature]

    def capture(self, **inputs: Tree) -> CapturedProgram:
        """The captured graph for these inputs' shapes: on a mesh, of one device's part of them."""
        return self._capture(map_leaves(self._spec, inputs))

    def lower(self, **inputs: Tree) -> Any:
        """The `jax.stages.Lowered` for these inputs' shapes: StableHLO, not yet compiled."""
        captured = self.capture(**inputs)
        with jax.enable_x64(needs_64_bit(captured.graph)):
            return self._jit(captured, inputs).lower(*self._split(inputs))

    def structs(self, specs: Mapping[str, Tree]) -> Tree:
        """Shapes and dtypes (leaves with `shape` and `dtype`) as what `lower` takes without arrays."""

        def struct(name: str, spec: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                tuple(spec.shape), jnp.dtype(spec.dtype), sharding=self.placement.sharding(name)
            )

        return map_leaves(struct, dict(specs))

    def _spec(self, name: str, leaf: Any) -> TensorSpec:
        shape = tuple(leaf.shape)
        if not self._whole and self.placement.shape.size > 1:
            axes = self.placement.axes_of(name)
            shape = local_shape(shape, (*axes, *((),) * (len(shape) - len(axes))), self.placement.shape)
        return TensorSpec(shape, torch_dtype(leaf.dtype))

    def _jit(self, captured: CapturedProgram, inputs: Mapping[str, Tree]) -> Any:
        function = self._as_jax(captured)
        placement = self.placement
        if placement.shape.size == 1:
            return jax.jit(function, donate_argnums=0)
        if self._whole:
            return jax.jit(function, donate_argnums=0, out_shardings=placement.shardings(captured.outputs))
        specs = map_leaves(lambda name, _: placement.spec(name), dict(inputs))
        outputs = map_leaves(lambda name, _: placement.spec(name), captured.outputs)
        parts = jax.shard_map(
            function, mesh=placement.mesh, in_specs=self._split(specs), out_specs=outputs, check_vma=False
        )
        return jax.jit(parts, donate_argnums=0)

    def _split(self, inputs: Mapping[str, Tree]) -> tuple[Mapping[str, Tree], Mapping[str, Tree]]:
        """The donated and the other inputs."""
        donated = {name: inputs[name] for name in self._donated}
        return donated, {name: tree for name, tree in inputs.items() if name not in donated}

    def _as_jax(self, captured: CapturedProgram) -> Callable[[Mapping[str, Tree], Mapping[str, Tree]], Tree]:
        """The captured function as a JAX function of its donated and of its other inputs."""
        run = to_jax(captured.graph, check=self._lowering.check)

        def function(donated: Mapping[str, Tree], kept: Mapping[str, Tree]) -> Tree:
            leaves = dict(named_leaves({**donated, **kept}))
            key = _fold_key([leaves[name] for name in self._key_inputs])
            with context.use(context.LoweringContext(key, self._lowering.matmul_precision)):
                outputs = run(*(leaves[name] for name in captured.input_names))
            return map_leaves(lambda _, index: outputs[index], captured.outputs)

        function.__name__ = self.name
        return function


def _fold_key(numbers: Sequence[Array]) -> Array | None:
    if not numbers:
        return None
    key = jax.random.key(numbers[0])
    for number in numbers[1:]:
        key = jax.random.fold_in(key, number)
    return key


def _signature(tree: Tree) -> Signature:
    return tuple((name, leaf_spec(leaf)) for name, leaf in named_leaves(tree))


def leaf_spec(leaf: Any) -> str:
    """`dtype[shape]` of an array, for messages."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def describe_change(before: Signature, after: Signature) -> str:
    """The inputs whose shape or dtype changed, as `name was A, now B`."""
    old, new = dict(before), dict(after)
    changes = [
        f"{name} was {old.get(name, 'absent')}, now {new.get(name, 'absent')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    return "; ".join(changes)
