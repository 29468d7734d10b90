"""Reaction and diffusion on a periodic square: Allen-Cahn and Gray-Scott."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbraid import space
from jaxbraid._options import check_choice
from jaxbraid.problems import _arguments as check
from jaxbraid.problems._arguments import real
from jaxbraid.problems._newton import solve_nonlinear_gmres
from jaxbraid.problems._plot import Picture
from jaxbraid.problems._problem import Problem, Step


def _apply(symbol: Any, u: Any, axis: str | None = None) -> Any:
    """The operator with this symbol on rfft2's modes; the first axis may be split."""

    def along_x(modes, symbol):
        return jnp.fft.ifft(jnp.fft.fft(modes, axis=0) * symbol.T, axis=0)

    modes = space.along(along_x, jnp.fft.rfft(u, axis=1), axis, symbol.T)
    return jnp.fft.irfft(modes, u.shape[1], axis=1)


# -- Allen-Cahn -----------------------------------------------------------------------------------

_SCHEMES = ("imex", "implicit", "crank_nicolson")


@functools.cache
def _allen_cahn(nu: int, scheme: str) -> Step:
    def setting(t0, t1, u, args):
        n = u.shape[0]
        eigenvalue = n**2 * (2 - 2 * np.cos(2 * np.pi * np.arange(n) / n))  # of minus Laplacian
        symbol = real(u, np.add.outer(eigenvalue, eigenvalue[: n // 2 + 1]))
        dt, eps = real(u, t1 - t0, args["eps"])
        return dt, symbol, lambda v: v * (1 - v**nu) / eps**2

    def imex(t0, t1, u, params, args):
        dt, symbol, reaction = setting(t0, t1, u, args)
        return _apply(1 / (1 + dt * symbol), u + dt * reaction(u))

    theta = 0.5 if scheme == "crank_nicolson" else 1.0

    def equation(v, data):
        """Zero where v = (I - theta dt Lap)^-1 (b + theta dt reaction(v)); Jacobian near I."""
        t0, t1, b, args = data
        dt, symbol, reaction = setting(t0, t1, v, args)
        return v - _apply(1 / (1 + theta * dt * symbol), b + theta * dt * reaction(v))

    def implicit(t0, t1, u, params, args):
        dt, symbol, reaction = setting(t0, t1, u, args)
        b = u
        if theta < 1:
            b = u + (1 - theta) * dt * (reaction(u) - _apply(symbol, u))
        return solve_nonlinear_gmres(equation, u, (t0, t1, b, args))

    return imex if scheme == "imex" else implicit


def allen_cahn_2d(
    nx: int = 128,
    eps: float = 0.04,
    nu: int = 2,
    radius: float = 0.25,
    scheme: str | Sequence[str] = "imex",
    *,
    t_end: float = 0.032,
    nt: int = 32,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The Allen-Cahn equation $u_t = u_{xx} + u_{yy} + u (1 - u^\nu) / \epsilon^2$.

    A disc shrinks. Periodic, on a square of side 1, with the five-point stencil of width $1/n_x$.
    In time:

    - `"imex"`, order 1: the Laplacian is implicit, the reaction explicit;
    - `"implicit"`, order 1: backward Euler;
    - `"crank_nicolson"`, order 2: the trapezoidal rule.

    IMEX steps are solved by Fourier transforms, implicit ones by Newton's method on the equation
    that these precondition, with GMRES inside. An implicit step has one solution where
    $\theta \Delta t < \epsilon^2$ ($\theta$ is 1, or 1/2); coarse levels should keep to that, or
    take `"imex"`.

    **Arguments**

    - `nx`: points in each direction; the state has shape `(nx, nx)`.
    - `eps`: width $\epsilon$ of the interface, positive.
    - `nu`: exponent $\nu$, an even number.
    - `radius`: of the disc at the start.
    - `scheme`: one of the above, or a sequence with one a level.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"eps": eps}`. The disc has a smooth edge; its values are taken on
    `linspace(-0.5, 0.5, nx)`, as in PyMGRIT, though the periodic grid's width is `1 / nx`.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        S. M. Allen, J. W. Cahn: A microscopic theory for antiphase boundary motion. Acta Metall.
        27, 1979.
    """
    nx, nu = check.integer("nx", nx, 2), check.integer("nu", nu, 2)
    if nu % 2:
        raise ValueError(f"nu={nu}: must be even.")
    eps, radius = check.number("eps", eps, above=0.0), check.number("radius", radius, above=0.0)
    schemes = check.each_level("scheme", scheme, lambda n, s: check_choice(n, s, _SCHEMES))
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype)
    grid = np.linspace(-0.5, 0.5, nx)
    distance = np.sqrt(np.add.outer(grid**2, grid**2))
    return Problem(
        f"Allen-Cahn equation ({schemes[0]})",
        check.one_or_all(tuple(_allen_cahn(nu, s) for s in schemes)),
        np.tanh((radius - distance) / (np.sqrt(2) * eps)).astype(kind),
        ts,
        args={"eps": eps},
        order=2 if schemes[0] == "crank_nicolson" else 1,
        picture=Picture("snapshots", ("u",), {"x": grid, "y": grid}),
    )


# -- Gray-Scott -----------------------------------------------------------------------------------


@functools.cache
def _gray_scott(side: float, axis: str | None) -> Step:
    def step(t0, t1, state, params, args):
        u, v = state["u"], state["v"]
        n = u.shape[1]
        dt, du, dv, feed, kill = real(u, t1 - t0, *(args[k] for k in ("du", "dv", "f", "k")))
        k = 2 * np.pi / side * np.fft.fftfreq(n, 1 / n)
        squares = real(u, np.add.outer(k**2, k[: n // 2 + 1] ** 2))
        rate = u * v**2
        u = _apply(1 / (1 + dt * du * squares), u + dt * (feed * (1 - u) - rate), axis)
        v = _apply(1 / (1 + dt * dv * squares), v + dt * (rate - (feed + kill) * v), axis)
        return {"u": u, "v": v}

    return step


def _shown(us: Any) -> np.ndarray:
    return np.asarray(us["v"])


def gray_scott_2d(
    nx: int = 256,
    side: float = 2.5,
    du: float = 2e-5,
    dv: float = 1e-5,
    f: float = 0.04,
    k: float = 0.06,
    seed: int = 0,
    *,
    space_axis: str | None = None,
    t_end: float = 2048.0,
    nt: int = 2048,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The Gray-Scott model of pattern formation, periodic on a square.

    $u_t = D_u \Delta u - u v^2 + f (1 - u)$, $v_t = D_v \Delta v + u v^2 - (f + k) v$, spectral in
    space. One IMEX step of order 1: diffusion is implicit, the reaction explicit.

    **Arguments**

    - `nx`: points in each direction, even.
    - `side`: length of the square's sides.
    - `du`, `dv`: diffusivities, positive.
    - `f`, `k`: feed and kill rate, which decide on the pattern.
    - `seed`: of the noise at the start.
    - `space_axis`: the mesh axis over which the first axis of the state is split, for
        `solve(mesh=mesh, space_axis=...)` with the same name; it must divide `nx`.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"du": du, "dv": dv, "f": f, "k": k}`; the state is `{"u": u, "v": v}`
    with arrays of shape `(nx, nx)`. It starts from $(u, v) = (1, 0)$ with $(1/2, 1/4)$ in a square
    of width 0.2 in the middle, and noise of one per cent.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        J. E. Pearson: Complex patterns in a simple system. Science 261, 1993.
    """
    nx, seed = check.integer("nx", nx, 4), check.integer("seed", seed, 0)
    if nx % 2:
        raise ValueError(f"nx={nx}: must be even.")
    side = check.number("side", side, above=0.0)
    args = {"du": check.number("du", du, above=0.0), "dv": check.number("dv", dv, above=0.0)}
    args |= {"f": check.number("f", f), "k": check.number("k", k)}
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype)
    # as wide as 20 of Pearson's 256 points, but no more than half of a small domain
    half = max(1, min(nx // 4, round(nx / side * 2.5 * 10 / 256)))
    square = np.zeros((nx, nx), bool)
    square[nx // 2 - half : nx // 2 + half, nx // 2 - half : nx // 2 + half] = True
    noise = 1 + 0.01 * np.random.default_rng(seed).uniform(-1, 1, (2, nx, nx))
    u = np.where(square, 0.5, 1.0) * noise[0]
    v = np.where(square, 0.25, 0.0) * noise[1]
    grid = side * np.arange(nx) / nx
    return Problem(
        "Gray-Scott model",
        _gray_scott(side, space_axis),
        {"u": u.astype(kind), "v": v.astype(kind)},
        ts,
        args=args,
        order=1,
        picture=Picture("snapshots", ("v",), {"x": grid, "y": grid}, _shown),
    )
