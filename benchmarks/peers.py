"""PyMGRIT and XBraid on the same problems, by the same cycles to the same tolerance, on one core.

    JAXBRAID_BENCH_PYMGRIT=/path/to/python python -m benchmarks.peers

PyMGRIT runs live, on the same core just before, in the environment whose interpreter is named
(`make bench` makes one). Its time is that of building the solver and solving; ours is that of a
solve after compiling, which is told besides. The histories of residuals are compared: the same
algorithm on the same problem has the same ones. XBraid's time of an iteration was recorded on a
machine of this kind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxbraid
from benchmarks import _bench
from benchmarks._bench import Row
from benchmarks._rk45 import rk45_step
from jaxbraid import MGRIT, problems

LIMITS = """
Nearly all the time of an iteration of the heat equation is that of its steps (`overhead` has the
ratio), 2 to 3 us each in a batch; XBraid's, in C, takes 44 us a step, all included.
"""
XBRAID = 0.72  # seconds an iteration: C, -O3, one rank
SAME = 1e-2  # of a residual: the last ones are near rounding
FLOOR = 1e-12  # residuals are known to some 1e-15 of the states, whatever the order of operations


class Case(NamedTuple):
    name: str
    key: str  # PyMGRIT's side of it
    points: tuple[int, int]  # of the time grid: full, quick
    make: Callable[[int], tuple[Any, Any, Any, Any]]  # points -> step, u0, ts, args
    config: MGRIT


def heat(points: int) -> tuple[Any, ...]:
    p = problems.heat_1d(65, (0.0, 1.0), ts=np.linspace(0, 2, points))
    return p.step, p.u0, p.ts, p.args


def brusselator(points: int) -> tuple[Any, ...]:
    p = problems.brusselator(ts=np.linspace(0, 12, points))
    return p.step, p.u0, p.ts, p.args


def _orbit(y: Any, moon: Any) -> Any:
    earth = 1 - moon
    to_earth = ((y[0] + moon) ** 2 + y[1] ** 2) ** 1.5
    to_moon = ((y[0] - earth) ** 2 + y[1] ** 2) ** 1.5
    return jnp.stack(
        [
            y[2],
            y[3],
            y[0] + 2 * y[3] - earth * (y[0] + moon) / to_earth - moon * (y[0] - earth) / to_moon,
            y[1] - 2 * y[2] - earth * y[1] / to_earth - moon * y[1] / to_moon,
        ]
    )


ORBIT_STEP = rk45_step(_orbit)


def arenstorf(points: int) -> tuple[Any, ...]:
    u0 = np.array([0.994, 0.0, 0.0, -2.00158510637908])  # PyMGRIT's digits, and its period
    return ORBIT_STEP, u0, np.linspace(0, 17.06521656015796, points), 0.012277471


CASES = (
    Case(
        "heat 1D, 65 points, 4 levels, m = 4, F-cycle",
        "heat",
        (1025, 257),
        heat,
        MGRIT(levels=4, cycle="F", nested_iteration=False, tol=1e-9, max_iters=20),
    ),
    Case(
        "Brusselator, RK4, 3 levels, m = 8",
        "brusselator",
        (2561, 2561),
        brusselator,
        MGRIT(levels=3, coarsening=8, tol=1e-9, max_iters=20),
    ),
    Case(
        "Arenstorf, adaptive RK45, 2 levels, m = 100",
        "arenstorf",
        (10001, 5001),
        arenstorf,
        MGRIT(levels=2, coarsening=100, tol=1e-7, max_iters=100),
    ),
)


def pymgrit(python: str, key: str, points: int, repeats: int) -> dict[str, Any]:
    script = pathlib.Path(__file__).with_name("_pymgrit_run.py")
    out = subprocess.run(
        [python, str(script), key, str(points), str(repeats)], capture_output=True, text=True
    )
    if out.returncode:
        raise RuntimeError(f"PyMGRIT failed:\n{out.stderr}")
    return json.loads(out.stdout.splitlines()[-1])


def agreement(ours: np.ndarray, theirs: np.ndarray) -> tuple[bool, str]:
    """Whether the histories are the same, but for rounding that the problem magnifies."""
    if len(ours) != len(theirs):
        return False, f"{len(ours)} iterations, PyMGRIT {len(theirs)}"
    known = theirs > FLOOR
    error = np.max(np.abs(ours - theirs)[known] / theirs[known])
    text = f"{len(ours)} iterations each; residuals above {FLOOR:g} differ by {error:.0e} at most"
    return bool(error < SAME), text


def against_pymgrit(case: Case, quick: bool) -> Row:
    points = case.points[quick]
    name = f"{case.name}, {points} time points"
    python = os.environ.get("JAXBRAID_BENCH_PYMGRIT")
    if not python or not os.path.exists(python):
        return Row(f"PyMGRIT / jaxbraid: {name}", "", "no PyMGRIT here", ">= 100x")
    theirs = pymgrit(python, case.key, points, 1 if quick or case.key == "arenstorf" else 3)
    step, u0, ts, args = case.make(points)
    ts = jnp.asarray(ts)

    @jax.jit
    def run(u0: Any, ts: Any) -> Any:
        sol = jaxbraid.solve(step, u0, ts, None, args, config=case.config)
        return sol.us, sol.stats

    start = time.perf_counter()
    stats = jax.block_until_ready(run(u0, ts))[1]
    first = time.perf_counter() - start
    ours = _bench.compare({"jaxbraid": lambda: run(u0, ts)}, quick)["jaxbraid"]
    history = np.asarray(stats.residuals)[: int(stats.iterations)]
    ratio = theirs["seconds"] / ours.shortest
    same, text = agreement(history, np.asarray(theirs["history"]))
    row = _bench.at_least(
        f"PyMGRIT / jaxbraid: {name}",
        {"PyMGRIT": theirs["seconds"], "jaxbraid": ours},
        ratio,
        100,
        f"{text}; first call, with compiling, {first:.1f} s; "
        f"PyMGRIT {theirs['version']}, NumPy {theirs['numpy']}",
    )
    return dataclasses.replace(row, met=row.met and same)


def against_xbraid(quick: bool) -> Row:
    nx, nt, more = (65, 1024, 2) if quick else (1025, 16384, 3)
    problem = problems.heat_1d(nx, (0.0, np.pi), t_end=2 * np.pi, nt=nt)
    ts, step, u0 = jnp.asarray(problem.ts), problem.step, problem.u0

    def run_of(iterations: int) -> Callable[[], Any]:
        config = MGRIT(levels=3, coarsening=16, cf_relax=0, max_iters=iterations)

        @jax.jit
        def run(u0: Any, ts: Any) -> Any:
            sol = jaxbraid.solve(step, u0, ts, None, problem.args, config=config, save="final")
            return sol.u, sol.stats

        return lambda: run(u0, ts)

    t = _bench.compare({"few": run_of(1), "more": run_of(1 + more)}, quick, 10.0)
    iteration = (t["more"].shortest - t["few"].shortest) / more
    case = f"XBraid (recorded) / jaxbraid: an iteration, heat 1D, {nx} points, {nt} steps"
    if quick:
        return Row(case, _bench.told({"jaxbraid": iteration}), "", ">= 5x")
    times = {"XBraid": XBRAID, "jaxbraid": iteration}
    return _bench.at_least(case, times, XBRAID / iteration, 5, "3 levels, m = 16, F-relaxation")


def rows(quick: bool) -> Iterator[Row]:
    for case in CASES[: 2 if quick else None]:
        yield against_pymgrit(case, quick)
    yield against_xbraid(quick)


if __name__ == "__main__":
    _bench.main(rows, __doc__, x64=True)
