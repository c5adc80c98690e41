"""The plans of the shipped families: which dimension of each parameter is split over `tensor`.

Key idea: the layout of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) with its sequence parallelism (Korthikanti
et al. 2022, arXiv:2205.05198): the first products of a block are split by columns (heads, hidden units), the last one
by rows, norms and residuals along the sequence, embedding and logits along the vocabulary.
"""

from collections.abc import Callable

from tpu_train.config import schema
from tpu_train.sharding.plan import ModuleRule, ParameterRule, Plan

_COLUMN = ParameterRule(tensor_dim=0)
_ROW = ParameterRule(tensor_dim=1)


def decoder(config: schema.DecoderModel) -> Plan:
    """Of a dense decoder, `models.decoder` with `models.attention` and `models.feed_forward`."""
    query = ParameterRule(tensor_dim=0, unit=config.head_dim)
    key = ParameterRule(tensor_dim=0, unit=config.head_dim, query_heads=config.num_heads)
    parameters = {
        "embedding.weight": _COLUMN,
        "layers.*.attention.query.weight": query,
        "layers.*.attention.key.weight": key,
        "layers.*.attention.value.weight": key,
        "layers.*.attention.output.weight": ParameterRule(tensor_dim=1, unit=config.head_dim),
        "layers.*.feed_forward.gate.weight": _COLUMN,
        "layers.*.feed_forward.up.weight": _COLUMN,
        "layers.*.feed_forward.down.weight": _ROW,
    }
    modules: dict[str, ModuleRule] = {
        "embedding": "vocabulary",
        "layers.*.attention": "gather_input",
        "layers.*.attention.output": "scatter_output",
        "layers.*.feed_forward": "gather_input",
        "layers.*.feed_forward.down": "scatter_output",
        "norm": "gather_output",
    }
    vocabulary = "embedding.weight"
    if not config.tie_embeddings:
        vocabulary = "output.weight"
        parameters[vocabulary] = _COLUMN
    return Plan(parameters, modules, vocabulary=vocabulary)


def moe_decoder(config: schema.DecoderModel) -> Plan:
    """Of a decoder whose feed-forward layers are mixtures, `models.moe`: experts over `expert`, the rest over fsdp."""
    del config  # the same for all sizes
    experts = "layers.*.feed_forward.experts"
    modules: dict[str, ModuleRule] = {experts: "experts"}
    return Plan({f"{experts}.*": ParameterRule(expert_dim=0)}, modules)


PLANS: dict[str, Callable[..., Plan]] = {"llama3": decoder, "qwen3": decoder, "qwen3_moe": moe_decoder}
