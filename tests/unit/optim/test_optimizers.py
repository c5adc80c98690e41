"""The functional optimizers give torch.optim's numbers, eagerly and traced."""

import math

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_train.optim.adamw import AdamW, bias_correction
from tpu_train.optim.optimizer import Optimizer, State
from tpu_train.optim.sgd import Sgd

STEPS = 20


def initial_state(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    return {slot: torch.zeros_like(param) for slot in optimizer.slots}


def rate(step: int) -> float:
    return 1e-2 * (step + 1) / STEPS


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    scales = [10.0 ** ((i % 5) - 3) for i in range(STEPS)]
    return [(scale * torch.randn(33, 7, generator=generator)).to(dtype) for scale in scales]


def start(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(33, 7, generator=torch.Generator().manual_seed(0)).to(dtype)


def run(optimizer: Optimizer, param: Tensor, *, decay: bool) -> tuple[Tensor, State]:
    state = initial_state(optimizer, param)
    for i, grad in enumerate(gradients(param.dtype)):
        lr, count = torch.tensor(rate(i)), torch.tensor(i + 1, dtype=torch.int32)
        param, state = optimizer.update(param, grad, state, lr=lr, count=count, decay=decay)
    return param, state


def run_torch(kind: type[torch.optim.Optimizer], param: Tensor, **arguments: object) -> tuple[Tensor, State]:
    param = param.clone().requires_grad_()
    optimizer = kind([param], **arguments)  # pyright: ignore[reportArgumentType]
    for i, grad in enumerate(gradients(param.dtype)):
        optimizer.param_groups[0]["lr"] = rate(i)
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]


def assert_near(actual: Tensor, expected: Tensor, relative: float) -> None:
    assert actual.dtype == expected.dtype
    scale = expected.abs().max()
    assert (actual - expected).norm() <= relative * expected.norm()
    assert (actual - expected).abs().max() <= relative * scale


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.3, 0.99), (0.0, 0.0)])
def test_adamw_equals_torch(decay: bool, beta1: float, beta2: float) -> None:
    ours, state = run(AdamW(beta1, beta2, 1e-8, 0.1), start(), decay=decay)
    betas, weight_decay = (beta1, beta2), 0.1 if decay else 0.0
    theirs, reference = run_torch(torch.optim.AdamW, start(), betas=betas, eps=1e-8, weight_decay=weight_decay)
    assert_near(ours, theirs, 1e-6)
    assert_near(state["mu"], reference["exp_avg"], 1e-6)
    assert_near(state["nu"], reference["exp_avg_sq"], 1e-6)


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_equals_torch(decay: bool, momentum: float) -> None:
    ours, state = run(Sgd(momentum, 0.1), start(), decay=decay)
    theirs, reference = run_torch(
        torch.optim.SGD, start(), lr=1.0, momentum=momentum, weight_decay=0.1 if decay else 0.0
    )
    assert_near(ours, theirs, 1e-6)
    if momentum:
        assert_near(state["momentum"], reference["momentum_buffer"], 1e-6)
    else:
        assert state == {}


@pytest.mark.parametrize("optimizer", [AdamW(0.9, 0.95, 1e-8, 0.1), Sgd(0.9, 0.1)])
def test_one_bf16_update_is_the_fp32_update_rounded_once(optimizer: Optimizer) -> None:
    param, grad = start(torch.bfloat16), gradients(torch.bfloat16)[3]
    arguments = {"lr": torch.tensor(1e-2), "count": torch.tensor(1, dtype=torch.int32), "decay": True}
    ours, state = optimizer.update(param, grad, initial_state(optimizer, param), **arguments)
    wide = param.float()
    expected, expected_state = optimizer.update(wide, grad.float(), initial_state(optimizer, wide), **arguments)
    assert torch.equal(ours, expected.bfloat16())
    for slot in optimizer.slots:
        assert torch.equal(state[slot], expected_state[slot].bfloat16())


def test_bf16_training_stays_near_fp32() -> None:
    wide, _ = run(AdamW(0.9, 0.95, 1e-8, 0.1), start(), decay=True)
    narrow, state = run(AdamW(0.9, 0.95, 1e-8, 0.1), start(torch.bfloat16), decay=True)
    assert narrow.dtype == state["mu"].dtype == state["nu"].dtype == torch.bfloat16
    assert (narrow.float() - wide).norm() <= 1.6e-2 * wide.norm()


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99, 0.999, 0.9999])
def test_bias_correction_has_full_fp32_accuracy(beta: float) -> None:
    for count in [*range(1, 11), 100, 10_000, 1_000_000]:
        ours = bias_correction(beta, torch.tensor(count, dtype=torch.int32), torch.float32)
        assert ours.dtype == torch.float32
        assert ours.shape == ()
        assert float(ours) == pytest.approx(-math.expm1(count * math.log(beta)), rel=3e-7)


@pytest.mark.parametrize("optimizer", [AdamW(0.9, 0.999, 1e-8, 0.1), Sgd(0.9, 0.1), Sgd(0.0, 0.1)])
def test_one_trace_serves_every_count_and_changes_nothing_in_place(optimizer: Optimizer) -> None:
    def update(param: Tensor, grad: Tensor, state: State, lr: Tensor, count: Tensor) -> tuple[Tensor, State]:
        return optimizer.update(param, grad, state, lr=lr, count=count, decay=True)

    def arguments(step: int) -> tuple[Tensor, Tensor, State, Tensor, Tensor]:
        state = {slot: start().square() for slot in optimizer.slots}
        return start(), gradients()[step], state, torch.tensor(rate(step)), torch.tensor(step + 1, dtype=torch.int32)

    traced = make_fx(update)(*arguments(0))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert not [op for op in calls if op._schema.is_mutable]  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    inputs = arguments(7)
    torch.testing.assert_close(traced(*inputs), update(*arguments(7)), rtol=0, atol=0)
    torch.testing.assert_close(inputs, arguments(7), rtol=0, atol=0)
