"""Runs PyTorch code on real tensors and compares each ATen op it executes with the op's JAX entry.

Key idea: a dispatch mode sees the ops below autograd, of the forward and of the backward alike, with the very arguments
PyTorch gives them. Each becomes a graph of one node, which runs through the interpreter as every captured graph does.
"""

import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_train.lowering.dtypes import jax_dtype
from tpu_train.lowering.interpreter import constant, to_jax
from tpu_train.lowering.table import TABLE

OPINFOS: dict[str, OpInfo] = {
    f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name: info for info in op_db
}
DTYPES = {"f": torch.float32, "b": torch.bfloat16, "i": torch.int64}

# What the table's dtypes can hold; float64 and larger integers need JAX's 64-bit mode.
_TESTED_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
# DESIGN.md section 5. The absolute part is in units of the largest argument or result: an element that nearly cancels
# in a sum carries the rounding of its summands (2**-7 is one in bfloat16), and both sides round in another order.
_TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (1.6e-2, 2**-7)}

# Thousands of programs that run once: compiling them is all the time there is (44 s of CPU instead of 57 for 44 ops).
_QUICK_COMPILE: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class CheckEntries(TorchDispatchMode):
    """Compares every op in `ops` that runs inside with its entry, once per distinct kind of arguments."""

    def __init__(self, ops: set[OpOverload]) -> None:
        super().__init__()
        self.ops = ops
        self.checked: dict[OpOverload, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.ops:
            return func(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        kind = _kind(args, kwargs)
        seen = self.checked.setdefault(func, set())
        if kind in seen or not all(_is_testable(x) for x in tensors):
            return func(*args, **kwargs)
        arrays = [constant(x) for x in tensors]
        expected = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and not _is_testable(expected):
            return expected  # a float beyond the integers' range becomes any integer, in C++ as in XLA
        if all(x.dtype in _TESTED_DTYPES for x in pytree.tree_leaves(expected) if isinstance(x, Tensor)):
            try:
                actual = run_entry(func, args, kwargs, arrays)
            except ValueError as error:
                if not str(error).startswith("aten::"):
                    raise
                return expected  # refused with a reason, which test_table.py checks
            if func in _DIM_OF_PICKS:
                dim = args[_DIM_OF_PICKS[func]] if len(args) > _DIM_OF_PICKS[func] else -1
                actual, compared = _picked(actual, args[0], dim), _picked(expected, args[0], dim)
            else:
                compared = expected
            try:
                compare(func, actual, compared, kind, _scale(tensors))
            except AssertionError:
                if not _is_as_good_as_pytorch(func, args, kwargs, actual, expected):
                    raise
            else:
                seen.add(kind)
        return expected


def _is_as_good_as_pytorch(func: OpOverload, args: Any, kwargs: Any, actual: Any, expected: Any) -> bool:
    """Whether the entry is about as near to PyTorch's float64 result as PyTorch's own result is, where that is far.

    A layer norm's derivative over rows of two elements is a thousandth of its terms: cancellation leaves no digits.
    Some CPU kernels sum bfloat16 in bfloat16. Four times PyTorch's error is near: both are a few roundings.
    """
    wide_args, wide_kwargs = pytree.tree_map_only(
        Tensor, lambda x: x.detach().double() if x.is_floating_point() else x, (args, kwargs)
    )
    try:
        exact = _tensors(func(*wide_args, **wide_kwargs))
    except (RuntimeError, NotImplementedError):  # no float64 kernel for these arguments
        return False
    ours = [x for x in (actual if isinstance(actual, (tuple, list)) else [actual]) if x is not None]
    for got, own, want in zip(ours, _tensors(expected), exact, strict=True):
        error = np.abs(np.asarray(got, np.float64) - want.numpy()).max(initial=0)
        if not error <= 4 * float((own.detach().double() - want).abs().max()):
            return False
    return True


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _kind(args: Any, kwargs: Any) -> str:
    """Shapes, dtypes and numbers of a call: values of tensors apart, what makes it differ from another."""
    return str(
        pytree.tree_map(lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(x), (args, kwargs))
    )


def _is_testable(x: Tensor) -> bool:
    if x.dtype not in _TESTED_DTYPES or x.layout != torch.strided:
        return False
    return x.dtype != torch.int64 or x.numel() == 0 or (x.min().item() >= -(2**31) and x.max().item() < 2**31)


def run_entry(func: OpOverload, args: Any, kwargs: Any, arrays: list[jax.Array]) -> Any:
    """The op's entry on `arrays`, which stand for the tensors in `args` and `kwargs`, by way of the interpreter."""
    graph = fx.Graph()

    def place(x: Any) -> Any:
        return graph.placeholder(f"x{len(graph.nodes)}") if isinstance(x, Tensor) else x

    node_args, node_kwargs = pytree.tree_map(place, (args, kwargs))
    graph.output(graph.call_function(func, tuple(node_args), node_kwargs))
    fn = to_jax(fx.GraphModule({}, graph))
    return jax.jit(fn, compiler_options=_QUICK_COMPILE)(*arrays)


# Which of equal elements these return is not said; position of their `dim` argument.
_DIM_OF_PICKS = {torch.ops.aten.topk.default: 2, torch.ops.aten.sort.default: 1}


def _picked(result: Any, source: Tensor, dim: int) -> tuple[Any, ...]:
    """Values and indices, the indices replaced by what they pick."""
    values, indices = result
    picked = source.gather(dim, torch.tensor(indices.tolist(), dtype=torch.int64).reshape(values.shape))
    return values, picked if isinstance(values, Tensor) else constant(picked)


def _scale(tensors: list[Tensor]) -> float:
    """The largest finite magnitude among float tensors, at least 1."""
    scale = 1.0
    for x in tensors:
        finite = x.detach()[x.isfinite()].abs() if x.is_floating_point() else x.new_zeros(0)
        scale = max(scale, float(finite.max())) if finite.numel() else scale
    return scale


def compare(func: OpOverload, actual: Any, expected: Any, kind: str, scale: float) -> None:
    if isinstance(expected, Tensor):
        actual, expected = [actual], [expected]
    assert len(actual) == len(expected), f"{func}{kind}: {len(actual)} results for {len(expected)}"
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        label = f"{func} result {i} of {kind}"
        if want is None:
            assert got is None, label
            continue
        assert tuple(got.shape) == tuple(want.shape), f"{label}: shape {got.shape} for {tuple(want.shape)}"
        assert got.dtype == jax_dtype(want.dtype), f"{label}: {got.dtype} for {want.dtype}"
        if "empty" not in func.__name__:
            _compare_values(got, want.detach(), label, scale)


def _compare_values(got: jax.Array, want: Tensor, label: str, scale: float) -> None:
    if not want.dtype.is_floating_point:
        # 64-bit results wrap into 32 bits, as the sums and products that lead to them do.
        np.testing.assert_array_equal(np.asarray(got), np.asarray(constant(want)), err_msg=label)
        return
    rtol, atol = _TOLERANCES[want.dtype]
    atol *= max(scale, _scale([want]))
    np.testing.assert_allclose(np.asarray(got, np.float32), want.float().numpy(), rtol, atol, err_msg=label)


def samples(info: OpInfo, dtype: torch.dtype) -> list[SampleInput]:
    """The OpInfo's samples, with gradients where it has them, in an order that mixes their kinds."""
    torch.manual_seed(0)
    with_grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    # Seeding before each sample, the default, records a stack trace each time: a quarter of the whole test's time.
    found = list(info.sample_inputs("cpu", dtype, requires_grad=with_grad, set_seed=False))
    random.Random(0).shuffle(found)
    return found


def run_sample(info: OpInfo, sample: SampleInput, mode: TorchDispatchMode) -> None:
    """Forward, and backward of a random cotangent, inside `mode`."""
    with mode:
        result = info(sample.input, *sample.args, **sample.kwargs)
        # Sparse results have no random cotangent, and no entries.
        outputs = [x for x in _tensors(result) if x.requires_grad and x.layout == torch.strided]
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        if outputs and inputs:
            with torch.no_grad():
                cotangents = [torch.randn_like(x) for x in outputs]
            torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)


def table_ops() -> dict[str, OpOverload]:
    """The table's ATen ops by their short names (`add.Tensor`); loops and random draws have tests of their own."""
    return {str(op).removeprefix("aten."): op for op in TABLE if str(op).startswith("aten.")}


def opinfos_with(dtype: torch.dtype) -> Iterator[tuple[str, OpInfo]]:
    for name, info in sorted(OPINFOS.items()):
        if dtype in info.supported_dtypes("cpu") and not name.startswith("jiterator"):  # a compiler for CUDA only
            yield name, info
