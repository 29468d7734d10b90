"""Checkpoints that several processes write, and that any number of them can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxbraid._options import check_integer


def save(
    path: str | os.PathLike[str], tree: PyTree, *, layers: int | None = None, notes: Any = None
) -> None:
    """Write a checkpoint with Orbax, each process the parts on its devices; all must call it.

    It is there as a whole or not at all: it gets its name when all of it is written.

    **Arguments**

    - `path`: a folder that does not exist yet, in a file system (or store, `gs://...`) that all
        processes share.
    - `tree`: any pytree of arrays (parameters, optimizer state, ...). Where there are several
        processes, its JAX arrays must be global (see `replicate`).
    - `layers`: the number of layers, if the tree holds leaves with slots after the last one
        (`global_layers`). Then it can be restored onto a mesh with another number of slots.
    - `notes`: anything that JSON can hold, read again by `read_notes`.

    **Raises**

    `ImportError` without Orbax, `FileExistsError` if there is such a path, `ValueError` naming a
    leaf that is not global.
    """
    ocp, folder = _orbax(path)
    slotted = []
    for where, leaf in _named_leaves(tree):
        if _is_split(leaf) and layers is not None and leaf.shape[0] > layers:
            slotted.append(where)
        if jax.process_count() > 1 and isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            raise ValueError(
                f"tree: {where} is an array of this process only: put it on the mesh (replicate)."
            )
    if layers is not None:
        layers = check_integer("layers", layers, 1)
    if folder.exists():
        raise FileExistsError(f"path={str(folder)!r} exists: checkpoints are not overwritten.")
    if jax.process_count() > 1:  # no process writes before all have looked
        multihost_utils.sync_global_devices("jaxbraid.distributed.save")
    about = {"layers": layers, "slotted": slotted, "notes": notes}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(tree=ocp.args.StandardSave(tree), about=ocp.args.JsonSave(about))
        checkpointer.save(folder, args=args)


def restore(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Read what `save` wrote, onto any mesh and any number of processes; all must call it.

    **Arguments**

    - `path`: the folder.
    - `like`: a pytree of arrays, or of `jax.ShapeDtypeStruct` with shardings, with the structure,
        shapes, dtypes and shardings that are wanted. Where a leaf has another number of slots than
        was saved, the slots after the last layer are left out or added (repeating the last layer).

    **Raises**

    `ImportError` without Orbax, `FileNotFoundError` if there is no checkpoint, `ValueError` naming
    the leaf if `like` does not describe what was saved.
    """
    with _reader(path) as (ocp, folder, checkpointer):
        about = _about(ocp, folder, checkpointer)
        metadata = checkpointer.metadata(folder).item_metadata.tree
        saved = {k: v for k, v in _named_leaves(metadata) if hasattr(v, "shape")}
        wanted = dict(_named_leaves(like))
        if saved.keys() != wanted.keys():
            odd = sorted(saved.keys() ^ wanted.keys())[0]
            side = "was saved, but like lacks it" if odd in saved else "was not saved"
            raise ValueError(f"like: {odd} {side}; it must have the structure of the saved tree.")
        for where, leaf in wanted.items():
            _check_restorable(where, saved[where], leaf, about)
        # not strict: Orbax cuts leaves to the wanted length or fills them up with zeros
        args = ocp.args.Composite(tree=ocp.args.StandardRestore(like, strict=False))
        tree = checkpointer.restore(folder, args=args).tree
    longer = {k for k, leaf in wanted.items() if np.shape(leaf)[:1] > tuple(saved[k].shape)[:1]}
    layers = about["layers"]

    def fill(where: Any, a: Any) -> Any:
        if _name(where) not in longer:
            return a
        repeat = jax.jit(lambda a: a.at[layers:].set(a[layers - 1]), out_shardings=a.sharding)
        return repeat(a)

    return jax.tree_util.tree_map_with_path(fill, tree)


def read_notes(path: str | os.PathLike[str]) -> Any:
    """The `notes` that `save` was given, as JSON gives them back.

    **Raises**

    `ImportError` without Orbax, `FileNotFoundError` if there is no checkpoint.
    """
    with _reader(path) as (ocp, folder, checkpointer):
        return _about(ocp, folder, checkpointer).get("notes")


def read_shapes(path: str | os.PathLike[str]) -> PyTree:
    """The tree that `save` was given, as nested dicts of `jax.ShapeDtypeStruct`.

    **Raises**

    `ImportError` without Orbax, `FileNotFoundError` if there is no checkpoint.
    """
    with _reader(path) as (_, folder, checkpointer):
        metadata = checkpointer.metadata(folder).item_metadata.tree
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a,
        metadata,
        is_leaf=lambda a: hasattr(a, "shape"),
    )


@contextlib.contextmanager
def _reader(path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any, Any]]:
    ocp, folder = _orbax(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"path={str(folder)!r}: there is no checkpoint.")
    handler = ocp.CompositeCheckpointHandler(
        tree=ocp.StandardCheckpointHandler(), about=ocp.JsonCheckpointHandler()
    )
    with ocp.Checkpointer(handler) as checkpointer:
        yield ocp, folder, checkpointer


def _about(ocp: Any, folder: Any, checkpointer: Any) -> dict[str, Any]:
    args = ocp.args.Composite(about=ocp.args.JsonRestore())
    return checkpointer.restore(folder, args=args).about


def _check_restorable(where: str, saved: Any, leaf: Any, about: dict[str, Any]) -> None:
    """That a leaf of `like` has the saved shape, or the same layers in another number of slots."""
    shape, wanted = tuple(saved.shape), tuple(np.shape(leaf))
    dtype = jnp.result_type(leaf)
    if np.dtype(saved.dtype) != dtype:
        raise ValueError(f"like: {where} has dtype {dtype}, but {saved.dtype} was saved.")
    if shape == wanted:
        return
    layers = about["layers"]
    both_layers = (
        layers is not None
        and len(shape) == len(wanted) > 0
        and shape[1:] == wanted[1:]
        and (shape[0] == layers or where in about["slotted"])
        and (wanted[0] == layers or (wanted[0] > layers and _is_split(leaf)))
    )
    if not both_layers:
        hint = "" if layers is not None else ", and save was not told the number of layers"
        raise ValueError(f"like: {where} has shape {wanted}, but {shape} was saved{hint}.")


def _is_split(leaf: Any) -> bool:
    """Whether devices have different parts of the leading axis."""
    sharding, shape = getattr(leaf, "sharding", None), np.shape(leaf)
    return sharding is not None and len(shape) > 0 and sharding.shard_shape(shape)[0] < shape[0]


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [(_name(k), v) for k, v in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path: Any) -> str:
    """The same for a tree and for what Orbax makes of it, where named tuples are dicts."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _orbax(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Orbax, and the path as it takes it: absolute, unless it names a store such as `gs://`."""
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as e:
        raise ImportError(
            "save and restore need Orbax: pip install orbax-checkpoint (or 'jaxbraid[examples]')."
        ) from e
    text = os.fspath(path)
    return ocp, epath.Path(text if "://" in text else os.path.abspath(text))
