"""The Delta correction: Newton's convergence, chaotic problems, Lyapunov exponents."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, _delta
from serial import serial

LORENZ = np.array([1.0, 1.0, 20.0])
TWO = MGRIT(levels=2, coarsening=8, cf_relax=0, max_iters=6)


def lorenz(t0, t1, u, params, args):
    """The classical Runge-Kutta method for the system of Lorenz."""

    def f(u):
        x, y, z = u
        return jnp.stack([10 * (y - x), x * (args - z) - y, x * y - 8 / 3 * z])

    dt = t1 - t0
    k1 = f(u)
    k2 = f(u + dt / 2 * k1)
    k3 = f(u + dt / 2 * k2)
    k4 = f(u + dt * k3)
    return u + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def grid(n, t=3.0):
    return np.linspace(0, t, n + 1)


def mesh_of(devices):
    return None if devices == 1 else jax.make_mesh((devices,), ("layer",))


def test_full_correction_converges_quadratically():
    """Each residual is of the order of the square of the one before; without it, only smaller."""
    ts = grid(768)
    plain = jaxbraid.solve(lorenz, LORENZ, ts, args=28.0, config=TWO)
    config = dataclasses.replace(TWO, delta="full")
    sol = jaxbraid.solve(lorenz, LORENZ, ts, args=28.0, config=config)
    r = np.append(sol.stats.initial_residual, sol.stats.residuals)
    assert r[0] > 1e-3
    assert np.all(r[1:4] < np.maximum(r[:3] ** 2, 1e-12))
    assert r[3] < 1e-12 < 1e-4 * plain.stats.residuals[2]
    np.testing.assert_allclose(sol.us, serial(lorenz, LORENZ, ts, args=28.0), rtol=0, atol=1e-10)


def test_a_linear_problem_is_solved_at_once():
    """Its derivative is the same everywhere, so the corrected coarse equation is exact."""
    a = np.array([[0.0, 1.0], [-40.0, -0.1]])

    def step(t0, t1, u, params, args):
        return u + (t1 - t0) * (a @ u)

    config = MGRIT(levels=3, coarsening=(4, 2), cf_relax=0, max_iters=1, delta="full")
    sol = jaxbraid.solve(step, np.ones(2), grid(64), config=config)
    np.testing.assert_allclose(sol.us, serial(step, np.ones(2), grid(64)), rtol=1e-11, atol=1e-11)


CASES = [
    # devices, steps, gradient, options
    (1, 100, True, {"delta": 1}),
    (1, 96, False, {"delta": 2, "levels": 3, "coarsening": 4, "cycle": "F", "cf_relax": 1}),
    (1, 96, False, {"delta": "full", "levels": 3, "coarsening": 4, "cycle": "W", "tol": 1e-11}),
    (1, 100, False, {"delta": 2, "coarsening": ((0, 8, 20, 31, 60, 99),)}),
    (3, 100, False, {"delta": "full", "levels": 3, "coarsening": 4}),
    (8, 64, True, {"delta": 2, "coarsening": 16, "tol": 1e-11}),  # intervals span two devices
    (3, 100, True, {"delta": "full", "coarsening": 4, "coarse_placement": 1}),
    (2, 100, False, {"delta": 2, "window": 6}),
]


@pytest.mark.parametrize(("devices", "n", "gradient", "options"), CASES)
def test_corrected_solutions_and_gradients_are_the_serial_ones(devices, n, gradient, options):
    """In few iterations, on any levels and devices; and what devices find is the same."""
    config = dataclasses.replace(TWO, max_iters=8, **options)
    ts = grid(n, n / 200)

    def run(rho, mesh):
        return jaxbraid.solve(lorenz, LORENZ, ts, args=rho, config=config, mesh=mesh)

    sol = run(28.0, mesh_of(devices))
    expected = serial(lorenz, LORENZ, ts, args=28.0)
    np.testing.assert_allclose(sol.us, expected, rtol=0, atol=1e-9)
    if devices > 1:
        np.testing.assert_allclose(sol.lyapunov, run(28.0, None).lyapunov, rtol=1e-7)
    if not gradient:
        return
    g = jax.grad(lambda rho: jnp.sum(run(rho, mesh_of(devices)).us ** 2))(28.0)
    g_serial = jax.grad(lambda rho: jnp.sum(serial(lorenz, LORENZ, ts, args=rho) ** 2))(28.0)
    np.testing.assert_allclose(g, g_serial, rtol=1e-8)


def test_lyapunov_exponents():
    """Against the usual method (push a frame through every step, orthonormalise) and theory.

    The sum of all exponents is the mean divergence, -(10 + 1 + 8/3), but for the error of the
    Runge-Kutta method; a leading part of the frame moves as it would alone.
    """
    ts = grid(2048, 10.0)
    config = MGRIT(levels=2, coarsening=16, cf_relax=0, max_iters=12, tol=1e-10, delta="full")
    sol = jaxbraid.solve(lorenz, LORENZ, ts, args=28.0, config=config)
    assert bool(sol.stats.converged)

    def push(frame, x):
        u, t0, t1 = x
        jacobian = jax.jacfwd(lambda u: lorenz(t0, t1, u, None, 28.0))(u)
        frame, r = jnp.linalg.qr(jacobian @ frame)
        return frame, jnp.log(jnp.abs(jnp.diagonal(r)))

    us = serial(lorenz, LORENZ, ts, args=28.0)
    xs = (us[:-1], jnp.asarray(ts[:-1]), jnp.asarray(ts[1:]))
    expected = jax.lax.scan(push, jnp.eye(3), xs)[1].sum(0) / 10
    np.testing.assert_allclose(sol.lyapunov, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(sol.lyapunov.sum(), -(10 + 1 + 8 / 3), rtol=1e-4)
    config = dataclasses.replace(config, delta=2, max_iters=20)
    sol = jaxbraid.solve(lorenz, LORENZ, ts, args=28.0, config=config)
    # another frame to start with, which matters as 1/time
    np.testing.assert_allclose(sol.lyapunov, expected[:2], rtol=0, atol=0.3)


def test_correction_of_complex_states_and_pytrees():
    """Complex numbers are two directions; a derivative need not be holomorphic."""
    u0 = {"a": np.array([1.0 + 0.5j]), "b": (np.float32(0.3), np.arange(2))}

    def step(t0, t1, u, params, args):
        a, (b, n) = u["a"], u["b"]
        dt = t1 - t0
        return {"a": a + dt * (1j * a * jnp.abs(a) ** 2 - b * jnp.conj(a)),
                "b": ((b - dt * b * jnp.abs(a[0])).astype(jnp.float32), n)}  # fmt: skip

    config = MGRIT(levels=2, coarsening=4, cf_relax=0, max_iters=5, delta="full")
    us = jaxbraid.solve(step, u0, grid(64, 1.0), config=config)
    assert us.lyapunov.shape == (3,)
    expected = serial(step, u0, grid(64, 1.0))
    np.testing.assert_allclose(us.us["a"], expected["a"], rtol=0, atol=1e-5)  # b is single
    np.testing.assert_allclose(us.us["b"][0], expected["b"][0], rtol=0, atol=1e-5)


def test_bases_are_orthonormal_and_span_what_they_did():
    shapes = {"a": jax.ShapeDtypeStruct((2,), complex), "b": jax.ShapeDtypeStruct((3,), float)}
    assert _delta.dimension(shapes) == 7
    for basis in (_delta.unit_vectors(shapes), _delta.some_basis(shapes, 4)):
        x = _delta.rows(jax.tree.map(lambda a: a[None], basis))[0]
        np.testing.assert_allclose(x @ x.T, np.eye(len(x)), atol=1e-14)
    basis = jax.tree.map(lambda a: 2 * a[None], _delta.some_basis(shapes, 4))
    q, growth = _delta.orthonormal(basis)
    np.testing.assert_allclose(growth, 2 * np.ones((1, 4)))
    np.testing.assert_allclose(2 * _delta.rows(q), _delta.rows(basis), atol=1e-14)


def test_refusals():
    def refuse(message, more=None, u0=LORENZ, **options):
        config = dataclasses.replace(TWO, **options)
        with pytest.raises(ValueError, match=message):
            jaxbraid.solve(lorenz, u0, grid(64), args=28.0, config=config, **(more or {}))

    refuse("delta=4: must be at most 3, the numbers in the state", delta=4)
    refuse("'full': not with spatial coarsening", {"transfers": [jaxbraid.transfers.injection()]},
           delta="full")  # fmt: skip
    mesh = jax.make_mesh((1, 3), ("layer", "space"))
    refuse("not on a mesh that splits states", {"mesh": mesh, "space_axis": "space"}, delta=1)
    with pytest.raises(ValueError, match="delta=0: must be >= 1 or None, 'full'"):
        MGRIT(delta=0)


@pytest.mark.parametrize("tol", [0.0, 1e-30])
@pytest.mark.parametrize("nu", [0, 1, 2])
def test_fine_steps_are_evaluated_as_often_as_without_correction(nu, tol):
    """Derivatives are taken of the sweep that closes the relaxation; one more, for exponents."""
    seen = []

    def step(t0, t1, u, params, args):
        jax.debug.callback(lambda dt: seen.append(round(float(dt) * 1e6)), t1 - t0)
        return u + (t1 - t0) * jnp.sin(u)

    def fine_sweeps(delta):
        seen.clear()
        config = MGRIT(levels=2, coarsening=4, cf_relax=nu, max_iters=3, tol=tol, delta=delta)
        jax.block_until_ready(jaxbraid.solve(step, np.ones(2), grid(32, 3.2), config=config).u)
        jax.effects_barrier()
        fine = seen.count(round(1e5))
        assert fine % 32 == 0
        return fine // 32

    plain = fine_sweeps(None)
    assert plain == 3 * (1 + nu) + 1 + (tol > 0)  # the results; the residual before the loop
    assert fine_sweeps("full") == fine_sweeps(1) == plain + 1
