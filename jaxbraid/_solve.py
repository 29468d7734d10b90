"""`solve`: integrate u' = f from a one-step method, all time steps at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from jaxbraid import _check, _tree
from jaxbraid._equations import Ends
from jaxbraid._forward import Track, Want, Watch
from jaxbraid._hierarchy import Hierarchy
from jaxbraid._layout import Layout, make_layout
from jaxbraid._live import live_table
from jaxbraid._options import MGRIT
from jaxbraid._problem import PerStep, Setup
from jaxbraid._run import Arrays, Output, run
from jaxbraid._stats import Solution
from jaxbraid.transfers import Transfer

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class _TimeStep:
    """A user's `step(t0, t1, u, params_n, args)` in the engine's form."""

    fn: Step
    has_aux: bool

    def __call__(self, time: Any, u: Any, own: PerStep, args: Any, side: Any) -> tuple[Any, Any]:
        out = self.fn(*time, u, own.params, args)
        return _check.with_aux("the step", out) if self.has_aux else (out, ())


def _interval_ends(ts: Array, start: Array, end: Array) -> Ends:
    return Ends(ts[start], ts[end])


def solve(
    step: Step | Sequence[Step],
    u0: PyTree,
    ts: Float[Array, " steps_plus_1"],
    params: PyTree | None = None,
    args: PyTree | None = None,
    *,
    config: MGRIT = MGRIT(),  # noqa: B008
    adjoint: MGRIT | None = None,
    transfers: Sequence[Transfer | None] | None = None,
    guess: PyTree | None = None,
    has_aux: bool = False,
    save: str = "all",
    periodic: bool = False,
    point_residuals: bool = False,
    callback: Callable[[int, float, Any], None] | None = None,
    callback_states: bool = True,
    progress: bool = False,
    mesh: Mesh | Layout | None = None,
    layer_axis: str = "layer",
    batch_axis: str | None = None,
    space_axis: str | None = None,
) -> Solution:
    r"""Solve $u_{n+1} = \Phi_n(u_n)$ on the time grid `ts` by MGRIT.

    **Arguments**

    - `step`: `step(t0, t1, u, params_n, args) -> u_next`, a one-step method from `t0` to `t1`; or a
        sequence of them, one a level, finest first. A coarse step from a C-point gets the
        parameters of the fine step that starts there.
    - `u0`: initial state, any pytree of arrays. Leaves that are not real or complex are constants
        that the step returns as they came.
    - `ts`: the `N + 1` points of the time grid, increasing or decreasing, any spacing. They are
        cast to the precision of the state (single, if that is half).
    - `params`: per-step parameters, a pytree with leading axis `N`.
    - `args`: anything that all steps share.
    - `config`: how to solve; `adjoint`: how to solve for derivatives, by default as
        `config` says, but with the 2-norm.
    - `transfers`: spatial coarsening: one `Transfer` (or `None`) for each level but the coarsest.
    - `guess`: states at the points 0..N to start from, instead of nested iteration; `"constant"`
        for `u0` everywhere.
    - `has_aux`: `step` returns `(u_next, aux)`.
    - `save`: which states the solution's `us` holds: `"all"`; `"coarse"`: those at the C-points of
        the finest level and at the end of time, the solution's `ts`; `"final"`: none. Without
        `"all"` no more memory is used than the C-points need.
    - `periodic`: the state at the end of time is that at its beginning, and is solved for; `u0`
        is but a guess. The states must forget where they come from: a perturbation must shrink
        from one period to the next, and `coarse_rounds` of `config` says for how many of them the
        coarsest level is marched at a visit. Derivatives hold for the converged solution, that
        with respect to `u0` is zero.
    - `point_residuals`: record residuals at each C-point, in the solution's `stats`.
    - `callback`: `callback(iteration, residual, states)` is called on the host after every
        iteration, under `jit` too, with NumPy arrays: the states at the C-points, as `us` has them
        with `save="coarse"`, before the last relaxation (`None` without `callback_states`, which
        saves their transfer). Iteration 0 is the initial guess, where its residual is known. A
        program is compiled for every function that is given: give one function, not always new
        ones. On several devices the first one calls.
    - `progress`: print the table of iterations while it runs, and a bar of their number.
    - `mesh`: devices to split the time steps over along `layer_axis`, and the leading axis of all
        leaves of `u0` along `batch_axis`, if given.
    - `space_axis`: name of the mesh axis that splits the leading axis of all leaves of `u0` (the
        axis after that of the batch, if there is one) as an axis of space. The step gets this
        device's part of the state, and exchanges what it needs with the others of its axis
        (`jaxbraid.space`).

    **Returns**

    A `Solution`, differentiable (in reverse mode) in `u0`, `params` and `args`; not in `ts`,
    which is an error, and not in `guess`.

    **Raises**

    `ValueError` or `TypeError` naming the argument at fault.
    """
    _check.config("config", config)
    adjoint = dataclasses.replace(config, norm=None) if adjoint is None else adjoint
    _check.config("adjoint", adjoint)
    u0 = _check.arrays("u0", u0)
    ts = _times(ts, u0)
    n = ts.shape[0] - 1
    params, args = _check.arrays("params", params), _check.arrays("args", args)
    if save not in ("all", "coarse", "final"):
        raise ValueError(f"save={save!r}: must be 'all', 'coarse' or 'final'.")
    layout = make_layout(mesh, layer_axis, batch_axis, space_axis)
    _check.parts_divide("u0", u0, layout)

    steps = tuple(step) if isinstance(step, Sequence) else (step,)
    setup = Setup(
        tuple(_TimeStep(s, has_aux) for s in steps),
        _interval_ends,
        n,
        config,
        adjoint,
        _check.transfers(transfers, config, adjoint),
        has_aux,
        periodic,
    )
    _check.one_a_level("step", steps, config)
    layout.agree("u0", u0)
    layout.agree("args", args)
    h, _ = setup.hierarchies(layout.devices)
    own = layout.count(h)
    meaning = "the number of steps len(ts) - 1" if own == n else "the number of this rank's steps"
    _check.leading_axis("params", params, own, meaning, layout.size(h))
    _check.delta(config, adjoint, setup, layout, u0)
    if periodic and len(h.levels) == 1:
        raise ValueError("periodic=True: needs a coarse level; give levels >= 2 and more steps.")
    guess = _check.guess(guess, u0, own)
    guess = None if guess is None else layout.starts(guess, h)
    want = Want(
        None if save == "final" else save,
        Track(point_residuals, _watches(config, callback, callback_states, progress)),
        has_aux,
        growth=config.delta is not None and len(h.levels) > 1,
    )
    out = run(setup, layout, want, Arrays(ts, u0, PerStep(params), args, None, guess), None)
    return _solution(out, want, layout, h, ts)


def _times(ts: Any, u0: PyTree) -> Array:
    """The time grid in the precision of the state, in single precision if that is half."""
    ts = _check.time_grid(ts)
    inexact = [x for x in jax.tree.leaves(u0) if _tree.is_inexact(x)]
    if not inexact:
        raise TypeError("u0 has no real or complex leaf: there is nothing to solve for.")
    real = jnp.finfo(jnp.result_type(*inexact)).dtype
    return jnp.asarray(ts).astype(jnp.promote_types(real, jnp.float32))


def _solution(out: Output, want: Want, layout: Layout, h: Hierarchy, ts: Array) -> Solution:
    us = times = lyapunov = None
    if want.states is not None:
        us = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), out.states, out.u)
        at = np.arange(layout.count(h)) if want.states == "all" else layout.c_points(h)
        times = ts[np.append(layout.first_step(h) + at, h.steps)]
    if want.growth:
        lyapunov = out.growth / jnp.abs(ts[-1] - ts[0])
    stats = out.stats
    assert stats is not None and want.track is not None
    if want.track.points:
        stats = dataclasses.replace(stats, point_residuals=out.points.T)
    return Solution(out.u, us, stats, out.aux if want.aux else None, times, lyapunov)


def _watches(
    config: MGRIT, callback: Any, callback_states: bool, progress: bool
) -> tuple[Watch, ...]:
    watches = []
    if callback is not None:
        if not callable(callback):
            raise TypeError(f"callback={callback!r}: must be a function or None.")
        watches.append(Watch(_host(callback), callback_states))
    if progress:
        watches.append(Watch(live_table(config.max_iters, config.tol), False))
    return tuple(watches)


@functools.lru_cache(maxsize=256)
def _host(callback: Callable[[int, float, Any], None]) -> Callable[[Any, Any, Any], None]:
    """`callback` with numbers in place of arrays of one; the same one for the same function."""

    def call(iteration: Any, residual: Any, states: Any) -> None:
        callback(int(iteration), float(residual), jax.tree.map(np.asarray, states))

    return call
