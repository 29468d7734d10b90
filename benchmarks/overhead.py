"""Overhead: a V-cycle on one core against the same batched steps alone.

    python -m benchmarks.overhead

The time of a cycle is what further iterations add to a solve: T(1 + R) - T(1), over R. "steps" is
the time of as many steps without any multigrid: per cycle 1 + nu scans over m steps of all
intervals, one coarse step of all intervals at once, and a scan over all coarse steps. They are
batched in the way that suits them best: intervals first in memory, last, or one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxbraid
from benchmarks import _bench
from benchmarks._bench import Row
from benchmarks._nets import F32, dense_layer
from jaxbraid import MGRIT, problems

MORE = 8  # further iterations
LIMITS = """
The cycle does besides its steps: differences of states at C-points (residual, correction), the
norm of the residual and right-hand sides of coarse steps. They count where a step takes not much
longer than reading its state.
"""
WAYS = ("first", "last", "one by one")


class Case(NamedTuple):
    """Steps `step(own, dt, u)` from `u0`, each with `own` (leading axis: steps), and its solve."""

    name: str
    step: Callable[[Any, Any, Any], Any]
    own: Any
    dt: float
    u0: Any
    m: int
    nu: int
    solve: Callable[[MGRIT, Any, Any], Any]  # (config, own, u0) -> the state at the end


def of_problem(name: str, problem: problems.Problem, m: int, nu: int) -> Case:
    ts = jnp.asarray(problem.ts)
    step: Any = problem.step

    def alone(t: Any, dt: Any, u: Any) -> Any:
        return step(t, t + dt, u, None, problem.args)

    def solve(config: MGRIT, t: Any, u: Any) -> Any:
        return jaxbraid.solve(step, u, ts, args=problem.args, config=config, save="final").u

    return Case(name, alone, ts[:-1], float(ts[1]), jnp.asarray(problem.u0), m, nu, solve)


def of_net(name: str, f: Callable, params: Any, x: Any, m: int, nu: int, args: Any = None) -> Case:
    layers = len(jax.tree.leaves(params)[0])
    extra = () if args is None else (args,)

    def alone(p: Any, dt: Any, u: Any) -> Any:
        return u + jnp.asarray(dt, u.dtype) * f(p, u, *extra)

    def solve(config: MGRIT, params: Any, x: Any) -> Any:
        return jaxbraid.parallel_ode_net(f, params, args=args, forward=config)(x)

    return Case(name, alone, params, 1 / layers, x, m, nu, solve)


def gru_field(p: Any, h: Any, args: Any) -> Any:
    r, z, n = jnp.split(p + h @ args, 3, axis=-1)
    return (1 - jax.nn.sigmoid(z)) * (jnp.tanh(n * jax.nn.sigmoid(r)) - h)


def cases(quick: bool) -> Iterator[Case]:
    def size(full: int, small: int) -> int:
        return small if quick else full

    n = size(2**16, 2**10)
    brusselator = problems.brusselator(t_end=24.0 * n / 2**16, nt=n)
    yield of_problem(f"Brusselator, {n} steps, m = 64, F", brusselator, 64, 0)
    yield of_problem(f"Brusselator, {n} steps, m = 64, FCF", brusselator, 64, 1)
    n, nx = size(4096, 64), size(1025, 65)
    heat = problems.heat_1d(nx, (0, np.pi), t_end=1.0, nt=n)
    yield of_problem(f"heat 1D, {nx} points, {n} steps, m = 16, F", heat, 16, 0)
    n = size(128, 16)
    k = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(k[0], (n, 64, 64), F32) / 8, "b": jnp.zeros((n, 64), F32)}
    x = jax.random.normal(k[1], (64, 64), F32)
    yield of_net(f"MLP 64, batch 64, {n} layers, m = 4, F", dense_layer, params, x, 4, 0)
    yield of_net(f"MLP 64, batch 64, {n} layers, m = 4, FCF", dense_layer, params, x, 4, 1)
    n = size(512, 16)
    xs = jax.random.normal(k[0], (n, 32, 300), F32)
    w = jax.random.normal(k[1], (100, 300), F32) / 10
    h = jnp.zeros((32, 100), F32)
    yield of_net(f"GRU 100, batch 32, {n} steps, m = 8, F", gru_field, xs, h, 8, 0, w)


def cycle_run(case: Case, iterations: int) -> Callable[[], Any]:
    config = MGRIT(levels=2, coarsening=case.m, cf_relax=case.nu, max_iters=iterations)
    run = jax.jit(lambda own, u0: case.solve(config, own, u0))
    return lambda: run(case.own, case.u0)


def alone_run(case: Case, way: str, cycles: int) -> Callable[[], Any]:
    """The steps of so many cycles, batched in one of the `WAYS`."""
    n = len(jax.tree.leaves(case.own)[0])
    m, k = case.m, n // case.m
    axis = -1 if way == "last" else 0

    def put(a: Any) -> Any:
        return jnp.moveaxis(a, 0, -1) if way == "last" else a

    def batched(own: Any, dt: float, u: Any) -> Any:
        def one(own: Any, u: Any) -> Any:
            return case.step(own, dt, u)

        if way == "one by one":
            return jax.lax.map(lambda x: one(*x), (own, u))
        return jax.vmap(one, in_axes=axis, out_axes=axis)(own, u)

    def sweep(own: Any, u: Any) -> Any:
        if way == "one by one":  # an interval at a time, not a step at a time

            def interval(x: Any) -> Any:
                def body(u: Any, p: Any) -> Any:
                    return case.step(p, case.dt, u), None

                return jax.lax.scan(body, *x)[0]

            return jax.lax.map(interval, (u, own))
        return jax.lax.scan(lambda u, p: (batched(p, case.dt, u), None), u, own)[0]

    # intervals of the fine level, (m, k, ...) or (k, m, ...), and the coarse steps
    fine = jax.tree.map(lambda a: a.reshape(k, m, *a.shape[1:]), case.own)
    coarse = jax.tree.map(lambda a: a[::m], case.own)
    if way != "one by one":
        fine = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), fine)
    if way == "last":
        fine = jax.tree.map(lambda a: jnp.moveaxis(a, 1, -1), fine)
    together = jax.tree.map(put, coarse)

    @jax.jit
    def run(fine: Any, coarse: Any, together: Any, us: Any) -> Any:
        def cycle(_: Any, us: Any) -> Any:
            for _ in range(1 + case.nu):
                us = sweep(fine, us)
            us = batched(together, m * case.dt, us)
            first = us[..., 0] if way == "last" else us[0]

            def body(u: Any, p: Any) -> Any:
                u = case.step(p, m * case.dt, u)
                return u, u

            # all that was stepped to is used, or the compiler could leave it out
            return (us + put(jax.lax.scan(body, first, coarse)[1])) / 2

        return jax.lax.fori_loop(0, cycles, cycle, us)

    us = put(jnp.broadcast_to(case.u0, (k, *case.u0.shape)))
    fine, coarse, together, us = jax.block_until_ready((fine, coarse, together, us))
    return lambda: run(fine, coarse, together, us)


def measured(case: Case, quick: bool) -> Row:
    ways = _bench.compare({w: alone_run(case, w, MORE) for w in WAYS}, quick, 2.0)
    way = min(ways, key=lambda w: ways[w].shortest)
    t = _bench.compare(
        {
            "once": cycle_run(case, 1),
            "more": cycle_run(case, 1 + MORE),
            "steps": alone_run(case, way, MORE),
        },
        quick,
    )
    cycle = (t["more"].shortest - t["once"].shortest) / MORE
    steps = t["steps"].shortest / MORE
    note = f"steps alone: intervals {way}"
    return _bench.at_most(case.name, {"cycle": cycle, "steps": steps}, cycle / steps, 1.2, note)


def rows(quick: bool) -> Iterator[Row]:
    for case in cases(quick):
        if case.nu == 0 or not quick:
            yield measured(case, quick)


if __name__ == "__main__":
    _bench.main(rows, __doc__, x64=True)
