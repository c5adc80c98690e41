"""Calls of attention with all gradients, compared with the definition in fp64."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from tpu_train.kernels.attention.cases import Case
from tpu_train.kernels.attention.reference import reference_attention

TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2}
NAMES = ["result", "query's gradient", "key's gradient", "value's gradient"]


def result_and_gradients(
    attention: Callable[..., Any], arrays: Sequence[Any], segments: np.ndarray | None, **options: Any
) -> list[np.ndarray]:
    """The result, and the gradients of query, key and value, by a JAX function; `arrays` as `Case.arrays`."""
    return [np.asarray(x) for x in _jitted(attention, tuple(options.items()))(*arrays, segments)]


@functools.cache
def _jitted(attention: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Any:
    def run(query: Any, key: Any, value: Any, out_grad: Any, segments: Any) -> Any:
        out, vjp = jax.vjp(lambda *heads: attention(*heads, segments, segments, **dict(options)), query, key, value)
        return out, *vjp(out_grad)

    # Interpreted kernels are long programs, run once: most of their time would go into optimizing them.
    interpreted = dict(options).get("interpret")
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0} if interpreted else None)


def defined(arrays: Sequence[Any], segments: np.ndarray | None, window: int | None) -> list[np.ndarray]:
    """The same by the definition, in fp64."""
    query, key, value, out_grad = (torch.from_numpy(np.asarray(x, np.float64)) for x in arrays)
    heads = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    ids = None if segments is None else torch.from_numpy(segments)
    out = reference_attention(query, key, value, ids, ids, window=window)
    return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, heads, out_grad))]


def assert_as_defined(attention: Callable[..., Any], case: Case, **options: Any) -> None:
    arrays, segments = case.arrays(), case.segment_ids()
    got = result_and_gradients(attention, arrays, segments, window=case.window, **options)
    want = defined(arrays, segments, case.window)
    for name, ours, right in zip(NAMES, got, want, strict=True):
        assert ours.shape == right.shape, name
        assert ours.dtype == arrays[0].dtype, name
        assert relative_error(ours, right) <= TOLERANCE[case.dtype], name


def relative_error(got: Any, want: Any) -> float:
    """Of a whole tensor, by norm; not a number where `got` has one."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def assert_documents_stand_alone(attention: Callable[..., Any], case: Case, **options: Any) -> None:
    """Each document of a packed sequence gives what it gives alone."""
    arrays, segments = case.arrays(), case.segment_ids()
    together = result_and_gradients(attention, arrays, segments, window=case.window, **options)
    end = 0
    for length in case.documents[0]:
        start, end = end, end + length
        own = [x[:, :, start:end] for x in arrays]
        alone = result_and_gradients(attention, own, None, window=case.window, **options)
        for name, ours, right in zip(NAMES, together, alone, strict=True):
            assert relative_error(ours[:, :, start:end], right) <= TOLERANCE[case.dtype], (start, name)


def assert_nothing_leaks(attention: Callable[..., Any], case: Case, **options: Any) -> None:
    """What one document holds changes no bit of another's results and gradients."""
    arrays, segments = case.arrays(), case.segment_ids()
    before = result_and_gradients(attention, arrays, segments, window=case.window, **options)
    ends = np.cumsum(case.documents[0])
    for start, end in zip([0, *ends], ends, strict=False):
        changed = [x.copy() for x in arrays]
        for x in changed:
            x[:, :, start:end] *= -30
        after = result_and_gradients(attention, changed, segments, window=case.window, **options)
        inside = np.zeros(case.seq_len, bool)
        inside[start:end] = True
        for name, old, new in zip(NAMES, before, after, strict=True):
            np.testing.assert_array_equal(old[:, :, ~inside], new[:, :, ~inside], err_msg=name)
            assert not np.array_equal(old[:, :, inside], new[:, :, inside]), name


def assert_a_window_of_one_gives_the_own_value(attention: Callable[..., Any], **options: Any) -> None:
    """The gradients of query and key are zero but for rounding: to be compared by size, not relative to themselves."""
    arrays = Case(256, 4, 2, 64).arrays()
    out, *grads = result_and_gradients(attention, arrays, None, window=1, **options)
    np.testing.assert_allclose(out, arrays[2].repeat(2, axis=1), rtol=1e-6)
    assert max(np.abs(x).max() for x in grads[:2]) < 1e-4
    np.testing.assert_allclose(grads[2], arrays[3].reshape(1, 2, 2, 256, 64).sum(2), rtol=1e-5, atol=1e-5)
