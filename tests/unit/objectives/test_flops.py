"""Model FLOPs per token against DESIGN's published checks."""

import pytest

from tpu_train.config.compose import compose
from tpu_train.objectives.flops import flops_per_token
from tpu_train.training.build import build_model
from tpu_train.training.metrics import Speedometer


@pytest.mark.parametrize(
    ("model", "seq_len", "full", "causal"),
    [
        ("llama3_8b", 8192, 57_912_852_480, 51_470_401_536),
        ("qwen3_30b", 8192, 37_577_293_824, 27_913_617_408),
        ("qwen3_235b", 4096, 167_255_212_032, 148_330_512_384),
    ],
)
def test_shipped_models_take_the_published_flops(model: str, seq_len: int, full: int, causal: int) -> None:
    flops = flops_per_token(build_model(compose([f"model={model}"]).run.model), seq_len)
    assert (flops.full, flops.causal) == (full, causal)


@pytest.mark.parametrize("num_chips", [1, 4])
def test_mfu_is_model_flops_per_chip_over_the_peak(num_chips: int) -> None:
    flops = flops_per_token(build_model(compose(["model=llama3_8b"]).run.model), 8192)
    rates = Speedometer(flops, peak_flops=459e12, num_chips=num_chips).rates(num_tokens=4096 * num_chips, seconds=1.0)
    assert rates["tokens_per_s"] == 4096
    assert rates["model_tflops_per_s"] == pytest.approx(237.211, rel=1e-5)  # 4096 * 57.912852480 GFLOPs
    assert rates["mfu"] == pytest.approx(0.516800, rel=1e-5)  # 237.211 / 459
    assert rates["mfu_causal"] == pytest.approx(0.516800 * 51_470_401_536 / 57_912_852_480, rel=1e-5)
