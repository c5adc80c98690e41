"""Rules across fields that need nothing but the config. Rules of one field stand beside it in the schema."""

from collections.abc import Iterator

from tpu_train.config.problems import Problem
from tpu_train.config.schema import Run, WarmupStableDecaySchedule

DECAY_KINDS = ("norm", "bias", "embedding")


def global_batch_size(run: Run) -> int:
    """Sequences per step over all devices."""
    if run.training.global_batch_size is not None:
        return run.training.global_batch_size
    assert run.training.batch_per_device is not None
    return run.training.batch_per_device * run.runtime.devices


def rules(run: Run) -> list[Problem]:
    """Everything in a config that does not fit together; each problem's place is the dotted key to change."""
    return [*_batch(run), *_model(run), *_schedule(run), *_devices(run)]


def _batch(run: Run) -> Iterator[Problem]:
    training = run.training
    per_device, total = training.batch_per_device, training.global_batch_size
    if per_device is None and total is None:
        yield Problem(
            "training.batch_per_device",
            "neither training.batch_per_device nor training.global_batch_size is set; set one",
        )
    elif per_device is not None and total is not None:
        yield Problem(
            "training.global_batch_size",
            f"training.batch_per_device is {per_device} and training.global_batch_size {total}; one of them must be "
            "null, for instance training.batch_per_device=null",
        )
    elif global_batch_size(run) % training.grad_accumulation:
        yield Problem(
            "training.grad_accumulation",
            f"training.grad_accumulation is {training.grad_accumulation}, which does not divide the global batch of "
            f"{global_batch_size(run)} sequences",
        )


def _model(run: Run) -> Iterator[Problem]:
    model = run.model
    if model.num_heads % model.num_kv_heads:
        yield Problem(
            "model.num_kv_heads",
            f"model.num_kv_heads is {model.num_kv_heads}, which does not divide model.num_heads, {model.num_heads}",
        )
    if model.head_dim % 2:
        yield Problem("model.head_dim", f"model.head_dim is {model.head_dim}; rotary embeddings need an even number")
    for kind in run.optimizer.no_decay:
        if kind not in DECAY_KINDS:
            yield Problem(
                "optimizer.no_decay", f"optimizer.no_decay has {kind!r}; allowed are {', '.join(DECAY_KINDS)}"
            )


def _schedule(run: Run) -> Iterator[Problem]:
    steps, schedule = run.training.steps, run.schedule
    # A warm-up longer than the run is sound (the first steps of a longer run), so that `training.steps=5` just works.
    if isinstance(schedule, WarmupStableDecaySchedule) and schedule.warmup_steps + schedule.decay_steps > steps:
        yield Problem(
            "schedule.decay_steps",
            f"schedule.warmup_steps + schedule.decay_steps is {schedule.warmup_steps} + {schedule.decay_steps}, more "
            f"than training.steps, {steps}",
        )
    injected = run.training.inject_inf_at_step
    if injected is not None and injected > steps:
        yield Problem(
            "training.inject_inf_at_step",
            f"training.inject_inf_at_step is {injected}, after the last step, training.steps={steps}",
        )


def _devices(run: Run) -> Iterator[Problem]:
    if run.parallelism.name == "single" and run.runtime.devices != 1:
        yield Problem("runtime.devices", f"runtime.devices is {run.runtime.devices}, but parallelism=single uses one")
