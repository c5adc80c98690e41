"""What a config may ask of the graph."""

from tpu_train.config.problems import Problem
from tpu_train.config.schema import Run
from tpu_train.graph.passes import PASSES


def rules(run: Run) -> list[Problem]:
    """`mode.passes` names passes that exist."""
    unknown = [name for name in run.mode.passes if name not in PASSES]
    if not unknown:
        return []
    return [Problem("mode.passes", f"mode.passes has {', '.join(unknown)}; allowed are {', '.join(PASSES)}")]
