"""What `tpu-train show graph` shows: the collectives of a run's captured training step, without devices."""

from typing import Any

from tpu_train.config.rules import global_batch_size, num_cpu_devices
from tpu_train.config.schema import Qwen3MoeModel, Run
from tpu_train.data.stream import batch_fields
from tpu_train.execution.paper import PaperRuntime
from tpu_train.graph.collective_report import as_text, count, find_collectives, table
from tpu_train.models.counting import looked_up
from tpu_train.objectives.causal_lm import ROUTER_SUMS
from tpu_train.sharding.theory import expected
from tpu_train.training.engine import Engine, reshards


def describe_graph(run: Run) -> tuple[dict[str, Any], str]:
    """The collectives of one device in one step, by layer, as data and as text."""
    engine = Engine(run, PaperRuntime(num_cpu_devices(run)))
    parallel = engine.parallel
    specs = engine.step_specs(global_batch_size(run, engine.mesh.size), run.training.seq_len, batch_fields(run.data))
    found = find_collectives(engine.train_step.capture(**specs))
    theory = expected(
        parallel.layouts,
        parallel.regions,
        engine.mesh,
        trainable={name for name, param in engine.model.named_parameters() if param.requires_grad},
        looked_up=looked_up(engine.model),
        num_microbatches=run.training.grad_accumulation,
        reshard=reshards(run),
        split_vocabulary=parallel.splits_vocabulary,
        metrics=ROUTER_SUMS if isinstance(run.model, Qwen3MoeModel) else (),
    )
    rows = table(found, theory)
    head = f"collectives of one device in one step, mesh {engine.mesh}"
    return {
        "mesh": {axis: getattr(engine.mesh, axis) for axis in ("replica", "fsdp", "tensor")},
        "collectives": rows,
        "as_expected": count(found) == theory,
    }, f"{head}\n{as_text(rows)}"
