"""Metrics to TensorBoard event files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

# Names of a metrics line by section; what is not listed is shown under train/.
_TAGS = {
    "validation_loss": "validation/loss",
    "tokens_per_s": "speed/tokens_per_s",
    "model_tflops_per_s": "speed/model_tflops_per_s",
    "mfu": "speed/mfu",
    "mfu_causal": "speed/mfu_causal",
    "step_time_s": "speed/step_time_s",
    "data_wait_s": "speed/data_wait_s",
    "peak_memory_bytes": "memory/peak_memory_bytes",
}
_FLUSH_SECONDS = 10


class TensorBoardLogger:
    """Event files in a folder; needs the extra `tensorboard`.

    Args:
        folder: gets the event files.
        run_config: the configuration, shown as text.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, run_config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and its package may be missing

        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_SECONDS)
        text = yaml.safe_dump(run_config, sort_keys=False)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, record: Mapping[str, Any]) -> None:
        """Writes a metrics line's numbers under its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(_TAGS.get(name, f"train/{name}"), value, record["step"])

    def close(self, exit_code: int) -> None:  # noqa: ARG002 - event files have no place for it
        """Ends the file."""
        self._writer.close()
