"""What a model costs, read off the built model: the two numbers of the model-FLOPs formula.

Key idea: training takes, per token, 6 FLOPs for each parameter of a matrix product and 12 * S for each unit of
attention width (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Both counts come from the modules that
will run and not from the config, so that a swapped block is counted as it is.
"""

from torch import nn

from tpu_train.models.attention import Attention
from tpu_train.models.decoder import Decoder
from tpu_train.models.linear import Embedding
from tpu_train.models.moe import Experts, MoeFeedForward


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that multiply a token: all matrices, the output projection when tied too, without the lookup.

    Of a mixture of experts the router, and as many experts as a token has.
    """
    return sum(_own_matmul_parameters(module) for module in model.modules())


def attention_width(model: nn.Module) -> int:
    """Query heads times head width, H * N, summed over the layers."""
    return sum(m.num_heads * m.head_dim for m in model.modules() if isinstance(m, Attention))


def looked_up(model: nn.Module) -> set[str]:
    """Names of the parameters that are only read by rows: embedding tables that are no output projection too."""
    tables = {id(p) for m in model.modules() if isinstance(m, Embedding | nn.Embedding) for p in m.parameters(False)}
    others = {id(p) for m in model.modules() if _own_matmul_parameters(m) for p in m.parameters(recurse=False)}
    for module in model.modules():
        if isinstance(module, Decoder) and module.output is None:
            others |= {id(weight) for weight in module.embedding.parameters()}
    return {name for name, param in model.named_parameters() if id(param) in tables - others}


def _own_matmul_parameters(module: nn.Module) -> int:
    """Those of the module itself; a vector (a norm's weight, a bias) is no matrix product."""
    if isinstance(module, Embedding | nn.Embedding | Experts):
        return 0
    if isinstance(module, MoeFeedForward):  # its router knows how many of the experts a token has
        return module.top_k * sum(w.shape[1:].numel() for w in module.experts.parameters())
    if isinstance(module, Decoder) and module.output is None:
        return sum(weight.numel() for weight in module.embedding.parameters())
    return sum(weight.numel() for weight in module.parameters(recurse=False) if weight.ndim >= 2)
