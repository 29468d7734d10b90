"""Checkpoints of a training run: model, optimizer, and what else goes on with it."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jaxbraid.distributed import read_notes, read_shapes, restore, save


def save_training(
    path: str | os.PathLike[str],
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    *,
    notes: Any = None,
) -> None:
    """Write all variables of a model and its optimizer with Orbax (`jaxbraid.distributed.save`).

    Statistics and PRNG keys and counters are among them, so training goes on from it exactly as it
    would have without. Structure and options (MGRIT, mesh) are not: the program makes them again,
    the same or others.

    **Arguments**

    - `path`: a folder that does not exist yet.
    - `model`, `optimizer`: whose variables to save.
    - `notes`: anything that JSON can hold: the step, `ControlState.to_json()` of a control.

    **Raises**

    As `jaxbraid.distributed.save`.
    """
    save(path, {"model": _plain(model), "optimizer": _plain(optimizer)}, notes=notes)


def restore_training(
    path: str | os.PathLike[str],
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
) -> Any:
    """Read what `save_training` wrote into a model and an optimizer, in place; returns the notes.

    Values go to where the present variables lie: put the model on another mesh before, and training
    goes on there, with any number of devices and any options of MGRIT (a warm restart).

    **Arguments**

    - `path`: the folder.
    - `model`: a model of the same structure.
    - `optimizer`: of the same structure, too; without one the saved optimizer's state is left out,
        and a new optimizer begins anew.

    **Raises**

    As `jaxbraid.distributed.restore`, and before anything is changed.
    """
    like = {"model": _plain(model), "optimizer": _plain(optimizer)}
    if optimizer is None:
        like["optimizer"] = _on_one_device(read_shapes(path).get("optimizer") or {})
    read = restore(path, like)
    notes = read_notes(path)
    _put(model, read["model"])
    if optimizer is not None:
        _put(optimizer, read["optimizer"])
    return notes


def _plain(module: nnx.Module | nnx.Optimizer | None) -> PyTree:
    """Variables as nested dicts of arrays, keys as their data."""
    if module is None:
        return {}
    return jax.tree.map(
        lambda a: jax.random.key_data(a) if _is_key(a) else a, nnx.to_pure_dict(nnx.state(module))
    )


def _put(module: nnx.Module | nnx.Optimizer, values: PyTree) -> None:
    state = nnx.state(module)

    def as_was(old: Any, new: Any) -> Any:
        if _is_key(old):
            return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
        return new

    values = jax.tree.map(as_was, nnx.to_pure_dict(state), values)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(module, state)


def _is_key(a: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key)


def _on_one_device(shapes: PyTree) -> PyTree:
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if jax.process_count() > 1:  # each process reads all of it
        mesh = jax.sharding.Mesh(jax.devices(), ("all",))
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), shapes)
