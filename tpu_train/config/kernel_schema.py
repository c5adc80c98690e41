"""The choices of the groups below `kernels`: which implementation computes an op of the model."""

import dataclasses
from typing import Literal

from tpu_train.config.fields import at_least, key, not_empty

Option = bool | int | float | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceAttention:
    """PyTorch's own scaled dot-product attention."""

    name: Literal["reference"] = key("Attention kernel.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplashAttention:
    """Pallas kernels for TPUs: blocks above the diagonal are skipped, and no matrix of scores is kept."""

    name: Literal["splash"] = key("Attention kernel.")
    implementation: Literal["jax", "tokamax"] = key("Whose kernels: JAX's, or those of the tokamax package.")
    block_q: int = key("Queries per block of the forward kernel.", rule=at_least(1), unit="tokens")
    block_kv: int = key("Keys per block that the forward kernel loads.", rule=at_least(1), unit="tokens")
    block_kv_compute: int = key("Keys of a loaded block per product.", rule=at_least(1), unit="tokens")
    block_q_dkv: int | None = key(
        "Queries per block of the kernel of key and value gradients; null: block_q.", rule=at_least(1), unit="tokens"
    )
    block_kv_dkv: int | None = key("Keys per block of it; null: block_kv.", rule=at_least(1), unit="tokens")
    block_kv_dkv_compute: int | None = key(
        "Keys of a loaded block of it per product; null: block_kv_compute.", rule=at_least(1), unit="tokens"
    )
    block_q_dq: int | None = key(
        "Queries per block of the kernel of query gradients; null: block_q.", rule=at_least(1), unit="tokens"
    )
    block_kv_dq: int | None = key("Keys per block of it; null: block_kv.", rule=at_least(1), unit="tokens")
    fused_backward: bool = key("One backward kernel instead of two, which takes more memory.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseAttention:
    """The same blocks in plain JAX, for any device: what trains long sequences on a CPU."""

    name: Literal["blockwise"] = key("Attention kernel.")
    block_q: int = key("Queries per block.", rule=at_least(1), unit="tokens")
    block_kv: int = key("Keys per block.", rule=at_least(1), unit="tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoAttention:
    """What suits the platform and the shapes; the log says which."""

    name: Literal["auto"] = key("Attention kernel.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomKernel:
    """A module of your own in the place of the model's."""

    name: Literal["custom"] = key("Kernel.")
    component: str = key("The module class, as package.module.Name.", rule=not_empty)
    paths: str = key('Where it goes: a pattern of paths such as layers.0.*; "**": everywhere.', rule=not_empty)
    options: dict[str, Option] = key("Arguments of the class.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceLoss:
    """Logits, then PyTorch's cross-entropy."""

    name: Literal["reference"] = key("Loss kernel.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedLoss:
    """Projection and cross-entropy together, block by block: the logits are never all there."""

    name: Literal["fused"] = key("Loss kernel.")
    implementation: Literal["auto", "pallas", "blockwise"] = key(
        "Pallas kernels, plain JAX, or what suits the platform."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoLoss:
    """What suits the platform and the shapes; the log says which."""

    name: Literal["auto"] = key("Loss kernel.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceMoe:
    """Every row with every expert, and a choice."""

    name: Literal["reference"] = key("Kernel of the experts' products.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMoe:
    """Each row with its own expert: a product of groups of rows."""

    name: Literal["grouped"] = key("Kernel of the experts' products.")
    implementation: Literal["auto", "pallas", "ragged"] = key("Pallas kernels, plain JAX, or what suits the platform.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoMoe:
    """What suits the platform and the shapes; the log says which."""

    name: Literal["auto"] = key("Kernel of the experts' products.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which implementation computes an op of the model."""

    attention: ReferenceAttention | SplashAttention | BlockwiseAttention | AutoAttention | CustomKernel = key(
        "Attention between projected heads."
    )
    loss: ReferenceLoss | FusedLoss | AutoLoss = key("Output projection and cross-entropy.")
    moe: ReferenceMoe | GroupedMoe | AutoMoe | CustomKernel = key("Experts' products; ignored without experts.")
