"""Learn y = sin(x) with a deep network of width 2, on one depth and on several.

An opening (1 -> 2), a stack of layers x <- x + dt tanh(W_n x + b_n), a closing (2 -> 1). The same
network is trained from the same weights in three ways: on its full depth only; by nested iteration
(shallow networks first, each one's weights and optimiser state prolonged to the next); by MG/OPT
(every step is a V-cycle over networks of several depths). Work is counted in evaluations of a
layer, forward or backward; the loss is that of the full depth. Every way may choose the best of the
same learning rates. Last, the full depth is trained layer-parallel, with two iterations forward and
one backward, as against serially.

    python examples/sine.py                     # 64 layers
    python examples/sine.py --target 1e-4
    python examples/sine.py --quick             # one seed, one learning rate

Writes outputs/sine/sine.png (elsewhere: --out).
"""

import argparse
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxbraid import MGRIT, parallel_ode_net
from jaxbraid.training import MGOPT, nested_iteration, smooth_layers

SERIAL = MGRIT(levels=1)
LAYERED = {"opening": False, "stack": True, "closing": False}
COLOURS = {"full depth": "#000000", "nested iteration": "#0072b2", "MG/OPT": "#d55e00"}
X = jnp.linspace(-jnp.pi, jnp.pi, 64)[:, None]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64, help="a multiple of 16")
    parser.add_argument("--steps", type=int, default=800, help="on the full depth only")
    parser.add_argument("--target", type=float, default=1e-3, help="the loss to reach")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1])
    parser.add_argument("--quick", action="store_true", help="one seed, one learning rate")
    parser.add_argument("--out", type=Path, default=Path("outputs/sine"))
    given = parser.parse_args()
    if given.quick:
        given.steps, given.seeds, given.rates = 400, 1, [0.03]
    if given.layers % 16:
        parser.error(f"--layers {given.layers}: must be a multiple of 16")
    return given


def weights(seed, layers):
    """All layers are the same at first, so networks of all depths start from the same flow."""
    keys = jax.random.split(jax.random.key(seed), 3)

    def layer(key):
        return {"w": 0.3 * jax.random.normal(key, (2, 2)), "b": jnp.zeros(2)}

    return {
        "opening": {"w": jax.random.normal(keys[0], (1, 2)), "b": jnp.zeros(2)},
        "stack": smooth_layers(keys[1], layer, layers, knots=1),
        "closing": {"w": jax.random.normal(keys[2], (2, 1)) / 2, "b": jnp.zeros(1)},
    }


def network(params, x, forward=SERIAL, adjoint=SERIAL):
    def affine(p, x):
        return x @ p["w"] + p["b"]

    net = parallel_ode_net(
        lambda p, x: jnp.tanh(affine(p, x)),
        params["stack"],
        t_final=5.0,
        forward=forward,
        adjoint=adjoint,
    )
    return affine(params["closing"], net(affine(params["opening"], x)))


def loss(params, batch, **mgrit):
    x, y = batch
    return jnp.mean((network(params, x, **mgrit) - y) ** 2)


def full_depth(given, seed, rate, loss=loss):
    """Weights, and the loss on the full depth after so much work."""
    return nested(given, seed, rate, [(given.layers, given.steps)], loss)


def nested(given, seed, rate, stages=None, loss=loss):
    n = given.layers
    stages = stages or [(n // 16, 150), (n // 4, 100), (n, given.steps // 2)]
    run = nested_iteration(
        loss,
        weights(seed, stages[0][0]),
        optax.adam(rate),
        itertools.repeat((X, jnp.sin(X))),
        stages,
        order="linear",
        layered=LAYERED,
    )
    full = run.layers == n
    return run.params, run.losses[full], (run.work - 2 * run.layers)[full]


@functools.cache
def mgopt(rate):
    return MGOPT(loss, optax.adam(rate), levels=3, coarsening=4, coarse=20, layered=LAYERED)


def v_cycles(given, seed, rate):
    method, params, infos = mgopt(rate), weights(seed, given.layers), []
    state = method.init(params)
    for _ in range(given.steps // 10):
        params, state, info = method.step(params, state, (X, jnp.sin(X)))
        infos.append(info)
    losses, work = (np.array([getattr(i, name) for i in infos]) for name in ("loss", "work"))
    return params, losses, np.cumsum(work) - work


def work_to(target, run):
    """Work until the loss is reached; infinite if it isn't."""
    _, losses, work = run
    reached = np.flatnonzero(losses <= target)
    return work[reached[0]] if len(reached) else np.inf


WAYS = {"full depth": full_depth, "nested iteration": nested, "MG/OPT": v_cycles}


def train_all(given, console):
    """For each way the best learning rate, by the mean work over all seeds, and its runs."""
    settings = list(itertools.product(WAYS, given.rates, range(given.seeds)))
    runs = {
        (way, rate, seed): WAYS[way](given, seed, rate)
        for way, rate, seed in track(settings, "training", console=console)
    }

    def work(way, rate):
        return np.mean([work_to(given.target, runs[way, rate, s]) for s in range(given.seeds)])

    best = {way: min(given.rates, key=functools.partial(work, way)) for way in WAYS}
    return best, {way: [runs[way, best[way], s] for s in range(given.seeds)] for way in WAYS}


def parity(given, rate, serial):
    """Root mean square errors after serial and after layer-parallel training, in per cent."""
    forward = MGRIT(levels=2, coarsening=4, cf_relax=0, max_iters=2, final_relax="FC")
    adjoint = MGRIT(levels=2, coarsening=4, cf_relax=0, max_iters=1, final_relax="FC")
    inexact = functools.partial(loss, forward=forward, adjoint=adjoint)
    parallel = full_depth(given, 0, rate, inexact)
    return [100 * float(loss(p, (X, jnp.sin(X)))) ** 0.5 for p in (serial[0], parallel[0])]


def draw(path, given, runs):
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.axhline(given.target, color="grey", linestyle=":", label="target")
    right.axhline(0, color="lightgrey")
    for (way, colour), style in zip(COLOURS.items(), ("-", "--", "-."), strict=True):
        for seed, (_, losses, work) in enumerate(runs[way]):
            left.loglog(
                work[work > 0],
                losses[work > 0],
                style,
                color=colour,
                alpha=1.0 if seed == 0 else 0.35,
                linewidth=1.8 if seed == 0 else 1.0,
                label=way if seed == 0 else None,
            )
        error = network(runs[way][0][0], X) - jnp.sin(X)
        right.plot(X, error, style, color=colour, label=way)
    left.set(
        title=f"{given.layers} layers of width 2 (faint: other seeds)",
        xlabel="work: layer evaluations",
        ylabel="loss on the full depth",
    )
    right.set(title="error after training", xlabel="x", ylabel="network - sin x")
    left.legend(), right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    given, console = options(), Console()
    best, runs = train_all(given, console)
    table = Table(title=f"work to a loss of {given.target:g}, {given.layers} layers")
    for column in ("training", "rate", "work of each seed", "mean", "of full depth"):
        table.add_column(column)
    works = {way: [work_to(given.target, run) for run in runs[way]] for way in WAYS}
    for way, work in works.items():
        part = np.mean(work) / np.mean(works["full depth"])
        each = " ".join(f"{w:.0f}" for w in work)
        table.add_row(way, f"{best[way]:g}", each, f"{np.mean(work):.0f}", f"{part:.2f}")
    console.print(table)
    serial, parallel = parity(given, best["full depth"], runs["full depth"][0])
    console.print(f"error after serial training: {serial:.2f} % of the amplitude")
    console.print(f"error after layer-parallel training: {parallel:.2f} % of the amplitude")
    draw(given.out / "sine.png", given, runs)
    console.print(f"picture: {given.out / 'sine.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
