"""`solve`: integrate u' = f from a one-step method, all time steps at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from jaxbraid import _check, _tree
from jaxbraid._forward import Want
from jaxbraid._layout import Layout, make_layout
from jaxbraid._options import MGRIT
from jaxbraid._problem import Setup
from jaxbraid._run import Arrays, run
from jaxbraid._stats import Solution
from jaxbraid.transfers import Transfer

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class _TimeStep:
    """A user's `step(t0, t1, u, params_n, args)` in the engine's form."""

    fn: Step
    has_aux: bool

    def __call__(self, time: Any, u: Any, params: Any, args: Any, side: Any) -> tuple[Any, Any]:
        out = self.fn(*time, u, params, args)
        return _check.with_aux("the step", out) if self.has_aux else (out, ())


def _interval_ends(ts: Array, start: Array, end: Array) -> tuple[Array, Array]:
    return ts[start], ts[end]


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
    mesh: Mesh | Layout | None = None,
    layer_axis: str = "layer",
    batch_axis: str | None = None,
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
    - `save`: `"all"`: the solution's `us` holds the states at all points; `"final"`: it is `None`,
        and no more memory is used than the C-points need.
    - `mesh`: devices to split the time steps over along `layer_axis`, and the leading axis of all
        leaves of `u0` along `batch_axis`, if given.

    **Returns**

    A `Solution`, differentiable (in reverse mode) in `u0`, `params` and `args`; not in `ts`,
    which is an error, and not in `guess`.

    **Raises**

    `ValueError` or `TypeError` naming the argument at fault.
    """
    _check.config("config", config)
    adjoint = dataclasses.replace(config, norm=None) if adjoint is None else adjoint
    _check.config("adjoint", adjoint)
    ts = _check.time_grid(ts)
    n = ts.shape[0] - 1
    u0 = _check.arrays("u0", u0)
    if not any(_tree.is_inexact(x) for x in jax.tree.leaves(u0)):
        raise TypeError("u0 has no real or complex leaf: there is nothing to solve for.")
    real = jnp.finfo(
        jnp.result_type(*(x for x in jax.tree.leaves(u0) if _tree.is_inexact(x)))
    ).dtype
    ts = jnp.asarray(ts).astype(jnp.promote_types(real, jnp.float32))
    params, args = _check.arrays("params", params), _check.arrays("args", args)
    if save not in ("all", "final"):
        raise ValueError(f"save={save!r}: must be 'all' or 'final'.")
    layout = make_layout(mesh, layer_axis, batch_axis)
    if layout.batch_axis is not None:
        _check.batch_divides("u0", u0, layout.parts, layout.batch_axis)

    steps = tuple(step) if isinstance(step, Sequence) else (step,)
    setup = Setup(
        tuple(_TimeStep(s, has_aux) for s in steps),
        _interval_ends,
        n,
        config,
        adjoint,
        _check.transfers(transfers, config, adjoint),
        has_aux,
    )
    _check.one_a_level("step", steps, config)
    layout.agree("u0", u0)
    layout.agree("args", args)
    h, _ = setup.hierarchies(layout.devices)
    own = layout.count(h)
    meaning = "the number of steps len(ts) - 1" if own == n else "the number of this rank's steps"
    _check.leading_axis("params", params, own, meaning, layout.size(h))
    guess = _check.guess(guess, u0, own)
    guess = None if guess is None else layout.starts(guess, h)
    want = Want(states=save == "all", stats=True, aux=has_aux)
    out = run(setup, layout, want, Arrays(ts, u0, params, args, None, guess), None)
    us = None
    if save == "all":
        us = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), out.states, out.u)
    assert out.stats is not None
    return Solution(out.u, us, out.stats, out.aux if has_aux else None)
