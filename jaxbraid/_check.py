"""Checks of what users hand in; each error names the argument, its value and what is allowed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jaxbraid import _tree
from jaxbraid._delta import dimension
from jaxbraid._equations import LevelProblem
from jaxbraid._options import MGRIT
from jaxbraid._problem import Setup, Shared, Space
from jaxbraid._tree import Tree
from jaxbraid.transfers import Transfer


def arrays(name: str, x: Tree) -> Tree:
    """The leaves as arrays with definite dtypes."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False):
            return leaf
        try:
            return jnp.asarray(leaf, jnp.result_type(leaf))
        except (TypeError, ValueError) as e:
            raise TypeError(
                f"{name} has a leaf of type {type(leaf).__name__}: its leaves must be arrays or "
                "numbers."
            ) from e

    return jax.tree.map(one, x)


def leading_axis(name: str, x: Tree, n: int, meaning: str, padded: int | None = None) -> None:
    """Every leaf of `x` has leading axis `n`, or else every leaf has leading axis `padded`."""
    leaves = jax.tree_util.tree_leaves_with_path(x)
    if padded is not None and all(jnp.shape(leaf)[:1] == (padded,) for _, leaf in leaves):
        return
    for path, leaf in leaves:
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != n:
            where = name + jax.tree_util.keystr(path)
            also = "" if padded in (None, n) else f" (or, padded for these devices, {padded})"
            raise ValueError(
                f"{where} has shape {jnp.shape(leaf)}: its leading axis must be {meaning}, "
                f"{n}{also}."
            )


def common_leading_axis(name: str, x: Tree, meaning: str) -> int:
    """The leading axis that all leaves of `x` have, at least 1."""
    leaves = jax.tree_util.tree_leaves_with_path(x)
    if not leaves:
        raise ValueError(f"{name} has no leaves: it must have arrays with leading axis {meaning}.")
    path, first = leaves[0]
    if jnp.ndim(first) == 0:
        raise ValueError(
            f"{name}{jax.tree_util.keystr(path)} is a scalar: its leading axis must be {meaning}."
        )
    n = jnp.shape(first)[0]
    if n < 1:
        raise ValueError(
            f"{name} has a leading axis of 0: there must be at least one of {meaning}."
        )
    leading_axis(name, x, n, meaning)
    return n


def mesh_axes(
    mesh: Any, layer_axis: str, batch_axis: str | None, space_axis: str | None = None
) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh or None.")
    axes = {"layer_axis": layer_axis, "batch_axis": batch_axis, "space_axis": space_axis}
    for name, axis in axes.items():
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(f"{name}={axis!r}: must be one of the mesh's axes {mesh.axis_names}.")
    for (name, axis), (other, same) in itertools.combinations(axes.items(), 2):
        if axis is not None and axis == same:
            raise ValueError(f"{name} and {other} are both {axis!r}: they must differ.")
    if layer_axis is None:
        raise TypeError("layer_axis=None: must be the name of a mesh axis.")


def parts_divide(name: str, x: Tree, layout: Any, first: int = 0) -> None:
    """Every leaf's axes from `first` on can be split over the mesh axes that split states."""
    sizes = [layout.mesh.shape[axis] for axis in layout.split]
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        where = name + jax.tree_util.keystr(path)
        for i, (axis, parts) in enumerate(zip(layout.split, sizes, strict=True), first):
            if jnp.ndim(leaf) <= i:
                raise ValueError(
                    f"{where} has {jnp.ndim(leaf)} axes: the mesh axis {axis!r} splits axis {i}, "
                    "which it must have."
                )
            if jnp.shape(leaf)[i] % parts:
                raise ValueError(
                    f"{where} has a size of {jnp.shape(leaf)[i]} along axis {i}, which the mesh "
                    f"axis {axis!r} of size {parts} does not divide."
                )


def config(name: str, value: Any) -> None:
    if not isinstance(value, MGRIT):
        raise TypeError(f"{name}={value!r}: must be a jaxbraid.MGRIT.")


def time_grid(ts: Any) -> Any:
    """The time grid as an array of real, finite, strictly monotonic times."""
    if not isinstance(ts, jax.Array):
        try:
            ts = np.asarray(ts)
        except ValueError as e:
            raise TypeError(f"ts={ts!r}: must be a list of real numbers.") from e
    if not np.issubdtype(ts.dtype, np.number) or np.issubdtype(ts.dtype, np.complexfloating):
        raise TypeError(f"ts has dtype {ts.dtype}: must be real numbers.")
    if ts.ndim != 1 or ts.shape[0] < 2:
        raise ValueError(f"ts has shape {ts.shape}: must be a list of at least two times.")
    if isinstance(ts, Tracer):
        return ts
    points = np.asarray(ts, float)
    forward, backward = points[1:] > points[:-1], points[1:] < points[:-1]
    if not (np.all(forward) or np.all(backward)) or not np.all(np.isfinite(points)):
        raise ValueError("ts must increase (or decrease) strictly, without NaN or infinity.")
    return ts


def with_aux(what: str, out: Any) -> tuple[Any, Any]:
    """The pair that a function with `has_aux` returns."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"{what} must return a pair (value, aux), as has_aux=True says.")
    return out


def differs(out: Tree, like: Tree, what: str, who: str) -> Exception | None:
    """How `out`, which `who` returns, differs from the structure, shapes and dtypes of `like`."""
    if jax.tree.structure(out) != jax.tree.structure(like):
        return TypeError(
            f"{who} returns the structure {jax.tree.structure(out)}: it must be that of the "
            f"{what}, {jax.tree.structure(like)}."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(like), jax.tree.leaves(out), strict=True)
    for (path, a), b in pairs:
        leaf = what + jax.tree_util.keystr(path)
        if jnp.shape(b) != a.shape:
            return ValueError(
                f"{who} returns {leaf} with shape {jnp.shape(b)}: it must be that of the {what}, "
                f"{a.shape}."
            )
        dtype = getattr(b, "dtype", None) or jnp.result_type(b)
        if dtype != a.dtype:
            return TypeError(
                f"{who} returns {leaf} with dtype {dtype}: it must be that of the {what}, "
                f"{a.dtype}. Cast what enters (times, dt, parameters) or the result."
            )
    return None


def check_steps(
    setup: Setup,
    space: Space,
    levels: tuple[LevelProblem, ...],
    shared: Shared,
    derivative: bool,
) -> None:
    """Every level's step returns a state like the one that it is given.

    For a derivative it may not close over traced values: the backward pass is traced elsewhere.
    """
    for l, lp in enumerate(levels):
        step = setup.step(l)
        x = jax.eval_shape(lambda i: _tree.take(i._replace(active=None), 0), lp.inputs)
        u = space.shapes[l]

        def run(u: Tree, x: Any, shared: Shared) -> Tree:
            return step(x.time, u, x.own, shared.args, shared.side)[0]  # noqa: B023

        jaxpr, out = jax.make_jaxpr(run, return_shape=True)(u, x, shared)
        where = "" if len(levels) == 1 else f" on level {l}"
        if derivative and any(isinstance(c, Tracer) for c in jaxpr.consts):
            raise TypeError(
                f"the step{where} closes over a traced value, which a derivative cannot see. Hand "
                "it in: as `args` if all steps share it, in `params` if each has its own, or as "
                "`side`."
            )
        wrong = differs(out, u, "state", f"the step{where}")
        if wrong is not None:
            raise wrong
        for i, (path, a) in enumerate(jax.tree_util.tree_leaves_with_path(u)):
            if not _tree.is_inexact(a) and jaxpr.jaxpr.outvars[i] is not jaxpr.jaxpr.invars[i]:
                raise TypeError(
                    f"the step{where} changes state{jax.tree_util.keystr(path)}, of dtype "
                    f"{a.dtype}: only real and complex leaves can change from step to step. Give "
                    "counters and keys as per-step `params`, and return other leaves as they came."
                )


def one_a_level(name: str, values: tuple[Any, ...], config: Any) -> None:
    if len(values) not in (1, config.levels):
        raise ValueError(
            f"{name} has {len(values)} entries: must be one function or one for each of the "
            f"levels={config.levels}."
        )
    for value in values:
        if not callable(value):
            raise TypeError(f"{name}={value!r}: must be a function.")


def transfers(value: Any, config: MGRIT, adjoint: MGRIT) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if isinstance(value, Transfer):
        value = (value,)
    if not isinstance(value, Sequence):
        raise TypeError(f"transfers={value!r}: must be a sequence of jaxbraid.Transfer or None.")
    value = tuple(value)
    if len(value) != config.levels - 1:
        raise ValueError(
            f"transfers has {len(value)} entries: must have levels - 1 = {config.levels - 1}, a "
            "Transfer or None for each level but the coarsest."
        )
    for i, t in enumerate(value):
        if t is not None and not isinstance(t, Transfer):
            raise TypeError(f"transfers[{i}]={t!r}: must be a jaxbraid.Transfer or None.")
    if all(t is None for t in value):
        return None
    if adjoint.levels > config.levels:
        raise ValueError(
            f"adjoint has levels={adjoint.levels}: with transfers it can have no more than the "
            f"forward solve, {config.levels}."
        )
    return value


def guess(value: Any, u0: Tree, n: int) -> Tree | None:
    """States at the points 0..n, given as they are or as `"constant"`."""
    if value is None:
        return None
    if isinstance(value, str):
        if value != "constant":
            raise ValueError(f"guess={value!r}: must be states at all points, 'constant' or None.")
        return _tree.repeat(u0, n + 1)
    if jax.tree.structure(value) != jax.tree.structure(u0):
        raise TypeError(
            f"guess has the structure {jax.tree.structure(value)}: must be that of the initial "
            f"state, {jax.tree.structure(u0)}."
        )

    def one(g: Any, u: jax.Array) -> jax.Array:
        if jnp.shape(g) != (n + 1, *u.shape):
            raise ValueError(
                f"guess has a leaf of shape {jnp.shape(g)}: must be {(n + 1, *u.shape)}, the "
                "states at all points."
            )
        try:
            g = jnp.asarray(g)
        except (TypeError, ValueError) as e:
            raise TypeError("guess has leaves that are not arrays: they must be numbers.") from e
        return g if g.dtype == u.dtype else g.astype(u.dtype)

    return jax.lax.stop_gradient(jax.tree.map(one, value, u0))


def delta(config: MGRIT, adjoint: MGRIT, setup: Setup, layout: Any, u0: Tree) -> None:
    """Whether a Delta correction, if it is asked for, can be made."""
    for name, one in (("config", config), ("adjoint", adjoint)):
        if one.delta is None:
            continue
        if setup.transfers is not None:
            raise ValueError(f"{name} has delta={one.delta!r}: not with spatial coarsening.")
        if layout.parts > 1:
            raise ValueError(
                f"{name} has delta={one.delta!r}: not on a mesh that splits states (batch_axis, "
                "space_axis)."
            )
        size = dimension([x for x in jax.tree.leaves(u0) if _tree.is_inexact(x)])
        if one.delta != "full" and one.delta > size:
            raise ValueError(
                f"{name} has delta={one.delta}: must be at most {size}, the numbers in the state."
            )
