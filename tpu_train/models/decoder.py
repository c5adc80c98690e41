"""The decoder-only language model: embedding, pre-norm layers, norm, output projection.

Key idea: it knows how its children are wired and nothing about them; families differ in the children they pass.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpu_train.models.attention import Attention
from tpu_train.models.cache import KVCache, LayerCache


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to the residual stream."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        feed_forward_norm: nn.Module,
        feed_forward: nn.Module,
        dropout: nn.Module,
    ):
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        segment_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Maps [B, S, D] to [B, S, D]; the other arguments are those of `Attention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, segment_ids, cache))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(
        self,
        embedding: nn.Module,
        rotary: nn.Module,
        layers: tuple[nn.Module, ...],
        norm: nn.Module,
        output: nn.Module | None,
    ):
        """Takes the children.

        Args:
            embedding: tokens [B, S] to [B, S, D]; owns `weight` [V, D].
            rotary: as `RotaryEmbedding`.
            layers: as `DecoderLayer`.
            norm: of the last residual stream.
            output: D to V; None projects by the embedding's weight (tied embeddings).
        """
        super().__init__()
        self.embedding = embedding
        self.rotary = rotary
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.output = output

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segment_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Predicts each next token.

        Args:
            tokens: int [B, S].
            positions: int [B, S], of each token within its document.
            segment_ids: int [B, S]; a token sees itself and the earlier tokens of equal id. None: all earlier tokens.
            cache: earlier tokens, which precede these; its tensors are replaced by ones that include these.

        Returns:
            Logits [B, S, V] in the dtype of the weights.

        Raises:
            ValueError: the cache has too few free slots.
        """
        features = self.features(tokens, positions, segment_ids, cache)
        return F.linear(features, self.output_weight) if self.output is None else self.output(features)

    def features(
        self,
        tokens: Tensor,
        positions: Tensor,
        segment_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What the logits are a projection of, [B, S, D]; the arguments are those of `forward`."""
        x = self.embedding(tokens)
        cos, sin = self.rotary(positions, x.dtype)
        if cache is None:
            for layer in self.layers:
                x = layer(x, cos, sin, segment_ids)
        else:
            segment_ids = torch.zeros_like(tokens) if segment_ids is None else segment_ids
            x = self._extend(x, cos, sin, segment_ids, cache)
        return self.norm(x)

    @property
    def output_weight(self) -> Tensor:
        """The projection from features to logits, [V, D]."""
        weight = (self.embedding if self.output is None else self.output).weight
        assert isinstance(weight, Tensor)
        return weight

    def _extend(self, x: Tensor, cos: Tensor, sin: Tensor, segment_ids: Tensor, cache: KVCache) -> Tensor:
        """Runs the layers over tokens that follow the cached ones."""
        cache.begin(segment_ids)
        for i, layer in enumerate(self.layers):
            layer_cache = cache.layer(i)
            x = layer(x, cos, sin, segment_ids, layer_cache)
            cache.update(i, layer_cache)
        cache.advance(x.shape[1])
        return x

    def empty_cache(
        self, batch_size: int, num_slots: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> KVCache:
        """A cache for this model of `num_slots` tokens per sequence; `dtype` is that of the activations."""
        attention = next(module for module in self.modules() if isinstance(module, Attention))
        return KVCache.empty(
            num_layers=len(self.layers),
            batch_size=batch_size,
            num_slots=num_slots,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=dtype,
            device=device,
        )
