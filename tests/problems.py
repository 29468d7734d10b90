"""Time-dependent problems as one-step methods `step(t0, t1, u, params, args) -> u_next`.

They are those of the reference histories (tests/reference/pymgrit.json), each with its equation
and scheme in the builder's docstring. Implicit steps are solved directly: by elimination where the
matrix is tridiagonal, by its eigenvectors (sines, Fourier modes) where these are known. Steps are
pure, and run under `jit`, `vmap` and `grad` with traced times.

`serial` marches a problem with `lax.scan`: the truth that parallel-in-time solutions are held to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Step = Callable[[Any, Any, Any, Any, Any], Any]
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, eq=False)  # holds arrays: compared by identity
class Problem:
    """What `jaxbraid.solve` takes: `step` is one function, or a tuple with one a level."""

    step: Step | tuple[Step, ...]
    u0: Any
    ts: np.ndarray
    params: Any = None
    args: Any = None


def serial(problem: Problem) -> Any:
    """The states at all points, leading axis N+1, by the finest level's step, one after another."""
    step = problem.step[0] if isinstance(problem.step, tuple) else problem.step

    def march(u: Any, x: Any) -> tuple[Any, Any]:
        t0, t1, params = x
        u = step(t0, t1, u, params, problem.args)
        return u, u

    ts = jnp.asarray(problem.ts)
    u0 = jax.tree.map(jnp.asarray, problem.u0)
    _, us = jax.lax.scan(march, u0, (ts[:-1], ts[1:], problem.params))
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), u0, us)


def dahlquist(
    ts: np.ndarray,
    lam: float = -1.0,
    u0: float = 1.0,
    method: str | tuple[str, ...] = "BE",
) -> Problem:
    """u' = lam u by a one-step method, or by one a level.

    "BE" and "FE" are backward and forward Euler, "TR" is the trapezoidal rule, "MR" the implicit
    midpoint rule. For this linear equation the last two are the same map, written differently.
    """

    def backward_euler(t0, t1, u, params, args):
        return u / (1 - (t1 - t0) * lam)

    def forward_euler(t0, t1, u, params, args):
        return (1 + (t1 - t0) * lam) * u

    def trapezoidal(t0, t1, u, params, args):
        z = (t1 - t0) * lam
        return (1 + z / 2) / (1 - z / 2) * u

    def midpoint(t0, t1, u, params, args):
        slope = lam * u / (1 - (t1 - t0) * lam / 2)
        return u + (t1 - t0) * slope

    steps = {"BE": backward_euler, "FE": forward_euler, "TR": trapezoidal, "MR": midpoint}
    step = steps[method] if isinstance(method, str) else tuple(steps[m] for m in method)
    return Problem(step, np.asarray(u0, np.float64), ts)


def _interior(x: Interval, n: int) -> tuple[np.ndarray, float]:
    """The n inner points of the vertex-centred grid on the interval, and its width."""
    return np.linspace(*x, n + 2)[1:-1], (x[1] - x[0]) / (n + 1)


def _heat_source(x: np.ndarray, t: Any, a: float) -> Any:
    """The right-hand side for which sin(pi x) cos(t) solves u_t - a u_xx = b."""
    return -np.sin(np.pi * x) * (jnp.sin(t) - a * np.pi**2 * jnp.cos(t))


def _heat_solve(shift: Any, scale: Any, b: jax.Array) -> jax.Array:
    """Solve (shift I + scale tridiag(-1, 2, -1)) u = b."""
    off = jnp.broadcast_to(-jnp.asarray(scale, b.dtype), b.shape)
    main = jnp.broadcast_to(jnp.asarray(shift + 2 * scale, b.dtype), b.shape)
    lower, upper = off.at[0].set(0), off.at[-1].set(0)
    return jax.lax.linalg.tridiagonal_solve(lower, main, upper, b[:, None])[:, 0]


def heat_1d(ts: np.ndarray, nx: int, x: Interval = (0.0, 1.0), a: float = 1.0) -> Problem:
    """u_t - a u_xx = b, u = 0 at both ends: central differences and backward Euler, b at t1.

    nx counts the points of the grid with its ends; the state holds the nx - 2 inner ones. The width
    of the grid follows from the size of the state, so the step serves spatially coarsened levels
    too. u(x, 0) = sin(pi x), and b is such that sin(pi x) cos(t) solves the differential equation.
    """

    def step(t0, t1, u, params, args):
        grid, dx = _interior(x, u.shape[0])
        dt = t1 - t0
        return _heat_solve(1.0, dt * a / dx**2, u + dt * _heat_source(grid, t1, a))

    return Problem(step, np.sin(np.pi * _interior(x, nx - 2)[0]), ts)


def heat_1d_bdf(
    ts: np.ndarray,
    nx: int,
    dtau: float,
    levels: int,
    x: Interval = (0.0, 1.0),
    a: float = 1.0,
    start: str = "trapezoidal",
) -> Problem:
    """The equation of `heat_1d` for pairs of time points (u(t), u(t + dtau)), t in `ts`.

    From the pair at t0 to that at t1 it takes two steps, of lengths t1 - t0 - dtau and dtau: of
    BDF2 with variable step lengths on the finest level, of BDF1 on the others. The first pair is
    made by one step of the trapezoidal rule, or of BDF1 with `start="bdf1"`.
    """
    grid, dx = _interior(x, nx - 2)
    scale = a / dx**2

    def bdf1_step(tau, t, u):
        return _heat_solve(1.0, tau * scale, u + tau * _heat_source(grid, t, a))

    def bdf2_step(tau, tau_before, t, u, u_before):
        """r^2/(tau(1+r)) u_before - (1+r)/tau u + (1+2r)/(tau(1+r)) u_next + L u_next = b(t)."""
        r = tau / tau_before
        old = (1 + r) / tau * u - r**2 / (tau * (1 + r)) * u_before
        new = (1 + 2 * r) / (tau * (1 + r))
        return _heat_solve(new, scale, _heat_source(grid, t, a) + old)

    def bdf1(t0, t1, u, params, args):
        first = bdf1_step(t1 - t0 - dtau, t1, u[1])
        return first, bdf1_step(dtau, t1 + dtau, first)

    def bdf2(t0, t1, u, params, args):
        gap = t1 - t0 - dtau
        first = bdf2_step(gap, dtau, t1, u[1], u[0])
        return first, bdf2_step(dtau, gap, t1 + dtau, first, u[1])

    def trapezoidal_step(u):
        padded = np.pad(u, 1)
        laplacian = padded[2:] - 2 * u + padded[:-2]
        source = _heat_source(grid, ts[0], a) + _heat_source(grid, ts[0] + dtau, a)
        return _heat_solve(1.0, dtau / 2 * scale, u + dtau / 2 * (scale * laplacian + source))

    u = np.sin(np.pi * grid)
    second = trapezoidal_step(u) if start == "trapezoidal" else bdf1_step(dtau, ts[0] + dtau, u)
    return Problem((bdf2,) + (bdf1,) * (levels - 1), (u, np.asarray(second)), ts)


def _sine_transform(n: int) -> np.ndarray:
    """The symmetric orthogonal matrix of eigenvectors of tridiag(-1, 2, -1) of order n."""
    k = np.arange(1, n + 1)
    return np.sqrt(2 / (n + 1)) * np.sin(np.pi * np.outer(k, k) / (n + 1))


def heat_2d(
    ts: np.ndarray,
    nx: int,
    ny: int,
    x: Interval = (0.0, 0.75),
    y: Interval = (0.0, 1.5),
    a: float = 3.5,
    amplitude: float = 5.0,
) -> Problem:
    """u_t - a (u_xx + u_yy) = 0, u = 0 on the boundary: five-point stencil and backward Euler.

    The state has shape (nx, ny) and holds the boundary points too. u(x, y, 0) is `amplitude` times
    the first sine in each direction (by default 5 sin(pi x / 0.75) sin(pi y / 1.5)).
    """
    sines, eigenvalues, profiles = [], [], []
    for (start, end), n in ((x, nx), (y, ny)):
        inner, d = _interior((start, end), n - 2)
        k = np.arange(1, n - 1)
        sines.append(_sine_transform(n - 2))
        eigenvalues.append(a / d**2 * (2 - 2 * np.cos(np.pi * k / (n - 1))))
        profiles.append(np.sin(np.pi * (inner - start) / (end - start)))
    (sx, sy), spectrum = sines, np.add.outer(*eigenvalues)

    def step(t0, t1, u, params, args):
        modes = sx @ u[1:-1, 1:-1] @ sy / (1 + (t1 - t0) * spectrum)
        return jnp.pad(sx @ modes @ sy, 1)

    return Problem(step, np.pad(amplitude * np.outer(*profiles), 1), ts)


def advection_1d(ts: np.ndarray, nx: int, x: Interval = (-1.0, 1.0), c: float = 1.0) -> Problem:
    """u_t + c u_x = 0 (c > 0), periodic: first-order upwind differences and backward Euler.

    nx counts the points of the grid with its ends; the state holds the nx - 1 first ones.
    u(x, 0) = exp(-x^2).
    """
    n = nx - 1
    grid = np.linspace(*x, nx)[:-1]
    dx = (x[1] - x[0]) / n
    symbol = c / dx * (1 - np.exp(-2j * np.pi * np.arange(n // 2 + 1) / n))

    def step(t0, t1, u, params, args):
        return jnp.fft.irfft(jnp.fft.rfft(u) / (1 + (t1 - t0) * symbol), n)

    return Problem(step, np.exp(-(grid**2)), ts)


def brusselator(
    ts: np.ndarray, a: float = 1.0, b: float = 3.0, u0: tuple[float, float] = (0.0, 1.0)
) -> Problem:
    """x' = a + x^2 y - (b + 1) x, y' = b x - x^2 y by the classical Runge-Kutta method."""

    def f(u):
        x, y = u
        return jnp.stack([a + x**2 * y - (b + 1) * x, b * x - x**2 * y])

    def step(t0, t1, u, params, args):
        dt = t1 - t0
        k1 = f(u)
        k2 = f(u + dt / 2 * k1)
        k3 = f(u + dt / 2 * k2)
        k4 = f(u + dt * k3)
        return u + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return Problem(step, np.asarray(u0, np.float64), ts)


def allen_cahn_2d(
    ts: np.ndarray, nx: int, eps: float = 0.08, nu: int = 2, radius: float = 0.25
) -> Problem:
    """u_t = u_xx + u_yy + u (1 - u^nu) / eps^2, periodic, on a square of side 1, by an IMEX step.

    The Laplacian (five-point stencil of width 1/nx) is implicit, the reaction explicit:
    (I - dt Lap) u_next = u + dt/eps^2 u (1 - u^nu). u(0) is a disc with a smooth edge. Its values
    are taken on linspace(-0.5, 0.5, nx), as in PyMGRIT, though the periodic grid's width is 1/nx.
    """
    grid = np.linspace(-0.5, 0.5, nx)
    distance = np.sqrt(np.add.outer(grid**2, grid**2))
    u0 = np.tanh((radius - distance) / (np.sqrt(2) * eps))
    frequency = 2 * np.pi * np.arange(nx) / nx
    eigenvalue = nx**2 * (2 - 2 * np.cos(frequency))
    symbol = np.add.outer(eigenvalue, eigenvalue[: nx // 2 + 1])

    def step(t0, t1, u, params, args):
        dt = t1 - t0
        b = u + dt / eps**2 * u * (1 - u**nu)
        return jnp.fft.irfft2(jnp.fft.rfft2(b) / (1 + dt * symbol), (nx, nx))

    return Problem(step, u0, ts)
