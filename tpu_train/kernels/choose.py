"""Which kernels a run gets: what its configuration names, and for `auto` what suits the platform and the shapes.

Key idea: one function decides, from plain numbers and without JAX, for the check and for the run. A kernel that was
named and cannot run is a problem with its reason; only `auto` falls back, and says what it took.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpu_train.config import kernel_schema as schema
from tpu_train.config.problems import Problem
from tpu_train.config.schema import Run
from tpu_train.kernels.attention.limits import check_blockwise, check_splash
from tpu_train.kernels.loss.limits import check_linear_logsumexp
from tpu_train.kernels.platform import Platform
from tpu_train.kernels.swap import load

# Sequences from which blocks are faster on a CPU than one product (scripts/bench_attention, docs/measurements.md).
_BLOCKWISE_FROM_TOKENS = 1024
# Vocabularies from which the fused loss is worth it on a CPU; below, the logits are small.
_FUSED_FROM_VOCABULARY = 8192
# Block sizes of splash attention, best first; the largest that divides the sequence is taken.
_SPLASH_BLOCKS = (1024, 512, 256, 128)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One choice.

    Attributes:
        name: of the implementation; "reference" for none, "custom" for one of the user's own.
        options: its static options.
        component: of a custom one.
        paths: where it goes.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    component: str | None = None
    paths: str = "**"


REFERENCE = Kernel("reference")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The kernels of a run.

    Attributes:
        attention: "splash", "blockwise", "reference" or "custom".
        loss: "pallas", "blockwise" or "reference".
        moe: "pallas", "ragged", "reference" or "custom".
        notes: what `auto` took, one line each.
        problems: kernels that cannot run.
    """

    attention: Kernel
    loss: Kernel
    moe: Kernel
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


def choose(run: Run, platform: Platform | None) -> Chosen:
    """Decides for a run.

    Args:
        run: the configuration.
        platform: of the devices; None where it is not known, which then rules nothing out.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    attention = _attention(run, platform, notes, problems)
    loss = _loss(run, platform, notes, problems)
    moe = _moe(run, platform, notes, problems) if hasattr(run.model, "num_experts") else REFERENCE
    return Chosen(attention, loss, moe, tuple(notes), tuple(problems))


def _attention(run: Run, platform: Platform | None, notes: list[str], problems: list[Problem]) -> Kernel:
    config, group = run.kernels.attention, "kernels.attention"
    match config:
        case schema.ReferenceAttention():
            return REFERENCE
        case schema.CustomKernel():
            return _custom(config, group, problems)
        case schema.BlockwiseAttention():
            options = {"block_q": config.block_q, "block_kv": config.block_kv}
            problems += [_problem(group, text) for text in check_blockwise(**options)]
            return Kernel("blockwise", options)
        case schema.SplashAttention():
            return _splash(config, run, platform, problems)
        case schema.AutoAttention():
            kernel = _auto_attention(run, platform)
            notes.append(f"{group}=auto: {kernel.name}")
            return kernel


def _splash(config: schema.SplashAttention, run: Run, platform: Platform | None, problems: list[Problem]) -> Kernel:
    group = "kernels.attention"
    options = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("name", "implementation")}
    if platform not in (None, "tpu"):
        problems.append(_problem(group, f"splash is a TPU kernel, and the platform is {platform}; {_OTHERS}"))
    if config.implementation == "tokamax":
        problems.append(
            _problem(
                f"{group}.implementation",
                "the attention of tokamax 0.0.12 takes no segment ids, which packed documents need; use jax",
            )
        )
    problems += [_problem(group, text, ("training.seq_len", "model")) for text in _splash_problems(run, options)]
    return Kernel("splash", options)


_OTHERS = "choose kernels/attention=blockwise, reference or auto"


def _splash_problems(run: Run, options: Mapping[str, Any]) -> list[str]:
    model = run.model
    return check_splash(run.training.seq_len, model.head_dim, model.num_heads, model.num_kv_heads, **options)


def _auto_attention(run: Run, platform: Platform | None) -> Kernel:
    seq_len = run.training.seq_len
    if platform == "tpu":
        block = next((size for size in _SPLASH_BLOCKS if seq_len % size == 0), None)
        options = {"block_q": min(block, 512), "block_kv": block, "block_kv_compute": min(block, 512)} if block else {}
        if block and not _splash_problems(run, options):
            return Kernel("splash", options)
    if platform == "cpu" and seq_len >= _BLOCKWISE_FROM_TOKENS:
        return Kernel("blockwise")
    return REFERENCE


def _loss(run: Run, platform: Platform | None, notes: list[str], problems: list[Problem]) -> Kernel:
    config, group = run.kernels.loss, "kernels.loss"
    match config:
        case schema.ReferenceLoss():
            return REFERENCE
        case schema.FusedLoss():
            name = _implementation(config.implementation, "blockwise", group, platform, notes, problems)
            if name == "pallas":
                problems += [_problem(group, text, ("model",)) for text in _loss_problems(run)]
            return Kernel(name)
        case schema.AutoLoss():
            large = run.model.vocab_size >= _FUSED_FROM_VOCABULARY
            fits = platform == "tpu" and not _loss_problems(run)
            kernel = Kernel("pallas") if fits else Kernel("blockwise") if large and platform == "cpu" else REFERENCE
            notes.append(f"{group}=auto: {kernel.name}")
            return kernel


def _loss_problems(run: Run) -> list[str]:
    itemsize = 2 if run.precision.compute == "bfloat16" else 4
    return check_linear_logsumexp(depth=run.model.dim, vocabulary=run.model.vocab_size, itemsize=itemsize)


def _moe(run: Run, platform: Platform | None, notes: list[str], problems: list[Problem]) -> Kernel:
    config, group = run.kernels.moe, "kernels.moe"
    best = "pallas" if platform == "tpu" else "ragged"
    match config:
        case schema.ReferenceMoe():
            return REFERENCE
        case schema.CustomKernel():
            return _custom(config, group, problems)
        case schema.GroupedMoe():
            return Kernel(_implementation(config.implementation, "ragged", group, platform, notes, problems))
        case schema.AutoMoe():
            notes.append(f"{group}=auto: {best}")
            return Kernel(best)


def _implementation(
    name: str, elsewhere: str, group: str, platform: Platform | None, notes: list[str], problems: list[Problem]
) -> str:
    """Which of Pallas kernels and what runs anywhere else; `auto` goes by the platform."""
    if name == "auto":
        name = "pallas" if platform == "tpu" else elsewhere
        notes.append(f"{group}.implementation=auto: {name}")
    if name == "pallas" and platform not in (None, "tpu"):
        message = f"pallas is a TPU kernel, and the platform is {platform}; choose {elsewhere} or auto"
        problems.append(_problem(f"{group}.implementation", message))
    return name


def _custom(config: schema.CustomKernel, group: str, problems: list[Problem]) -> Kernel:
    try:
        load(config.component)
    except ValueError as error:
        problems.append(_problem(f"{group}.component", str(error)))
    return Kernel("custom", config.options, config.component, config.paths)


def _problem(place: str, message: str, keys: tuple[str, ...] = ()) -> Problem:
    return Problem(place, message, (*keys, "runtime.platform"))
