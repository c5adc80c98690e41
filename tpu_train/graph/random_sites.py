"""Random ops of PyTorch as draws that carry their key: each call site gets a number that is part of the graph.

Key idea: a captured graph has no generator whose state could advance, so every random op is decomposed, while it is
traced, into a draw `tpu_train::random_*(…, site)`. Where the site comes from is the point:

* in a step, from PyTorch's own default generator, which `torch.utils.checkpoint` saves in the forward and restores for
  the recomputation, as it does for eager dropout. So a recomputed op has its forward's site and draws the same numbers;
* in an initialization, from the full name of the parameter being filled, so that neither the order of modules nor the
  mesh changes a weight.
"""

import contextlib
import contextvars
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tpu_train.lowering.intrinsics import random_integers, random_normal, random_uniform
from tpu_train.sharding.collectives import draw_axes

aten = torch.ops.aten

SITE_BITS = 62  # two non-negative 31-bit halves: `fold_in` takes 32 bits at a time

# Gives the site of a draw into a tensor (in-place ops), or of one that makes a new tensor (None).
SiteSource = Callable[[Tensor | None], int]


def _site_of_call(_: Tensor | None) -> int:
    with _disable_current_modes():
        return int(torch.randint(2**SITE_BITS, ()))


_SOURCE: contextvars.ContextVar[SiteSource] = contextvars.ContextVar("site_source", default=_site_of_call)


@contextlib.contextmanager
def sites_by_call() -> Iterator[None]:
    """Sites by order of the calls, the same in every process; the caller's generator is left as it was."""
    token = _SOURCE.set(_site_of_call)
    try:
        with torch.random.fork_rng(devices=()), _disable_current_modes():
            torch.manual_seed(0)
            yield
    finally:
        _SOURCE.reset(token)


@contextlib.contextmanager
def sites_by_name(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Sites by the name of the tensor that a draw fills (or a view of it) and the number of draws into it so far.

    Raises:
        ValueError: inside, for a draw into another tensor.
    """
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    draws: Counter[str] = Counter()

    def site(tensor: Tensor | None) -> int:
        name = None if tensor is None else names.get(tensor.untyped_storage()._cdata)
        if name is None:
            raise ValueError("an initializer draws random numbers outside a parameter; fill the parameter in place")
        draws[name] += 1
        return name_to_site(f"{name}#{draws[name]}")

    token = _SOURCE.set(site)
    try:
        yield
    finally:
        _SOURCE.reset(token)


def name_to_site(name: str) -> int:
    """A site that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> (64 - SITE_BITS)


def _site(tensor: Tensor | None = None) -> int:
    return _SOURCE.get()(tensor)


def _float_draw(draw: Any, size: Sequence[int], dtype: torch.dtype | None, into: Tensor | None = None) -> Tensor:
    """A draw in float32, rounded to the dtype asked for."""
    dtype = dtype or torch.get_default_dtype()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    drawn = draw(list(size), _site(into), dtype=wide, axes=draw_axes(len(size)))
    return drawn.to(dtype)


def _rand(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _float_draw(random_uniform, size, dtype)


def _rand_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _float_draw(random_uniform, x.shape, dtype or x.dtype)


def _randn(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _float_draw(random_normal, size, dtype)


def _randn_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _float_draw(random_normal, x.shape, dtype or x.dtype)


def _randint_low(low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    dtype = dtype or torch.int64
    drawn = random_integers(list(size), low, high, _site(), dtype=torch.int64, axes=draw_axes(len(size)))
    return drawn.to(dtype)


def _randint(high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _randint_low(0, high, size, dtype=dtype)


def _randint_like_low(x: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _randint_low(low, high, x.shape, dtype=dtype or x.dtype)


def _randint_like(x: Tensor, high: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _randint_like_low(x, 0, high, dtype=dtype)


def _randperm(n: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.argsort(_float_draw(random_uniform, [n], torch.float32)).to(dtype or torch.int64)


def _bernoulli(probability: Tensor, **_: Any) -> Tensor:
    return (_float_draw(random_uniform, probability.shape, torch.float32) < probability).to(probability.dtype)


def _bernoulli_p(x: Tensor, p: float, **_: Any) -> Tensor:
    return (_float_draw(random_uniform, x.shape, torch.float32) < p).to(x.dtype)


def _bernoulli_into(x: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
    return x.copy_(_float_draw(random_uniform, x.shape, torch.float32, into=x) < p)


def _uniform_into(x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(_float_draw(random_uniform, x.shape, torch.float32, into=x) * (high - low) + low)


def _normal_into(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(_float_draw(random_normal, x.shape, torch.float32, into=x) * std + mean)


def _exponential_into(x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(-torch.log1p(-_float_draw(random_uniform, x.shape, torch.float32, into=x)) / rate)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _float_draw(random_uniform, x.shape, torch.float32) >= p
    scale = 0.0 if math.isclose(p, 1.0) else 1.0 / (1.0 - p)
    return x * kept * scale, kept


# What make_fx decomposes while it traces; a random op that is not here is refused by the lowering, by name.
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand_like,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn_like,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.randperm.default: _randperm,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli_.float: _bernoulli_into,
    aten.bernoulli_.Tensor: _bernoulli_into,
    aten.uniform_.default: _uniform_into,
    aten.normal_.default: _normal_into,
    aten.exponential_.default: _exponential_into,
    aten.native_dropout.default: _native_dropout,
}
