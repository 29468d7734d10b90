"""The engine reproduces PyMGRIT's convergence histories.

The reference file holds, for 22 problems, what PyMGRIT reports: the norm after each iteration until
it falls below a tolerance, and norms of the last iterate. Same cycle, same start and same stop mean
the same numbers up to rounding, whatever the order of operations.

A history alone could agree by luck with a wrong problem, so what PyMGRIT ended with is held against
the serial solution too, which needs no engine.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxbraid
from jaxbraid import problems
from jaxbraid.problems import Problem

FILE = pathlib.Path(__file__).parent / "reference" / "pymgrit.json"
CASES = json.loads(FILE.read_text())["cases"]

# A residual is a difference of two nearly equal states, each with rounding errors of some units in
# its last place (1e-16), and no two orders of operations (batched or in turn, elimination or
# eigenvectors) make the same ones. So residuals are known to some 1e-15 of the state. The floor is
# larger than that, and well below every stopping tolerance (1e-7 to 1e-10); above it, six digits
# tell any change to the algorithm.
RESIDUAL_RTOL = 1e-6
FLOOR = 1e-12
# States are no differences: their rounding errors are relative to the state itself, however much it
# has decayed. Eight digits are few enough for any order of operations, and where little is left of
# the error, enough to tell a wrong problem. Single entries of a state may vanish, so there is a
# floor here too, relative to the norm of that state.
STATE_RTOL = 1e-8

METHODS = {
    "BE": "BE",
    "TR (trapezoidal)": "TR",
    "TR fine, BE on both coarse levels": ("TR", "BE", "BE"),
}


def time_grid(spec: dict) -> np.ndarray:
    """The time grid in the reference file's words: an interval and a number of points, or text."""
    if "t" in spec:
        return np.linspace(*spec["t"], spec["nt"])
    grids = {
        "linspace(0,4,129)": np.linspace(0, 4, 129),
        "linspace(0,5,257)": np.linspace(0, 5, 257),
    }
    return grids[spec["time_grid"]]


def build(spec: dict, **options: Any) -> Problem:
    """The problem that a case of the reference file spells out."""
    if "x" in spec:  # PyMGRIT's sines have a half wave in each unit of length
        x = tuple(spec["x"])
        half_waves = round(x[1] - x[0])
    match spec["problem"]:
        case "dahlquist":
            method = METHODS[spec["method"]]
            return problems.dahlquist(method, spec["lam"], spec["u0"], ts=time_grid(spec))
        case "heat_1d":
            return problems.heat_1d(spec["nx"], x, spec["a"], half_waves, ts=time_grid(spec))
        case "heat_1d, pairs of time points (t, t+dtau)":
            grid = spec["nx"], x, spec["a"], half_waves, spec["dtau"], spec["levels"]
            return problems.heat_1d_bdf(*grid, ts=np.linspace(0, 2, 129)[::2], **options)
        case "heat_2d":
            y = tuple(spec["y"])
            return problems.heat_2d(spec["nx"], spec["ny"], x, y, spec["a"], ts=time_grid(spec))
        case "advection_1d":
            return problems.advection_1d(spec["nx"], x, spec["c"], ts=time_grid(spec))
        case "brusselator":
            return problems.brusselator(spec["a"], spec["b"], spec["u0"], ts=time_grid(spec))
        case "allen_cahn_2d":
            model = spec["eps"], spec["nu"], spec["radius"]
            return problems.allen_cahn_2d(spec["nx"], *model, ts=time_grid(spec))
        case unknown:
            raise ValueError(f"no builder for the problem {unknown!r}")


def config(case: dict, stop: str) -> jaxbraid.MGRIT:
    """PyMGRIT's options in jaxbraid's words; stop by its tolerance, or by counting iterations."""
    iterations = len(case["residuals"])
    spec, options = case["problem"], case["options"]
    coarsening = spec.get("coarsening")
    if coarsening is None:
        coarsening = (tuple(spec["coarse_indices"]),)
    elif isinstance(coarsening, list):
        coarsening = tuple(coarsening)
    return jaxbraid.MGRIT(
        levels=spec["levels"],
        coarsening=coarsening,
        cf_relax=options["cf_iter"],
        cycle=options["cycle_type"],
        # some iterations to spare, so that stopping where PyMGRIT did is the tolerance's doing
        max_iters=iterations + 3 if stop == "tol" else iterations,
        tol=options["tol"] if stop == "tol" else 0.0,
        c_weight=options["weight_c"],
        nested_iteration=options["nested_iteration"],
        criterion={0: "residual", 1: "jump"}[options["conv_crit"]],
        temporal_norm={1: "one", 2: "two", 3: "max"}[options["t_norm"]],
        window=spec.get("at_mgrit_k"),
    )


def transfers(spec: dict) -> tuple[jaxbraid.Transfer | None, ...] | None:
    """Full weighting on the first two transfers; the third, where there is one, keeps the space."""
    if "spatial" not in spec:
        return None
    weighting, count = jaxbraid.transfers.full_weighting(), spec["levels"] - 1
    return (weighting, weighting, None)[:count]


def pair_guess(spec: dict) -> Any:
    """PyMGRIT's nested iteration for pairs of time points, as a guess for the finest level.

    In PyMGRIT each level starts nested iteration from an initial value of its own, which on the
    BDF1 levels was made by BDF1. jaxbraid has one u0 for all levels, so those below the finest are
    solved here from that other pair. F-points need no guess: the first relaxation sets them.
    """
    fine = build(spec, start="bdf1")
    coarse = jaxbraid.MGRIT(levels=spec["levels"] - 1, coarsening=2, max_iters=1)
    sol = jaxbraid.solve(fine.step[1:], fine.u0, fine.ts[::2], None, fine.args, config=coarse)
    return jax.tree.map(lambda u: np.repeat(u, 2, axis=0)[:-1], sol.us)


def flat(us: Any, i: int) -> np.ndarray:
    """The state at point i as one vector."""
    return np.concatenate([np.ravel(leaf[i]) for leaf in jax.tree.leaves(us)])


def residual_floor(problem: Problem) -> float:
    norm = np.linalg.norm(np.concatenate([np.ravel(u) for u in jax.tree.leaves(problem.u0)]))
    return FLOOR * max(1.0, float(norm))


def states(us: Any, case: dict) -> dict[str, np.ndarray]:
    """What the reference file tells of a solution, under the file's names."""
    n = len(jax.tree.leaves(us)[0])
    last, middle = flat(us, n - 1), flat(us, n // 2)
    return {
        "final_norm": np.linalg.norm(last),
        "final_first": last[: len(case["final_first"])],
        "mid_norm": np.linalg.norm(middle),
    }


# With a tolerance the iteration is a loop that ends on its data, without it a scan: two programs.
# Every history is run through the first, one of each kind through both.
BOTH = (
    "dahl_jump",
    "dahl_l3c4_F",
    "dahl_ragged",
    "dahl_irregular_coarsening",
    "heat1d_spatial_l4",
    "at_dahl_k4",
)


@pytest.mark.parametrize(
    ("name", "stop"), [(n, "tol") for n in CASES] + [(n, "max_iters") for n in BOTH]
)
def test_history(name, stop):
    case = CASES[name]
    spec, expected = case["problem"], np.asarray(case["residuals"])
    problem, iterations = build(spec), len(expected)

    sol = problem.solve(
        config(case, stop),
        transfers=transfers(spec),
        guess=pair_guess(spec) if "dtau" in spec else None,
    )

    residuals = np.asarray(sol.stats.residuals)
    assert int(sol.stats.iterations) == iterations
    assert bool(sol.stats.converged) or stop == "max_iters"
    assert np.all(np.isnan(residuals[iterations:]))
    np.testing.assert_allclose(
        residuals[:iterations], expected, rtol=RESIDUAL_RTOL, atol=residual_floor(problem)
    )
    for key, value in states(sol.us, case).items():
        norm = case["mid_norm" if key == "mid_norm" else "final_norm"]
        np.testing.assert_allclose(
            value, case[key], rtol=STATE_RTOL, atol=FLOOR * norm, err_msg=key
        )


@pytest.mark.parametrize("name", CASES)
def test_problem_is_the_references(name):
    """The serial solution is PyMGRIT's last iterate but for the error that is left in that.

    These steps don't amplify errors (Brusselator's hardly), so the error at any point is at most
    the sum of the residuals before it, and that at most their norm times the root of their number.
    """
    case = CASES[name]
    problem = build(case["problem"])
    points = len(problem.ts)
    left = np.sqrt(points) * case["residuals"][-1]
    for key, value in states(problem.serial(), case).items():
        np.testing.assert_allclose(
            value, case[key], rtol=0, atol=left + residual_floor(problem), err_msg=key
        )
