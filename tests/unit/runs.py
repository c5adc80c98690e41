"""Small runs that tests share: configurations built in code, and the same run in plain PyTorch."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tpu_train.config import kernel_schema, schema
from tpu_train.training.build import build_model

# Larger than a model's usual 0.02: a tiny model's attention gradients vanish there, AdamW divides them by their own
# size, and PyTorch's float32 run is 1.1e-5 from its float64 run. At 0.1 both float32 runs stay within 2e-6 of it.
INIT_STD = 0.1

QWEN3 = schema.Qwen3Model(
    family="qwen3",
    dim=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_dim=96,
    vocab_size=320,
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=True,
    init_std=INIT_STD,
    seq_len=32,
)

LLAMA3 = schema.Llama3Model(
    family="llama3",
    dim=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_dim=96,
    vocab_size=320,
    rope_theta=5e5,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=INIT_STD,
    seq_len=32,
    rope_scaling=schema.RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16),
)

QWEN3_MOE = schema.Qwen3MoeModel(
    family="qwen3_moe",
    dim=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_dim=32,
    num_experts=8,
    top_k=2,
    norm_topk_prob=True,
    vocab_size=320,
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=True,
    init_std=INIT_STD,
    seq_len=32,
)

TRAINING = schema.Training(
    steps=20,
    seq_len=32,
    batch_per_device=8,
    global_batch_size=None,
    grad_accumulation=1,
    max_grad_norm=None,
    seed=0,
    log_every=10,
    on_nan="stop",
    max_time=None,
    inject_inf_at_step=None,
)

REFERENCE_KERNELS = kernel_schema.Kernels(
    attention=kernel_schema.ReferenceAttention(name="reference"),
    loss=kernel_schema.ReferenceLoss(name="reference"),
    moe=kernel_schema.ReferenceMoe(name="reference"),
)

ADAMW = schema.AdamW(
    name="adamw",
    lr=1e-3,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    no_decay=("norm", "bias", "embedding"),
)

SGD = schema.Sgd(name="sgd", lr=1e-2, momentum=0.9, weight_decay=0.01, no_decay=("norm",))


def make_run(**changes: Any) -> schema.Run:
    """A float32 run of a tiny Qwen3; keyword arguments replace sections, `training` takes a dict of its changes."""
    training = dataclasses.replace(TRAINING, **changes.pop("training", {}))
    run = schema.Run(
        model=QWEN3,
        objective=schema.CausalLmObjective(name="causal_lm"),
        parallelism=schema.SingleParallelism(name="single"),
        kernels=REFERENCE_KERNELS,
        mode=schema.GraphMode(name="graph", passes=("fuse_cross_entropy_pass",), check_graph=True),
        precision=schema.Precision(param="float32", compute="float32", matmul="default"),
        optimizer=ADAMW,
        schedule=schema.ConstantSchedule(name="constant", warmup_steps=0),
        data=schema.SyntheticData(name="synthetic", num_workers=0),
        tokenizer=schema.BytesTokenizer(name="bytes"),
        training=training,
        validation=schema.Validation(every=None, steps=0),
        checkpoint=schema.Checkpoint(
            every=None, keep_last=2, keep_every=None, resume="auto", init_from=None, on_error="continue"
        ),
        runtime=schema.Runtime(platform="cpu", devices=1),
        logging=schema.Logging(
            wandb=schema.Wandb(mode="disabled", project="tests", name=None, tags=()),
            tensorboard=schema.TensorBoard(enabled=False),
            metadata={},
        ),
        run_dir=None,
    )
    return dataclasses.replace(run, **changes)


def random_batches(count: int, run: schema.Run, ignored: bool = False) -> list[dict[str, np.ndarray]]:
    """Batches of random tokens. With `ignored`, the later a row the more of its labels are -100, all of the last two's.

    Only 32 tokens occur, so that each has a gradient from many positions: AdamW divides by a gradient's own size, and a
    token seen once, before ignored labels, has one so small that PyTorch's float32 run is 3e-5 from its float64 run.
    """
    rng = np.random.default_rng(7)
    rows, seq_len = run.training.batch_per_device or 0, run.training.seq_len
    batches = []
    for _ in range(count):
        tokens = rng.integers(0, 32, (rows, seq_len + 1)).astype(np.int32)
        labels = tokens[:, 1:].copy()
        share = np.linspace(0, 1.2, rows)[:, None] if ignored else np.zeros((rows, 1))
        labels[rng.random(labels.shape) < share] = -100
        batches.append({"tokens": tokens[:, :-1].copy(), "labels": labels})
    return batches


def build_torch_model(config: Any, params: Mapping[str, np.ndarray]) -> nn.Module:
    """The model in plain PyTorch with the given weights."""
    model = build_model(config, "cpu")
    missing = model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in params.items()}, strict=False)
    assert not missing.unexpected_keys
    return model


@dataclasses.dataclass
class TorchResult:
    """What the plain PyTorch loop gave: per step, and in the end."""

    losses: list[float]
    grad_norms: list[float]
    params: dict[str, np.ndarray]


def train_in_torch(
    run: schema.Run, params: Mapping[str, np.ndarray], batches: Iterable[Mapping[str, np.ndarray]]
) -> TorchResult:
    """The run as a PyTorch user would write it: autograd, torch.optim, clip_grad_norm_, the whole batch at once."""
    model = build_torch_model(run.model, params)
    named = dict(model.named_parameters())
    optimizer = _torch_optimizer(run.optimizer, named)
    result = TorchResult([], [], {})
    for batch in batches:
        tokens, labels = (torch.from_numpy(batch[k]).long() for k in ("tokens", "labels"))
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        logits = model(tokens, positions)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        limit = run.training.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(list(named.values()), limit)
        optimizer.step()
        result.losses.append(loss.item())
        result.grad_norms.append(norm.item())
    result.params = {name: p.detach().numpy() for name, p in named.items()}
    return result


def _torch_optimizer(config: schema.AdamW | schema.Sgd, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    # By the names that this project's models give: attention_norm, query_norm, norm, embedding.
    kept = [p for name, p in named.items() if any(kind in name for kind in config.no_decay)]
    decayed = [p for name, p in named.items() if not any(kind in name for kind in config.no_decay)]
    assert kept
    assert decayed
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    if isinstance(config, schema.Sgd):
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
