"""A character-level language model: a decoder-only transformer, trained in parallel over layers.

The text is Python's own reference, which ships with it (`pydoc_data.topics`, some 480 000
characters); the last tenth is for validation. The first and the last two layers are computed
exactly, those between them by MGRIT with two iterations forward and one backward, which makes the
gradient inexact. The same network is trained serially, too, from the same weights on the same
batches. The picture shows both trainings, and a model of pairs of characters for comparison.

    python examples/language_model.py
    python examples/language_model.py --buffers 0 0     # MGRIT for all layers
    python examples/language_model.py --quick           # a small network, a few steps

Writes outputs/language_model/language_model.png (elsewhere: --out).
"""

import argparse
import functools
import pydoc_data.topics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxbraid import MGRIT
from jaxbraid.nn import BufferedStack, TransformerBlock

NAMES = {"parallel": "layer-parallel", "serial": "serial"}


class LanguageModel(nnx.Module):
    """Characters [batch, length] to logits of the one after each, [batch, length, characters]."""

    def __init__(self, given, characters, mesh, rngs):
        config = functools.partial(
            MGRIT, levels=2, coarsening=given.factor, cf_relax=0, final_relax="FC"
        )
        small = nnx.initializers.normal(0.1)
        self.embedding = nnx.Embed(characters, given.width, embedding_init=small, rngs=rngs)
        self.position = nnx.Param(small(rngs.params(), (given.length, given.width)))
        self.stack = BufferedStack(
            lambda rngs: TransformerBlock(given.width, given.heads, causal=True, rngs=rngs),
            given.layers,
            buffers=tuple(given.buffers),
            rngs=rngs,
            t_final=given.t_final,
            smooth_init=True,  # coarse levels leave out layers, so neighbours should be alike
            forward=config(max_iters=2),
            adjoint=config(max_iters=1),
            mesh=mesh,
        )
        self.norm = nnx.LayerNorm(given.width, rngs=rngs)
        self.head = nnx.Linear(given.width, characters, rngs=rngs)

    def __call__(self, text):
        x = self.embedding(text) + self.position[: text.shape[1]]
        return self.head(self.norm(self.stack(x)))


def load_text():
    """The text as numbers of its characters, for training and validation, and the characters."""
    topics = pydoc_data.topics.topics
    text = "".join(topics[name] for name in sorted(topics))
    characters, numbers = np.unique(list(text), return_inverse=True)
    end = len(numbers) * 9 // 10
    return numbers[:end], numbers[end:], characters


def windows(text, starts, length):
    """Pieces of `length` characters and the next one."""
    return text[starts[..., None] + np.arange(length + 1)].astype(np.int32)


def losses(model, pieces):
    """Cross-entropy of every character given those before it, and which were guessed."""
    logits, targets = model(pieces[:, :-1]), pieces[:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return loss, logits.argmax(-1) == targets


@functools.partial(jax.jit, static_argnames=("graph", "optimizer"))
def train(graph, optimizer, state, batches):
    """One step of Optax for each of `batches`; `state` is (weights, optimizer's state)."""

    def step(state, pieces):
        weights, moments = state
        gradient = jax.grad(lambda w: losses(nnx.merge(graph, w), pieces)[0].mean())(weights)
        updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), None

    return jax.lax.scan(step, state, batches)[0]


@functools.partial(jax.jit, static_argnames="graph")
def validate(graph, weights, pieces):
    """Bits per character and the fraction of them that are guessed."""
    loss, right = losses(nnx.merge(graph, weights), pieces)
    return loss.mean() / jnp.log(2), right.mean()


@functools.partial(jax.jit, static_argnames=("graph", "count"))
def generate(graph, weights, text, count):
    """`count` characters that go on with `text`, drawn one after another."""
    model = nnx.merge(graph, weights)

    def draw(text, key):
        new = jax.random.categorical(key, model(text[None])[0, -1] / 0.6)
        return jnp.append(text[1:], new), new

    return jax.lax.scan(draw, text, jax.random.split(jax.random.key(0), count))[1]


def pairs(training, validation, characters):
    """Bits per character of a model that knows the character before."""
    counts = np.ones((characters, characters))
    np.add.at(counts, (training[:-1], training[1:]), 1)
    p = counts / counts.sum(1, keepdims=True)
    return -np.log2(p[validation[:-1], validation[1:]]).mean()


def run(given, graphs, weights, training, validation, devices):
    """Trains both networks; returns weights and, by mode, (steps, bits, accuracy, seconds)."""
    rng = np.random.default_rng(given.seed)
    schedule = optax.warmup_cosine_decay_schedule(0, given.rate, given.steps // 10, given.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    start = weights, optimizer.init(weights)
    states = {mode: jax.device_put(start, devices[mode]) for mode in NAMES}
    starts = np.arange(0, len(validation) - given.length - 1, given.length)
    held_out = windows(validation, rng.permutation(starts)[: given.validate], given.length)
    records = {mode: [] for mode in NAMES}
    with Progress() as progress:
        bar = progress.add_task("training", total=given.steps)
        for done in range(given.every, given.steps + 1, given.every):
            shape = given.every, given.batch
            starts = rng.integers(len(training) - given.length, size=shape)
            batches = windows(training, starts, given.length)
            for mode in NAMES:
                begin = time.perf_counter()
                own = jax.device_put(batches, devices[mode])
                states[mode] = jax.block_until_ready(
                    train(graphs[mode], optimizer, states[mode], own)
                )
                seconds = time.perf_counter() - begin
                weights = jax.device_get(states[mode][0])
                bits, accuracy = map(float, validate(graphs["serial"], weights, held_out))
                records[mode].append((done, bits, accuracy, seconds))
            both = ", ".join(f"{NAMES[mode]} {records[mode][-1][1]:.3f}" for mode in NAMES)
            progress.update(bar, completed=done, description=f"bits per character: {both}")
    return jax.device_get(states["parallel"][0]), {m: np.array(r) for m, r in records.items()}


def picture(path, records, baseline):
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = {"parallel": {"color": "#0072b2", "lw": 5, "alpha": 0.5}}
    styles["serial"] = {"color": "black", "ls": "--"}
    for mode, style in styles.items():
        steps, bits, accuracy, _ = records[mode].T
        left.plot(steps, bits, label=NAMES[mode], **style)
        right.plot(steps, 100 * accuracy, label=NAMES[mode], **style)
    left.axhline(baseline, color="#d55e00", ls=":", label="pairs of characters")
    left.set(title="Validation loss", xlabel="step", ylabel="bits per character")
    right.set(title="Next character guessed", xlabel="step", ylabel="%")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = functools.partial(parser.add_argument, type=int, metavar="N")
    add("--layers", default=20, help="all layers (%(default)s)")
    add("--buffers", default=[2, 2], nargs=2, help="exact layers at the ends (2 2)")
    add("--width", default=32, help="features of a character (%(default)s)")
    add("--heads", default=2, help="attention heads (%(default)s)")
    add("--length", default=64, help="characters that the model sees (%(default)s)")
    add("--factor", default=4, help="coarsening factor (%(default)s)")
    add("--t-final", default=5.0, type=float, help="sum of the layers' steps (%(default)s)")
    add("--devices", default=2, help="that the layers are split over (%(default)s)")
    add("--batch", default=16, help="pieces in a batch (%(default)s)")
    add("--steps", default=300, help="of training (%(default)s)")
    add("--every", default=25, help="steps between validations (%(default)s)")
    add("--validate", default=128, help="pieces to validate on (%(default)s)")
    add("--rate", default=5e-3, type=float, help="learning rate (%(default)s)")
    add("--seed", default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small network, a few steps")
    parser.add_argument("--out", type=Path, default=Path("outputs/language_model"))
    given = parser.parse_args()
    if given.quick:
        given.layers, given.width, given.length, given.t_final = 12, 16, 16, 3.0
        given.steps, given.batch, given.validate = 50, 8, 64
    return given


def main():
    given, console = options(), Console()
    jax.config.update("jax_num_cpu_devices", given.devices)
    mesh = Mesh(np.array(jax.devices()[: given.devices]), ("layer",))
    training, validation, characters = load_text()
    model = LanguageModel(given, len(characters), mesh, nnx.Rngs(given.seed))
    parallel, weights = nnx.split(model)
    model.set_attributes(serial=True)
    graphs = {"parallel": parallel, "serial": nnx.graphdef(model)}
    devices = {"parallel": NamedSharding(mesh, PartitionSpec()), "serial": jax.devices()[0]}
    console.print(f"{len(training)} characters, {given.layers} layers on {given.devices} devices")
    weights, records = run(given, graphs, jax.device_get(weights), training, validation, devices)

    table = Table("validation", *NAMES.values(), title="Language model")
    _, bits, accuracy, _ = zip(*(records[mode][-1] for mode in NAMES), strict=True)
    table.add_row("bits per character", *(f"{b:.3f}" for b in bits))
    table.add_row("accuracy", *(f"{a:.2%}" for a in accuracy))
    seconds = (np.median(records[mode][:, 3]) / given.every for mode in NAMES)
    table.add_row("milliseconds a step (median)", *(f"{1000 * s:.0f}" for s in seconds))
    console.print(table)
    baseline = pairs(training, validation, len(characters))
    console.print(f"pairs of characters: {baseline:.3f} bits per character")
    prompt = validation[: given.length].astype(np.int32)
    new = np.asarray(generate(graphs["serial"], weights, prompt, 300))
    console.rule("text of the layer-parallel network")
    console.print("".join(characters[new]), markup=False, highlight=False)
    console.rule()
    given.out.mkdir(parents=True, exist_ok=True)
    picture(given.out / "language_model.png", records, baseline)
    console.print(f"picture: {given.out / 'language_model.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
