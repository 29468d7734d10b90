"""The step of PyMGRIT's Arenstorf orbit in JAX: from t0 to t1 by RK45 that chooses its step sizes.

It is `scipy.integrate.solve_ivp(method="RK45")` with its tolerances: the pair of Dormand and Prince
(5th order, error of 4th), the first step of Hairer, Norsett and Wanner, section II.4. Each interval
takes as many steps as it needs; batched, all go on until the last is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

A = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
)
B = (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)
E = (-71 / 57600, 0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40)
RTOL, ATOL = 1e-3, 1e-6
SAFETY, LEAST, MOST, EXPONENT = 0.9, 0.2, 10.0, -1 / 5


def _norm(x: Any) -> Any:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _first_step(f: Callable[[Any], Any], u: Any, slope: Any, length: Any) -> Any:
    scale = ATOL + jnp.abs(u) * RTOL
    d0, d1 = _norm(u / scale), _norm(slope / scale)
    h0 = jnp.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / d1)
    h0 = jnp.minimum(h0, length)
    d2 = _norm((f(u + h0 * slope) - slope) / scale) / h0
    flat = (d1 <= 1e-15) & (d2 <= 1e-15)
    h1 = jnp.where(flat, jnp.maximum(1e-6, h0 * 1e-3), (0.01 / jnp.maximum(d1, d2)) ** 0.2)
    return jnp.minimum(jnp.minimum(100 * h0, h1), length)


def rk45_step(field: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step for `jaxbraid.solve` of u' = field(u, args)."""

    def step(t0: Any, t1: Any, u: Any, params: Any, args: Any) -> Any:
        def f(u: Any) -> Any:
            return field(u, args)

        def advance(carry: Any) -> Any:
            t, u, slope, h, rejected = carry
            h = jnp.maximum(h, 10 * jnp.abs(jnp.nextafter(t, np.inf) - t))
            end = jnp.minimum(t + h, t1)
            h = end - t
            slopes = [slope]
            for row in A:
                slopes.append(f(u + h * sum(a * k for a, k in zip(row, slopes, strict=True))))
            new = u + h * sum(b * k for b, k in zip(B, slopes, strict=True))
            slopes.append(f(new))
            scale = ATOL + jnp.maximum(jnp.abs(u), jnp.abs(new)) * RTOL
            error = _norm(h * sum(e * k for e, k in zip(E, slopes, strict=True)) / scale)
            factor = SAFETY * error**EXPONENT  # infinite without an error
            good = error < 1
            largest = jnp.where(rejected, 1.0, MOST)
            factor = jnp.where(good, jnp.minimum(largest, factor), jnp.maximum(LEAST, factor))
            kept = jax.tree.map(
                lambda a, b: jnp.where(good, a, b), (end, new, slopes[-1]), (t, u, slope)
            )
            return *kept, h * factor, ~good

        slope = f(u)
        first = t0, u, slope, _first_step(f, u, slope, t1 - t0), jnp.array(False)
        return jax.lax.while_loop(lambda c: c[0] < t1, advance, first)[1]

    return step
