"""What the examples of steps on the host share: options, counting, the table and the picture.

All steps run on this one host, so MGRIT saves no time here; it calls the host less often, for many
states at once. Time is saved where each process has a host of its own, or a batch costs less than
its states one by one.
"""

import argparse
import itertools
import time
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxbraid
from jaxbraid.host import host_step

jax.config.update("jax_enable_x64", True)
console = Console()


def options(description, argv, out):
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: a few seconds")
    parser.add_argument("--out", type=Path, default=Path("outputs") / out, help="folder of results")
    return parser.parse_args(argv)


def march(fn, u0, ts, args=None):
    """All states by one step after another on the host, with NumPy alone: the truth."""
    us = [np.asarray(u0)]
    for t0, t1 in itertools.pairwise(ts):
        us.append(fn(np.array([t0]), np.array([t1]), us[-1][None], None, args)[0])
    return np.stack(us)


def solve_and_compare(name, fn, u0, ts, *, config, vjp=None, args=None):
    """Solve by MGRIT with steps on the host, with a line that shows progress, and serially."""
    console.rule(name)
    count = {"calls": 0, "states": 0}
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("solving")

        def counted(t0, t1, u, params, args):
            count["calls"] += 1
            count["states"] += len(t0)
            text = f"{count['calls']} calls of the host, {count['states']} states stepped"
            progress.update(task, description=text)
            return fn(t0, t1, u, params, args)

        step = host_step(counted, vjp=vjp)
        start = time.perf_counter()
        solution = jax.block_until_ready(
            jaxbraid.solve(step, u0, ts, args=args, config=config, guess="constant")
        )
        seconds = time.perf_counter() - start
        calls, states = count["calls"], count["states"]
    console.print(str(solution.stats))

    start = time.perf_counter()
    serial = march(fn, u0, ts, args)
    serial_seconds = time.perf_counter() - start
    error = np.abs(np.asarray(solution.us) - serial).max() / np.abs(serial).max()

    table = Table(
        "",
        "host calls",
        "states stepped",
        "seconds, compilation included",
        "largest relative error",
    )
    n = len(ts) - 1
    table.add_row("serial", str(n), str(n), f"{serial_seconds:.2f}", "-")
    table.add_row("MGRIT", str(calls), str(states), f"{seconds:.2f}", f"{error:.1e}")
    console.print(table)
    return solution, error


def residual_axes(axes, stats):
    """Residuals over iterations."""
    values = np.concatenate([[stats.initial_residual], stats.residuals[: int(stats.iterations)]])
    axes.semilogy(values, "o-", color="#0072B2")
    axes.set(xlabel="iteration", ylabel="residual norm", title="MGRIT")


def figure(panels):
    """A row of axes and what saves it."""
    fig = Figure(figsize=(4.4 * panels, 3.8), layout="constrained")
    return fig, fig.subplots(1, panels)


def save(fig, folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    fig.savefig(folder / name, dpi=150)
    console.print(f"picture: {folder / name}")


def by_step_size(t0, t1):
    """The step sizes in a batch, equal up to rounding, and the entries that have each of them."""
    sizes = np.array([float(f"{dt:.12g}") for dt in t1 - t0])
    for dt in np.unique(sizes):
        yield dt, np.flatnonzero(sizes == dt)


def square_image(fig, axes, u, t):
    """A state on the unit square, given row by row."""
    n = round(len(u) ** 0.5)
    image = axes.imshow(np.asarray(u).reshape(n, n).T, origin="lower", extent=(0, 1, 0, 1))
    fig.colorbar(image, ax=axes, label="u")
    axes.set(title=f"u at t = {t:g}", xlabel="x", ylabel="y")
