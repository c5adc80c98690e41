"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) with Llama 3.1's frequency scaling.

Key idea: the frequencies are fp32 values computed once on the CPU, equal bit for bit to Hugging Face's, and kept as
Python numbers: a model then has no buffers, can be made on the meta device, and a captured graph holds a constant.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Angles of the rotation that encodes a token's position."""

    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, float] | None = None):
        """Computes the frequencies.

        Args:
            head_dim: N, even.
            theta: base of the geometric series of frequencies.
            scaling: Llama 3.1's `factor`, `low_freq_factor`, `high_freq_factor` and `original_max_positions`.
        """
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / (theta**exponents)
        if scaling is not None:
            frequencies = scale_frequencies(frequencies, **scaling)
        self.frequencies: tuple[float, ...] = tuple(frequencies.tolist())

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [B, S, 1, N/2] in `dtype`, of positions [B, S]; the angles are computed in fp32."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        angles = positions[..., None, None].float() * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def scale_frequencies(
    frequencies: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: float,
) -> Tensor:
    """Llama 3.1's stretching of long wavelengths (`apply_scaling` of github.com/meta-llama/llama-models).

    Wavelengths above `original_max_positions / low_freq_factor` tokens are multiplied by `factor`, those below
    `original_max_positions / high_freq_factor` are kept, and between the two the frequencies are interpolated. The
    order of operations is that of transformers' `_compute_llama3_parameters`; another order rounds differently.
    """
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > original_max_positions / low_freq_factor
    is_short = wavelengths < original_max_positions / high_freq_factor
    smooth = (original_max_positions / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    return torch.where(is_long, frequencies / factor, torch.where(is_short, frequencies, between))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + N/2) of each head of [B, S, heads, N] by the angles of `RotaryEmbedding`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
