"""Sampling from a language model as two functions to be captured, prefill and decode, and the choice of a token.

Key idea: prefill fills the cache with all of a prompt but its last token, and decode takes the last token so far. So
decode alone has logits and draws, one program for every token, and the logits of a prompt's other tokens, a [B, S, V]
tensor, are dead code in prefill and never computed.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module

from tpu_train.graph.capture import Tree
from tpu_train.models.cache import KVCache
from tpu_train.models.decoder import Decoder

Tensors = Mapping[str, Tensor]

# How a token is chosen: the likeliest; drawn from all tokens; drawn from the nucleus, which takes a sort.
Method = Literal["greedy", "all", "nucleus"]

_PADDING, _TEXT = 0, 1  # segment ids


def make_prefill(model: Decoder, num_slots: int, dtype: torch.dtype) -> Callable[..., Tree]:
    """`prefill(params, tokens, lengths) -> cache`, to be captured.

    `params` are all tensors of the model by full name, in the dtype they are computed in; `tokens` int32 [B, P] holds
    texts that end at the right, the last `lengths` int32 [B] of a row, from 0 to P. The cache is a dict of `KVCache`'s
    fields with P slots filled.

    Args:
        model: its tensors are replaced by `params`; may be on meta.
        num_slots: T, the tokens that the cache has room for.
        dtype: of the activations.
    """

    def prefill(params: Tensors, tokens: Tensor, lengths: Tensor) -> Tree:
        model.eval()
        batch_size, num_tokens = tokens.shape
        positions = torch.arange(num_tokens, dtype=torch.int32) - (num_tokens - lengths)[:, None]
        segment_ids = torch.where(positions >= 0, _TEXT, _PADDING)
        cache = model.empty_cache(batch_size, num_slots, dtype)
        with _reparametrize_module(model, {**params}, tie_weights=True):
            model(tokens, positions.clamp(min=0), segment_ids, cache)
        return {**_tree(cache), "cursor": torch.full((), num_tokens, dtype=torch.int32)}

    return prefill


def make_decode(model: Decoder, method: Method, num_streams: int) -> Callable[..., Tree]:
    """`decode(params, cache, carry, controls) -> {"cache": ..., "carry": ...}`, to be captured.

    `carry` holds `token` and `position`, int32 [B], of the last token so far, and `step`, 0-d int32, the tokens
    generated so far; what comes back has the next token. `controls` holds `temperature` and `top_p`, 0-d float32,
    `streams`, int32 [B], which of the step's random numbers a row uses, and `seed`, 0-d int32. Draws are keyed by
    `controls.seed` and `carry.step`.

    Args:
        model: its tensors are replaced by `params`; may be on meta.
        method: how a token is chosen; `greedy` ignores the controls, `all` ignores `top_p`.
        num_streams: random numbers that a step draws; streams are below it.
    """

    def decode(params: Tensors, cache: Tree, carry: Tensors, controls: Tensors) -> Tree:
        logits, cache = next_logits(model, params, cache, carry["token"], carry["position"])
        if method == "greedy":
            token = logits.argmax(-1)
        else:
            # By stream, not by row: a row's numbers do not depend on what else is in the batch.
            uniforms = torch.rand(num_streams)[controls["streams"]]
            top_p = controls["top_p"] if method == "nucleus" else None
            token = draw_tokens(logits, uniforms, controls["temperature"], top_p)
        new = {"token": token.int(), "position": carry["position"] + 1, "step": carry["step"] + 1}
        return {"cache": cache, "carry": new}

    return decode


def next_logits(model: Decoder, params: Tensors, cache: Tree, token: Tensor, position: Tensor) -> tuple[Tensor, Tree]:
    """Logits [B, V] of the token after `token` int [B] at `position` int [B], and the cache that includes it."""
    model.eval()
    state = KVCache(list(cache["keys"]), list(cache["values"]), cache["segment_ids"], cache["cursor"])
    with _reparametrize_module(model, {**params}, tie_weights=True):
        logits = model(token[:, None], position[:, None], torch.full_like(token[:, None], _TEXT), state)
    return logits[:, 0], _tree(state)


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: Tensor, top_p: Tensor | None = None) -> Tensor:
    """Draws a token per row.

    Probabilities are softmax(logits / temperature) in float32. With `top_p` the draw is from the nucleus (Holtzman et
    al. 2020, arXiv:1904.09751): the fewest likeliest tokens whose probabilities add up to `top_p`, one at least.

    Args:
        logits: [B, V].
        uniforms: float32 [B] in [0, 1); what is drawn follows from them. JAX's are multiples of 2^-23, so that a token
            is drawn with its probability to within that.
        temperature: 0-d, above 0.
        top_p: 0-d, above 0; None: draw from all tokens.

    Returns:
        int64 [B].
    """
    logits = logits.float()
    # The likeliest is at 0 before the division, so that no temperature makes an infinity minus an infinity.
    probabilities = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    if top_p is None:
        return _draw(probabilities, uniforms)
    probabilities, tokens = probabilities.sort(-1, descending=True)
    likelier = F.pad(probabilities.cumsum(-1)[:, :-1], (1, 0))
    places = _draw(torch.where(likelier < top_p, probabilities, 0), uniforms)
    return tokens.gather(1, places[:, None])[:, 0]


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index of positive weight, [B], up to which the weights [B, V] exceed that share of their sum."""
    sums = weights.cumsum(-1)
    hit = (sums > uniforms[:, None] * sums[:, -1:]) & (weights > 0)
    # By rounding there may be none.
    return torch.where(hit.any(-1), hit.int().argmax(-1), weights.argmax(-1))


def _tree(cache: KVCache) -> Tree:
    return {"keys": cache.keys, "values": cache.values, "segment_ids": cache.segment_ids, "cursor": cache.cursor}
