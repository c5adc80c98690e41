"""One JSON line per step: what a step was, how long it took, how far from the hardware's peak."""

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

from tpu_train.objectives.flops import FlopsPerToken

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Speedometer:
    """Turns a step's time into rates per chip.

    Attributes:
        flops_per_token: model FLOPs, forward and backward.
        peak_flops: FLOP/s of one chip at its best.
        num_chips: chips that share the step.
    """

    flops_per_token: FlopsPerToken
    peak_flops: float
    num_chips: int = 1

    def rates(self, num_tokens: int, seconds: float) -> dict[str, float]:
        """`tokens_per_s` and `model_tflops_per_s` per chip, `mfu` ("full" attention convention) and `mfu_causal`."""
        tokens_per_s = num_tokens / seconds / self.num_chips
        return {
            "tokens_per_s": tokens_per_s,
            "model_tflops_per_s": tokens_per_s * self.flops_per_token.full / 1e12,
            "mfu": tokens_per_s * self.flops_per_token.full / self.peak_flops,
            "mfu_causal": tokens_per_s * self.flops_per_token.causal / self.peak_flops,
        }


class MetricsFile:
    """`metrics.jsonl`: a whole line per record, readable while the run goes on, going on where an earlier run ended.

    A disk that is full keeps lines waiting until there is room; what never found room is lost with the process.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line. JSON has no NaN or Infinity: such values become null."""
        line = json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False) + "\n"
        self._waiting += line.encode()
        try:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            log.warning("metrics.jsonl cannot be written (%s); its lines wait", error.strerror)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
