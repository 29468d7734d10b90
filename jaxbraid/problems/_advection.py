"""The advection equation u_t + c u_x = 0 and Burgers' equation u_t + u u_x = nu u_xx."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbraid.problems import _arguments as check
from jaxbraid.problems._arguments import real
from jaxbraid.problems._heat import Interval, inner_points, theta_order
from jaxbraid.problems._plot import Picture
from jaxbraid.problems._problem import Problem, Step
from jaxbraid.problems._tridiagonal import tridiagonal_solve


@functools.cache
def _advection(x: Interval) -> Step:
    def step(t0, t1, u, params, args):
        n = u.shape[0]
        dt, c = real(u, t1 - t0, args["c"])
        number = c * dt * n / (x[1] - x[0])
        angle = 2 * np.pi * np.arange(n // 2 + 1) / n
        # the upwind difference is |c|/2 times the second difference away from the central one
        diffusion, transport = real(u, 1 - np.cos(angle), np.sin(angle))
        symbol = 1 + jnp.abs(number) * diffusion + 1j * number * transport
        return jnp.fft.irfft(jnp.fft.rfft(u) / symbol, n)

    return step


def advection_1d(
    nx: int = 129,
    x: Interval = (-1.0, 1.0),
    c: float = 1.0,
    *,
    t_end: float = 2.0,
    nt: int = 128,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The advection equation $u_t + c u_x = 0$, periodic.

    First-order upwind differences and backward Euler, of order 1, solved directly by Fourier
    transforms. The width of the grid follows from the size of the state.

    **Arguments**

    - `nx`: points of the grid with its ends; the state holds the `nx - 1` first ones.
    - `x`: the interval.
    - `c`: velocity, of either sign.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"c": c}`. The solution is $e^{-x^2}$, periodically continued, shifted by
    $c (t - t_0)$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        R. J. LeVeque: Finite Difference Methods for Ordinary and Partial Differential Equations,
        chapter 10.
    """
    nx, x, c = check.integer("nx", nx, 3), check.interval("x", x), check.number("c", c)
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype)
    grid = np.linspace(*x, nx)[:-1]

    def exact(t, args=None):
        shift = ({"c": c} if args is None else args)["c"] * (t - ts[0])
        return jnp.exp(-((x[0] + jnp.mod(grid - shift - x[0], x[1] - x[0])) ** 2))

    return Problem(
        "Advection equation",
        _advection(x),
        np.exp(-(grid**2)).astype(kind),
        ts,
        args={"c": c},
        exact=exact,
        order=1,
        picture=Picture("image", ("u",), {"x": grid}),
    )


# -- Burgers' equation ----------------------------------------------------------------------------


def _wave(x: Any, t: Any, left: Any, right: Any, nu: Any) -> Any:
    """The travelling wave from the value `left` to `right`, which starts around 0 at t = 0."""
    speed, half_jump = (left + right) / 2, (left - right) / 2
    return speed - half_jump * jnp.tanh(half_jump * (x - speed * t) / (2 * nu))


@functools.cache
def _burgers(x: Interval, left: float, right: float, theta: float) -> Step:
    def step(t0, t1, u, params, args):
        t0, t1, nu = real(u, t0, t1, args["nu"])
        dx = (x[1] - x[0]) / (u.shape[0] + 1)
        dt, ends = t1 - t0, real(u, np.asarray(x))

        def change(v, ends):
            """-(v^2/2)_x + nu v_xx at the inner points."""
            w = jnp.concatenate([ends[:1], v, ends[1:]])
            flux, second = w**2 / 2, w[2:] - 2 * w[1:-1] + w[:-2]
            return (flux[:-2] - flux[2:]) / (2 * dx) + nu * second / dx**2

        # u+^2/2 is linearised about u, so u+ - u =: d solves a linear system
        old, new = (_wave(ends, t, left, right, nu) for t in (t0, t1))
        w = jnp.concatenate([old[:1], u, old[1:]])
        transport, diffusion = theta * dt / (2 * dx), theta * dt * nu / dx**2
        lower, upper = -transport * w[:-2] - diffusion, transport * w[2:] - diffusion
        d = new - old  # known at the ends
        b = dt * change(u, old)
        b = b.at[0].add(-lower[0] * d[0]).at[-1].add(-upper[-1] * d[1])
        return u + tridiagonal_solve(lower, 1 + 2 * diffusion, upper, b)

    return step


def burgers_1d(
    nx: int = 257,
    x: Interval = (-2.0, 3.0),
    nu: float = 0.05,
    values: tuple[float, float] = (1.0, 0.0),
    theta: float | Sequence[float] = 0.5,
    *,
    t_end: float = 2.0,
    nt: int = 256,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""Burgers' equation $u_t + (u^2/2)_x = \nu u_{xx}$: a viscous shock that travels.

    Central differences in space, of order 2, and the linearly implicit theta method in time: the
    flux at the new time is $u^2/2 + u (u^+ - u)$, so that each step solves one tridiagonal system
    (of Beam and Warming's kind). Of order 2 for $\theta = 1/2$, 1 otherwise. The width of the grid
    follows from the size of the state.

    **Arguments**

    - `nx`: points of the grid with its ends; the state holds the `nx - 2` inner ones. A grid wider
        than $2 \nu / \max |u|$ lets the solution oscillate at the shock.
    - `x`: the interval.
    - `nu`: viscosity, positive.
    - `values`: what the solution is far left and far right of the shock.
    - `theta`: 1 is backward Euler, 1/2 the trapezoidal rule; in [1/2, 1], or a sequence of them,
        one a level.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"nu": nu}`. The solution is the travelling wave
    $u = s - h \tanh(h (x - s t) / (2 \nu))$ with the speed $s$ and the half jump $h$ of `values`,
    which the Hopf-Cole transformation gives; its values are set at the ends.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        E. Hopf: The partial differential equation $u_t + u u_x = \mu u_{xx}$. Comm. Pure Appl.
        Math. 3, 1950; R. M. Beam, R. F. Warming: An implicit finite-difference algorithm for
        hyperbolic systems in conservation-law form. J. Comput. Phys. 22, 1976.
    """
    nx, x, nu = check.integer("nx", nx, 3), check.interval("x", x), check.number("nu", nu, above=0)
    thetas = check.each_level("theta", theta, check.fraction)
    for value in thetas:
        if value < 0.5:
            raise ValueError(f"theta={theta}: must lie in [0.5, 1], or the steps are unstable.")
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise TypeError(f"values={values!r}: must be a pair of numbers, left and right.")
    left, right = (check.number(f"values[{i}]", v) for i, v in enumerate(values))
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype)
    grid, _ = inner_points(x, nx - 2)

    def exact(t, args=None):
        return _wave(grid, t, left, right, ({"nu": nu} if args is None else args)["nu"])

    return Problem(
        "Burgers' equation",
        check.one_or_all(tuple(_burgers(x, left, right, theta) for theta in thetas)),
        np.asarray(exact(ts[0])).astype(kind),
        ts,
        args={"nu": nu},
        exact=exact,
        order=theta_order(thetas[0]),
        picture=Picture("image", ("u",), {"x": grid}),
    )
