"""One core against serial: MGRIT and the best `lax.scan` of the same steps, all states returned.

    python -m benchmarks.against_serial

The scan may unroll 1 to 16 steps and hold the state as a vector or as separate numbers, as suits it
best. MGRIT has two levels; of a few factors and relaxations, with the iterations they need (at
least one), the fastest counts whose states are all within 1e-10 of the scan's, relative to the
largest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbraid
from benchmarks import _bench
from benchmarks._bench import Row
from jaxbraid import MGRIT, problems
from jaxbraid.problems import Problem

ACCURACY = 1e-10
LIMITS = """
With k iterations all steps are made k + 1 times (each cycle's relaxation, and the last sweep, which
writes the states), and the coarse steps 2 k + 1 times one after another or at once. So a step of a
batch must be cheaper than a step of the scan by k + 1 times the goal: for one iteration 6 times for
ODEs, and for the heat equation's few iterations as many times 1.5. The scan keeps a state of few
numbers in registers; a batched step reads and writes its states, and with intervals first in memory
the numbers of a state lie side by side, so arithmetic is done on strided parts. A step of the heat
equation takes 6 us in the scan, of which the solve takes 4, and 2 in a batch: at the four or five
times that all steps are made here that is no gain, over a scan with LAPACK's solver (20 us) it is.
Writing all states costs the scan once what copying them costs, and MGRIT twice.
"""
UNROLL = (1, 2, 4, 16)
Run = Callable[[], Any]


def scan(problem: Problem, unroll: int, apart: bool) -> Run:
    """The serial program; `apart`: the state's numbers are carried separately."""
    ts, u0 = jnp.asarray(problem.ts), jnp.asarray(problem.u0)
    step: Any = problem.step

    @jax.jit
    def run(u0: Any, ts: Any) -> Any:
        def body(u: Any, t: Any) -> Any:
            u = step(*t, jnp.stack(u) if apart else u, None, problem.args)
            u = tuple(u) if apart else u
            return u, u

        first = tuple(u0) if apart else u0
        return jax.lax.scan(body, first, (ts[:-1], ts[1:]), unroll=unroll)[1]

    return lambda: run(u0, ts)


def mgrit(problem: Problem, m: int, cf_relax: int, iterations: int) -> Run:
    config = MGRIT(
        levels=2, coarsening=m, cf_relax=cf_relax, max_iters=iterations, final_relax="FC"
    )
    ts = jnp.asarray(problem.ts)
    step: Any = problem.step

    @jax.jit
    def run(u0: Any, ts: Any) -> Any:
        return jaxbraid.solve(step, u0, ts, None, problem.args, config=config).us

    return lambda: run(problem.u0, ts)


def fastest(runs: dict[str, Run], quick: bool) -> tuple[str, Run]:
    times = _bench.compare(runs, True, 10.0 if not quick else 2.0)
    name = min(times, key=lambda n: times[n].shortest)
    return name, runs[name]


def compared(
    problem: Problem, case: str, goal: float, factors: tuple[int, ...], quick: bool
) -> Row:
    few = np.size(problem.u0) <= 4
    ways = itertools.product(UNROLL[:2] if quick or not few else UNROLL, (False, True)[: 1 + few])
    serial_name, serial = fastest(
        {f"unroll {n}{', apart' * a}": scan(problem, n, a) for n, a in ways}, quick
    )
    truth = serial()
    truth = np.asarray(jnp.stack(truth, axis=-1) if isinstance(truth, tuple) else truth)
    good: dict[str, Run] = {}
    for m, nu in itertools.product(factors, (0,) if few else (0, 1)):
        for iterations in range(1, 5 if few else 12):
            run = mgrit(problem, m, nu, iterations)
            error = np.max(np.abs(np.asarray(run())[1:] - truth)) / np.max(np.abs(truth))
            if error <= ACCURACY:
                relax = ("F", "FCF")[nu]
                good[f"m = {m}, {relax}, {iterations} iterations, error {error:.0e}"] = run
                break
    if not good:
        return Row(case, "", "none is accurate enough", f">= {goal:g}x", False)
    name, best = fastest(good, quick)
    t = _bench.compare({"scan": serial, "MGRIT": best}, quick, 6.0)
    note = f"scan: {serial_name}; MGRIT: {name}"
    return _bench.at_least(case, t, t["scan"].shortest / t["MGRIT"].shortest, goal, note)


def rows(quick: bool) -> Iterator[Row]:
    small, large = (2**14, 2**15) if quick else (2**18, 2**20)
    factors = (64,) if quick else (64, 256, 1024)
    for n in (small,) if quick else (small, large):
        problem = problems.brusselator(t_end=24.0, nt=n)
        yield compared(problem, f"Brusselator, RK4, {n} steps", 3.0, factors, quick)
    if not quick:
        problem = problems.lorenz_63(t_end=5.0, nt=small)
        yield compared(problem, f"Lorenz, RK4, {small} steps", 3.0, factors, quick)
    nx, n = (65, 1024) if quick else (1025, 16384)
    problem = problems.heat_1d(nx, (0, np.pi), t_end=2 * np.pi, nt=n)
    case = f"heat 1D, backward Euler, {nx} points, {n} steps"
    yield compared(problem, case, 1.5, (16,) if quick else (8, 16, 32), quick)


if __name__ == "__main__":
    _bench.main(rows, __doc__, x64=True)
