"""One training step four ways, in one run: PyTorch eager, torch.compile, hand-written JAX, mode=graph.

Same model, weights, batches and threads. Each contender has a process of its own, as its users would run it, and they
take turns, one step each, so that whatever else the machine does hits all of them. Prints medians and ratios; the
losses of all must agree, or the times mean nothing.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.nn import functional as F

from tpu_train.config import schema
from tpu_train.config.compose import compose
from tpu_train.config.rules import global_batch_size
from tpu_train.execution.host_memory import keep_freed_memory
from tpu_train.execution.runtime import Runtime
from tpu_train.training.build import build_model
from tpu_train.training.engine import Engine

# A small Qwen3 with the family's own vocabulary, tied.
OVERRIDES = [
    "model=qwen3_debug",
    "model.dim=256",
    "model.num_layers=4",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "model.ffn_dim=768",
    "model.vocab_size=151936",
    "model.tie_embeddings=true",
    "precision=fp32",
    "data=synthetic",
    "training.seq_len=512",
    "runtime.platform=cpu",
]
CONTENDERS = ("eager", "compile", "jax", "graph")
LOSS_TOLERANCE = 1e-4  # relative; the contenders compute the same function in different orders

Batch = Mapping[str, np.ndarray]
Step = Callable[[Batch], float]


def is_decayed(name: str) -> bool:
    """Whether a parameter of this model has weight decay: matrices have, norms and the embedding have not."""
    return "norm" not in name and "embedding" not in name


def torch_step(run: schema.Run, params: Mapping[str, np.ndarray], compiled: bool) -> Step:
    """A training step as a PyTorch user writes it."""
    model = build_model(run.model, "cpu")
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in params.items()})
    named = dict(model.named_parameters())
    config = run.optimizer
    assert isinstance(config, schema.AdamW)
    groups = [
        {"params": [p for n, p in named.items() if is_decayed(n) is flag], "weight_decay": config.weight_decay * flag}
        for flag in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    limit = run.training.max_grad_norm
    assert limit is not None

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def step(batch: Batch) -> float:
        tokens, labels = (torch.from_numpy(batch[name]).long() for name in ("tokens", "labels"))
        loss = forward(tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(list(named.values()), limit)
        optimizer.step()
        return loss.item()

    return step


def graph_step(run: schema.Run, params: Mapping[str, np.ndarray]) -> Step:
    """A training step of `mode=graph`."""
    runtime = Runtime(run.runtime.platform)
    engine = Engine(run, runtime)
    state = engine.state_from(runtime.put(params))
    lr = run.optimizer.lr

    def step(batch: Batch) -> float:
        nonlocal state
        state, metrics = engine.step(state, batch, lr)
        return float(runtime.fetch(metrics)["loss"])

    return step


def jax_step(run: schema.Run, params: Mapping[str, np.ndarray]) -> Step:
    """A training step as a JAX user writes it by hand: one jitted function, weights and moments donated."""
    weights = {name: jnp.array(value) for name, value in params.items()}
    state = (weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights), jnp.int32(0))
    update = jax.jit(functools.partial(jax_update, run), donate_argnums=0)

    def step(batch: Batch) -> float:
        nonlocal state
        state, loss = update(state, jnp.asarray(batch["tokens"]), jnp.asarray(batch["labels"]))
        return float(loss)

    return step


def jax_update(run: schema.Run, state: tuple[Any, ...], tokens: Array, labels: Array) -> tuple[tuple[Any, ...], Array]:
    """Forward, backward, clipping and AdamW."""
    params, mu, nu, count = state
    config = run.optimizer
    assert isinstance(config, schema.AdamW)
    assert run.training.max_grad_norm is not None
    loss, grads = jax.value_and_grad(jax_loss)(params, tokens, labels, run.model)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    factor = jnp.minimum(1.0, run.training.max_grad_norm / (norm + 1e-6))
    count = count + 1
    correction1 = 1 - config.beta1 ** count.astype(jnp.float32)
    correction2 = 1 - config.beta2 ** count.astype(jnp.float32)
    new: tuple[dict[str, Array], ...] = ({}, {}, {})
    for name, param in params.items():
        grad = grads[name] * factor
        first = config.beta1 * mu[name] + (1 - config.beta1) * grad
        second = config.beta2 * nu[name] + (1 - config.beta2) * grad * grad
        decay = config.weight_decay if is_decayed(name) else 0.0
        change = first / correction1 / (jnp.sqrt(second / correction2) + config.eps)
        new[0][name] = param * (1 - config.lr * decay) - config.lr * change
        new[1][name], new[2][name] = first, second
    return (*new, count), loss


def jax_loss(params: Mapping[str, Array], tokens: Array, labels: Array, model: Any) -> Array:
    """Mean cross-entropy of a Qwen3 with tied embeddings."""
    x = params["embedding.weight"][tokens]
    frequencies = 1 / model.rope_theta ** (jnp.arange(0, model.head_dim, 2) / model.head_dim)
    angles = jnp.arange(tokens.shape[1])[:, None] * frequencies
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    for i in range(model.num_layers):
        weights = {k.removeprefix(f"layers.{i}."): v for k, v in params.items() if k.startswith(f"layers.{i}.")}
        h = jax_rms_norm(x, weights["attention_norm.weight"], model.norm_eps)
        x = x + jax_attention(h, weights, cos, sin, model)
        h = jax_rms_norm(x, weights["feed_forward_norm.weight"], model.norm_eps)
        gated = jax.nn.silu(h @ weights["feed_forward.gate.weight"].T) * (h @ weights["feed_forward.up.weight"].T)
        x = x + gated @ weights["feed_forward.down.weight"].T
    logits = jax_rms_norm(x, params["norm.weight"], model.norm_eps) @ params["embedding.weight"].T
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def jax_attention(h: Array, weights: Mapping[str, Array], cos: Array, sin: Array, model: Any) -> Array:
    """Causal grouped-query attention with normed queries and keys; h is [B, S, D]."""
    batch, length, _ = h.shape
    groups = model.num_heads // model.num_kv_heads

    def heads(name: str) -> Array:
        return (h @ weights[f"attention.{name}.weight"].T).reshape(batch, length, -1, model.head_dim)

    def rotate(x: Array) -> Array:
        low, high = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    query = rotate(jax_rms_norm(heads("query"), weights["attention.query_norm.weight"], model.norm_eps))
    key = rotate(jax_rms_norm(heads("key"), weights["attention.key_norm.weight"], model.norm_eps))
    value = heads("value")
    query = query.reshape(batch, length, model.num_kv_heads, groups, model.head_dim)
    scores = jnp.einsum("bskgn,btkn->bkgst", query, key) / model.head_dim**0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weight = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = jnp.einsum("bkgst,btkn->bskgn", weight, value).reshape(batch, length, -1)
    return mixed @ weights["attention.output.weight"].T


def jax_rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm over the last dimension."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def make_step(name: str, run: schema.Run, params: Mapping[str, np.ndarray]) -> Step:
    """A contender's step, from the given weights."""
    match name:
        case "jax":
            return jax_step(run, params)
        case "graph":
            return graph_step(run, params)
        case _:
            return torch_step(run, params, compiled=name == "compile")


def batches_of(run: schema.Run, count: int) -> list[Batch]:
    """The same random batches in every process."""
    rng = np.random.default_rng(0)
    shape = (global_batch_size(run), run.training.seq_len + 1)
    rows = [rng.integers(0, run.model.vocab_size, shape, dtype=np.int32) for _ in range(count)]
    return [{"tokens": row[:, :-1].copy(), "labels": row[:, 1:].copy()} for row in rows]


def work(arguments: argparse.Namespace) -> None:
    """A contender's process: a line in, a step, a line out with its seconds and loss."""
    run = configuration(arguments)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if arguments.keep_memory:
        keep_freed_memory()
    step = make_step(arguments.worker, run, load_file(arguments.params))
    for batch in batches_of(run, arguments.warmup + arguments.steps):
        sys.stdin.readline()
        start = time.perf_counter()
        loss = step(batch)
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)


def measure(names: Sequence[str], arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each contender, taking turns; refuses losses that differ."""
    run = configuration(arguments)
    runtime = Runtime(run.runtime.platform)
    params = runtime.fetch(Engine(run, runtime).initial_state()["params"])
    save_file({name: np.array(value) for name, value in params.items()}, folder / "params.safetensors")
    words = [*sys.argv[1:], "--params", str(folder / "params.safetensors")]
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(start_worker(name, words)) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(arguments.warmup + arguments.steps):
            results = {name: ask(worker) for name, worker in workers.items()}
            for name, result in results.items():
                if abs(result["loss"] - results["graph"]["loss"]) > LOSS_TOLERANCE * abs(result["loss"]):
                    raise SystemExit(f"step {number + 1}: the losses differ: {results}")
                if number >= arguments.warmup:
                    seconds[name].append(result["seconds"])
            print(f"step {number + 1}: loss {results['graph']['loss']:.5f}", file=sys.stderr)
    return seconds


@contextlib.contextmanager
def start_worker(name: str, words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """The process of a contender."""
    command = [sys.executable, __file__, "--worker", name, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def ask(worker: subprocess.Popen[str]) -> dict[str, float]:
    """One step of a contender."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(file=worker.stdin, flush=True)
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"{worker.args}: ended with exit code {worker.wait()}")
    return json.loads(line)


def configuration(arguments: argparse.Namespace) -> schema.Run:
    """The run that is measured."""
    return compose([*OVERRIDES, f"training.batch_per_device={arguments.batch}", *arguments.override]).run


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each contender")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, compilation included")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--without", action="append", default=[], choices=CONTENDERS[:-1], help="leave one out")
    parser.add_argument("--keep-memory", action="store_true", help="give all contenders mode=graph's memory policy")
    parser.add_argument("override", nargs="*", help="config overrides, like model.num_layers=8")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--params", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    names = [name for name in CONTENDERS if name not in arguments.without]
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(names, arguments, Path(folder))
    run = configuration(arguments)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in build_model(run.model).parameters()),
        "sequences": global_batch_size(run),
        "seq_len": run.training.seq_len,
        "threads": len(os.sched_getaffinity(0)),
        "steps": arguments.steps,
        "contenders": {
            name: {"seconds": value, "ratio_to_graph": value / medians["graph"]} for name, value in medians.items()
        },
    }
    print(json.dumps(result) if arguments.json else describe(result))


def describe(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [
        f"Qwen3, {result['parameters']:,} parameters, {result['sequences']} x {result['seq_len']} tokens, float32, "
        f"{result['threads']} threads, median of {result['steps']} steps"
    ]
    lines += [
        f"{name:8s} {row['seconds']:7.3f} s  {row['ratio_to_graph']:6.3f} x graph"
        for name, row in result["contenders"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
