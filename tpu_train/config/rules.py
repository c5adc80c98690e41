"""Rules across fields that need nothing but the config. Rules of one field stand beside it in the schema."""

from collections.abc import Iterator

from tpu_train.config.problems import Problem
from tpu_train.config.schema import Qwen3MoeModel, Run, WarmupStableDecaySchedule

# Of each pair one is given; a value of the primary config yields to the other one, wherever that is set.
EXCLUSIVE = (("training.batch_per_device", "training.global_batch_size"),)
DECAY_KINDS = ("norm", "bias", "embedding")


def num_cpu_devices(run: Run) -> int:
    """Devices on the CPU, of all processes."""
    return run.runtime.devices * (run.runtime.num_processes or 1)


def global_batch_size(run: Run, num_devices: int | None = None) -> int:
    """Sequences per step over all devices; their number defaults to that on the CPU."""
    if run.training.global_batch_size is not None:
        return run.training.global_batch_size
    assert run.training.batch_per_device is not None
    return run.training.batch_per_device * (num_cpu_devices(run) if num_devices is None else num_devices)


def rules(run: Run) -> list[Problem]:
    """Everything in a config that does not fit together.

    Each problem's place is the dotted key to change, its keys are the others that the rule compared.
    """
    return [*_batch(run), *_model(run), *_schedule(run), *_devices(run), *_processes(run)]


def _batch(run: Run) -> Iterator[Problem]:
    training = run.training
    per_device, total = training.batch_per_device, training.global_batch_size
    sizes = ("training.batch_per_device", "training.global_batch_size", "runtime.devices")
    if per_device is None and total is None:
        yield Problem(sizes[0], f"neither {sizes[0]} nor {sizes[1]} is set; set one", sizes)
    elif per_device is not None and total is not None:
        yield Problem(
            sizes[1],
            f"{sizes[1]} is {total} and {sizes[0]} {per_device}, and they exclude each other; leave one out or set it "
            f"to null, for instance {sizes[0]}=null",
            sizes,
        )
    elif global_batch_size(run) % training.grad_accumulation:
        yield Problem(
            "training.grad_accumulation",
            f"training.grad_accumulation is {training.grad_accumulation}, which does not divide the global batch of "
            f"{global_batch_size(run)} sequences; nearest that do: "
            f"{_nearest_divisors(global_batch_size(run), training.grad_accumulation)}",
            sizes,
        )


def _nearest_divisors(number: int, wanted: int) -> str:
    """The divisors below and above a number that is none; above the number itself there is none."""
    below = max(divisor for divisor in range(1, min(wanted, number) + 1) if number % divisor == 0)
    above = next((divisor for divisor in range(wanted, number + 1) if number % divisor == 0), None)
    return f"{below}" if above is None else f"{below} and {above}"


def _model(run: Run) -> Iterator[Problem]:
    model = run.model
    if model.num_heads % model.num_kv_heads:
        yield Problem(
            "model.num_kv_heads",
            f"model.num_kv_heads is {model.num_kv_heads}, which does not divide model.num_heads, {model.num_heads}",
            ("model.num_heads",),
        )
    if model.head_dim % 2:
        yield Problem("model.head_dim", f"model.head_dim is {model.head_dim}; rotary embeddings need an even number")
    if isinstance(model, Qwen3MoeModel) and model.top_k > model.num_experts:
        yield Problem(
            "model.top_k",
            f"model.top_k is {model.top_k}, more than model.num_experts, {model.num_experts}",
            ("model.num_experts",),
        )
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
            ("schedule.warmup_steps", "training.steps"),
        )
    injected = run.training.inject_inf_at_step
    if injected is not None and injected > steps:
        yield Problem(
            "training.inject_inf_at_step",
            f"training.inject_inf_at_step is {injected}, after the last step, training.steps={steps}",
            ("training.steps",),
        )


def _devices(run: Run) -> Iterator[Problem]:
    if run.parallelism.name == "single" and run.runtime.devices != 1:
        message = f"runtime.devices is {run.runtime.devices}, but parallelism=single uses one"
        yield Problem("runtime.devices", message, ("parallelism",))
    yield from process_problems(run)


def process_problems(run: Run) -> list[Problem]:
    """Problems of the number of processes, which the configuration may tell, or at the start the environment."""
    count = run.runtime.num_processes or 1
    if run.parallelism.name != "single" or count == 1:
        return []
    message = f"parallelism is single, one device, and there are {count} processes; choose another, for instance fsdp"
    return [Problem("parallelism", message, ("runtime.num_processes",))]


def _processes(run: Run) -> Iterator[Problem]:
    runtime = run.runtime
    values = {
        "runtime.coordinator": runtime.coordinator,
        "runtime.num_processes": runtime.num_processes,
        "runtime.process_id": runtime.process_id,
    }
    keys = tuple(values)
    given = [key for key, value in values.items() if value is not None]
    missing = [key for key in keys if key not in given]
    if given and missing:
        yield Problem(
            given[0],
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set and {' and '.join(missing)} not; set all "
            "three, or none for what the environment says",
            keys,
        )
    if runtime.coordinator is not None and not _is_address(runtime.coordinator):
        message = f"runtime.coordinator is {runtime.coordinator!r}; allowed is host:port, for instance 10.0.0.1:8482"
        yield Problem("runtime.coordinator", message)
    if runtime.process_id is not None and runtime.process_id >= (runtime.num_processes or runtime.process_id + 1):
        yield Problem(
            "runtime.process_id",
            f"runtime.process_id is {runtime.process_id}; allowed are 0 to {(runtime.num_processes or 1) - 1}, as "
            f"runtime.num_processes is {runtime.num_processes}",
            ("runtime.num_processes",),
        )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
