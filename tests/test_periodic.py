"""Time-periodic problems: the state at the end of time is that at its beginning."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, transfers

CONFIG = MGRIT(levels=2, coarsening=4, max_iters=25, tol=1e-11)


def forced(t0, t1, u, params, args):
    """Backward Euler for a damped oscillator with a periodic force, and a force of each step."""
    dt = t1 - t0
    matrix = jnp.array([[0.0, 1.0], [-4.0, -1.0]])
    force = jnp.stack([jnp.zeros_like(t1), args * jnp.cos(2 * jnp.pi * t1) + params])
    return jnp.linalg.solve(jnp.eye(2) - dt * matrix, u + dt * force)


def orbit(ts, params, args):
    """The truth: the fixed point of the affine map over one period, by elimination."""

    def period(u):
        def body(u, x):
            u = forced(*x[:2], u, x[2], args)
            return u, u

        return jax.lax.scan(body, u, (ts[:-1], ts[1:], params))

    zero = jnp.zeros(2)
    matrix = jax.jacfwd(lambda u: period(u)[0])(zero)
    u0 = jnp.linalg.solve(jnp.eye(2) - matrix, period(zero)[0])
    return jnp.concatenate([u0[None], period(u0)[1]])


CASES = [
    # steps, devices, options
    (64, 1, {}),
    (61, 1, {"levels": 3, "final_relax": "FC"}),
    (61, 1, {"coarsening": ((0, 5, 20, 40),)}),
    (61, 3, {"levels": 3, "cycle": "F", "coarse_rounds": 6}),
    (16, 8, {"saved_states": "coarse"}),  # intervals span two devices
    (61, 3, {"nested_iteration": False, "coarse_placement": 1, "tol": 0.0}),
    (64, 2, {"delta": "full", "max_iters": 12}),
]


@pytest.mark.parametrize(("n", "devices", "options"), CASES)
def test_periodic_solution_and_its_gradients(n, devices, options):
    ts = jnp.linspace(0, 1, n + 1)
    params = jnp.sin(jnp.arange(n))
    config = dataclasses.replace(CONFIG, **options)
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("layer",))

    def solve(u0, params, args):
        more = {"config": config, "periodic": True, "mesh": mesh}
        return jaxbraid.solve(forced, u0, ts, params, args, **more)

    us = solve(jnp.zeros(2), params, 1.3).us
    np.testing.assert_allclose(us, orbit(ts, params, 1.3), rtol=0, atol=1e-10)
    weights = np.random.default_rng(0).normal(size=(n + 1, 2))  # the two ends weigh differently

    def loss(us):
        return jnp.sum(weights * us**2)

    got = jax.grad(lambda *x: loss(solve(*x).us), argnums=(0, 1, 2))(jnp.ones(2), params, 1.3)
    expected = jax.grad(lambda *x: loss(orbit(ts, *x)), argnums=(0, 1))(params, 1.3)
    assert not np.any(got[0])  # where the guess lies does not matter
    np.testing.assert_allclose(got[1], expected[0], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(got[2], expected[1], rtol=1e-8)


def test_nonlinear_heat_with_spatial_coarsening():
    """u_t = u_xx - u^3 + sin(2 pi t) in time periods: it repeats itself, whatever the guess."""
    n = 15

    def step(t0, t1, u, params, args):
        dx = 1 / (u.shape[0] + 1)
        padded = jnp.pad(u, 1)
        laplacian = (padded[2:] - 2 * u + padded[:-2]) / dx**2
        return u + (t1 - t0) * (0.1 * laplacian - u**3 + jnp.sin(2 * jnp.pi * t1))

    ts = jnp.linspace(0, 2, 257)
    config = dataclasses.replace(CONFIG, levels=2, coarsening=2, tol=1e-9)
    coarsen = [transfers.full_weighting()]
    more = {"config": config, "transfers": coarsen, "periodic": True}
    sol = jaxbraid.solve(step, jnp.zeros(n), ts, **more)
    assert bool(sol.stats.converged)
    np.testing.assert_allclose(sol.us[0], sol.us[-1], rtol=0, atol=1e-8)

    def year(u, _):
        return jax.lax.scan(lambda u, t: (step(*t, u, None, None), None), u, (ts[:-1], ts[1:]))[0]

    settled = jax.lax.fori_loop(0, 30, lambda _, u: year(u, None), jnp.zeros(n))
    np.testing.assert_allclose(sol.us[0], settled, rtol=0, atol=1e-7)


@pytest.mark.parametrize("devices", [1, 3])
def test_the_end_of_time_is_an_unknown(devices):
    """Its residual counts, also where it is no C-point otherwise (63 steps, factor 4)."""
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("layer",))
    config = dataclasses.replace(CONFIG, tol=0.0, max_iters=2)
    more = {"config": config, "periodic": True, "mesh": mesh, "point_residuals": True}
    stats = jaxbraid.solve(forced, jnp.zeros(2), jnp.linspace(0, 1, 64), jnp.ones(63), 1.0,
                           **more).stats  # fmt: skip
    points = stats.point_residuals
    assert points.shape == (3, 16)
    norms = np.append(stats.initial_residual, stats.residuals)
    np.testing.assert_allclose(np.sqrt(np.sum(points**2, axis=1)), norms, rtol=1e-12)
    assert np.all(points[:, -1] > 0)


def test_needs_a_coarse_level():
    with pytest.raises(ValueError, match="periodic=True: needs a coarse level"):
        ts = np.linspace(0, 1, 3)
        jaxbraid.solve(forced, np.zeros(2), ts, np.zeros(2), 1.0, periodic=True)
