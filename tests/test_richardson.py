"""Richardson extrapolation, its error estimate, and the grids that are refined by it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, _adaptive, richardson, solve_adaptive

CONFIG = MGRIT(levels=2, coarsening=4, max_iters=30, tol=1e-13)


def euler(t0, t1, u, params, args):
    """Backward Euler for u' = -args u + sin t."""
    dt = t1 - t0
    return (u + dt * jnp.sin(t1)) / (1 + dt * args)


def heun(t0, t1, u, params, args):
    """Heun's rule for the oscillator of Van der Pol."""

    def f(u):
        return jnp.stack([u[1], args * (1 - u[0] ** 2) * u[1] - u[0]])

    dt = t1 - t0
    k = f(u)
    return u + dt / 2 * (k + f(u + dt * k))


def exact(t):
    """Of u' = -2u + sin t, u(0) = 1."""
    return (2 * np.sin(t) - np.cos(t)) / 5 + 6 / 5 * np.exp(-2 * t)


@pytest.mark.parametrize("factor", [2, 3])
def test_extrapolation_gains_an_order(factor):
    """Through MGRIT with the plain step on the coarse level."""
    steps, errors = (80, 160, 320), []
    for n in steps:
        several = [richardson(euler, 1, factor), euler]
        sol = jaxbraid.solve(several, 1.0, np.linspace(0, 2, n + 1), args=2.0, config=CONFIG)
        assert bool(sol.stats.converged)
        errors.append(abs(float(sol.u) - exact(2.0)))
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(orders, 2, atol=0.1)


def test_estimate_is_the_error_of_the_divided_steps():
    """To first order, and of each leaf that is a number; gradients go through the values alone."""
    step = richardson(euler, 1, error=True)
    u, (e, n) = jnp.float64(0.7), step(0.3, 0.31, jnp.float64(0.7), None, 2.0)
    half = euler(0.305, 0.31, euler(0.3, 0.305, u, None, 2.0), None, 2.0)
    a, b = (2 * np.sin(0.3) - np.cos(0.3)) / 5, (2 * np.sin(0.31) - np.cos(0.31)) / 5
    truth = b + (0.7 - a) * np.exp(-2 * 0.01)
    np.testing.assert_allclose(n, abs(half - truth), rtol=0.02)
    assert abs(e - truth) < 0.02 * abs(half - truth)
    pair = richardson(lambda t0, t1, u, p, a: (euler(t0, t1, u[0], p, a), u[1]), 1, error=True)
    (value, kept), m = pair(0.3, 0.31, (u, jnp.int32(7)), None, 2.0)
    np.testing.assert_array_equal([value, m, kept], [e, n, 7])
    assert step is richardson(euler, 1, error=True)
    assert float(jax.grad(lambda u: step(0.3, 0.31, u, None, 2.0)[1])(u)) == 0
    doubled = richardson(euler, 1, error=True, norm=lambda e: 2 * jnp.abs(e))
    np.testing.assert_allclose(doubled(0.3, 0.31, u, None, 2.0)[1], 2 * n, rtol=1e-15)


def test_gradient_of_an_extrapolated_solution():
    ts = np.linspace(0, 2, 31)
    step = richardson(euler, 1)

    def serial(a):
        u = jnp.float64(1.0)
        for t0, t1 in itertools.pairwise(ts):
            u = step(t0, t1, u, None, a)
        return u

    got = jax.grad(lambda a: jaxbraid.solve(step, 1.0, ts, args=a, config=CONFIG).u)(2.0)
    np.testing.assert_allclose(got, jax.grad(serial)(2.0), rtol=1e-10)


def test_grid_is_refined_until_every_step_is_accurate():
    """Fine where the oscillator relaxes, coarse where it creeps; true errors are as estimated."""
    first = np.linspace(0, 8, 257)
    sol = solve_adaptive(heun, np.array([2.0, 0.0]), first, 3.0, order=2, tol=1e-6)
    assert sol.converged
    assert len(sol.rounds) >= 3
    assert sol.rounds[0].steps == 256 < sol.rounds[-1].steps == len(sol.ts) - 1
    assert sol.errors.max() <= 1e-6
    assert set(first) <= set(sol.ts)
    dt = np.diff(sol.ts)
    assert dt.max() > 8 * dt.min()
    assert np.all(dt > 0)

    def divided(u, t):  # the steps whose error is estimated, and the truth: 64 times as many
        def march(n):
            ts = t[0] + (t[1] - t[0]) * jnp.arange(n + 1) / n
            return jax.lax.fori_loop(0, n, lambda i, u: heun(ts[i], ts[i + 1], u, None, 3.0), u)

        return jnp.linalg.norm(march(2) - march(64))

    ends = np.stack([sol.ts[:-1], sol.ts[1:]], axis=1)
    true = jax.vmap(divided)(jnp.asarray(sol.us)[:-1], jnp.asarray(ends))
    np.testing.assert_allclose(sol.errors, true, rtol=0.4, atol=5e-8)
    uniform = np.linspace(0, 8, len(sol.ts))  # of as many steps, is far worse
    step = richardson(heun, 2, error=True)
    config = MGRIT(levels=1)
    worst = jaxbraid.solve(step, np.array([2.0, 0.0]), uniform, args=3.0, config=config,
                           has_aux=True).aux.max()  # fmt: skip
    assert worst > 4e-6
    lines = str(sol).splitlines()
    assert len(lines) == len(sol.rounds) + 2
    assert lines[-1] == "converged"


def test_limits_and_pytrees():
    """Ends at a limit without having converged; leaves that are no numbers go along."""

    def pair(t0, t1, u, params, args):
        return {**u, "a": euler(t0, t1, u["a"], None, args)}

    u0 = {"a": np.float64(1.0), "n": np.int32(3)}
    few = {"order": 1, "tol": 1e-6}
    sol = solve_adaptive(pair, u0, np.linspace(0, 1, 9), 2.0, max_rounds=1, **few)
    assert not sol.converged
    assert len(sol.rounds) == 1
    sol = solve_adaptive(pair, u0, np.linspace(0, 1, 9), 2.0, max_steps=20, **few)
    assert not sol.converged
    assert sol.rounds[-1].steps <= 20
    sol = solve_adaptive([pair, pair], u0, np.linspace(0, 1, 9), 2.0, **few)
    assert sol.converged
    np.testing.assert_array_equal(sol.us["n"], 3)
    np.testing.assert_allclose(sol.u["a"], exact(1.0), atol=2e-6)


def test_refusals():
    ts = np.linspace(0, 1, 9)
    for message, call in [
        ("order=0: must be >= 1", lambda: richardson(euler, 0)),
        ("factor=1: must be >= 2", lambda: richardson(euler, 1, 1)),
        ("tol=0: must be a positive", lambda: solve_adaptive(euler, 1.0, ts, order=1, tol=0)),
        ("max_steps=3: must be >= 8",
         lambda: solve_adaptive(euler, 1.0, ts, order=1, tol=1e-3, max_steps=3)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="step=3: must be a function"):
        richardson(3, 1)
    with pytest.raises(TypeError, match="params: not for solve_adaptive"):
        solve_adaptive(euler, 1.0, ts, order=1, tol=1e-3, params=1)
    with pytest.raises(FloatingPointError, match="start with more steps"):
        explosive = lambda t0, t1, u, p, a: u + (t1 - t0) * 1e200 * u**2  # noqa: E731
        solve_adaptive(explosive, 1.0, ts, order=1, tol=1e-3)


def test_divided_grid_is_equidistant_within_each_step():
    """And the states are interpolated linearly; what is no number is taken from the left."""
    ts = np.array([0.0, 1.0, 4.0])
    us = {"a": np.stack([ts, 2 - 3 * ts], axis=1), "n": np.array([5, 6, 7])}
    points, guess = _adaptive._divide(ts, np.array([2, 3]), us)
    np.testing.assert_allclose(points, [0, 0.5, 1, 2, 3, 4], rtol=1e-15)
    np.testing.assert_allclose(guess["a"], np.stack([points, 2 - 3 * points], axis=1), rtol=1e-14)
    np.testing.assert_array_equal(guess["n"], [5, 5, 6, 6, 6, 7])
