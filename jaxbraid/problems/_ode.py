"""Ordinary differential equations: Dahlquist, Brusselator, Lorenz, Arenstorf, Van der Pol."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbraid._options import check_choice
from jaxbraid.problems import _arguments as check
from jaxbraid.problems._arguments import like, real
from jaxbraid.problems._newton import solve_nonlinear
from jaxbraid.problems._plot import Picture
from jaxbraid.problems._problem import Problem, Step

VectorField = Callable[[Any, Any, Any], Any]


@functools.cache
def runge_kutta_4(f: VectorField) -> Step:
    """The classical Runge-Kutta method for u' = f(t, u, args)."""

    def step(t0, t1, u, params, args):
        t0, t1 = real(u, t0, t1)
        dt = t1 - t0
        middle = t0 + dt / 2
        k1 = f(t0, u, args)
        k2 = f(middle, u + dt / 2 * k1, args)
        k3 = f(middle, u + dt / 2 * k2, args)
        k4 = f(t1, u + dt * k3, args)
        return u + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return step


# -- Dahlquist's test equation --------------------------------------------------------------------


def _backward_euler(t0, t1, u, params, args):
    lam = like(u, args["lam"])
    return u / (1 - real(u, t1 - t0) * lam)


def _forward_euler(t0, t1, u, params, args):
    lam = like(u, args["lam"])
    return (1 + real(u, t1 - t0) * lam) * u


def _trapezoidal(t0, t1, u, params, args):
    z = real(u, t1 - t0) * like(u, args["lam"])
    return (1 + z / 2) / (1 - z / 2) * u


def _midpoint(t0, t1, u, params, args):
    dt, lam = real(u, t1 - t0), like(u, args["lam"])
    slope = lam * u / (1 - dt * lam / 2)
    return u + dt * slope


_DAHLQUIST = {
    "BE": _backward_euler,
    "FE": _forward_euler,
    "TR": _trapezoidal,
    "MR": _midpoint,
}


def dahlquist(
    method: str | Sequence[str] = "BE",
    lam: complex = -1.0,
    u0: complex = 1.0,
    *,
    t_end: float = 5.0,
    nt: int = 100,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""Dahlquist's test equation $u' = \lambda u$.

    **Arguments**

    - `method`: `"BE"`, `"FE"` (backward, forward Euler, order 1), `"TR"` (trapezoidal rule) or
        `"MR"` (implicit midpoint rule; both of order 2, and for this equation the same map, written
        differently); or a sequence of them, one a level.
    - `lam`, `u0`: real or complex numbers; if one is complex, so is the state.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"lam": lam}` and $u(t) = e^{\lambda (t - t_0)} u_0$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        G. Dahlquist: A special stability problem for linear multistep methods. BIT 3, 1963.
    """
    methods = check.each_level("method", method, lambda n, m: check_choice(n, m, tuple(_DAHLQUIST)))
    for name, value in (("lam", lam), ("u0", u0)):
        if isinstance(value, bool) or np.ndim(value) or not np.issubdtype(type(value), np.number):
            raise TypeError(f"{name}={value!r}: must be a real or complex number.")
    ts = check.time_grid(t_end, nt, ts)
    kind = check.precision(dtype, bool(np.iscomplexobj(lam) or np.iscomplexobj(u0)))
    state = np.asarray(u0, kind)

    def exact(t, args=None):
        return state * jnp.exp(({"lam": lam} if args is None else args)["lam"] * (t - ts[0]))

    step = check.one_or_all(tuple(_DAHLQUIST[m] for m in methods))
    order = 1 if methods[0] in ("BE", "FE") else 2
    return Problem(f"Dahlquist ({methods[0]})", step, state, ts, None, {"lam": lam}, exact, order)


# -- Brusselator ----------------------------------------------------------------------------------


def _brusselator(t, u, args):
    a, b = real(u, args["a"], args["b"])
    x, y = u
    return jnp.stack([a + x**2 * y - (b + 1) * x, b * x - x**2 * y])


def brusselator(
    a: float = 1.0,
    b: float = 3.0,
    u0: Sequence[float] = (0.0, 1.0),
    *,
    t_end: float = 12.0,
    nt: int = 640,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The Brusselator, an autocatalytic reaction: $x' = a + x^2 y - (b+1) x$, $y' = b x - x^2 y$.

    By the classical Runge-Kutta method, of order 4. For $b > 1 + a^2$ there is a limit cycle.

    **Arguments**

    - `a`, `b`: concentrations.
    - `u0`: $(x, y)$ at the start.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"a": a, "b": b}`; the state is $(x, y)$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        I. Prigogine, R. Lefever: Symmetry breaking instabilities in dissipative systems II. J.
        Chem. Phys. 48, 1968; E. Hairer, S. P. Nørsett, G. Wanner: Solving Ordinary Differential
        Equations I, section I.16.
    """
    args = {"a": check.number("a", a), "b": check.number("b", b)}
    return Problem(
        "Brusselator",
        runge_kutta_4(_brusselator),
        check.vector("u0", u0, 2, dtype),
        check.time_grid(t_end, nt, ts),
        args=args,
        order=4,
        picture=Picture("phase", ("x", "y")),
    )


# -- Lorenz ---------------------------------------------------------------------------------------


def _lorenz(t, u, args):
    sigma, rho, beta = real(u, args["sigma"], args["rho"], args["beta"])
    x, y, z = u
    return jnp.stack([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])


def lorenz_63(
    sigma: float = 10.0,
    rho: float = 28.0,
    beta: float = 8 / 3,
    u0: Sequence[float] = (20.0, 5.0, -5.0),
    *,
    t_end: float = 10.0,
    nt: int = 14400,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The Lorenz equations: $x' = \sigma (y-x)$, $y' = x (\rho - z) - y$, $z' = x y - \beta z$.

    By the classical Runge-Kutta method, of order 4. They are chaotic: an error grows by a factor of
    about $e^{0.9 t}$, which MGRIT's tolerance should allow for.

    **Arguments**

    - `sigma`, `rho`, `beta`: Prandtl number, Rayleigh number, aspect ratio.
    - `u0`: $(x, y, z)$ at the start.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"sigma": sigma, "rho": rho, "beta": beta}`; the state is $(x, y, z)$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        E. N. Lorenz: Deterministic nonperiodic flow. J. Atmos. Sci. 20, 1963. In parallel in time:
        M. J. Gander, E. Hairer: Nonlinear convergence analysis for the parareal algorithm, 2008.
    """
    values = {"sigma": sigma, "rho": rho, "beta": beta}
    return Problem(
        "Lorenz",
        runge_kutta_4(_lorenz),
        check.vector("u0", u0, 3, dtype),
        check.time_grid(t_end, nt, ts),
        args={name: check.number(name, value) for name, value in values.items()},
        order=4,
        picture=Picture("phase", ("x", "y", "z")),
    )


# -- Van der Pol ----------------------------------------------------------------------------------


def _van_der_pol(t, u, args):
    mu = real(u, args["mu"])
    x, y = u
    return jnp.stack([y, mu * (1 - x**2) * y - x])


GAMMA = 1 - np.sqrt(0.5)  # the one for which SDIRK2 is L-stable, with small error constants


@functools.cache
def _implicit(f: VectorField, method: str) -> Step:
    def stage(t, base, scale, guess, args):
        """The state v = base + scale f(t, v)."""

        def equation(v, data):
            base, scale, t, args = data
            return v - base - scale * f(t, v, args)

        return solve_nonlinear(equation, guess, (base, scale, t, args))

    def backward_euler(t0, t1, u, params, args):
        t0, t1 = real(u, t0, t1)
        return stage(t1, u, t1 - t0, u, args)

    def sdirk2(t0, t1, u, params, args):
        t0, t1, gamma = real(u, t0, t1, GAMMA)
        dt = t1 - t0
        first = stage(t0 + gamma * dt, u, gamma * dt, u, args)
        slope = (first - u) / (gamma * dt)  # f(first) would magnify Newton's error by stiffness
        return stage(t1, u + (1 - gamma) * dt * slope, gamma * dt, first, args)

    return {"BE": backward_euler, "SDIRK2": sdirk2}[method]


def van_der_pol(
    mu: float = 10.0,
    u0: Sequence[float] = (2.0, 0.0),
    method: str | Sequence[str] = "SDIRK2",
    *,
    t_end: float = 20.0,
    nt: int = 2048,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""Van der Pol's oscillator, stiff for a large $\mu$: $x' = y$, $y' = \mu (1 - x^2) y - x$.

    By an implicit Runge-Kutta method: `"SDIRK2"`, L-stable, of order 2, or `"BE"`, backward Euler,
    of order 1. Newton's method solves for the stages; where it fails the state becomes NaN.
    It needs short steps in the solution's jumps: for $\mu = 100$ steps of 0.05 are short enough for
    SDIRK2, but backward Euler fails with 0.01; for $\mu = 1000$ both fail with 0.01. Coarse
    levels take longer steps.

    **Arguments**

    - `mu`: damping, positive. The period is about $1.6 \mu$ for a large $\mu$ (19 for 10), in which
        the solution jumps twice.
    - `u0`: $(x, y)$ at the start.
    - `method`: `"SDIRK2"` or `"BE"`, or a sequence of them, one a level.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"mu": mu}`; the state is $(x, y)$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        E. Hairer, G. Wanner: Solving Ordinary Differential Equations II, section IV.1; R.
        Alexander: Diagonally implicit Runge-Kutta methods for stiff ODEs. SIAM J. Numer. Anal. 14,
        1977.
    """
    methods = check.each_level("method", method, lambda n, m: check_choice(n, m, ("SDIRK2", "BE")))
    return Problem(
        "Van der Pol",
        check.one_or_all(tuple(_implicit(_van_der_pol, m) for m in methods)),
        check.vector("u0", u0, 2, dtype),
        check.time_grid(t_end, nt, ts),
        args={"mu": check.number("mu", mu, above=0.0)},
        order=1 if methods[0] == "BE" else 2,
        picture=Picture("series", ("x", "y")),
    )
