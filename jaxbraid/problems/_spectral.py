"""Periodic equations by Fourier modes: Schrödinger's, and Kuramoto and Sivashinsky's."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbraid.problems import _arguments as check
from jaxbraid.problems._arguments import real
from jaxbraid.problems._heat import Interval
from jaxbraid.problems._plot import Picture
from jaxbraid.problems._problem import Problem, Step

# -- Schrödinger's equation -----------------------------------------------------------------------


@functools.cache
def _split_step(x: Interval) -> Step:
    def step(t0, t1, u, params, args):
        n, length = u.shape[0], x[1] - x[0]
        dt, omega = real(u, t1 - t0, args["omega"])
        grid = real(u, x[0] + length * np.arange(n) / n)
        squares = real(u, (2 * np.pi / length * np.fft.fftfreq(n, 1 / n)) ** 2)
        half = jnp.exp(-0.25j * dt * (omega * grid) ** 2)  # by V = (omega x)^2 / 2
        return half * jnp.fft.ifft(jnp.exp(-0.5j * dt * squares) * jnp.fft.fft(half * u))

    return step


def _free_packet(x: Any, t: Any, centre: float, momentum: float) -> Any:
    """The Gaussian of variance 1/2 at t = 0, which spreads without a potential."""
    spread = 1 + 1j * t
    phase = momentum * (x - centre) - momentum**2 * t / 2
    decay = (x - centre - momentum * t) ** 2 / (2 * spread)
    return jnp.pi**-0.25 / jnp.sqrt(spread) * jnp.exp(1j * phase - decay)


def _coherent_state(x: Any, t: Any, centre: float, momentum: float, omega: Any) -> Any:
    """The ground state of the oscillator, displaced: it swings without a change of shape."""
    cos, sin = jnp.cos(omega * t), jnp.sin(omega * t)
    q = centre * cos + momentum / omega * sin
    p = momentum * cos - centre * omega * sin
    phase = p * x - (p * q - momentum * centre) / 2 - momentum * centre - omega * t / 2
    # at t = 0 the phase is momentum (x - centre), as that of the free packet is
    return (omega / jnp.pi) ** 0.25 * jnp.exp(1j * phase - omega * (x - q) ** 2 / 2)


def schroedinger_1d(
    nx: int = 256,
    x: Interval = (-10.0, 10.0),
    omega: float = 1.0,
    centre: float = -2.0,
    momentum: float = 1.0,
    *,
    t_end: float = 6.283185307179586,
    nt: int = 512,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""Schrödinger's equation $i \psi_t = -\psi_{xx} / 2 + \omega^2 x^2 \psi / 2$, periodic.

    Strang's splitting, spectral in space: half a step by the potential, a step of the free particle
    in Fourier space, half a step by the potential. It is unitary and of order 2; without potential
    it is exact in time.

    **Arguments**

    - `nx`: points of the periodic grid.
    - `x`: the interval, wide enough for the wave to be negligible at its ends.
    - `omega`: frequency of the harmonic oscillator; 0 is a free particle.
    - `centre`, `momentum`: of the packet at the start.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision (`complex128`).

    **Returns**

    A `Problem` with `args={"omega": omega}` and a complex state. The solution is the coherent
    state, which swings with frequency $\omega$, or for $\omega = 0$ a Gaussian packet that spreads.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        M. D. Feit, J. A. Fleck, A. Steiger: Solution of the Schrödinger equation by a spectral
        method. J. Comput. Phys. 47, 1982.
    """
    nx, x = check.integer("nx", nx, 4), check.interval("x", x)
    omega = check.number("omega", omega, least=0.0)
    centre, momentum = check.number("centre", centre), check.number("momentum", momentum)
    ts, kind = check.time_grid(t_end, nt, ts), check.precision(dtype, complex_state=True)
    grid = x[0] + (x[1] - x[0]) * np.arange(nx) / nx

    def exact(t, args=None):
        t = t - ts[0]
        if omega == 0:
            return _free_packet(grid, t, centre, momentum)
        frequency = ({"omega": omega} if args is None else args)["omega"]
        return _coherent_state(grid, t, centre, momentum, frequency)

    return Problem(
        "Schrödinger's equation",
        _split_step(x),
        np.asarray(exact(ts[0])).astype(kind),
        ts,
        args={"omega": omega},
        exact=exact,
        order=2,
        picture=Picture("image", ("|ψ|",), {"x": grid}),
    )


# -- Kuramoto and Sivashinsky's equation ----------------------------------------------------------

CONTOUR = 32  # points of the circles over which the coefficients are averaged


def _etdrk4_coefficients(z: Any) -> tuple[Any, Any, Any, Any]:
    """The integrals of the exponential in ETDRK4 for step times eigenvalue z, a real array.

    Their formulas cancel near z = 0, so each is taken as its mean over a circle around z (of which
    the upper half is enough, as the functions are real).
    """
    angles = np.pi * (np.arange(1, CONTOUR + 1) - 0.5) / CONTOUR
    r = z[:, None] + jnp.asarray(np.exp(1j * angles)).astype(jnp.result_type(z, jnp.complex64))
    e = jnp.exp(r)

    def mean(values):
        return jnp.mean(jnp.real(values), axis=1)

    return (
        mean((jnp.exp(r / 2) - 1) / r),
        mean((-4 - r + e * (4 - 3 * r + r**2)) / r**3),
        mean((2 + r + e * (r - 2)) / r**3),
        mean((-4 - 3 * r - r**2 + e * (4 - r)) / r**3),
    )


@functools.cache
def _etdrk4(length: float) -> Step:
    def step(t0, t1, u, params, args):
        n = u.shape[0]
        dt, nu = real(u, t1 - t0, args["nu"])
        k = 2 * np.pi / length * np.arange(n // 2 + 1)
        derivative = k.copy()
        derivative[-1] = 0.0  # the odd derivative of the highest mode is not seen on the grid
        k, derivative = real(u, k, derivative)
        z = dt * (k**2 - nu * k**4)
        half, full = jnp.exp(z / 2), jnp.exp(z)
        q, f1, f2, f3 = (dt * c for c in _etdrk4_coefficients(z))

        def nonlinear(v):
            return -0.5j * derivative * jnp.fft.rfft(jnp.fft.irfft(v, n) ** 2)

        v = jnp.fft.rfft(u)
        at_v = nonlinear(v)
        a = half * v + q * at_v
        at_a = nonlinear(a)
        b = half * v + q * at_a
        at_b = nonlinear(b)
        c = half * a + q * (2 * at_b - at_v)
        at_c = nonlinear(c)
        return jnp.fft.irfft(full * v + f1 * at_v + 2 * f2 * (at_a + at_b) + f3 * at_c, n)

    return step


def kuramoto_sivashinsky(
    nx: int = 128,
    length: float = 32 * np.pi,
    nu: float = 1.0,
    *,
    t_end: float = 150.0,
    nt: int = 600,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""The Kuramoto-Sivashinsky equation $u_t = -u u_x - u_{xx} - \nu u_{xxxx}$, periodic.

    Spectral in space, ETDRK4 in time, of order 4: the linear part is exact, and the integrals of
    the exponential come from contours in the complex plane. It turns chaotic (from about $t = 50$
    with the defaults), so MGRIT's error estimates hold over short times.

    **Arguments**

    - `nx`: points of the periodic grid, even.
    - `length`: $L$ of the interval.
    - `nu`: coefficient of the fourth derivative, positive.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"nu": nu}`. It starts from $\cos(s) (1 + \sin(s))$, $s = 2 \pi x / L$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        A.-K. Kassam, L. N. Trefethen: Fourth-order time-stepping for stiff PDEs. SIAM J. Sci.
        Comput. 26, 2005.
    """
    nx = check.integer("nx", nx, 4)
    if nx % 2:
        raise ValueError(f"nx={nx}: must be even.")
    length, nu = check.number("length", length, above=0.0), check.number("nu", nu, above=0.0)
    grid = length * np.arange(nx) / nx
    s = 2 * np.pi * grid / length
    return Problem(
        "Kuramoto-Sivashinsky equation",
        _etdrk4(length),
        (np.cos(s) * (1 + np.sin(s))).astype(check.precision(dtype)),
        check.time_grid(t_end, nt, ts),
        args={"nu": nu},
        order=4,
        picture=Picture("image", ("u",), {"x": grid}),
    )
