"""Other arrays onto a mesh of several processes, and whole arrays from it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxbraid._options import check_integer


def replicate(x: PyTree, mesh: Mesh) -> PyTree:
    """`x` on all devices of the mesh; each process must give the same (JAX checks that).

    **Raises**

    `TypeError` if `mesh` is none.
    """
    _check_mesh(mesh)
    sharding = NamedSharding(mesh, PartitionSpec())

    def one(a: Any) -> jax.Array:
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            return jax.jit(lambda a: a, out_shardings=sharding)(a)
        return jax.device_put(a, sharding)

    return jax.tree.map(one, x)


def shard_batch(
    x: PyTree, mesh: Mesh, batch_axis: str = "batch", *, axis: int = 0, own_part: bool = False
) -> PyTree:
    """Samples as global arrays, split along the batch and the same for all layers.

    **Arguments**

    - `x`: arrays of samples. Each process gives the same whole arrays, of which its devices take
        their parts.
    - `mesh`, `batch_axis`: the mesh and the name of the axis that splits the batch.
    - `axis`: which axis of the arrays counts samples (1 for batches `[steps, batch, ...]`).
    - `own_part`: `x` has only the samples for this process's devices, in order, as for
        `jax.make_array_from_process_local_data`. Processes that hold different layers of the same
        samples must give the same; where all parts of the batch lie on a process's devices, that
        is the whole batch.

    **Raises**

    `ValueError` if the batch cannot be split evenly.
    """
    _check_mesh(mesh)
    if batch_axis not in mesh.axis_names:
        raise ValueError(
            f"batch_axis={batch_axis!r}: must be one of the mesh's axes {mesh.axis_names}."
        )
    axis = check_integer("axis", axis, 0)
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * axis, batch_axis))
    parts = mesh.shape[batch_axis]
    if own_part:
        where = np.moveaxis(mesh.devices, mesh.axis_names.index(batch_axis), 0)
        mine = jax.process_index()
        parts = sum(any(d.process_index == mine for d in part.flat) for part in where)

    def one(path: Any, a: Any) -> jax.Array:
        shape = np.shape(a)
        if len(shape) <= axis or shape[axis] % parts:
            raise ValueError(
                f"x{jax.tree_util.keystr(path)} has shape {shape}: its axis {axis}, the samples, "
                f"must be a multiple of {parts}, the parts of the batch"
                f"{' on this process' if own_part else ''}."
            )
        if own_part:
            return jax.make_array_from_process_local_data(sharding, np.asarray(a))
        a = np.asarray(a, jnp.result_type(a))
        return jax.make_array_from_callback(shape, sharding, lambda index: a[index])

    return jax.tree_util.tree_map_with_path(one, x)


def gather(x: PyTree) -> PyTree:
    """Whole arrays as NumPy arrays, on every process; all processes must call it.

    Nothing is cut: parameters made by `global_layers` keep the slots after their last layer. Arrays
    that lie on this process alone are returned as they are here.
    """

    def one(a: Any) -> np.ndarray:
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            return np.asarray(multihost_utils.process_allgather(a, tiled=True))
        return np.asarray(a)

    return jax.tree.map(one, x)


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh.")
