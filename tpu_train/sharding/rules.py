"""What can be wrong with a mesh, found before anything starts."""

from collections.abc import Iterator

from tpu_train.config.problems import Problem
from tpu_train.config.rules import global_batch_size, num_cpu_devices
from tpu_train.config.schema import Run, SingleParallelism
from tpu_train.kernels.platform import known_platform
from tpu_train.sharding.mesh import AXES, MeshShape, fill


def mesh_shape(run: Run, num_devices: int, num_slices: int = 1) -> MeshShape:
    """The mesh that a configuration asks for.

    Raises:
        ValueError: it cannot be made of these devices.
    """
    if isinstance(run.parallelism, SingleParallelism):
        return MeshShape()
    sizes = {axis: getattr(run.parallelism, axis) for axis in AXES}
    if sizes["expert"] == 1 and not hasattr(run.model, "num_experts"):
        del sizes["expert"]  # of no interest in a message about a dense model
    if sizes["replica"] is None:
        sizes["replica"] = num_slices if num_slices > 1 else 2
    return fill(sizes, num_devices)


def rules(run: Run) -> list[Problem]:
    """Problems of the mesh where the devices are known: on the CPU. Elsewhere they are told at the start."""
    return mesh_problems(run, num_cpu_devices(run)) if known_platform(run) == "cpu" else []


def mesh_problems(run: Run, num_devices: int, num_slices: int = 1) -> list[Problem]:
    """Problems of laying a run over this many devices."""
    try:
        shape = mesh_shape(run, num_devices, num_slices)
    except ValueError as error:
        message = f"parallelism={run.parallelism.name}: {error}; set runtime.devices on the CPU, or other sizes"
        return [Problem("parallelism", message, ("runtime.devices", "runtime.num_processes"))]
    return [*_batch(run, shape, num_devices), *_tensor(run, shape), *_expert(run, shape)]


def _batch(run: Run, shape: MeshShape, num_devices: int) -> Iterator[Problem]:
    training = run.training
    if (training.batch_per_device is None) == (training.global_batch_size is None):
        return  # told by the rules of the config
    total = global_batch_size(run, num_devices)
    parts = shape.data_size * training.grad_accumulation
    if total % parts == 0 or (shape.data_size == 1):
        return
    key = "training.global_batch_size" if training.global_batch_size is not None else "training.batch_per_device"
    below, above = total // parts * parts, -(-total // parts) * parts
    nearest = f"{below} and {above}" if below else str(above)
    yield Problem(
        key,
        f"a global batch of {total} sequences cannot be laid over {shape.data_size} devices (replica x fsdp) in "
        f"{training.grad_accumulation} microbatches; nearest global batches that can: {nearest}",
        ("parallelism", "training.grad_accumulation", "runtime.devices"),
    )


def _tensor(run: Run, shape: MeshShape) -> Iterator[Problem]:
    if shape.tensor == 1:
        return
    if run.model.num_heads % shape.tensor:
        yield Problem(
            "parallelism.tensor",
            f"tensor={shape.tensor} does not divide model.num_heads, {run.model.num_heads}; allowed are its divisors: "
            f"{', '.join(str(n) for n in range(1, run.model.num_heads + 1) if run.model.num_heads % n == 0)}",
            ("model.num_heads", "runtime.devices"),
        )
    seq_len = run.training.seq_len
    if seq_len % shape.tensor:
        below, above = seq_len // shape.tensor * shape.tensor, -(-seq_len // shape.tensor) * shape.tensor
        yield Problem(
            "training.seq_len",
            f"training.seq_len is {seq_len}, which tensor={shape.tensor} does not divide; nearest that it does: "
            f"{f'{below} and {above}' if below else above}",
            ("parallelism", "runtime.devices"),
        )


def _expert(run: Run, shape: MeshShape) -> Iterator[Problem]:
    if shape.expert == 1:
        return
    experts = getattr(run.model, "num_experts", None)
    keys = ("model", "runtime.devices")
    if experts is None:
        yield Problem(
            "parallelism.expert", f"expert={shape.expert}, but model.family {run.model.family} has none", keys
        )
    elif experts % shape.expert:
        yield Problem(
            "parallelism.expert",
            f"expert={shape.expert} does not divide model.num_experts, {experts}; allowed are its divisors: "
            f"{', '.join(str(n) for n in range(1, experts + 1) if experts % n == 0)}",
            keys,
        )
