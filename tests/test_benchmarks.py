"""The harness of the benchmarks: turns, verdicts, the written results. No time is asserted."""

from __future__ import annotations

import datetime
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from benchmarks import __main__ as runner
from benchmarks import _bench, overhead
from benchmarks._bench import Row, Timed
from benchmarks._rk45 import rk45_step
from benchmarks.evaluations import counted, cycle_formula
from jaxbraid import MGRIT


def test_programs_take_turns_and_the_shortest_time_counts(monkeypatch):
    """Two calls each that are not timed, then turns; `slow` takes three seconds, then two."""
    calls, clock = [], [0]
    ticks = {"fast": iter([9, 9, 1, 1, 1]), "slow": iter([9, 9, 3, 2, 3])}

    def run(name):
        def call():
            calls.append(name)
            clock[0] += next(ticks[name])

        return call

    monkeypatch.setattr(_bench.time, "perf_counter", lambda: clock[0])
    t = _bench.compare({"fast": run("fast"), "slow": run("slow")}, budget=0.0)
    assert calls == ["fast", "fast", "slow", "slow"] + ["fast", "slow"] * 3
    assert t == {"fast": Timed(1, 1), "slow": Timed(2, 3)}


@pytest.mark.parametrize(("ratio", "below", "above"), [(1.0, True, False), (1.5, False, True)])
def test_a_row_says_whether_its_goal_is_met(ratio, below, above):
    times = {"ours": Timed(2e-3, 3e-3), "theirs": 1.5}
    assert _bench.at_most("a", times, ratio, 1.2).met is below
    row = _bench.at_least("a", times, ratio, 1.2)
    assert row.met is above
    assert (row.times, row.goal) == ("ours 2 ms, theirs 1.5 s", ">= 1.2x")
    (quick,) = _bench.measured(lambda quick: iter([row]), True)
    assert quick.met is None and quick.measured == row.measured


def test_results_are_told_goal_by_goal(monkeypatch):
    """Rows come from a process of the benchmark's own; one that stops is a row, too."""
    code = (
        "import sys; sys.path.insert(0, '.'); import dataclasses, json;"
        "from benchmarks._bench import Row;"
        "print(json.dumps(dataclasses.asdict(Row('case', '1 s', '2x', '>= 3x', False, 'why'))));"
        "sys.exit('no memory')"
    )
    real = runner.subprocess.Popen
    monkeypatch.setattr(
        runner.subprocess,
        "Popen",
        lambda _, **options: real([sys.executable, "-c", code], **options),
    )
    rows = list(runner.rows_of("overhead", False))
    assert rows[0] == Row("case", "1 s", "2x", ">= 3x", False, "why")
    assert rows[1].met is False and rows[1].note == "no memory"
    monkeypatch.setattr(runner, "PATIENCE", 0.1)
    code = "import time; time.sleep(60)"
    (row,) = runner.rows_of("overhead", False)
    assert row.case == "overhead stopped" and row.met is False
    monkeypatch.undo()
    rows.append(Row("other", "", "1x", "", None))
    start = datetime.datetime(2030, 1, 2, tzinfo=datetime.UTC)
    text = runner.markdown([runner.Result("overhead", rows, 60.0)], start, False)
    assert "2030-01-02" in text and "| 3 | 0 of 2 |" in text
    assert "| case | 1 s | 2x | >= 3x | **no** |" in text
    assert "| other |  | 1x |  |  |" in text
    assert "- case: why" in text


def test_a_cycle_is_counted_as_the_formula_says():
    few, more = (counted(MGRIT(cf_relax=0, max_iters=n), "forward") for n in (1, 2))
    assert [b - a for a, b in zip(few, more, strict=True)] == cycle_formula(2, 0) == [64, 32]


def test_the_adaptive_step_is_scipys():
    """Steps of several lengths, through which SciPy takes one step or many: the same numbers."""
    from scipy.integrate import solve_ivp

    def field(u, args):
        return jnp.stack([u[1], args * (1 - u[0] ** 2) * u[1] - u[0]])

    for length in (0.01, 1.0, 12.0):
        u0 = np.array([2.0, 0.1])
        sol = solve_ivp(
            lambda t, u: np.array([u[1], 5.0 * (1 - u[0] ** 2) * u[1] - u[0]]),
            (0.5, 0.5 + length),
            u0,
        )
        u = rk45_step(field)(jnp.float64(0.5), jnp.float64(0.5 + length), jnp.array(u0), None, 5.0)
        # rounding errors, magnified by the jumps of the solution
        np.testing.assert_allclose(u, sol.y[:, -1], rtol=1e-9)


@pytest.mark.parametrize("nu", [0, 1])
def test_steps_alone_are_the_same_in_every_way(nu):
    """A cycle's steps of u' = p u, worked out by hand, and a row made of them."""
    own = np.linspace(-0.1, 0.2, 8)

    def step(p, dt, u):
        return u * (1 + p * dt)

    def solve(config, own, u0):
        def by_time(t0, t1, u, p, args):
            return step(p, t1 - t0, u)

        return jaxbraid.solve(by_time, u0, np.arange(9.0), own, config=config).u

    case = overhead.Case("tiny", step, own, 1.0, np.array([1.0, 2.0]), 4, nu, solve)
    us = np.tile(case.u0, (2, 1))
    for _ in range(1 + nu):
        us *= np.prod(1 + own.reshape(2, 4), axis=1)[:, None]
    us *= 1 + 4 * own[::4, None]
    truth = (us + us[0] * np.cumprod(1 + 4 * own[::4])[:, None]) / 2
    for way in overhead.WAYS:
        got = np.asarray(overhead.alone_run(case, way, 1)())
        np.testing.assert_allclose(got.T if way == "last" else got, truth, rtol=1e-12)
    row = overhead.measured(case, True)
    assert row.case == "tiny" and row.goal == "<= 1.2x" and "cycle" in row.times
