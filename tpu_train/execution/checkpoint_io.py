"""Device arrays to and from disk by Orbax, which is imported at the first use.

Key idea: a save copies what it needs before it returns, so the step after it may overwrite the state, and writes in the
background; the folder gets its name only when it is whole.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_train.graph.capture import Tree, map_leaves

_STATE, _META = "state", "meta"


class CheckpointWriter:
    """Writes one checkpoint at a time in the background."""

    def __init__(self) -> None:
        self._checkpointer: Any = None

    def start(self, path: Path, state: Tree, meta: Mapping[str, Any]) -> None:
        """Begins to write a folder that does not exist yet; waits for the one before.

        Args:
            path: absolute.
            state: device arrays.
            meta: JSON.

        Raises:
            Exception: what the disk says, of this or of the write before; Orbax raises many kinds.
        """
        orbax = _orbax()
        if self._checkpointer is None:
            self._checkpointer = orbax.AsyncCheckpointer(orbax.CompositeCheckpointHandler())
        arguments = {_STATE: orbax.args.PyTreeSave(_snapshot(state)), _META: orbax.args.JsonSave(dict(meta))}
        self._checkpointer.save(path, args=orbax.args.Composite(**arguments), force=True)

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            Exception: what the disk says.
        """
        if self._checkpointer is not None:
            self._checkpointer.wait_until_finished()


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON of a checkpoint."""
    orbax = _orbax()
    reader = orbax.Checkpointer(orbax.CompositeCheckpointHandler())
    return dict(reader.restore(path, args=orbax.args.Composite(meta=orbax.args.JsonRestore()))[_META])


def saved_specs(path: Path) -> dict[str, Any]:
    """Nested dicts of what a checkpoint's arrays are, each with `shape` and `dtype`."""
    orbax = _orbax()
    reader = orbax.Checkpointer(orbax.PyTreeCheckpointHandler())
    return dict(reader.metadata(path / _STATE).item_metadata.tree)


def restore(path: Path, specs: Tree, sharding_of: Callable[[str], Any]) -> Tree:
    """The state of a checkpoint, on devices, whatever mesh it was saved from.

    Args:
        path: absolute.
        specs: what is read: leaves with `shape` and `dtype`; other parts of the checkpoint are left alone. Arrays are
            cut, or padded with zeros, to these shapes: a mesh pads what it does not divide.
        sharding_of: dotted name of a leaf to the sharding it gets.
    """
    return _read(path, map_leaves(lambda name, spec: _struct(spec, sharding_of(name)), specs), None)


def read_array(path: Path, names: tuple[str, ...], spec: Any) -> np.ndarray:
    """One array of a checkpoint, on the host; cut to the shape of `spec` where a mesh padded it.

    Args:
        path: absolute.
        names: keys of the nested dicts that lead to it.
        spec: with `shape` and `dtype`.
    """
    tree: Any = _struct(spec, None)
    for name in reversed(names):
        tree = {name: tree}
    found: Any = _read(path, tree, np.ndarray)
    for name in names:
        found = found[name]
    return found[tuple(slice(size) for size in spec.shape)]


def _struct(spec: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(spec.shape), jnp.dtype(spec.dtype), sharding=sharding)


def _read(path: Path, structs: Any, kind: Any) -> Any:
    orbax = _orbax()

    def argument(struct: jax.ShapeDtypeStruct) -> Any:
        if kind is not None:
            return orbax.RestoreArgs(restore_type=kind, dtype=struct.dtype)
        return orbax.ArrayRestoreArgs(
            sharding=struct.sharding, global_shape=struct.shape, dtype=struct.dtype, strict=False
        )

    how = jax.tree.map(argument, structs)
    reader = orbax.Checkpointer(orbax.CompositeCheckpointHandler())
    arguments = orbax.args.PyTreeRestore(structs, restore_args=how, partial_restore=True)
    return reader.restore(path, args=orbax.args.Composite(state=arguments))[_STATE]


def _snapshot(state: Tree) -> Tree:
    """The state in buffers that no later step is given: on the CPU Orbax reads arrays where they are."""
    return map_leaves(lambda _, leaf: jnp.copy(leaf) if next(iter(leaf.devices())).platform == "cpu" else leaf, state)


def _orbax() -> Any:
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # each array is reported, and errors that are raised too
    import orbax.checkpoint

    return orbax.checkpoint
