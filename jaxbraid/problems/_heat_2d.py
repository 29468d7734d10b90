"""The heat equation u_t - a (u_xx + u_yy) = b on a rectangle, in parts if space is split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbraid import space
from jaxbraid.problems import _arguments as check
from jaxbraid.problems._arguments import real
from jaxbraid.problems._heat import Interval, sine_wave, theta_order
from jaxbraid.problems._plot import Picture
from jaxbraid.problems._problem import Problem, Step

Side = float | Callable[[Any, Any], Any]
Sides = tuple[Side, Side, Side, Side]


def _sine_transform(n: int) -> np.ndarray:
    """The symmetric orthogonal matrix of eigenvectors of tridiag(-1, 2, -1) of order n."""
    k = np.arange(1, n + 1)
    return np.sqrt(2 / (n + 1)) * np.sin(np.pi * np.outer(k, k) / (n + 1))


def _boundary(sides: Sides, x: Any, y: Any, t: Any, rows: Any, nx: int) -> jax.Array:
    """The boundary's values at `t` on these rows of the grid, and zeros inside."""
    given = (jnp.asarray(side(s, t) if callable(side) else side)
             for side, s in zip(sides, (y, y, x, x), strict=True))  # fmt: skip
    left, right, bottom, top = given
    first, last = (rows == 0)[:, None], (rows == nx - 1)[:, None]
    column = jnp.arange(len(y))
    across = jnp.where(column == 0, jnp.broadcast_to(bottom, x.shape)[:, None], 0)
    across = jnp.where(column == len(y) - 1, jnp.broadcast_to(top, x.shape)[:, None], across)
    return jnp.where(first, left, jnp.where(last, right, across))


@functools.cache
def _heat_2d(
    x: Interval, y: Interval, theta: float, sides: Sides, source: Any, axis: str | None
) -> Step:
    def step(t0, t1, u, params, args):
        t0, t1, a = real(u, t0, t1, args["a"])
        n, ny = u.shape
        nx = n if axis is None else n * jax.lax.axis_size(axis)
        px, py = space.part(jnp.linspace(*x, nx), axis), np.linspace(*y, ny)
        rows, columns = space.part(np.arange(nx), axis), np.arange(ny)
        inside = ((rows > 0) & (rows < nx - 1))[:, None] & (columns > 0) & (columns < ny - 1)
        dx, dy = (x[1] - x[0]) / (nx - 1), (y[1] - y[0]) / (ny - 1)
        dt = t1 - t0

        def boundary(t):
            return real(u, _boundary(sides, px, py, t, rows, nx))

        def change(w, t):
            """Right-hand side at t of the inner points, from the values at all points."""
            near, padded = space.halo(w, axis, boundary="zero"), jnp.pad(w, ((0, 0), (1, 1)))
            along_x = (near[2:] - 2 * w + near[:-2]) / dx**2
            along_y = (padded[:, 2:] - 2 * w + padded[:, :-2]) / dy**2
            rate = a * (along_x + along_y)
            if source is not None:
                rate = rate + real(u, source(px[:, None], py[None], t))
            return jnp.where(inside, rate, 0)

        new = boundary(t1)
        b = jnp.where(inside, u, 0) + theta * dt * change(new, t1)
        if theta < 1:
            b = b + (1 - theta) * dt * change(jnp.where(inside, u, boundary(t0)), t0)
        sx, sy = real(u, _sine_transform(nx - 2), _sine_transform(ny - 2))
        kx, ky = (2 - 2 * np.cos(np.pi * np.arange(1, m - 1) / (m - 1)) for m in (nx, ny))
        kx, ky = real(u, kx / dx**2, ky / dy**2)

        def solve(modes, ky):
            modes = sx @ modes[1:-1] / (1 + theta * dt * a * (kx[:, None] + ky))
            return jnp.pad(sx @ modes, ((1, 1), (0, 0)))

        inner = space.along(solve, b[:, 1:-1] @ sy, axis, ky) @ sy
        return jnp.pad(inner, ((0, 0), (1, 1))) + new

    return step


def heat_2d(
    nx: int = 65,
    ny: int = 65,
    x: Interval = (0.0, 0.75),
    y: Interval = (0.0, 1.5),
    a: float = 3.5,
    theta: float | Sequence[float] = 1.0,
    sides: Sequence[Side] = (0.0, 0.0, 0.0, 0.0),
    source: Callable[[Any, Any, Any], Any] | None = None,
    initial: Callable[[Any, Any], Any] | None = None,
    *,
    space_axis: str | None = None,
    t_end: float = 2.0,
    nt: int = 64,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The heat equation $u_t - a (u_{xx} + u_{yy}) = b(x, y, t)$ on a rectangle, $u$ given around.

    Five-point stencil in space, of order 2; the theta method of `heat_1d` in time, solved directly
    by sine transforms. The state has shape `(nx, ny)` and holds the boundary points, too.

    **Arguments**

    - `nx`, `ny`: points of the grid, with those on the boundary.
    - `x`, `y`: the rectangle.
    - `a`: diffusivity, positive.
    - `theta`: 1 is backward Euler (order 1), 1/2 Crank-Nicolson (order 2), 0 forward Euler; or a
        sequence of them, one a level.
    - `sides`: the boundary values on the left, right, bottom and top side: numbers, or functions
        `side(s, t)` of the coordinate along the side and time.
    - `source`: `source(x, y, t)`, the right-hand side $b$, or `None`.
    - `initial`: `initial(x, y)`, the state at the start.
    - `space_axis`: the mesh axis over which the first axis of the state is split, for
        `solve(mesh=mesh, space_axis=...)` with the same name; it must divide `nx`.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"a": a}`. By default it starts from five times the first sine in each
    direction; without source and with `sides` of zeros that decays as
    $e^{-a (k_x^2 + k_y^2) (t - t_0)}$, and `exact` is given.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        K. W. Morton, D. F. Mayers: Numerical Solution of Partial Differential Equations, chapter 3.
    """
    nx, ny = check.integer("nx", nx, 3), check.integer("ny", ny, 3)
    x, y, a = check.interval("x", x), check.interval("y", y), check.number("a", a, above=0.0)
    thetas = check.each_level("theta", theta, check.fraction)
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype)
    if not isinstance(sides, (tuple, list)) or len(sides) != 4:
        raise ValueError(f"sides={sides!r}: must have four entries: left, right, bottom, top.")
    left, right, bottom, top = (
        side if callable(side) else check.number(f"sides[{i}]", side)
        for i, side in enumerate(sides)
    )
    sides = (left, right, bottom, top)
    for name, f in (("source", source), ("initial", initial)):
        if f is not None and not callable(f):
            raise TypeError(f"{name}={f!r}: must be a function or None.")

    px, py = np.linspace(*x, nx), np.linspace(*y, ny)
    (sx, kx), (sy, ky) = sine_wave(x, 1, px[1:-1]), sine_wave(y, 1, py[1:-1])
    sines = 5.0 * np.outer(sx, sy)
    inner = sines if initial is None else initial(px[1:-1, None], py[None, 1:-1])
    inner = jnp.broadcast_to(jnp.asarray(inner), (nx - 2, ny - 2))
    framed = np.asarray(_boundary(sides, px, py, ts[0], np.arange(nx), nx))
    u0 = (np.pad(np.asarray(inner), 1) + framed).astype(kind)

    def exact(t, args=None):
        rate = ({"a": a} if args is None else args)["a"] * (kx**2 + ky**2)
        return jnp.pad(sines, 1) * jnp.exp(-rate * (t - ts[0]))

    closed = initial is None and source is None and not any(callable(s) or s for s in sides)
    return Problem(
        "Heat equation (2D)",
        check.one_or_all(
            tuple(_heat_2d(x, y, theta, sides, source, space_axis) for theta in thetas)
        ),
        u0,
        ts,
        args={"a": a},
        exact=exact if closed else None,
        order=theta_order(thetas[0]),
        picture=Picture("snapshots", ("u",), {"x": px, "y": py}),
    )
