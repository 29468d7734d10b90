"""One core against serial: MGRIT and the best `lax.scan` of the same steps.

    python -m benchmarks.against_serial

The scan may unroll 1 to 16 steps and hold the state as a vector or as separate numbers, as suits it
best. MGRIT has two levels and F-relaxation; of a few factors, and ways to end, with the iterations
they need (at least one), the fastest counts whose states are all within 1e-10 of the scan's,
relative to the largest. Both programs return the state at the end of time, or all states.
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
k iterations make all steps k times, the last sweep, for all states, once more, and the coarse steps
are made 2 k + 1 times. Of a Brusselator's 5 to 6 ns a step the arithmetic of the one sweep is 2
(the core's peak; 26 in the scan, which waits for each result), bringing the times of steps into the
order of intervals 2, coarse steps 1 to 2; the second sweep is 2 more, and writing all states and
bringing them into the order of time 5. A kernel has one result on CPUs, so two numbers share one as
parts of a complex number; three numbers (Lorenz) take two, and what they have in common is computed
twice. A step of the heat equation takes 6 us in the scan, of which the solve takes 4, and 2 in a
batch: at the four or five times that all steps are made here that is no gain, over a scan with
LAPACK's solver (20 us) it is.
"""
MOST = 12  # iterations
UNROLL = (1, 2, 4, 16)
Run = Callable[[], Any]


def scan(problem: Problem, unroll: int, apart: bool, save: str) -> Run:
    """The serial program; `apart`: the state's numbers are carried separately."""
    ts, u0 = jnp.asarray(problem.ts), jnp.asarray(problem.u0)
    step: Any = problem.step

    @jax.jit
    def run(u0: Any, ts: Any) -> Any:
        def body(u: Any, t: Any) -> Any:
            u = step(*t, jnp.stack(u) if apart else u, None, problem.args)
            u = tuple(u) if apart else u
            return u, u if save == "all" else None

        first = tuple(u0) if apart else u0
        u, us = jax.lax.scan(body, first, (ts[:-1], ts[1:]), unroll=unroll)
        return us if save == "all" else u

    return lambda: run(u0, ts)


def mgrit(problem: Problem, save: str, iterations: int, m: int, final: Any) -> Run:
    config = MGRIT(levels=2, coarsening=m, cf_relax=0, max_iters=iterations, final_relax=final)
    ts = jnp.asarray(problem.ts)
    step: Any = problem.step

    @jax.jit
    def run(u0: Any, ts: Any) -> Any:
        sol = jaxbraid.solve(step, u0, ts, None, problem.args, config=config, save=save)
        return sol.us if save == "all" else sol.u  # what is not returned is not computed

    return lambda: run(problem.u0, ts)


def needed(problem: Problem, m: int, truth: np.ndarray) -> int:
    """After how many iterations the C-points (or the last of them) are accurate."""
    errors = []

    def watch(iteration: int, residual: float, states: Any) -> None:
        errors.append(difference(states, truth))

    config = MGRIT(levels=2, coarsening=m, cf_relax=0, max_iters=MOST)
    ts = jnp.asarray(problem.ts)
    step: Any = problem.step
    sol = jaxbraid.solve(
        step, problem.u0, ts, None, problem.args, config=config, save="final", callback=watch
    )
    jax.block_until_ready(sol.u)
    jax.effects_barrier()
    return max(1, next((i for i, e in enumerate(errors) if e <= ACCURACY), MOST))


def difference(u: Any, truth: np.ndarray) -> float:
    """Of states (or the last of them), relative to the largest; `u` has the initial one too."""
    u = u[-len(truth) :] if truth.ndim > 1 else u[-1] if np.ndim(u) > 1 else u
    return float(np.max(np.abs(np.asarray(u) - truth)) / np.max(np.abs(truth)))


def fastest(runs: dict[str, Run], quick: bool) -> tuple[str, Run]:
    times = _bench.compare(runs, True, 10.0 if not quick else 2.0)
    name = min(times, key=lambda n: times[n].shortest)
    return name, runs[name]


def compared(
    problem: Problem, case: str, goal: float, factors: tuple[int, ...], save: str, quick: bool
) -> Row:
    few = np.size(problem.u0) <= 4
    ways = itertools.product(UNROLL[:2] if quick or not few else UNROLL, (False, True)[: 1 + few])
    serial_name, serial = fastest(
        {f"unroll {n}{', apart' * a}": scan(problem, n, a, save) for n, a in ways}, quick
    )
    truth = serial()
    truth = np.asarray(jnp.stack(truth, axis=-1) if isinstance(truth, tuple) else truth)
    good: dict[str, Run] = {}
    for m in factors:
        first = needed(problem, m, truth if save == "final" else truth[m - 1 :: m])
        for final, more in (("F", 0), ("F", 1), ("FC", -1), ("FC", 0)):
            iterations = max(1, first + more)
            run = mgrit(problem, save, iterations, m, final)
            error = difference(run(), truth)
            if error <= ACCURACY:
                good[f"m = {m}, at last {final}, {iterations} iterations, error {error:.0e}"] = run
    if not good:
        return Row(case, "", "none is accurate enough", f">= {goal:g}x", False)
    name, best = fastest(good, quick)
    t = _bench.compare({"scan": serial, "MGRIT": best}, quick, 6.0)
    note = f"scan: {serial_name}; MGRIT: {name}"
    return _bench.at_least(case, t, t["scan"].shortest / t["MGRIT"].shortest, goal, note)


def rows(quick: bool) -> Iterator[Row]:
    small, large = (2**14, 2**15) if quick else (2**18, 2**20)
    factors = (64,) if quick else (64, 256, 1024)
    nx, n = (65, 1024) if quick else (1025, 16384)
    cases: list[tuple[str, Problem, float, tuple[int, ...]]] = [
        ("Brusselator, RK4", problems.brusselator(t_end=24.0, nt=small), 3.0, factors),
        ("Brusselator, RK4", problems.brusselator(t_end=24.0, nt=large), 3.0, factors),
        ("Lorenz, RK4", problems.lorenz_63(t_end=5.0, nt=small), 3.0, factors),
        (
            f"heat 1D, backward Euler, {nx} points",
            problems.heat_1d(nx, (0, np.pi), t_end=2 * np.pi, nt=n),
            1.5,
            (16,) if quick else (32, 64),
        ),
    ]
    for save, what in (("final", "last state"), ("all", "all states")):
        for name, problem, goal, choice in cases[:: 3 if quick else 1]:
            case = f"{name}, {len(problem.ts) - 1} steps, {what}"
            yield compared(problem, case, goal, choice, save, quick)


if __name__ == "__main__":
    _bench.main(rows, __doc__, x64=True)
