"""A chaotic system parallel in time: plain MGRIT stalls, the Delta correction converges.

The equations of Lorenz over many Lyapunov times (1/0.9 time units each), by the classical
Runge-Kutta method on two time grids. A perturbation of the coarse grid's making grows by e in each
Lyapunov time, so a coarse propagator that only approximates the fine one soon corrects towards
another trajectory. The Delta correction gives it the fine one's derivative as well: in all three
directions (Newton's method), or along one or two vectors that follow the fastest growth.

    python examples/lorenz.py                    # 27 Lyapunov times
    python examples/lorenz.py --time 15          # 13 of them: plain MGRIT gets there, too
    python examples/lorenz.py --quick            # a short run

Writes outputs/lorenz/lorenz.png (elsewhere: --out).
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jaxbraid import MGRIT, problems

jax.config.update("jax_enable_x64", True)

DELTAS = {"plain": None, "one vector": 1, "two vectors": 2, "all directions": "full"}
LYAPUNOV_TIME = 1 / 0.906
COLOURS = ("#000000", "#0072b2", "#009e73", "#d55e00")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", type=float, default=30.0, help="length of the time interval")
    parser.add_argument("--dt", type=float, default=1 / 400, help="length of a fine step, about")
    parser.add_argument("--factor", type=int, default=16, help="coarsening factor")
    parser.add_argument("--iterations", type=int, default=30, help="at most so many")
    parser.add_argument("--quick", action="store_true", help="8 time units, 8 iterations")
    parser.add_argument("--out", type=Path, default=Path("outputs/lorenz"))
    given = parser.parse_args()
    if given.quick:
        given.time, given.iterations = 8.0, 8
    return given


def main() -> None:
    given, console = options(), Console()
    nt = round(given.time / given.dt / given.factor) * given.factor
    problem = problems.lorenz_63(t_end=given.time, nt=nt)
    truth = problem.serial()
    console.print(f"{nt} steps, {given.time / LYAPUNOV_TIME:.0f} Lyapunov times")

    table = Table("coarse propagator", "iterations", "residual", "error", "exponents", "seconds")
    solutions = {}
    for name, delta in DELTAS.items():
        config = MGRIT(
            levels=2, coarsening=given.factor, max_iters=given.iterations, tol=1e-8, delta=delta
        )
        begin = time.perf_counter()
        sol = solutions[name] = jax.block_until_ready(problem.solve(config))
        seconds = time.perf_counter() - begin
        norms = np.append(sol.stats.initial_residual, sol.stats.residuals)
        error = float(jnp.abs(sol.us - truth).max())
        exponents = "" if sol.lyapunov is None else "  ".join(f"{x:.2f}" for x in sol.lyapunov)
        table.add_row(
            name,
            f"{int(sol.stats.iterations)}{'' if sol.stats.converged else ' (not there)'}",
            f"{norms[int(sol.stats.iterations)]:.1e}",
            f"{error:.1e}",
            exponents,
            f"{seconds:.1f}",
        )
        console.print(f"{name}: done")
    console.print(table)
    console.print(
        "error: largest difference from serial stepping; rounding errors alone grow to about "
        f"{1e-16 * np.exp(given.time / LYAPUNOV_TIME):.0e}. seconds: with compiling."
    )

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, sol), colour, mark in zip(solutions.items(), COLOURS, "osD^", strict=True):
        norms = np.append(sol.stats.initial_residual, sol.stats.residuals)
        left.semilogy(norms, color=colour, marker=mark, markersize=4, label=name)
    left.axhline(1e-8, color="grey", linestyle=":", label="tolerance")
    left.set(xlabel="iteration", ylabel="residual (2-norm over the C-points)",
             title="Convergence by coarse propagator")  # fmt: skip
    left.legend()
    x, _, z = np.asarray(solutions["all directions"].us).T
    right.plot(x, z, color=COLOURS[1], linewidth=0.5)
    right.set(xlabel="x", ylabel="z", title=f"The trajectory up to t = {given.time:g}")
    given.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out / "lorenz.png", dpi=120)
    console.print(f"picture: {given.out / 'lorenz.png'}")


if __name__ == "__main__":
    main()
