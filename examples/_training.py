"""What the training examples have in common: one network, trained layer-parallel and serially.

An example makes an NNX model with a `ParallelStack` (or several), a loss and a score; `compare`
trains the model twice, from the same weights and on the same batches: with a few MGRIT iterations
on a mesh of layer x batch devices, and exactly, in sequence, on one.
"""

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from jaxbraid import MGRIT

NAMES = {"parallel": "layer-parallel", "serial": "serial"}
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # told apart by the colour-blind, too


def make_parser(doc, name, **defaults):
    """The options that all examples have; `defaults` are their values in the full setting."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    add = functools.partial(parser.add_argument, metavar="N", type=positive)
    add("--layers", default=32, help="layers of the stack (%(default)s)")
    add("--levels", default=2, help="MGRIT levels; 1 is sequential (%(default)s)")
    add("--factor", default=4, help="coarsening factor (%(default)s)")
    add("--iterations", default=2, help="forward MGRIT iterations (%(default)s)")
    add("--adjoint-iterations", default=1, help="adjoint MGRIT iterations (%(default)s)")
    add("--mesh", default=[4, 2], type=mesh_shape, metavar="LxB", help="layer x batch axes (4x2)")
    add("--batch", default=128, help="samples in a batch (%(default)s)")
    add("--epochs", default=10, help="(%(default)s)")
    add("--rate", default=5e-3, type=float, help="highest learning rate (%(default)s)")
    add("--seed", default=0, type=int, help="of weights, data and batches (%(default)s)")
    add("--out", default=Path(f"outputs/{name}"), type=Path, metavar="DIR", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short run, as the tests do it")
    parser.set_defaults(**defaults)
    return parser


def parse(parser, **quick):
    """The options; with --quick, `quick` takes the place of the defaults."""
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
    options = parser.parse_args()
    if options.batch % options.mesh[1]:
        parser.error(f"--batch {options.batch}: must be a multiple of the batch axis of --mesh")
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def positive(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def mesh_shape(text):
    layer, batch = text.split("x")
    return [positive(layer), positive(batch)]


def make_mesh(options):
    """A mesh of layer x batch devices: virtual ones on the CPU, unless XLA_FLAGS has its own."""
    count = int(np.prod(options.mesh))
    # XLA's threads: those that wait for another device's message must leave some for its products.
    os.environ.setdefault("NPROC", str(2 * count))
    jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()[:count]
    if len(devices) < count:
        raise SystemExit(f"--mesh: needs {count} devices; XLA_FLAGS makes {len(devices)} only.")
    return Mesh(np.array(devices).reshape(options.mesh), ("layer", "batch"))


def parallel_options(options, mesh, cf_relax=None):
    """Arguments of a stack: unless told, F-relaxation on the finest level, FCF on coarser ones."""
    if cf_relax is None:
        cf_relax = tuple(int(level > 0) for level in range(options.levels - 1)) or 0
    mgrit = functools.partial(
        MGRIT, options.levels, options.factor, cf_relax=cf_relax, final_relax="FC"
    )
    return {
        "forward": mgrit(max_iters=options.iterations),
        "adjoint": mgrit(max_iters=options.adjoint_iterations),
        "mesh": mesh,
        "batch_axis": "batch",
    }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Trained models by mode (both evaluate serially), and a record of each epoch."""

    models: dict[str, nnx.Module]
    records: dict[str, list[dict[str, float]]]

    @property
    def names(self) -> dict[str, str]:
        """Of the modes, as they are shown."""
        return {mode: NAMES.get(mode, mode) for mode in self.records}


@functools.partial(jax.jit, static_argnames=("graph", "optimizer", "loss"))
def train_step(graph, optimizer, loss, state, batch):
    """One Optax step; `state` is (parameters, other variables, optimiser's state)."""
    params, others, opt_state = state

    def value(params):
        model = nnx.merge(graph, params, others, copy=True)
        out = loss(model, *batch)
        return out, nnx.state(model, nnx.Param, ...)[1]

    (out, others), gradient = jax.value_and_grad(value, has_aux=True)(params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return (optax.apply_updates(params, updates), others, opt_state), out


def place(state, mesh, layers):
    """Puts a state on the mesh; what has an entry a layer is split among the devices."""

    def put(leaf):
        split = np.ndim(leaf) and len(leaf) == layers and layers % mesh.shape["layer"] == 0
        return jax.device_put(leaf, NamedSharding(mesh, P("layer") if split else P()))

    return jax.tree.map(put, state)


def shuffled_batches(data, options, epoch):
    """All batches of an epoch, shuffled by (seed, epoch); what fills no batch is left out."""
    batches = len(data[0]) // options.batch
    order = np.random.default_rng((options.seed, epoch)).permutation(len(data[0]))
    order = order[: batches * options.batch].reshape(batches, options.batch)
    return tuple(array[order] for array in data)


def cross_entropy(logits, labels, smoothing=0.0):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(logits, targets).mean()


def accuracy(model, *batch):
    """The part of a batch, whose last array are labels, that is told right."""
    *inputs, labels = batch
    return (model(*inputs).argmax(-1) == labels).mean()


def make_optimizer(options, steps):
    """AdamW with clipped gradients; its rate rises in a tenth of the steps, then falls to zero."""
    schedule = optax.warmup_cosine_decay_schedule(
        options.rate / 10, options.rate, steps // 10, steps
    )
    adamw = optax.adamw(schedule, weight_decay=1e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def describe(name, records):
    """A line beside the progress bar."""
    if not records:
        return f"{name:14} compiling"
    shown = ((k, v) for k, v in records[-1].items() if k != "seconds")
    text = ", ".join(f"{k} {v:.3f}" if abs(v) > 1e-3 else f"{k} {v:.0e}" for k, v in shown)
    return f"{name:14} {text}"


def compare(
    options: argparse.Namespace,
    mesh: Mesh,
    model: nnx.Module,
    loss: Callable[..., Any],
    score: Callable[..., Any],
    data: tuple[np.ndarray, ...],
    test: tuple[np.ndarray, ...],
    console: Console,
    variants: dict[str, nnx.Module] | None = None,
    *,
    watch: Callable[[str, Any], dict[str, float]] = lambda mode, params: {},
    checkpoints: Any = None,
    stop_after: int | None = None,
) -> Comparison:
    """Trains `model` in both ways on `loss(model, *batch)`; `score(model, *test)` each epoch.

    Evaluation is exact for both, and in the state that `model.eval()` makes. `variants` are models
    of the same weights that are trained as well, by the names shown; `watch(mode, params)` adds to
    the record of an epoch. `checkpoints` may hold what to go on from, and is told of every epoch.
    """
    graphs = {}
    graphs["parallel"], params, others = nnx.split(model, nnx.Param, ...)
    model.set_attributes(serial=True, raise_if_not_found=False)
    graphs["serial"] = nnx.graphdef(model)
    graphs |= {mode: nnx.graphdef(variant) for mode, variant in (variants or {}).items()}
    model.eval()
    graph = nnx.graphdef(model)
    scored = jax.jit(lambda params, others, test: score(nnx.merge(graph, params, others), *test))

    optimizer = make_optimizer(options, options.epochs * (len(data[0]) // options.batch))
    states = dict.fromkeys(graphs, (params, others, optimizer.init(params)))
    done, records = 0, {mode: [] for mode in graphs}
    if checkpoints is not None:
        done, states, records = checkpoints.restore(states, records)
    one = jax.devices()[0]
    devices: dict[str, Any] = {mode: NamedSharding(mesh, P("batch")) for mode in graphs}
    states = {mode: place(state, mesh, options.layers) for mode, state in states.items()}
    devices["serial"], states["serial"] = one, jax.device_put(states["serial"], one)
    names = Comparison({}, records).names

    columns = MofNCompleteColumn(), BarColumn(4), TextColumn("{task.description}")
    with Progress(*columns, console=console) as progress:
        bars = {
            mode: progress.add_task(describe(name, records[mode]), True, options.epochs, done)
            for mode, name in names.items()
        }
        for epoch in range(done, min(options.epochs, stop_after or options.epochs)):
            for mode in names:
                began, losses = time.perf_counter(), []
                for batch in zip(*shuffled_batches(data, options, epoch), strict=True):
                    batch = jax.device_put(batch, devices[mode])
                    states[mode], value = train_step(
                        graphs[mode], optimizer, loss, states[mode], batch
                    )
                    losses.append(value)
                record = {"loss": float(np.mean([float(value) for value in losses]))}
                record["seconds"] = time.perf_counter() - began
                record["score"] = float(scored(*jax.device_put(states[mode][:2], one), test))
                records[mode].append(record | watch(mode, states[mode][0]))
                text = describe(names[mode], records[mode])
                progress.update(bars[mode], advance=1, description=text)
            if checkpoints is not None:
                checkpoints.save(epoch + 1, states, records)
    weights = {mode: jax.device_put(state[:2], one) for mode, state in states.items()}
    models = {mode: nnx.merge(graph, *w, copy=True) for mode, w in weights.items()}
    return Comparison(models, records)


def print_table(console, title, result, score="test accuracy", form="{:.2%}", rows=()):
    both = list(result.records.values())
    seconds = [[epoch["seconds"] for epoch in r] for r in both]
    table = Table("", *result.names.values(), title=title)
    table.add_row(score, *(form.format(r[-1]["score"]) for r in both))
    table.add_row("training loss", *(f"{r[-1]['loss']:.5f}" for r in both))
    for row in rows:
        table.add_row(*row)
    table.add_row("time of an epoch (median)", *(f"{np.median(s):.2f} s" for s in seconds))
    table.add_row("time of training, with compilation", *(f"{sum(s):.1f} s" for s in seconds))
    console.print(table)


def draw_curves(axes, result, key, label):
    """`"loss"` or `"score"` of both trainings by epoch."""
    styles = [{"lw": 5, "color": BLUE, "alpha": 0.5}, {"ls": "--", "color": "black"}]
    styles += [{"color": colour, "marker": "."} for colour in (ORANGE, GREEN)]
    for (mode, name), style in zip(result.names.items(), styles, strict=False):
        values = [record[key] for record in result.records[mode]]
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.set(xlabel="epoch", ylabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()


def draw_training(figure, result):
    """Loss and accuracy, one above the other."""
    curve, score = figure.subplots(2, 1)
    draw_curves(curve, result, "loss", "training loss")
    draw_curves(score, result, "score", "accuracy of the test")
