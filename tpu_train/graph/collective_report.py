"""Which collectives a captured graph holds: by layer, with bytes, and against what theory says."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from tpu_train.graph.capture import CapturedProgram
from tpu_train.lowering.intrinsics import loop
from tpu_train.sharding.collectives import ALL_GATHER, ALL_REDUCE, COLLECTIVES, EXCHANGE
from tpu_train.sharding.theory import OF_THE_LOSS, Use, When


@dataclasses.dataclass(frozen=True)
class Found:
    """A collective of the graph.

    Attributes:
        use: what and whose it is.
        num_bytes: of the whole tensor: what a gather makes, what a reduction reads, on one device.
        trips: how often a step runs it: a loop's body has it once for all its iterations.
    """

    use: Use
    num_bytes: int
    trips: int


def find_collectives(captured: CapturedProgram) -> list[Found]:
    """Every collective of a captured program, in order."""
    return list(_walk(captured.graph, 1))


def _walk(module: fx.GraphModule, trips: int) -> Iterator[Found]:
    for node in module.graph.nodes:
        if node.target in COLLECTIVES:
            yield _found(node, trips)
        elif node.target is loop:
            body, _, xs = node.args[:3]
            yield from _walk(getattr(module, body.target), trips * xs[0].meta["val"].shape[0])


def _found(node: fx.Node, trips: int) -> Found:
    op = node.target._schema.name.rpartition(":")[2]  # type: ignore[union-attr]
    axes, label = ([node.args[5]], node.args[7]) if node.target is EXCHANGE else (node.args[1], node.args[4])
    source: Any = node if node.target is ALL_GATHER else node.args[0]
    value = source.meta["val"]
    when: When = "backward" if node.meta.get("autograd_backward") else "forward"
    if node.target is ALL_REDUCE and label not in OF_THE_LOSS:
        when = "update"  # gradients and their norm, once the backward is through
    use = Use(op, "+".join(axes), str(label), when)  # type: ignore[arg-type]
    return Found(use, math.prod(value.shape) * value.dtype.itemsize, trips)


def count(found: Sequence[Found]) -> Counter[Use]:
    """How often a step runs each."""
    counted: Counter[Use] = Counter()
    for item in found:
        counted[item.use] += item.trips
    return counted


def part_of(label: str) -> str:
    """The layer that an owner belongs to (`layers.3`), or its first part."""
    match = re.match(r"(.*?\.\d+)\.", label)
    return match[1] if match else label.partition(".")[0]


def table(found: Sequence[Found], theory: Counter[Use]) -> list[dict[str, Any]]:
    """One row for each part, op, axes and pass: how many, of how many bytes, and how many theory expects.

    What theory expects and the graph lacks has a row with count 0.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}

    def row(use: Use) -> dict[str, Any]:
        key = {"part": part_of(use.label), "op": use.op, "axes": use.axes, "when": use.when}
        return rows.setdefault(tuple(key.values()), {**key, "count": 0, "bytes": 0, "expected": 0})

    for item in found:
        entry = row(item.use)
        entry["count"] += item.trips
        entry["bytes"] += item.trips * item.num_bytes
    for use, number in theory.items():
        row(use)["expected"] += number
    return list(rows.values())


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The table for people: layers whose rows are alike are one line each row."""
    parts: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        values = (row["op"], row["axes"], row["when"], row["count"], row["expected"], row["bytes"])
        parts.setdefault(row["part"], []).append(values)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for part, values in parts.items():
        stem, _, number = part.rpartition(".")
        alike.setdefault((stem if number.isdigit() else part, *values), []).append(part)
    lines = [_line("part", ("op", "axes", "when"), ("count", "expected", "MB"))]
    for (_, *values), names in alike.items():
        name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, each"
        for i, (*words, number, wanted, size) in enumerate(values):
            lines.append(_line("" if i else name, words, (number, wanted, f"{size / 1e6:,.3f}")))
    number, wanted, size = (sum(row[key] for row in rows) for key in ("count", "expected", "bytes"))
    lines.append(_line("step", ("", "", ""), (number, wanted, f"{size / 1e6:,.3f}")))
    wrong = sum(row["count"] != row["expected"] for row in rows)
    lines.append(f"{wrong} rows are not as theory expects" if wrong else "as theory expects")
    return "\n".join(lines)


def _line(name: str, words: Sequence[str], numbers: Sequence[Any]) -> str:
    return f"{name:<28}{words[0]:<16}{words[1]:<24}{words[2]:<10}" + "".join(f"{number:>12}" for number in numbers)
