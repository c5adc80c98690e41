"""Every entry of the table against PyTorch's own kernels, on the samples of PyTorch's operator database."""

import pytest
import torch
from table_checker import DTYPES, OPINFOS, CheckEntries, opinfos_with, run_sample, samples, table_ops
from table_samples import HAND_WRITTEN
from table_sources import OPINFO_SOURCES
from torch._ops import OpOverload

OPS = table_ops()
# What PyTorch says about its own samples, nothing of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter with Tensor src is deprecated:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:torch.searchsorted\(\). input value tensor is non-contiguous:UserWarning"),
]
QUICK_CHECKS = 2  # per op, OpInfo and dtype; all of them with --full


def _check_opinfo(name: str, ops: set[OpOverload], dtype: torch.dtype, limit: int | None) -> CheckEntries:
    """Compares what the OpInfo's samples run, until each op in `ops` was compared `limit` times."""
    mode = CheckEntries(ops)
    for sample in samples(OPINFOS[name], dtype):
        run_sample(OPINFOS[name], sample, mode)
        if limit is not None and all(len(mode.checked.get(op, ())) >= limit for op in ops):
            break
    return mode


def test_every_entry_has_a_source_of_right_values() -> None:
    assert set(OPINFO_SOURCES) | set(HAND_WRITTEN) == set(OPS)


@pytest.mark.parametrize("name", sorted(OPINFO_SOURCES))
def test_entry_equals_pytorch_on_opinfo_samples(name: str) -> None:
    sources, dtypes = OPINFO_SOURCES[name]
    for letter in dtypes:
        checked = 0
        for source in sources:
            if DTYPES[letter] in OPINFOS[source].supported_dtypes("cpu"):
                mode = _check_opinfo(source, {OPS[name]}, DTYPES[letter], QUICK_CHECKS)
                checked += len(mode.checked.get(OPS[name], ()))
        assert checked, f"{sources} never run {name} with {DTYPES[letter]}"


@pytest.mark.parametrize("name", sorted(HAND_WRITTEN))
def test_entry_equals_pytorch_on_hand_written_samples(name: str) -> None:
    make, dtypes = HAND_WRITTEN[name]
    for letter in dtypes:
        mode = CheckEntries({OPS[name]})
        calls = make(DTYPES[letter])
        for args, kwargs in calls:
            with mode:
                OPS[name](*args, **kwargs)
        assert len(mode.checked[OPS[name]]) == len(calls)


@pytest.mark.full
# PyTorch warns of experimental, deprecated and slow paths in its own samples; JAX's warnings are of other categories.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "letter"), [(name, letter) for letter in DTYPES for name, _ in opinfos_with(DTYPES[letter])]
)
def test_all_entries_equal_pytorch_on_all_samples(name: str, letter: str) -> None:
    _check_opinfo(name, set(OPS.values()), DTYPES[letter], limit=None)
