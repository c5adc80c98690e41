"""How a run that began fails."""

from pathlib import Path


class RunFailed(Exception):
    """A run failed after its folder was made; the cause is chained, its traceback is in the log.

    Attributes:
        reason: the error's type and the first line of its message.
        log_path: the run's `log.txt`.
    """

    def __init__(self, error: BaseException, log_path: Path) -> None:
        lines = str(error).strip().splitlines() or ["no message"]
        self.reason = f"{type(error).__name__}: {lines[0]}"
        self.log_path = log_path
        super().__init__(f"{self.reason} (traceback in {log_path})")
