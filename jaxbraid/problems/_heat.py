"""The heat equation u_t - a u_xx = b on an interval: theta method, BDF2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbraid._options import check_choice
from jaxbraid.problems import _arguments as check
from jaxbraid.problems._arguments import real
from jaxbraid.problems._plot import Picture
from jaxbraid.problems._problem import Problem, Step
from jaxbraid.problems._tridiagonal import tridiagonal_solve

Interval = tuple[float, float]


def inner_points(x: Interval, n: int) -> tuple[np.ndarray, float]:
    """The n inner points of the vertex-centred grid on the interval, and its width."""
    return np.linspace(*x, n + 2)[1:-1], (x[1] - x[0]) / (n + 1)


def theta_order(theta: float) -> int:
    """Global order of the theta method."""
    return 2 if theta == 0.5 else 1


def _solve(shift: Any, scale: Any, b: Any) -> jax.Array:
    """Solve (shift I + scale tridiag(-1, 2, -1)) u = b."""
    return tridiagonal_solve(-scale, shift + 2 * scale, -scale, b)


def _second_difference(u: Any) -> Any:
    """tridiag(1, -2, 1) u: of a state that vanishes at both ends."""
    padded = jnp.pad(u, 1)
    return padded[2:] - 2 * u + padded[:-2]


def sine_wave(x: Interval, half_waves: int, grid: np.ndarray) -> tuple[np.ndarray, float]:
    """The sine of so many half waves that vanishes at both ends, and its wave number."""
    k = half_waves * np.pi / (x[1] - x[0])
    return np.sin(k * (grid - x[0])), k


def _source(sine: Any, k: float, t: Any, a: Any) -> Any:
    """The right-hand side for which sine(x) cos(t) solves u_t - a u_xx = b."""
    return -sine * (jnp.sin(t) - a * k**2 * jnp.cos(t))


# -- one dimension --------------------------------------------------------------------------------


@functools.cache
def _heat_1d(x: Interval, half_waves: int, theta: float) -> Step:
    def step(t0, t1, u, params, args):
        t0, t1, a = real(u, t0, t1, args["a"])
        grid, dx = inner_points(x, u.shape[0])
        sine, k = sine_wave(x, half_waves, grid)
        sine, dt, scale = real(u, sine), t1 - t0, (t1 - t0) * a / dx**2
        b = u + dt * theta * _source(sine, k, t1, a)
        if theta < 1:
            b = b + (1 - theta) * (dt * _source(sine, k, t0, a) + scale * _second_difference(u))
        return _solve(1.0, theta * scale, b) if theta > 0 else b

    return step


def heat_1d(
    nx: int = 1001,
    x: Interval = (0.0, 2.0),
    a: float = 1.0,
    half_waves: int = 1,
    theta: float | Sequence[float] = 1.0,
    *,
    t_end: float = 2.0,
    nt: int = 64,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The heat equation $u_t - a u_{xx} = b(x, t)$ on an interval, $u = 0$ at both ends.

    Central differences in space, of order 2, and the theta method in time:
    $(u^+ - u) / \Delta t = \theta F(t_1, u^+) + (1 - \theta) F(t_0, u)$, of order 2 for
    $\theta = 1/2$ (Crank-Nicolson) and 1 otherwise. The width of the grid follows from the size of
    the state, so the step serves spatially coarsened levels, too.

    **Arguments**

    - `nx`: points of the grid with its ends; the state holds the `nx - 2` inner ones.
    - `x`: the interval.
    - `a`: diffusivity, positive.
    - `half_waves`: how many half waves $p$ of a sine the solution has in the interval.
    - `theta`: 1 is backward Euler, 1/2 Crank-Nicolson, 0 forward Euler; or a sequence of them, one
        a level.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"a": a}`. $b$ is such that $u = \sin(k (x - x_0)) \cos t$ with
    $k = p \pi / (x_1 - x_0)$ is the solution, whatever $a$. With `x=(0, pi)` and `a=1` it is the
    heat equation of XBraid's examples, $u = \sin x \cos t$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        K. W. Morton, D. F. Mayers: Numerical Solution of Partial Differential Equations, chapter 2.
    """
    nx, half_waves = check.integer("nx", nx, 3), check.integer("half_waves", half_waves, 1)
    x, thetas = check.interval("x", x), check.each_level("theta", theta, check.fraction)
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype)
    grid, _ = inner_points(x, nx - 2)
    sine, _ = sine_wave(x, half_waves, grid)

    def exact(t, args=None):
        return sine * jnp.cos(t)

    return Problem(
        "Heat equation",
        check.one_or_all(tuple(_heat_1d(x, half_waves, theta) for theta in thetas)),
        (sine * np.cos(ts[0])).astype(kind),
        ts,
        args={"a": check.number("a", a, above=0.0)},
        exact=exact,
        order=theta_order(thetas[0]),
        picture=Picture("image", ("u",), {"x": grid}),
    )


# -- pairs of time points -------------------------------------------------------------------------


@functools.cache
def _heat_1d_bdf(x: Interval, half_waves: int, dtau: float) -> tuple[Step, Step]:
    """The steps from pair to pair by BDF2 and by BDF1."""

    def setting(t0, t1, u, args):
        t0, t1, a = real(u, t0, t1, args["a"])
        grid, dx = inner_points(x, u.shape[0])
        sine, k = sine_wave(x, half_waves, grid)
        sine = real(u, sine)
        return t0, t1, a / dx**2, lambda t: _source(sine, k, t, a)

    def bdf1_step(tau, t, u, scale, source):
        return _solve(1.0, tau * scale, u + tau * source(t))

    def bdf2_step(tau, tau_before, t, u, u_before, scale, source):
        """r^2/(tau(1+r)) u_before - (1+r)/tau u + (1+2r)/(tau(1+r)) u_next + L u_next = b(t)."""
        r = tau / tau_before
        old = (1 + r) / tau * u - r**2 / (tau * (1 + r)) * u_before
        new = (1 + 2 * r) / (tau * (1 + r))
        return _solve(new, scale, source(t) + old)

    def bdf1(t0, t1, u, params, args):
        t0, t1, *rest = setting(t0, t1, u[1], args)
        first = bdf1_step(t1 - t0 - dtau, t1, u[1], *rest)
        return first, bdf1_step(dtau, t1 + dtau, first, *rest)

    def bdf2(t0, t1, u, params, args):
        t0, t1, *rest = setting(t0, t1, u[1], args)
        gap = t1 - t0 - dtau
        first = bdf2_step(gap, dtau, t1, u[1], u[0], *rest)
        return first, bdf2_step(dtau, gap, t1 + dtau, first, u[1], *rest)

    return bdf2, bdf1


def heat_1d_bdf(
    nx: int = 1001,
    x: Interval = (0.0, 2.0),
    a: float = 1.0,
    half_waves: int = 1,
    dtau: float | None = None,
    levels: int = 2,
    start: str = "trapezoidal",
    *,
    t_end: float = 2.0,
    nt: int = 64,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The heat equation of `heat_1d` by BDF2, as a one-step method for pairs of time points.

    The state is the pair $(u(t), u(t + \Delta\tau))$. From the pair at $t_0$ to that at $t_1$ there
    are two steps, of lengths $t_1 - t_0 - \Delta\tau$ and $\Delta\tau$: of BDF2 with variable step
    lengths (order 2) on the finest level, of BDF1 on the others, where its pairs are far apart.

    **Arguments**

    - `nx`, `x`, `a`, `half_waves`: as for `heat_1d`.
    - `dtau`: distance $\Delta\tau$ of a pair's points, less than all steps; by default half of the
        first step, which makes the points equidistant.
    - `levels`: the number of levels that the steps are for; that of the solve.
    - `start`: how the first pair is made: `"trapezoidal"` rule or `"bdf1"`.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"a": a}`.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        R. D. Falgout, M. Lecouvez, C. S. Woodward: A parallel-in-time algorithm for variable step
        multistep methods. J. Comput. Sci. 37, 2019.
    """
    nx, half_waves = check.integer("nx", nx, 3), check.integer("half_waves", half_waves, 1)
    x, a = check.interval("x", x), check.number("a", a, above=0.0)
    levels = check.integer("levels", levels, 1)
    start = check_choice("start", start, ("trapezoidal", "bdf1"))
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype)
    shortest = float(np.min(np.diff(ts)))
    gap = float(ts[1] - ts[0]) / 2 if dtau is None else check.number("dtau", dtau, above=0.0)
    if not 0 < gap < shortest:
        raise ValueError(f"dtau={gap}: must be positive and less than all steps, {shortest}.")

    grid, dx = inner_points(x, nx - 2)
    sine, k = sine_wave(x, half_waves, grid)
    t, scale, u = ts[0], gap * a / dx**2, sine * np.cos(ts[0])
    if start == "trapezoidal":
        source = _source(sine, k, t, a) + _source(sine, k, t + gap, a)
        b = u + (scale * _second_difference(u) + gap * source) / 2
        second = _solve(1.0, scale / 2, b)
    else:
        second = _solve(1.0, scale, u + gap * _source(sine, k, t + gap, a))
    bdf2, bdf1 = _heat_1d_bdf(x, half_waves, gap)

    def exact(t, args=None):
        return sine * jnp.cos(t), sine * jnp.cos(t + gap)

    return Problem(
        "Heat equation (BDF2)",
        check.one_or_all((bdf2,) + (bdf1,) * (levels - 1)),
        (u.astype(kind), np.asarray(second).astype(kind)),
        ts,
        args={"a": a},
        exact=exact,
        order=2,
        picture=Picture("image", ("u",), {"x": grid}),
    )
