"""Run by `mpirun` for test_mpi.py: solves on ranks, compared with the same solve on one device.

Prints `ok` from every rank, or ends the whole run with the first failure.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys

os.environ["MPI4JAX_NO_WARN_JAX_VERSION"] = "1"

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxbraid
import jaxbraid.mpi
from jaxbraid import MGRIT
from nets import dense, dense_weights, field, relative_error, tree_net

WORLD = MPI.COMM_WORLD
jaxbraid.mpi.Ranks.of(WORLD)  # from here on a failing rank ends the run


def loss(y):
    return jnp.sum(y["a"] ** 2) + jnp.sum(jnp.cos(y["s"]))


def network(
    layers: int,
    batch: int,
    levels: int,
    factor: int,
    cycle: str,
    iters: int,
    placement: int | None = None,
) -> None:
    """Output, gradients and both residual histories of a network equal those of one device."""
    params, args, x = tree_net(layers)
    config = MGRIT(
        levels=levels,
        coarsening=factor,
        cycle=cycle,
        max_iters=iters,
        coarse_placement=placement,
    )
    ranks = jaxbraid.mpi.Ranks.of(WORLD, batch=batch)
    own = ranks.own_layers(layers, config)
    part = ranks.batch.Get_rank()
    size = 4 // batch

    def run(params, args, x, probe, make):
        net = make(params, args)
        solution = net.solve(x, adjoint_probe=probe)
        return loss(solution.u), (solution.u, solution.stats.residuals)

    def single(params, args):
        return jaxbraid.parallel_ode_net(field, params, args=args, forward=config)

    def ranked(params, args):
        return jaxbraid.mpi.parallel_ode_net(
            field, params, layers=layers, ranks=ranks, args=args, forward=config
        )

    def grad(make, params, x):
        probe = make(params, args).adjoint_probe()
        fn = jax.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True)
        fn = jax.jit(fn, static_argnums=4)
        (_, (y, residuals)), (dp, da, dx, record) = fn(params, args, x, probe, make)
        return y, residuals, dp, da, dx, record.residuals

    mine = jax.tree.map(lambda a: a[part * size : (part + 1) * size], x)
    y, residuals, dp, da, dx, adjoint = grad(ranked, jax.tree.map(lambda a: a[own], params), mine)
    y0, residuals0, dp0, da0, dx0, adjoint0 = grad(single, params, x)
    y0, dx0 = jax.tree.map(lambda a: a[part * size : (part + 1) * size], (y0, dx0))
    dp0 = jax.tree.map(lambda a: a[own], dp0)
    assert relative_error((y, dx, da), (y0, dx0, da0)) < 1e-12
    if own.stop > own.start:
        assert relative_error(dp, dp0) < 1e-11
    np.testing.assert_allclose(residuals, residuals0, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(adjoint, adjoint0, rtol=1e-9, atol=1e-14)


def sequences(n: int, batch: int) -> None:
    """One input a layer and sample: each rank has those of its layers and its part of the batch."""
    w = dense_weights(n)
    x, z = jnp.ones((4, 3)), jnp.sin(jnp.arange(n * 12.0)).reshape(n, 4, 3)
    config = MGRIT(levels=2, coarsening=2, max_iters=2)
    ranks = jaxbraid.mpi.Ranks.of(WORLD, batch=batch)
    own, size = ranks.own_layers(n, config), 4 // batch
    part = slice(ranks.batch.Get_rank() * size, (ranks.batch.Get_rank() + 1) * size)

    def layer(w, x, inputs):
        return dense(w, x + inputs)

    def loss(make, w, z, x):
        return jnp.sum(make(layer, w, forward=config)(x, inputs=z) ** 2)

    def ranked(f, w, forward):
        return jaxbraid.mpi.parallel_ode_net(f, w, layers=n, ranks=ranks, forward=forward)

    dw, dz = jax.jit(jax.grad(lambda w, z: loss(ranked, w, z, x[part]), (0, 1)))(
        w[own], z[own, part]
    )
    dw0, dz0 = jax.grad(lambda w, z: loss(jaxbraid.parallel_ode_net, w, z, x), (0, 1))(w, z)
    if own.stop > own.start:
        assert relative_error(dw, dw0[own]) < 1e-11
        np.testing.assert_allclose(dz, dz0[own, part], rtol=1e-9, atol=1e-14)


def integration(tol: float) -> None:
    """`solve` with a tolerance and per-step parameters."""
    n = 50
    ts, params = jnp.linspace(0, 2, n + 1), jnp.linspace(0.5, 1.5, n)

    def step(t0, t1, u, p, args):
        return (u + (t1 - t0) * jnp.sin(t1)) / (1 + p * (t1 - t0))

    config = MGRIT(levels=3, coarsening=3, tol=tol, max_iters=12)
    ranks = jaxbraid.mpi.Ranks.of(WORLD)
    own = ranks.own_layers(n, config)
    one = jaxbraid.solve(step, jnp.ones(2), ts, params, config=config)
    sol = jaxbraid.mpi.solve(step, jnp.ones(2), ts, params[own], config=config, ranks=ranks)
    assert int(sol.stats.iterations) == int(one.stats.iterations)
    assert relative_error(sol.u, one.u) < 1e-12
    assert relative_error(sol.us[:-1], one.us[own]) < 1e-12 if own.stop > own.start else True


def guesses() -> None:
    """States of an earlier solve go on where it stopped, on every number of ranks."""
    n = 13
    ts = jnp.linspace(0, 2, n + 1)

    def step(t0, t1, u, p, args):
        return (u + (t1 - t0) * jnp.sin(t1)) / (1 + t1 - t0)

    for factor in (2, 4):
        config = MGRIT(levels=2, coarsening=factor, max_iters=1)
        ranks = jaxbraid.mpi.Ranks.of(WORLD)
        first = jaxbraid.mpi.solve(step, jnp.ones(2), ts, config=config, ranks=ranks)
        again = jaxbraid.mpi.solve(
            step, jnp.ones(2), ts, config=config, ranks=ranks, guess=first.us
        )
        np.testing.assert_allclose(
            again.stats.initial_residual, first.stats.residuals[-1], rtol=1e-10
        )
        one = jaxbraid.solve(step, jnp.ones(2), ts, config=config)
        one = jaxbraid.solve(step, jnp.ones(2), ts, config=config, guess=one.us)
        assert relative_error(again.u, one.u) < 1e-13
        np.testing.assert_allclose(again.stats.residuals, one.stats.residuals, rtol=1e-9)


def half_precision() -> None:
    """bfloat16, for which MPI has no type."""
    w, x = dense_weights(8, dtype=jnp.bfloat16), jnp.ones((2, 3), jnp.bfloat16)
    ranks = jaxbraid.mpi.Ranks.of(WORLD)
    config = MGRIT(coarsening=2, max_iters=1)
    own = ranks.own_layers(8, config)

    def value(w, make):
        return jnp.sum(make(w)(x) ** 2)

    def ranked(w):
        return jaxbraid.mpi.parallel_ode_net(dense, w, layers=8, ranks=ranks, forward=config)

    def single(w):
        return jaxbraid.parallel_ode_net(dense, w, forward=config)

    y, g = jax.value_and_grad(value)(w[own], ranked)
    y0, g0 = jax.value_and_grad(value)(w, single)
    assert g.dtype == jnp.bfloat16
    assert abs(y - y0) < 0.02 * abs(y0)
    np.testing.assert_allclose(*(x.astype(float) for x in (g, g0[own])), atol=0.02 * jnp.max(g0))


def oscillator(t0, t1, u, params, args):
    """Backward Euler for a damped pendulum with a periodic force."""
    dt, v = t1 - t0, u[1]
    v = (v - dt * (4 * jnp.sin(u[0]) - jnp.cos(2 * jnp.pi * t1) - params)) / (1 + dt * args)
    return jnp.stack([u[0] + dt * v, v])


def features(coarsening: int, *cases: tuple[str | int | None, bool]) -> None:
    """What else a solve gives out, the Delta correction and periodic time, as on one device."""
    ts = np.linspace(0, 1, 33)
    params, u0 = np.sin(np.arange(32)), np.array([0.3, 0.0])
    ranks = jaxbraid.mpi.Ranks.of(WORLD)
    for delta, periodic in cases:
        config = MGRIT(levels=2, coarsening=coarsening, max_iters=6, delta=delta)
        own = ranks.own_layers(32, config)
        seen = []

        def run(solve, params, seen=seen, config=config, periodic=periodic, **options):
            return solve(
                oscillator, u0, ts, params, 3.0, config=config, save="coarse", periodic=periodic,
                point_residuals=True, callback=lambda *x: seen.append(x), **options,
            )  # fmt: skip

        sol = run(jaxbraid.mpi.solve, params[own], ranks=ranks)
        jax.effects_barrier()
        assert len(seen) == (7 if WORLD.Get_rank() == 0 else 0)
        alone = []
        one = run(jaxbraid.solve, params, alone)
        jax.effects_barrier()
        at = np.arange(0, 32, coarsening)
        mine = (at >= own.start) & (at < own.stop)
        np.testing.assert_allclose(sol.ts, np.append(ts[at[mine]], 1.0))
        states = np.concatenate([np.asarray(one.us)[:-1][mine], np.asarray(one.us)[-1:]])
        np.testing.assert_allclose(sol.us, states, rtol=0, atol=1e-13)
        points = np.asarray(one.stats.point_residuals)[:, mine]
        np.testing.assert_allclose(sol.stats.point_residuals, points, rtol=1e-6, atol=1e-13)
        if delta is not None:
            np.testing.assert_allclose(sol.lyapunov, one.lyapunov, rtol=1e-9)
        for (i, r, u), (j, s, v) in zip(seen, alone, strict=False):
            assert i == j
            np.testing.assert_allclose(r, s, rtol=1e-6, atol=1e-13)
            np.testing.assert_allclose(u, v, rtol=0, atol=1e-12)

        def loss(solve, params, run=run, **options):
            us = run(solve, params, **options).us
            return jnp.sum(us[-1] ** 2)

        g = jax.grad(lambda p: loss(jaxbraid.mpi.solve, p, ranks=ranks))(params[own])
        g_one = jax.grad(lambda p: loss(jaxbraid.solve, p))(params)
        np.testing.assert_allclose(g, g_one[own], rtol=1e-7, atol=1e-13)


def mismatch() -> None:
    """Different sizes on the ranks are an error on all of them, not a hang."""
    ranks = jaxbraid.mpi.Ranks.of(WORLD)
    layers = 8 + WORLD.Get_rank()
    try:
        jaxbraid.mpi.parallel_ode_net(field, tree_net(layers)[0], layers=layers, ranks=ranks)
    except ValueError as e:
        assert "layers differs between ranks" in str(e)
    else:
        assert WORLD.Get_size() == 1

    own = ranks.own_layers(8)
    params, args, x = tree_net(8, batch=2 + WORLD.Get_rank())
    params = jax.tree.map(lambda a: a[own], params)
    net = jaxbraid.mpi.parallel_ode_net(field, params, layers=8, ranks=ranks, args=args)
    for call in (net, jax.jit(net)):
        try:
            call(x)
        except ValueError as e:
            assert "x differs between ranks" in str(e)
        else:
            assert WORLD.Get_size() == 1


def main(case: str) -> None:
    size = WORLD.Get_size()
    if case == "network":  # blocks of equal size, and fewer layers than ranks
        network(16, 1, 2, 4, "V", 2)
        network(2, 1, 2, 2, "V", 1)
        network(13, 1, 3, 2, "V", 2, placement=1)
    elif case == "uneven":  # no block divides the layers; a batch axis where the ranks allow it
        network(7, 2 if size % 2 == 0 else 1, 3, 2, "V", 2)
        sequences(9, 2 if size % 2 == 0 else 1)
    elif case == "integration":
        integration(1e-10)
        integration(0.0)
        guesses()
        half_precision()
    elif case == "features":
        features(4, (None, True), ("full", False))
        features(16, (1, False))  # where intervals span ranks
    elif case == "mismatch":
        mismatch()
    elif case == "fail":
        if WORLD.Get_rank() == size - 1:
            raise RuntimeError("this rank fails on purpose")
        network(16, 1, 2, 4, "V", 2)
    print(f"ok {case} on rank {WORLD.Get_rank()} of {size}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
