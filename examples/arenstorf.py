"""Arenstorf's orbit in 10 000 steps, parallel in time.

A satellite between earth and moon, which comes back after one period. Two time grids: a step of
Tsitouras' method of order 5 on the fine one, several of them for each coarse step of a hundred
times the length, or the coarse grid would miss the passages near the moon. The picture shows what
the iteration does: the states at the C-points after each iteration.

    python examples/arenstorf.py
    python examples/arenstorf.py --substeps 2       # cheaper coarse steps: more iterations
    python examples/arenstorf.py --quick            # 5 000 steps

Writes outputs/arenstorf/arenstorf.png (elsewhere: --out).
"""

import argparse
import time
from pathlib import Path

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from jaxbraid import MGRIT, problems

jax.config.update("jax_enable_x64", True)
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--factor", type=int, default=100, help="coarsening factor")
    parser.add_argument("--substeps", type=int, default=5, help="in a coarse step")
    parser.add_argument("--quick", action="store_true", help="5 000 steps, factor 50")
    parser.add_argument("--out", type=Path, default=Path("outputs/arenstorf"))
    given = parser.parse_args()
    if given.quick:
        given.steps, given.factor = 5000, 50
    return given


def main() -> None:
    given, console = options(), Console()
    problem = problems.arenstorf(diffrax.Tsit5(), (1, given.substeps), nt=given.steps)
    config = MGRIT(levels=2, coarsening=given.factor, cf_relax=0, max_iters=20, tol=1e-9)
    iterates = []

    def keep(iteration, residual, states):
        iterates.append((iteration, states))

    console.print(f"{given.steps} steps, {given.steps // given.factor} coarse ones")
    sol = jax.block_until_ready(problem.solve(config, callback=keep, progress=True))
    jax.effects_barrier()
    begin = time.perf_counter()
    jax.block_until_ready(problem.solve(config).us)
    console.print(f"seconds: {time.perf_counter() - begin:.2f} (with compiling)")
    error = float(jnp.abs(sol.us - problem.serial()).max())
    back = float(np.linalg.norm(sol.us[-1, :2] - problem.u0[:2]))
    console.print(f"largest difference from serial stepping: {error:.1e}")
    console.print(f"distance from the start after one period: {back:.1e}")

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    x, y = np.asarray(sol.us)[:, :2].T
    left.plot(x, y, color="#0072b2", linewidth=1, label="satellite")
    left.plot(-0.012277471, 0, "o", color="black", markersize=9, label="earth")
    left.plot(1 - 0.012277471, 0, "o", color="grey", markersize=5, label="moon")
    left.set(title=f"{given.steps} steps", xlabel="x", ylabel="y", aspect="equal")
    left.legend(loc="lower right")
    right.plot(x, y, color="lightgrey", linewidth=1)
    for (i, states), colour in zip(iterates, COLOURS, strict=False):  # early ones shine through
        size = 11 - 2 * i
        right.plot(*states[:, :2].T, ".", color=colour, markersize=size, label=f"iteration {i}")
    right.set(title="C-points", xlabel="x", aspect="equal", xlim=left.get_xlim(),
              ylim=left.get_ylim())  # fmt: skip
    right.legend(loc="center")
    given.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out / "arenstorf.png", dpi=120)
    console.print(f"picture: {given.out / 'arenstorf.png'}")


if __name__ == "__main__":
    main()
