"""`solve`: fixed points, counts of evaluations, grids, norms, spatial coarsening, derivatives."""

from __future__ import annotations

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, problems, transfers
from nets import mesh_of, relative_error
from serial import serial


def decay(t0, t1, u, params, args):
    """Backward Euler for u' = -u + sin t."""
    return (u + (t1 - t0) * jnp.sin(t1)) / (1 + (t1 - t0))


# -- the serial solution is a fixed point ---------------------------------------------------------


def fixed_point_residuals(step, u0, ts, args=None, transfers=None, **options):
    us = serial(step, u0, jnp.asarray(ts), args=args)
    config = MGRIT(max_iters=10, coarsening=2, **options)
    more = {"config": config, "guess": us, "transfers": transfers}
    sol = jaxbraid.solve(step, u0, ts, args=args, **more)
    bound = 1e-15 * np.sqrt(len(ts) - 1) * float(jnp.max(jnp.linalg.norm(us, axis=-1)))
    return np.append(sol.stats.initial_residual, sol.stats.residuals), bound


@pytest.mark.parametrize(("cycle", "levels", "nu"), list(itertools.product("VF", (2, 4), (0, 1))))
def test_serial_solution_is_a_fixed_point(cycle, levels, nu):
    """A step of one number rounds alike in any batch: nothing moves at all."""
    ts, options = jnp.linspace(0, 4, 65), {"cycle": cycle, "levels": levels, "cf_relax": nu}
    residuals, _ = fixed_point_residuals(decay, jnp.float64(-2.0), ts, **options)
    assert np.all(residuals == 0.0)


@pytest.mark.parametrize("size", [3, 12])
def test_serial_solution_of_vectors_is_a_fixed_point_but_for_rounding(size):
    """Whether a product and a sum are rounded once or twice depends on how a vector is compiled."""
    ts = jnp.linspace(0, 4, 65)
    residuals, bound = fixed_point_residuals(decay, jnp.linspace(-2, 1, size), ts)
    assert np.all(residuals <= bound)


@pytest.mark.parametrize(("cycle", "levels"), [("V", 2), ("F", 4)])
def test_fixed_point_with_spatial_coarsening(cycle, levels):
    heat = problems.heat_1d(17, half_waves=2)
    coarsen = (transfers.full_weighting(), None, None)[: levels - 1]
    residuals, bound = fixed_point_residuals(
        heat.step, heat.u0, heat.ts, heat.args, transfers=coarsen, cycle=cycle, levels=levels
    )
    assert np.all(residuals <= bound)


# -- evaluations are counted at run time ----------------------------------------------------------


def counting_step(counts):
    """A nonlinear step that tells the host each time it, or its vjp, is evaluated, and its size."""

    def tell(kind):
        def note(dt):
            counts[kind, round(float(dt) * 1e6)] += 1

        return note

    @jax.custom_vjp
    def step(dt, u):
        jax.debug.callback(tell("step"), dt)
        return u + dt * jnp.sin(u)

    def forward(dt, u):
        jax.debug.callback(tell("linearization"), dt)
        return u + dt * jnp.sin(u), (dt, u)

    def backward(saved, ct):
        dt, u = saved
        jax.debug.callback(tell("vjp"), dt)
        return jnp.zeros_like(dt), ct * (1 + dt * jnp.cos(u))

    step.defvjp(forward, backward)
    return lambda t0, t1, u, params, args: step(t1 - t0, u)


@pytest.mark.parametrize("direction", ["step", "vjp"])
@pytest.mark.parametrize(("levels", "nu"), [(2, 0), (2, 1), (3, 1)])
def test_evaluations_of_the_step(levels, nu, direction):
    """Level 0: (1 + nu) N a cycle and N for the last sweep; level l: one for tau, the sweeps."""
    n, m, iters = 64, 4, 3
    counts = collections.Counter()
    step = counting_step(counts)
    ts = jnp.linspace(0, 1, n + 1)
    config = MGRIT(levels=levels, coarsening=m, max_iters=iters, cf_relax=nu)

    def run(u0):
        return jnp.sum(jaxbraid.solve(step, u0, ts, config=config).us)

    if direction == "step":
        jax.block_until_ready(run(jnp.float64(1.0)))
    else:
        jax.block_until_ready(jax.grad(run)(jnp.float64(1.0)))
    jax.effects_barrier()

    dt = 1e6 / n
    got = [counts[direction, round(dt * m**l)] for l in range(levels)]
    expected = [iters * (1 + nu) * n + n]
    if levels == 2:
        # tau and the coarse solve in each cycle; nested iteration solves once more
        expected.append(iters * 2 * n // m + n // m)
    else:
        k = n // m
        visit = (1 + nu) * k + (k - k // m)  # relaxation, and F-relaxation on the way up
        expected.append(iters * (k + visit) + visit)
        expected.append(iters * 2 * k // m + 3 * k // m)
    assert got == expected


@pytest.mark.parametrize("batch", ["all", "one"])
def test_evaluations_with_kept_linearizations_and_saved_c_points(batch):
    """Kept: each step of each level is linearised once, in the forward solve's last sweep.

    C-points: m - 1 steps an interval a sweep. The numbers stay the same.
    """
    n, m, iters, nu = 64, 4, 3, 1
    ts = jnp.linspace(0, 1, n + 1)
    grads, counts = {}, {}

    def run(name, **options):
        counts[name] = collections.Counter()
        config = MGRIT(
            levels=3, coarsening=m, max_iters=iters, cf_relax=nu, batch_intervals=batch, **options
        )
        step = counting_step(counts[name])
        grads[name] = jax.grad(lambda u: jnp.sum(jaxbraid.solve(step, u, ts, config=config).us))(
            jnp.float64(1.0)
        )
        jax.effects_barrier()

    run("plain")
    run("kept", linearization="keep")
    run("saved", saved_states="coarse")
    run("both", linearization="keep", saved_states="coarse")
    run("remat", linearization="keep", remat=jax.checkpoint_policies.nothing_saveable)

    def count(name, kind):
        return [counts[name][kind, round(1e6 / n * m**l)] for l in range(3)]

    slots = [n, n // m, n // m**2]
    assert count("plain", "linearization") == count("plain", "vjp")
    assert count("kept", "linearization") == count("both", "linearization") == slots
    assert count("remat", "linearization")[0] > n
    assert list(np.subtract(count("plain", "step"), count("kept", "step"))) == [n, 0, 0]
    extra = np.subtract(count("saved", "step"), count("plain", "step"))
    sweeps = iters * (1 + nu) + 1
    assert list(extra) == [sweeps * (n - n // m), 0, 0]
    extra = np.subtract(count("both", "step"), count("plain", "step"))
    assert list(extra) == [n - n // m, 0, 0]
    for name, gradient in grads.items():
        assert count(name, "vjp") == count("plain", "vjp")
        assert relative_error(gradient, grads["plain"]) < 1e-14


def test_program_size_does_not_grow():
    """Neither with the number of steps nor with the number of devices."""

    def size(n, devices):
        ts = jnp.linspace(0, 1, n + 1)
        config = MGRIT(levels=3, coarsening=2, max_iters=2)
        mesh = mesh_of(devices)

        def run(u0):
            us = jaxbraid.solve(decay, u0, ts, config=config, mesh=mesh, layer_axis="depth").us
            return jnp.sum(us**2)

        text = jax.jit(jax.grad(run)).lower(jnp.ones(3)).as_text()
        return len(text.splitlines())

    assert size(4096, 2) == size(64, 2)
    assert abs(size(64, 8) - size(64, 2)) < 0.02 * size(64, 2)


# -- grids and options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "coarsening",
    [4, (4, 3), (3, (0, 1, 4, 6, 11)), ((0, 2, 3, 7, 15, 16, 30), 2), ((0, 5, 9, 33), (0, 1, 3))],
)
def test_any_grid_is_solved_exactly(coarsening):
    """Non-uniform times, irregular coarsening, steps that no factor divides."""
    ts = jnp.cumsum(jnp.linspace(0.01, 0.3, 34))
    u0 = {"x": jnp.array([1.0, 2.0]), "y": jnp.array(0.5)}
    params = jnp.linspace(0.5, 1.5, 33)

    def step(t0, t1, u, p, args):
        x = u["x"] - (t1 - t0) * p * jnp.sin(u["x"]) * u["y"]
        return {"x": x, "y": u["y"] / (1 + (t1 - t0) * args)}

    config = MGRIT(levels=3, coarsening=coarsening, max_iters=33)

    def value(fn):
        def run(u0, params, args):
            us = fn(u0, params, args)
            return jnp.sum(jnp.cos(us["x"])) + jnp.sum(us["y"] ** 2), us

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))

    parallel = value(lambda u, p, a: jaxbraid.solve(step, u, ts, p, a, config=config).us)
    exact = value(lambda u, p, a: serial(step, u, ts, p, a))
    (_, us), grads = parallel(u0, params, 0.7)
    (_, us0), grads0 = exact(u0, params, 0.7)
    assert relative_error(us, us0) < 1e-12
    assert relative_error(grads, grads0) < 1e-10


def test_decreasing_time():
    ts = jnp.linspace(2, 0, 33)
    sol = jaxbraid.solve(decay, jnp.ones(2), ts, config=MGRIT(tol=1e-13))
    assert relative_error(sol.us, serial(decay, jnp.ones(2), ts)) < 1e-12


def test_tolerance_stops_early_and_zero_does_not():
    ts = jnp.linspace(0, 4, 129)
    some = jaxbraid.solve(decay, jnp.ones(2), ts, config=MGRIT(tol=1e-8, max_iters=20))
    assert bool(some.stats.converged) and 1 < int(some.stats.iterations) < 20
    k = int(some.stats.iterations)
    all_ = jaxbraid.solve(decay, jnp.ones(2), ts, config=MGRIT(max_iters=20))
    assert int(all_.stats.iterations) == 20
    np.testing.assert_allclose(some.stats.residuals[:k], all_.stats.residuals[:k], rtol=1e-6)
    assert np.all(np.isnan(some.stats.residuals[k:]))


def test_norms():
    """Temporal norms and a spatial norm of the user's, against the residuals themselves."""
    ts, m = jnp.linspace(0, 4, 33), 4
    guess = jax.random.normal(jax.random.key(0), (33, 2)).at[0].set(1.0)

    def residual(**options):
        config = MGRIT(coarsening=m, max_iters=1, **options)
        sol = jaxbraid.solve(decay, jnp.ones(2), ts, config=config, guess=guess)
        return float(sol.stats.initial_residual)

    w = guess[:-1:m]
    for j in range(m):
        w = jax.vmap(decay, (0, 0, 0, None, None))(ts[j:-1:m], ts[j + 1 :: m], w, None, None)
    r = np.asarray(w - guess[m::m])
    two = np.linalg.norm(r, axis=1)
    assert np.isclose(residual(), np.linalg.norm(two), rtol=1e-12)
    assert np.isclose(residual(temporal_norm="one"), np.sum(two), rtol=1e-12)
    assert np.isclose(residual(temporal_norm="max"), np.max(two), rtol=1e-12)
    largest = residual(norm=lambda u: jnp.max(jnp.abs(u)), temporal_norm="one")
    assert np.isclose(largest, np.sum(np.max(np.abs(r), axis=1)), rtol=1e-12)


@pytest.mark.parametrize("factor", [1, 2])
def test_w_cycles_converge_faster_than_v(factor):
    ts = jnp.linspace(0, 4, 129)

    def residuals(cycle):
        config = MGRIT(
            levels=4, coarsening=2 * factor if factor < 2 else 2, cycle=cycle, max_iters=3
        )
        return jaxbraid.solve(decay, jnp.ones(2), ts, config=config).stats.residuals

    assert residuals("W")[-1] < residuals("V")[-1]


# -- spatial coarsening ---------------------------------------------------------------------------


def diffusion(t0, t1, u, rate, args):
    """Backward Euler for u' = rate u_xx - u^3 / 10 (explicit), cell averages on [0, 1], no flux."""
    n = u.shape[-1]
    left = jnp.roll(jnp.eye(n), 1, 0).at[0].set(0)
    laplace = (left + left.T - 2 * jnp.eye(n)).at[0, 0].set(-1).at[-1, -1].set(-1) * n**2
    dt = t1 - t0
    rhs = u - dt * args * u**3
    return jnp.linalg.solve(jnp.eye(n) - dt * rate * laplace, rhs)


@pytest.mark.parametrize("adjoint_transfers", ["transpose", "forward"])
@pytest.mark.parametrize("mesh", [None, (3, 1)])
def test_spatial_coarsening_is_exact_in_the_end(mesh, adjoint_transfers):
    n, ts = 10, jnp.linspace(0, 0.1, 11)
    u0 = jnp.cos(jnp.pi * (jnp.arange(12) + 0.5) / 12)
    rates = jnp.linspace(0.5, 1.0, n)
    config = MGRIT(levels=3, coarsening=2, max_iters=5, adjoint_transfers=adjoint_transfers)
    pool = transfers.average_pooling()

    def parallel(u0, rates, args):
        return jaxbraid.solve(
            diffusion,
            u0,
            ts,
            rates,
            args,
            config=config,
            transfers=(pool, pool),
            mesh=None if mesh is None else mesh_of(*mesh),
            layer_axis="depth",
        ).us

    def value(fn):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(fn(*a) ** 4), argnums=(0, 1, 2)))

    got = value(parallel)(u0, rates, 0.1)
    expected = value(lambda u, r, a: serial(diffusion, u, ts, r, a))(u0, rates, 0.1)
    assert relative_error(got, expected) < 1e-10


def test_memory_of_final_only():
    ts = jnp.linspace(0, 1, 1025)
    sol = jaxbraid.solve(decay, jnp.ones(3), ts, config=MGRIT(tol=1e-12), save="final")
    assert sol.us is None
    assert relative_error(sol.u, serial(decay, jnp.ones(3), ts)[-1]) < 1e-10
