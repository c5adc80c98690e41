"""Whole modules through capture and lowering: values and gradients equal PyTorch's."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_train.lowering.decompose import make_lowerable
from tpu_train.lowering.interpreter import constant, to_jax


class ConvolutionalNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(8, 4, 1),
            nn.Upsample(scale_factor=1.5, mode="bilinear"),
            nn.MaxPool2d(2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return out if weights is None else out + weights.sum(-1, keepdim=True)


class EmbeddingAndGather(nn.Module):
    """Embedding with a padding row, a pick per row, a masked write, and a sorted top-k routing as in a MoE."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        weights, experts = logits.softmax(-1).topk(2, dim=-1)
        picked = torch.gather(logits, -1, experts) * weights
        gates = torch.zeros_like(logits).scatter(-1, experts, weights)
        gates[tokens == 0] = 0.0
        return torch.cat([picked, gates.cumsum(-1), logits[:, [-1, 0]].mean(1, keepdim=True).expand_as(logits)], -1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.LogSoftmax(-1))


def _encoder_layer() -> nn.Module:
    # Evaluation without gradients would take a fused path that exists on no TPU; here parameters have gradients.
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True).eval()


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (_mlp, lambda: torch.randn(3, 5, 6)),
    "convolutional": (ConvolutionalNet, lambda: torch.randn(2, 3, 8, 8)),
    "encoder_layer": (_encoder_layer, lambda: torch.randn(2, 7, 16)),
    "attention": (lambda: SelfAttention(need_weights=False), lambda: torch.randn(2, 7, 16)),
    "attention_with_weights": (lambda: SelfAttention(need_weights=True), lambda: torch.randn(2, 7, 16)),
    "embedding_and_gather": (EmbeddingAndGather, lambda: torch.tensor([[1, 0, 5, 10], [3, 3, 0, 7]])),
}


@pytest.mark.parametrize("name", MODULES)
def test_captured_and_lowered_module_equals_pytorch(name: str) -> None:
    torch.manual_seed(0)
    make_module, make_input = MODULES[name]
    module, x = make_module(), make_input()
    parameters = dict(module.named_parameters())
    cotangent = torch.randn_like(module(x))

    def step(x: Tensor, cotangent: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        out = torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x,))
        return (out, *torch.autograd.grad(out, values, cotangent))

    values = [value.detach().clone().requires_grad_() for value in parameters.values()]
    expected = step(x, cotangent, *values)
    graph = make_lowerable(make_fx(step, tracing_mode="fake")(x, cotangent, *values))
    actual = jax.jit(to_jax(graph, check=True))(*(constant(tensor) for tensor in (x, cotangent, *values)))

    for label, got, want in zip(("output", *parameters), actual, expected, strict=True):
        wide = want.detach().numpy()
        # Relative to the tensor's largest element: gradients sum over batch and sequence, some nearly to nothing.
        np.testing.assert_allclose(np.asarray(got), wide, rtol=1e-5, atol=1e-5 * np.abs(wide).max(), err_msg=label)
