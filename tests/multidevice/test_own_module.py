"""A module that knows nothing of this project, with a plan by parameter path, on a mesh."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.multidevice.meshes import on
from tests.unit.runs import make_run, random_batches
from tpu_train.execution.runtime import Runtime
from tpu_train.sharding.plan import ParameterRule, Plan
from tpu_train.training.engine import Engine

ROWS, STEPS = 8, 5


class Conv(nn.Module):
    """Embedding, a causal convolution, a gate, a projection: parameters of one to three dimensions, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(320, 24)
        self.mix = nn.Conv1d(24, 40, kernel_size=3)
        self.gate = nn.Parameter(torch.empty(40))
        self.out = nn.Linear(40, 320)
        self.register_buffer("shift", torch.linspace(-1, 1, 320))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gate)

    def forward(self, tokens: Tensor, positions: Tensor, segment_ids: Tensor | None) -> Tensor:
        x = F.pad(self.table(tokens).transpose(1, 2), (2, 0))
        x = self.mix(x).transpose(1, 2) * self.gate.sigmoid()
        return self.out(F.gelu(x)) + self.shift


PLAN = Plan(
    parameters={
        "table.weight": ParameterRule(fsdp_dim=1),
        "mix.*": ParameterRule(fsdp_dim=0),
        "out.bias": ParameterRule(fsdp_dim=None),
    }
)


def train(run: Any, num_devices: int, plan: Plan | None) -> tuple[Engine, list[float], dict[str, np.ndarray]]:
    engine = Engine(run, Runtime("cpu", num_devices), Conv(), plan)
    state, losses = engine.initial_state(), []
    for batch in random_batches(STEPS, make_run(training={"batch_per_device": ROWS}), ignored=True):
        state, metrics = engine.step(state, batch, 1e-3)
        losses.append(float(metrics["loss"]))
    layouts = engine.parallel.layouts
    final = {n: np.array(v)[tuple(map(slice, layouts[n].shape))] for n, v in state["params"].items()}
    return engine, losses, final


def test_it_trains_as_on_one_device() -> None:
    run = make_run(training={"batch_per_device": None, "global_batch_size": ROWS})
    _, one, alone = train(run, 1, PLAN)
    for mesh in (("fsdp", 1, 8, 1), ("fsdp_2d", 2, 4, 1)):
        engine, losses, final = train(on(run, mesh), 8, PLAN)
        np.testing.assert_allclose(losses, one, rtol=1e-5)
        for name, value in alone.items():
            assert np.linalg.norm(final[name] - value) / np.linalg.norm(value) <= 1e-5, name
        axes = {name: layout.axes for name, layout in engine.parallel.layouts.items()}
        assert axes["table.weight"] == ((), ("fsdp",))
        assert axes["mix.weight"] == (("fsdp",), (), ())
        assert axes["mix.bias"] == (("fsdp",),)
        assert axes["out.bias"] == ((),)
        assert axes["out.weight"] == (("fsdp",), ())


def test_rules_that_fit_nothing_or_twice_are_refused() -> None:
    run = on(make_run(), ("fsdp", 1, 8, 1))
    with pytest.raises(ValueError, match=r"tabel.weight fits none of the model's gate, table.weight"):
        Engine(run, Runtime("cpu", 8), Conv(), Plan(parameters={"tabel.weight": ParameterRule()}))
    with pytest.raises(ValueError, match=r"mix.bias fits both mix.\* and \*.bias"):
        Engine(run, Runtime("cpu", 8), Conv(), Plan(parameters={**PLAN.parameters, "*.bias": ParameterRule()}))
    with pytest.raises(ValueError, match=r"gate has 1 dimensions, and its rule splits dimension 1"):
        Engine(run, Runtime("cpu", 8), Conv(), Plan(parameters={"gate": ParameterRule(fsdp_dim=1)}))
    with pytest.raises(ValueError, match=r"tensor=8: the model's sharding plan has no rules for tensor parallelism"):
        Engine(on(make_run(), ("tp", 1, 1, 8)), Runtime("cpu", 8), Conv())


class Positioned(Conv):
    """Asks torch.distributed where it is."""

    def forward(self, tokens: Tensor, positions: Tensor, segment_ids: Tensor | None) -> Tensor:
        return super().forward(tokens, positions, segment_ids) + torch.distributed.get_rank()


def test_a_graph_that_depends_on_the_device_it_is_traced_as_is_refused() -> None:
    run = on(make_run(training={"batch_per_device": None, "global_batch_size": ROWS}), ("fsdp", 1, 8, 1))
    engine = Engine(run, Runtime("cpu", 8), Positioned())
    batch = random_batches(1, make_run(training={"batch_per_device": ROWS}))[0]
    with pytest.raises(ValueError, match=r"(?s)not that of the last: .*, 0\).* against .*, 7\).*own_module.py"):
        engine.step(engine.initial_state(), batch, 1e-3)
