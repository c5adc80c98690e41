"""What an entry of the table may ask of the program around it: the random key and the matmul precision.

Key idea: entries keep the plain signature of their ATen op. The few that need more read it from here while the program
is being traced; nothing of it exists at run time.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
from jax import Array

MatmulPrecision = Literal["default", "high", "highest"]


@dataclasses.dataclass(frozen=True)
class LoweringContext:
    """One program, or one loop body of it, being traced.

    Attributes:
        key: typed PRNG key of this step (and, inside loops, of this iteration); None where nothing may draw.
        matmul_precision: one, three or six bfloat16 passes for float32 products on TPU, by JAX's names.
    """

    key: Array | None = None
    matmul_precision: MatmulPrecision = "default"


_CONTEXT: contextvars.ContextVar[LoweringContext] = contextvars.ContextVar("lowering", default=LoweringContext())  # noqa: B039 - frozen


def current() -> LoweringContext:
    """The context of the program being traced."""
    return _CONTEXT.get()


@contextlib.contextmanager
def use(context: LoweringContext) -> Iterator[None]:
    """Makes `context` the current one."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def iteration(index: Array) -> LoweringContext:
    """The current context inside iteration `index` (int32 scalar) of a loop: its draws differ from every other's."""
    context = current()
    if context.key is None:
        return context
    return dataclasses.replace(context, key=jax.random.fold_in(context.key, index))
