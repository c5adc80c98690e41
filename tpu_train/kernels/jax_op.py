"""A JAX function as a PyTorch op: one node of a captured graph, with shapes, a derivative and an eager meaning.

Key idea: everything follows from the function. Its annotations are the schema, `jax.eval_shape` the fake
implementation, `jax.vjp` (with the function's own `custom_vjp` rule, where it has one) the derivative. The derivative's
residuals are outputs of a second op, `NAME_forward`, and inputs of a third, `NAME_backward`, so that the forward never
runs twice and a graph shows what is kept; residuals that are inputs are not made again.

    @jax_op("my_kernels::scaled")
    def scaled(x: jax.Array, scale: jax.Array, *, power: int = 2) -> jax.Array:
        return x * scale**power

    y = scaled(tensor, tensor_scale, power=3)  # of torch tensors
"""

import dataclasses
import functools
import hashlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun
from torch import Tensor

from tpu_train.kernels.arrays import array_spec, empty_like_spec, to_array, to_tensor

# What each op of a captured graph lowers to; the lowering's table reads it.
LOWERINGS: dict[Any, Callable[..., Any]] = {}

_STATIC = {int: "int", float: "float", bool: "bool", str: "str"}
_libraries: dict[str, torch.library.Library] = {}
_by_name: dict[str, "JaxOp"] = {}


@dataclasses.dataclass(frozen=True)
class _Argument:
    """One argument: its schema type, and whether it is an array."""

    name: str
    kind: str
    is_array: bool
    keyword_only: bool
    default: Any

    def __str__(self) -> str:
        default = "" if self.default is inspect.Parameter.empty else f"={_literal(self.default)}"
        return f"{self.kind} {self.name}{default}"


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """How residuals of one call's shapes are kept.

    Attributes:
        run: the function and its derivative's leaves, as traced at these shapes; of the arrays that are not None.
        tree: the derivative's structure, of whose leaves the residuals are.
        places: for each leaf which array it is, counted over array arguments and then outputs; None for one that is
            saved besides.
        shapes: of what the forward op returns: outputs, then saved residuals.
        num_outputs: of the function.
    """

    run: Callable[..., Sequence[Any]]
    tree: Any
    places: tuple[int | None, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    num_outputs: int


class JaxOp:
    """See `jax_op`; called with torch tensors it is the op.

    Attributes:
        function: the JAX function.
        name: `namespace::name`.
        op: the overload of a graph's node where no derivative is wanted.
        forward_op: likewise, with residuals.
        backward_op: its derivative.
    """

    def __init__(self, name: str, function: Callable[..., Any], donate: Sequence[str]) -> None:
        self.name, self.function = name, function
        self._arguments, self._num_outputs = _read(name, function)
        unknown = set(donate) - {a.name for a in self._arguments if a.is_array}
        if unknown:
            raise ValueError(f"jax_op {name}: donate names {', '.join(sorted(unknown))}, which is no array argument")
        self._donate = tuple(donate)
        self._derivatives: dict[str, _Derivative] = {}
        namespace, _, short = name.partition("::")
        library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        arguments = _schema(self._arguments)
        returns = "Tensor" if self._num_outputs is None else f"({', '.join(['Tensor'] * self._num_outputs)})"
        library.define(f"{short}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        library.define(f"{short}_forward({arguments}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
        library.define(
            f"{short}_backward(Tensor[] residuals, Tensor[] grads, str key) -> Tensor[]",
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        ops = getattr(torch.ops, namespace)
        self.op = getattr(ops, short).default
        self.forward_op = getattr(ops, f"{short}_forward").default
        self.backward_op = getattr(ops, f"{short}_backward").default
        self._implement(library, short)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op on torch tensors."""
        return self.op(*args, **kwargs)

    def _implement(self, library: torch.library.Library, short: str) -> None:
        plain = {short: self._run, f"{short}_forward": self._run_forward, f"{short}_backward": self._run_backward}
        shapes = {
            short: self._shapes,
            f"{short}_forward": self._forward_shapes,
            f"{short}_backward": self._backward_shapes,
        }
        lowered = {self.op: self._lower, self.forward_op: self._lower_forward, self.backward_op: self._lower_backward}
        for name, run in plain.items():
            library.impl(name, _eager(run, self.name), "CompositeExplicitAutograd")
            torch.library.register_fake(f"{library.ns}::{name}", shapes[name], lib=library)
        library.impl(short, self._with_derivative, "Autograd")
        LOWERINGS.update(lowered)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Array arguments in order (None where one is left out), and the static ones by name."""
        given = dict(zip([a.name for a in self._arguments], args, strict=False)) | dict(kwargs)
        full = {a.name: given.get(a.name, None if a.default is inspect.Parameter.empty else a.default)
                for a in self._arguments}  # fmt: skip
        arrays = [full.pop(a.name) for a in self._arguments if a.is_array]
        return arrays, full

    def _call(self, arrays: Sequence[Any], static: Mapping[str, Any]) -> tuple[Any, ...]:
        """The function's outputs."""
        names = [a.name for a in self._arguments if a.is_array]
        found = self.function(**dict(zip(names, arrays, strict=True)), **static)
        return (found,) if self._num_outputs is None else tuple(found)

    # The op itself.

    def _lower(self, *args: Any, **kwargs: Any) -> Any:
        out = self._call(*self._bind(args, kwargs))
        return out[0] if self._num_outputs is None else out

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        arrays, static = self._bind(args, kwargs)
        donated = tuple(i for i, a in enumerate(a for a in self._arguments if a.is_array) if a.name in self._donate)
        out = _jitted(self._call_flat, tuple(static.items()), donated)(*map(to_array, arrays))
        return self._returned([to_tensor(value) for value in out])

    def _call_flat(self, static: tuple[tuple[str, Any], ...], *arrays: Any) -> tuple[Any, ...]:
        return self._call(arrays, dict(static))

    def _shapes(self, *args: Any, **kwargs: Any) -> Any:
        arrays, static = self._bind(args, kwargs)
        specs = jax.eval_shape(lambda *given: self._call(given, static), *map(array_spec, arrays))
        device = next(x.device for x in arrays if x is not None)
        return self._returned([empty_like_spec(spec, device) for spec in specs])

    def _returned(self, outputs: Sequence[Tensor]) -> Any:
        return outputs[0] if self._num_outputs is None else tuple(outputs)

    # Its derivative.

    def _with_derivative(self, *args: Any, **kwargs: Any) -> Any:
        arrays, static = self._bind(args, kwargs)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
            outputs = _Derivable.apply(self, static, *arrays)
            return self._returned(outputs)  # type: ignore[arg-type]
        with torch._C._AutoDispatchBelowAutograd():
            return self.op(*args, **kwargs)

    def derivative(self, arrays: Sequence[Any], static: Mapping[str, Any]) -> tuple[str, _Derivative]:
        """How the derivative at these shapes is kept, and the key that names it in a graph."""
        specs = [array_spec(x) for x in arrays]
        shapes = [None if spec is None else (spec.shape, str(spec.dtype)) for spec in specs]
        key = hashlib.sha256(repr((self.name, shapes, sorted(static.items()))).encode()).hexdigest()[:16]
        if key not in self._derivatives:
            self._derivatives[key] = self._derive(specs, static)
        return key, self._derivatives[key]

    def _derive(self, specs: Sequence[Any], static: Mapping[str, Any]) -> _Derivative:
        found: list[Any] = []

        def forward(*arrays: Any) -> Any:
            outputs, leaves, tree = self._vjp(arrays, static)
            found.append(tree)
            return (*outputs, *leaves)

        given = [spec for spec in specs if spec is not None]
        # Traced with an argument each: of a tensor that is given twice JAX would make one residual.
        closed = jax.make_jaxpr(lambda *present: forward(*_fill(specs, present)))(*given)
        jaxpr, count = closed.jaxpr, self._num_outputs or 1
        known = {id(var): len(specs) + i for i, var in enumerate(jaxpr.outvars[:count])}
        present = [i for i, spec in enumerate(specs) if spec is not None]
        known |= {id(var): place for var, place in zip(jaxpr.invars, present, strict=True)}
        leaves = jaxpr.outvars[count:]
        places = tuple(known.get(id(var)) for var in leaves)
        kept = [*jaxpr.outvars[:count], *(v for v, place in zip(leaves, places, strict=True) if place is None)]
        shapes = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept)  # type: ignore[union-attr]
        return _Derivative(jaxpr_as_fun(closed), found[-1], places, shapes, count)

    def _vjp(self, arrays: Sequence[Any], static: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Any], Any]:
        """Outputs, and leaves and structure of the derivative with respect to the floating-point arrays."""
        places = _differentiable(arrays)

        def part(*values: Any) -> tuple[Any, ...]:
            full = list(arrays)
            for place, value in zip(places, values, strict=True):
                full[place] = value
            return self._call(full, static)

        outputs, vjp = jax.vjp(part, *(arrays[place] for place in places))
        leaves, tree = jax.tree.flatten(vjp)
        return outputs, leaves, tree

    def _lower_forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        arrays, static = self._bind(args, kwargs)
        _, kept = self.derivative(arrays, static)
        values = kept.run(*(x for x in arrays if x is not None))
        outputs, leaves = values[: kept.num_outputs], values[kept.num_outputs :]
        return [*outputs, *(leaf for leaf, place in zip(leaves, kept.places, strict=True) if place is None)]

    def _run_forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arrays, static = self._bind(args, kwargs)

        def forward(static: tuple[tuple[str, Any], ...], *given: Any) -> tuple[Any, ...]:
            return tuple(self._lower_forward(*given, **dict(static)))

        positional = tuple(static.items())
        return [to_tensor(value) for value in jax.jit(forward, static_argnums=0)(positional, *map(to_array, arrays))]

    def _forward_shapes(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arrays, static = self._bind(args, kwargs)
        device = next(x.device for x in arrays if x is not None)
        return [empty_like_spec(spec, device) for spec in self.derivative(arrays, static)[1].shapes]

    def _lower_backward(self, residuals: Sequence[Any], grads: Sequence[Any], key: str) -> list[Any]:
        vjp = jax.tree.unflatten(self._derivatives[key].tree, list(residuals))
        return list(vjp(tuple(grads)))

    def _run_backward(self, residuals: Sequence[Tensor], grads: Sequence[Tensor], key: str) -> list[Tensor]:
        arrays = ([to_array(x) for x in residuals], [to_array(x) for x in grads])
        return [to_tensor(value) for value in jax.jit(self._lower_backward, static_argnums=2)(*arrays, key)]

    def _backward_shapes(self, residuals: Sequence[Tensor], grads: Sequence[Tensor], key: str) -> list[Tensor]:
        specs = jax.eval_shape(
            lambda r, g: self._lower_backward(r, g, key), [*map(array_spec, residuals)], [*map(array_spec, grads)]
        )
        return [empty_like_spec(spec, grads[0].device) for spec in specs]


class _Derivable(torch.autograd.Function):
    """The op with its derivative, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, op: JaxOp, static: Mapping[str, Any], *arrays: Tensor | None) -> tuple[Tensor, ...]:
        key, kept = op.derivative(arrays, static)
        names = [a.name for a in op._arguments if a.is_array]
        with torch._C._AutoDispatchBelowAutograd():
            values = op.forward_op(**dict(zip(names, arrays, strict=True)), **static)
        outputs, saved = values[: kept.num_outputs], iter(values[kept.num_outputs :])
        known = [*arrays, *outputs]
        residuals = [next(saved) if place is None else known[place] for place in kept.places]
        ctx.save_for_backward(*residuals)
        ctx.op, ctx.key = op, key
        ctx.places, ctx.num_arrays = _differentiable(arrays), len(arrays)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = ctx.op.backward_op(list(ctx.saved_tensors), list(grads), ctx.key)
        by_place = dict(zip(ctx.places, found, strict=True))
        return (None, None, *(by_place.get(i) for i in range(ctx.num_arrays)))


def jax_op(name: str, *, donate: Sequence[str] = ()) -> Callable[[Callable[..., Any]], JaxOp]:
    """Makes a PyTorch op of a JAX function.

    Args:
        name: `namespace::name`, not yet taken.
        donate: array arguments whose buffers an eager call may give to the result; in a captured graph XLA decides.

    The function's arguments are annotated: `jax.Array` or `jax.Array | None` for arrays; `int`, `float`, `bool`, `str`,
    a `Literal` of strings, `tuple[int, ...]`, or one of these `| None`, for static options, which are hashable and part
    of the graph. It returns `jax.Array` or a tuple of a fixed number of them. Its derivative is JAX's, or its own by
    `jax.custom_vjp`; integer arrays have none.

    Raises:
        TypeError: an annotation that is missing or none of these.
        ValueError: the name is taken or not of the form `namespace::name`; a donated argument that is no array.
    """
    if name.count("::") != 1:
        raise ValueError(f"jax_op {name!r}: a name has the form namespace::name")
    if name in _by_name:
        where = inspect.getsourcefile(_by_name[name].function)
        raise ValueError(f"jax_op {name} is taken by {_by_name[name].function.__qualname__} in {where}; choose another")

    def register(function: Callable[..., Any]) -> JaxOp:
        _by_name[name] = JaxOp(name, function, donate)
        return _by_name[name]

    return register


def register_natively(op: JaxOp) -> Any:
    """The same function as an op of the native TPU backend of PyTorch.

    Raises:
        ValueError: that backend is not installed.
    """
    native = getattr(getattr(getattr(torch, "tpu", None), "pallas", None), "jax_op", None)
    if native is None:
        raise ValueError(f"{op.name}: torch.tpu.pallas.jax_op is not there; install torch_tpu")
    return native(op.name)(op.function)


def _read(name: str, function: Callable[..., Any]) -> tuple[list[_Argument], int | None]:
    """The arguments, and the number of outputs of a function that returns a tuple."""
    hints = typing.get_type_hints(function)
    arguments = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints:
            raise TypeError(f"jax_op {name}: argument {parameter.name} has no annotation")
        kind, is_array = _kind(name, parameter.name, hints[parameter.name])
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if is_array and keyword_only:
            raise TypeError(f"jax_op {name}: array argument {parameter.name} must be positional")
        arguments.append(_Argument(parameter.name, kind, is_array, keyword_only, parameter.default))
    returned = hints.get("return")
    if returned is jax.Array:
        return arguments, None
    parts = typing.get_args(returned)
    if typing.get_origin(returned) is tuple and parts and all(part is jax.Array for part in parts):
        return arguments, len(parts)
    raise TypeError(
        f"jax_op {name}: returns {returned}; allowed are jax.Array and tuple[jax.Array, ...] of a fixed length"
    )


def _kind(name: str, argument: str, hint: Any) -> tuple[str, bool]:
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    optional = "?" if types.NoneType in members else ""
    (member, *others) = [m for m in members if m is not types.NoneType]
    if not others and member is jax.Array:
        return f"Tensor{optional}", True
    if not others and member in _STATIC:
        return f"{_STATIC[member]}{optional}", False
    if not others and typing.get_origin(member) is Literal and all(isinstance(w, str) for w in typing.get_args(member)):
        return f"str{optional}", False
    if not others and member == tuple[int, ...]:
        return f"int[]{optional}", False
    raise TypeError(
        f"jax_op {name}: argument {argument} is annotated {hint}; allowed are jax.Array, int, float, bool, str, a "
        "Literal of strings, tuple[int, ...], and each with | None"
    )


def _schema(arguments: Sequence[_Argument]) -> str:
    positional = [str(a) for a in arguments if not a.keyword_only]
    keywords = [str(a) for a in arguments if a.keyword_only]
    return ", ".join([*positional, *(["*", *keywords] if keywords else [])])


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _differentiable(arrays: Sequence[Any]) -> tuple[int, ...]:
    """Places of the floating-point arrays, of PyTorch or JAX."""

    def is_float(x: Any) -> bool:
        return x.is_floating_point() if isinstance(x, Tensor) else jnp.issubdtype(x.dtype, jnp.floating)

    return tuple(i for i, x in enumerate(arrays) if x is not None and is_float(x))


def _fill(specs: Sequence[Any], present: Sequence[Any]) -> list[Any]:
    """The arrays in their places, None where there is none."""
    values = iter(present)
    return [None if spec is None else next(values) for spec in specs]


@functools.cache
def _jitted(call: Callable[..., Any], static: tuple[tuple[str, Any], ...], donated: tuple[int, ...]) -> Any:
    return jax.jit(functools.partial(call, static), donate_argnums=donated)


def _eager(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The op on CPU tensors, on JAX's CPU device."""

    @functools.wraps(run)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        try:
            with jax.default_device(jax.devices("cpu")[0]):
                return run(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return on_cpu
