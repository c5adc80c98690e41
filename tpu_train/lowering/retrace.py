"""Running a captured graph node by node, to trace it again."""

from typing import Any

import torch
from torch import fx


class Retracer(fx.Interpreter):
    """An interpreter for which strides mean nothing, as they do in XLA.

    A decomposition may give a result of other strides than the op it replaces, and a `view` recorded for the old
    strides would then fail; reshape makes it a copy where it must be one.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one node."""
        if target is torch.ops.aten.view.default:
            return torch.reshape(*args, **kwargs)
        return super().call_function(target, args, kwargs)
