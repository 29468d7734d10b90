"""Adaptive inexactness: few MGRIT iterations stall near convergence, a control notices.

A network of 64 layers, rough in depth, learns a sine by full-batch Adam, three times from the same
weights: with gradients of 2 forward and 1 adjoint iterations all the time; with a control that
compares the gradient with that of twice the iterations now and then, and raises relaxation and
iterations when the error is over a tolerance; and with exact gradients.

    python examples/inexact.py
    python examples/inexact.py --tol 0.1          # a stricter control

The picture inexact.png shows the true loss and gradient, computed serially from the weights.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxbraid import MGRIT
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training import InexactnessControl, set_solvers, solver_ladder

NAMES = {"fixed": "2 forward, 1 adjoint iterations", "controlled": "controlled", "serial": "exact"}
EXACT = MGRIT(levels=1)


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Network(nnx.Module):
    def __init__(self, layers, width):
        rngs = nnx.Rngs(0)
        self.opening = nnx.Linear(1, width, kernel_init=nnx.initializers.normal(2.0), rngs=rngs)
        self.stack = ParallelStack(lambda r: Block(width, r), layers, rngs=rngs, t_final=2.0)
        self.closing = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.closing(self.stack(jnp.tanh(self.opening(x))))


@functools.partial(jax.jit, static_argnames="graph")
def evaluate(graph, weights, x, y):
    """Loss and gradient."""
    return jax.value_and_grad(lambda weights: jnp.mean((nnx.merge(graph, weights)(x) - y) ** 2))(
        weights
    )


@functools.partial(jax.jit, static_argnames=("graph", "optimizer", "steps"))
def train(graph, optimizer, steps, state, x, y):
    """So many full-batch steps; `state` is (weights, optimizer's state)."""

    def step(state, _):
        weights, opt_state = state
        _, gradient = evaluate(graph, weights, x, y)
        updates, opt_state = optimizer.update(gradient, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), None

    return jax.lax.scan(step, state, length=steps)[0]


def run(control, model, optimizer, given, data, progress):
    """Trains; the control's state and a record (step, true loss, true gradient's norm)."""

    def graph(solvers):  # static, as options of MGRIT are
        return nnx.graphdef(set_solvers(model, *solvers))

    weights = nnx.state(model)
    state = weights, optimizer.init(weights)
    decided, records = control.init(), []
    for step in progress(range(0, given.steps, given.every)):
        while control.due(decided, step):
            estimate = control.estimate(
                decided,
                lambda s: evaluate(graph(s), state[0], *data)[1],  # noqa: B023
            )
            decided, _ = control.update(decided, step, estimate)
        state = train(graph(control.solvers(decided)), optimizer, given.every, state, *data)
        loss, gradient = evaluate(graph((EXACT, EXACT)), state[0], *data)
        records.append((step + given.every, float(loss), float(optax.tree.norm(gradient))))
    return decided, np.array(records)


def draw(path, records, decisions):
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    styles = {
        "fixed": {"color": "#D55E00", "ls": "-"},
        "controlled": {"color": "#0072B2", "lw": 3, "alpha": 0.7},
        "serial": {"color": "black", "ls": "--", "lw": 1.2},
    }
    titles = "True loss", "Norm of the true gradient"
    both = figure.subplots(1, 2)
    for column, (axes, title) in enumerate(zip(both, titles, strict=True), 1):
        for mode, record in records.items():
            axes.plot(record[:, 0], record[:, column], label=NAMES[mode], **styles[mode])
        for d in (d for d in decisions if d.action != "keep"):
            axes.axvline(d.step, color="#0072B2", ls=":", lw=1)
        axes.set(title=title, xlabel="step (dotted: the control raises)", yscale="log")
        axes.grid(alpha=0.3)
    both[0].legend()
    figure.savefig(path, dpi=150)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--every", type=int, default=100, help="steps between checks")
    parser.add_argument("--tol", type=float, default=0.3, help="largest relative error")
    parser.add_argument("--quick", action="store_true", help="32 layers, 1500 steps")
    parser.add_argument("--out", type=Path, default=Path("outputs/inexact"))
    given = parser.parse_args()
    if given.quick:
        given.layers, given.steps = 32, 1500
    return given


def main():
    given, console = parse_options(), Console()
    x = jnp.linspace(-1, 1, 64)[:, None]
    model = Network(given.layers, width=6)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, given.steps, 0.01))
    data = x, 0.8 * jnp.sin(3 * jnp.pi * x)

    mgrit = functools.partial(MGRIT, coarsening=4, cf_relax=0, final_relax="FC")
    ladder = solver_ladder(mgrit(max_iters=2), mgrit(max_iters=1), layers=given.layers)
    ladders = {"fixed": ladder[:1], "controlled": ladder, "serial": ladder[-1:]}
    controls = {
        mode: InexactnessControl(rungs, tol=given.tol, every=given.every)
        for mode, rungs in ladders.items()
    }
    with Progress(console=console) as bar:
        runs = {}
        for mode, control in controls.items():
            track = functools.partial(bar.track, description=f"{mode:10}")
            runs[mode] = run(control, model, optimizer, given, data, track)
    console.print(controls["controlled"].table(runs["controlled"][0], keeps=False))
    table = Table("gradients", "true loss", "norm of the true gradient", title="At the end")
    for mode, (_, record) in runs.items():
        table.add_row(NAMES[mode], *(f"{value:.1e}" for value in record[-1, 1:]))
    console.print(table)

    given.out.mkdir(parents=True, exist_ok=True)
    records = {mode: record for mode, (_, record) in runs.items()}
    draw(given.out / "inexact.png", records, runs["controlled"][0].decisions)
    console.print(f"picture: {given.out / 'inexact.png'}")


if __name__ == "__main__":
    main()
