"""The kernels as PyTorch ops. Importing it imports JAX and Pallas, so it is imported where a kernel was chosen."""

from tpu_train.kernels.attention.blockwise import blockwise_attention
from tpu_train.kernels.attention.splash import splash_attention
from tpu_train.kernels.jax_op import JaxOp, jax_op
from tpu_train.kernels.loss import blockwise as loss_blockwise
from tpu_train.kernels.loss import pallas as loss_pallas
from tpu_train.kernels.moe import pallas as moe_pallas
from tpu_train.kernels.moe import ragged as moe_ragged

ATTENTION: dict[str, JaxOp] = {
    "splash": jax_op("tpu_train::splash_attention")(splash_attention),
    "blockwise": jax_op("tpu_train::blockwise_attention")(blockwise_attention),
}
LOSS: dict[str, JaxOp] = {
    "pallas": jax_op("tpu_train::linear_logsumexp_pallas")(loss_pallas.linear_logsumexp),
    "blockwise": jax_op("tpu_train::linear_logsumexp_blockwise")(loss_blockwise.linear_logsumexp),
}
MOE: dict[str, JaxOp] = {
    "pallas": jax_op("tpu_train::grouped_matmul_pallas")(moe_pallas.grouped_matmul),
    "ragged": jax_op("tpu_train::grouped_matmul_ragged")(moe_ragged.grouped_matmul),
}
