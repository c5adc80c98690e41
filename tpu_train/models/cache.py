"""The key/value cache of incremental decoding.

Key idea: static shapes and no mutation. A cache has a fixed number of slots T, of which the first `cursor` are filled;
appending replaces the tensors by new ones. A decode step captured once (`cursor` as a 0-d tensor) therefore serves
every step: the cache's fields go in as inputs and come out as outputs.
"""

import dataclasses
from typing import Self

import torch
from torch import Tensor


@dataclasses.dataclass
class LayerCache:
    """What one attention layer sees of the cache.

    Attributes:
        keys: rotated keys, [B, T, K, N].
        values: [B, T, K, N].
        segment_ids: document of each slot, [B, T]; those of the tokens being added are already in.
        cursor: slot of the first token being added.
    """

    keys: Tensor
    values: Tensor
    segment_ids: Tensor
    cursor: Tensor | int

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Puts the keys and values [B, S, K, N] of S new tokens into the slots from the cursor on."""
        self.keys = _put(self.keys, keys, self.cursor)
        self.values = _put(self.values, values, self.cursor)


@dataclasses.dataclass
class KVCache:
    """Keys and values of all layers for the tokens seen so far.

    Attributes:
        keys: one [B, T, K, N] per layer.
        values: one [B, T, K, N] per layer.
        segment_ids: document of each slot, [B, T]. Batches of prompts of different lengths are padded on the left
            with tokens of another segment.
        cursor: number of filled slots; an int, or a 0-d int64 tensor to serve any step with one captured graph. An int
            is checked against T, a tensor cannot be.
    """

    keys: list[Tensor]
    values: list[Tensor]
    segment_ids: Tensor
    cursor: Tensor | int

    @classmethod
    def empty(
        cls,
        *,
        num_layers: int,
        batch_size: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """A cache of T = `num_slots` empty slots per sequence; `dtype` is that of the model's activations."""
        shape = (batch_size, num_slots, num_kv_heads, head_dim)
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        segment_ids = torch.zeros(batch_size, num_slots, dtype=torch.int64, device=device)
        return cls(keys, [torch.zeros_like(key) for key in keys], segment_ids, 0)

    def begin(self, segment_ids: Tensor) -> None:
        """Enters the segment ids [B, S] of the tokens to be added, before any layer runs.

        Raises:
            ValueError: the free slots do not suffice.
        """
        num_tokens, num_slots = segment_ids.shape[1], self.segment_ids.shape[1]
        if isinstance(self.cursor, int) and self.cursor + num_tokens > num_slots:
            raise ValueError(
                f"cache: {num_tokens} tokens do not fit after {self.cursor} of {num_slots} slots; make a longer cache"
            )
        self.segment_ids = _put(self.segment_ids, segment_ids.to(self.segment_ids.dtype), self.cursor)

    def layer(self, index: int) -> LayerCache:
        """The part of layer `index`, to be handed back by `update`."""
        return LayerCache(self.keys[index], self.values[index], self.segment_ids, self.cursor)

    def update(self, index: int, layer: LayerCache) -> None:
        """Takes over what layer `index` appended; the lists are replaced too."""
        self.keys = [*self.keys[:index], layer.keys, *self.keys[index + 1 :]]
        self.values = [*self.values[:index], layer.values, *self.values[index + 1 :]]

    def advance(self, num_tokens: int) -> None:
        """Counts the tokens added, after all layers ran."""
        self.cursor = self.cursor + num_tokens


def _put(slots: Tensor, new: Tensor, cursor: Tensor | int) -> Tensor:
    """`slots` [B, T, ...] with `new` [B, S, ...] from slot `cursor` on."""
    indices = cursor + torch.arange(new.shape[1], device=new.device)
    return slots.index_copy(1, indices, new)
