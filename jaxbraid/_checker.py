"""`check_problem`: are step, transfers and norm what MGRIT takes them for? Told in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxbraid import _check, _tree
from jaxbraid._check_space import check_norm, check_transfer
from jaxbraid._check_step import Slot, check_step
from jaxbraid._hierarchy import Hierarchy, build_hierarchies
from jaxbraid._options import MGRIT
from jaxbraid._report import Finding, Report
from jaxbraid.transfers import Transfer


def check_problem(
    step: Callable[..., Any] | Sequence[Callable[..., Any]],
    u0: PyTree,
    ts: Float[Array, " steps_plus_1"],
    params: PyTree | None = None,
    args: PyTree | None = None,
    *,
    config: MGRIT = MGRIT(),  # noqa: B008
    transfers: Sequence[Transfer | None] | None = None,
    order: float | None = None,
    has_aux: bool = False,
    key: Array | None = None,
) -> Report:
    r"""Look into the pieces of a problem before it is solved, and say what is wrong with them.

    Evaluates the step of each level a few dozen times, at the first, the middle and the last slot
    of that level. What is looked at:

    - `params`, `transfers`, `ts`: as `solve` checks them, and how many levels there really are.
    - step, on each level: structure, shapes and dtypes of what it returns; finite values; the same
        result when called twice, under `jit`, and in a batch (`vmap`); its order, measured with
        $2^k$ smaller steps in place of one, $p = \log_2 (d_k / d_{k+1})$ with
        $d_k = \|u^{(2^k)} - u^{(2^{k+1})}\|$; its vjp, and jvp where it has one, in `u`, `params`
        and `args` against central differences along random directions, in double precision.
    - coarse steps: how far one is from the fine steps that it stands for.
    - transfers: shapes; $R$ and $P$ are linear; $R$ keeps constants; whether $R = c P^T$, and how
        far $R P$ is from the identity.
    - `config.norm`: a real scalar, nonnegative, zero for zero, $\|a u\| = |a| \|u\|$, the triangle
        inequality.

    **Arguments**

    - `step`, `u0`, `ts`, `params`, `args`, `config`, `transfers`, `has_aux`: as for `solve`. `u0`
        should be a typical state: of one that is zero the step shows little.
    - `order`: the order that the finest step should have; an error if another one is measured.
    - `key`: for the random directions, by default `jax.random.key(0)`.

    **Returns**

    A `Report`: print it, or call its `raise_if_failed()`. What the pieces themselves raise is a
    finding, too.

    **Raises**

    `TypeError` if `config` isn't an `MGRIT`.
    """
    _check.config("config", config)
    steps = tuple(step) if isinstance(step, Sequence) else (step,)
    found: list[Finding] = []
    grid = _attempt(found, "ts", lambda: np.asarray(_check.time_grid(ts)))
    u0 = _attempt(found, "u0", lambda: _state(u0))
    params = _attempt(found, "params", lambda: _check.arrays("params", params))
    args = _attempt(found, "args", lambda: _check.arrays("args", args))
    _attempt(found, "step", lambda: _check.one_a_level("step", steps, config))
    pairs = _attempt(found, "transfers", lambda: _check.transfers(transfers, config, config))
    if found:
        return Report(tuple(found))
    n = len(grid) - 1
    meaning = "the number of steps len(ts) - 1"
    _attempt(found, "params", lambda: _check.leading_axis("params", params, n, meaning))
    h = _attempt(found, "config", lambda: build_hierarchies((config, config), n, 1)[0])
    if found:
        return Report(tuple(found))
    found.append(_levels(config, h, n))

    keys = iter(jax.random.split(jax.random.key(0) if key is None else key, 2 * len(h.levels)))
    u, same_space = u0, True
    first: Callable[..., Any] | None = None
    for l, level in enumerate(h.levels):
        ends = [np.asarray(x(0, n)) for x in (level.start, level.end)]
        inside = np.flatnonzero(ends[0] < n)
        slots = []
        for i in sorted({inside[0], inside[len(inside) // 2], inside[-1]}):
            a, b = int(ends[0][i]), int(ends[1][i])
            points = jnp.asarray(grid[a : b + 1], jnp.promote_types(_real(u0), jnp.float32))
            slots.append(Slot(points, _tree.take(params, slice(a, b))))
        fn = steps[min(l, len(steps) - 1)]
        fine = first if l and same_space else None
        wanted = order if l == 0 else None
        distinct = l < len(steps) or not same_space
        found += check_step(fn, u, slots, args, l, has_aux, wanted, next(keys), fine, distinct)
        first = fn if l == 0 else first
        if l == len(h.levels) - 1:
            break
        transfer = None if pairs is None else pairs[l]
        if transfer is not None:
            same_space = False
            findings, u = check_transfer(transfer, u, l, next(keys))
            found += findings
            if u is None:
                break
    if config.norm is not None:
        found += check_norm(config.norm, u0, next(keys))
    return Report(tuple(found))


def _attempt(found: list[Finding], name: str, run: Callable[[], Any]) -> Any:
    """What `run` returns; what it raises is an error that is noted."""
    try:
        return run()
    except (TypeError, ValueError) as e:
        found.append(Finding(name, "error", str(e)))
        return None


def _state(u0: Any) -> Any:
    u0 = _check.arrays("u0", u0)
    if not any(_tree.is_inexact(x) for x in jax.tree.leaves(u0)):
        raise TypeError("u0 has no real or complex leaf: there is nothing to solve for.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(u0):
        if _tree.is_inexact(leaf) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise ValueError(f"u0{jax.tree_util.keystr(path)} holds NaN or infinity.")
    return u0


def _real(u: Any) -> Any:
    return jnp.finfo(jnp.result_type(*(x for x in jax.tree.leaves(u) if _tree.is_inexact(x)))).dtype


def _levels(config: MGRIT, h: Hierarchy, n: int) -> Finding:
    sizes = ", ".join(str(int(np.sum(np.asarray(x.start(0, n)) < n))) for x in h.levels)
    text = f"{len(h.levels)} levels of {sizes} steps."
    if len(h.levels) == 1 and config.levels > 1:
        text += " That is sequential time stepping: the time axis is too short to be coarsened."
        return Finding("levels", "warning", text)
    if len(h.levels) < config.levels:
        text += f" levels={config.levels} were asked for, but a coarser one would have less than "
        text += f"min_coarse={config.min_coarse} steps."
        return Finding("levels", "warning", text)
    return Finding("levels", "ok", text)
