"""The Brusselator parallel in time: three time grids, and a gradient through the solution.

An autocatalytic reaction that settles into a limit cycle, by the classical Runge-Kutta method.
After the solve, the time integral of x is differentiated with respect to the concentrations a and
b: the adjoint is solved by MGRIT too, backwards in time.

    python examples/brusselator.py
    python examples/brusselator.py --quick          # fewer steps

Writes outputs/brusselator/brusselator.png (elsewhere: --out).
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from jaxbraid import MGRIT, problems

jax.config.update("jax_enable_x64", True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5120)
    parser.add_argument("--time", type=float, default=24.0)
    parser.add_argument("--quick", action="store_true", help="640 steps up to t = 12")
    parser.add_argument("--out", type=Path, default=Path("outputs/brusselator"))
    given = parser.parse_args()
    if given.quick:
        given.steps, given.time = 640, 12.0
    return given


def main() -> None:
    given, console = options(), Console()
    problem = problems.brusselator(t_end=given.time, nt=given.steps)
    config = MGRIT(levels=3, coarsening=4, max_iters=20, tol=1e-10)
    console.print(f"{given.steps} steps on 3 levels")
    sol = problem.solve(config, progress=True, point_residuals=True)
    jax.effects_barrier()
    error = float(jnp.abs(sol.us - problem.serial()).max())
    console.print(f"largest difference from serial stepping: {error:.1e}")

    def integral(args, march):
        us = march(dataclasses.replace(problem, args=args))
        return jnp.sum(us[:-1, 0]) * given.time / given.steps

    parallel = jax.grad(integral)(problem.args, lambda p: p.solve(config).us)
    serial = jax.grad(integral)(problem.args, lambda p: p.serial())
    for name in problem.args:
        console.print(
            f"d(integral of x)/d{name}: {float(parallel[name]):.10f}, serially "
            f"{float(serial[name]):.10f}"
        )

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    x, y = np.asarray(sol.us).T
    left.plot(problem.ts, x, color="#0072b2", label="x")
    left.plot(problem.ts, y, "--", color="#d55e00", label="y")
    left.set(title="Concentrations", xlabel="t")
    left.legend()
    middle.plot(x, y, color="#0072b2")
    middle.plot(*problem.u0, "o", color="#d55e00", label="t = 0")
    middle.set(title="Limit cycle", xlabel="x", ylabel="y")
    middle.legend()
    rows = range(int(sol.stats.iterations) + 1)
    for i, shade in zip(rows, np.linspace(0.8, 0, len(rows)), strict=True):
        at = np.asarray(sol.stats.point_residuals)[i]
        right.semilogy(problem.ts[4::4], at, color=str(shade), label=f"iteration {i}")
    right.set(title="Residual at each C-point", xlabel="t", ylim=(1e-17, None))
    right.legend(fontsize="small")
    given.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out / "brusselator.png", dpi=120)
    console.print(f"picture: {given.out / 'brusselator.png'}")


if __name__ == "__main__":
    main()
