"""Train a residual network on handwritten digits, in parallel over its layers.

The network is an opening, a stack of layers x <- x + dt f(theta_n, x), and a closing layer. It is
trained twice, from the same seed and on the same batches: layer-parallel (a few MGRIT iterations
forward and backward, on a mesh of layer x batch devices) and serially (exact).

    python examples/digits.py                     # 64 layers on a mesh of 4 x 2 devices
    python examples/digits.py --iterations 1      # a cheaper and less exact forward solve
    python examples/digits.py --layers 128 --levels 3 --mesh 8x1
    python examples/digits.py --stop-after 5      # an interruption ...
    python examples/digits.py --resume            # ... that changes nothing in the final weights

The devices are virtual ones on the CPU, so this runs anywhere; as they share its cores, the times
tell nothing about speed-up. Checkpoints and the picture digits.png go to outputs/digits (elsewhere:
--out); without --resume a run starts anew.
"""

import argparse
import functools
import os
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxbraid
from jaxbraid.flax.nnx import ParallelStack

NAMES = {"parallel": "layer-parallel", "serial": "serial"}


class Block(nnx.Module):
    """The vector field of one layer: dx/dt = tanh(W x + b)."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Network(nnx.Module):
    def __init__(self, options, mesh: Mesh, iterations: int, adjoint_iterations: int):
        rngs = nnx.Rngs(options.seed)
        mgrit = functools.partial(
            jaxbraid.MGRIT, levels=options.levels, coarsening=options.factor, final_relax="FC"
        )
        self.conv = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.opening = nnx.Linear(8 * 8 * 32, options.width, rngs=rngs)
        self.stack = ParallelStack(
            lambda rngs: Block(options.width, rngs),
            options.layers,
            rngs=rngs,
            smooth_init=True,  # coarse levels leave out layers, so neighbours should be alike
            t_final=2.0,
            forward=mgrit(max_iters=iterations),
            adjoint=mgrit(max_iters=adjoint_iterations),
            mesh=mesh,
            batch_axis="batch",
        )
        self.closing = nnx.Linear(options.width, 10, rngs=rngs)

    def open(self, images):
        """From pixels [batch, 8, 8, 1] to the state that the stack propagates, [batch, width]."""
        x = nnx.relu(self.conv(images))
        return jnp.tanh(self.opening(x.reshape(len(x), -1)))

    def __call__(self, images):
        return self.closing(self.stack(self.open(images)))


def make_networks(options, mesh):
    """Graphs of the network (structure, mesh, MGRIT options) and its weights from the seed.

    The parallel and the serial network differ in the graph only, as does a parallel one with more
    iterations ("converging"), for the picture.
    """
    model = Network(options, mesh, options.iterations, options.adjoint_iterations)
    parallel, weights = nnx.split(model)
    model.set_attributes(serial=True)
    iterations = min(8, -(-options.layers // options.factor))  # no more than make it exact
    converging = nnx.graphdef(Network(options, mesh, iterations, iterations))
    graphs = {"parallel": parallel, "serial": nnx.graphdef(model), "converging": converging}
    return graphs, jax.device_get(weights)


def mean_loss(logits, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


@functools.partial(jax.jit, static_argnames=("graph", "optimizer"))
def train_epoch(graph, optimizer, state, images, labels):
    """One Optax step a batch; `state` is (weights, optimizer's state). Also the mean loss."""

    def step(state, batch):
        weights, opt_state = state
        images, labels = batch
        loss, gradient = jax.value_and_grad(
            lambda weights: mean_loss(nnx.merge(graph, weights)(images), labels)
        )(weights)
        updates, opt_state = optimizer.update(gradient, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), loss

    state, losses = jax.lax.scan(step, state, (images, labels))
    return state, losses.mean()


@functools.partial(jax.jit, static_argnames="graph")
def accuracy(graph, weights, images, labels):
    return (nnx.merge(graph, weights)(images).argmax(-1) == labels).mean()


@functools.partial(jax.jit, static_argnames="graph")
def inspect(graph, weights, images, labels):
    """The gradient on one batch, and how the forward and the adjoint solve for it went.

    Residuals are relative: divided by the norm of all states, or of all adjoint states.
    """

    def loss(weights, probe):
        model = nnx.merge(graph, weights)
        solution = model.stack.solve(model.open(images), adjoint_probe=probe)
        return mean_loss(model.closing(solution.u), labels), solution

    # The "gradient" with respect to the probe is the record of the adjoint solve.
    probe = nnx.merge(graph, weights).stack.adjoint_probe()
    (gradient, adjoint), forward = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, probe)
    states = jnp.linalg.norm(forward.us, axis=(1, 2))
    return {
        "gradient": gradient,
        "states": states,
        "adjoints": adjoint.norms,
        "forward": forward.stats.residuals / jnp.linalg.norm(states),
        "adjoint": adjoint.residuals / jnp.linalg.norm(adjoint.norms),
    }


def gradient_error(inexact, exact):
    """Difference of two gradients in the 2-norm, relative to the exact one."""
    inexact, exact = jax.device_get((inexact, exact))
    return float(optax.tree.norm(optax.tree.sub(inexact, exact)) / optax.tree.norm(exact))


def load_data():
    """Images [n, 8, 8, 1] in 0..1 and labels: 1437 to train with, 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    split = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    return tuple(split[0::2]), tuple(split[1::2])


def shuffled_batches(data, options, epoch):
    """All batches of an epoch, shuffled by (seed, epoch); what fills no batch is left out."""
    batches = len(data[0]) // options.batch
    order = np.random.default_rng((options.seed, epoch)).permutation(len(data[0]))
    order = order[: batches * options.batch].reshape(batches, options.batch)
    return tuple(array[order] for array in data)


def place(state, mesh):
    """Puts weights (and what Optax keeps of them) on the mesh, those of the stack split."""

    def put(path, leaf):
        split = "stack" in jax.tree_util.keystr(path) and len(leaf) % mesh.shape["layer"] == 0
        return jax.device_put(leaf, NamedSharding(mesh, P("layer") if split else P()))

    return jax.tree_util.tree_map_with_path(put, state)


def restore(checkpoints, settings, state):
    """Epoch, networks' states and records of the last checkpoint, if there is one."""
    epoch = checkpoints.latest_step()
    if epoch is None:
        return 0, state, {mode: [] for mode in NAMES}
    log = checkpoints.restore(epoch, args=ocp.args.Composite(log=ocp.args.JsonRestore())).log
    if log["settings"] != settings:
        raise SystemExit(f"--resume: the checkpoint has other settings: {log['settings']}")
    wanted = ocp.args.Composite(state=ocp.args.StandardRestore(state))
    return epoch, checkpoints.restore(epoch, args=wanted).state, log["records"]


def describe(mode, records):
    """A line beside the progress bar; residuals are those of the last iteration."""
    if not records:
        return f"{NAMES[mode]:14} compiling"
    text = "{loss:.4f}, accuracy {accuracy:.1%}" + (
        ", residuals {forward:.0e} {adjoint:.0e}" if mode == "parallel" else ""
    )
    return f"{NAMES[mode]:14} loss {text.format(**records[-1])}"


def train(options, mesh, graphs, weights, data, test, console):
    """Trains both networks, epoch by epoch: their weights, and a record of every epoch."""
    steps = options.epochs * (len(data[0]) // options.batch)
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, steps // 10, steps)
    optimizer = optax.adamw(schedule, weight_decay=1e-2)

    settings = {k: v for k, v in vars(options).items() if k not in ("out", "resume", "stop_after")}
    folder = options.out.absolute() / "checkpoints"
    if not options.resume:
        shutil.rmtree(folder, ignore_errors=True)
    checkpoints = ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    start = dict.fromkeys(NAMES, (weights, optimizer.init(weights)))
    done, states, records = restore(checkpoints, settings, start)

    one = jax.devices()[0]
    states["parallel"] = place(states["parallel"], mesh)
    states["serial"] = jax.device_put(states["serial"], one)
    devices = {"parallel": NamedSharding(mesh, P(None, "batch")), "serial": one}  # of the batches
    sample = shuffled_batches(data, options, 0)
    sample = sample[0][0], sample[1][0]

    columns = MofNCompleteColumn(), BarColumn(8), TextColumn("{task.description}")
    with Progress(*columns, console=console) as progress:
        bars = {
            mode: progress.add_task(describe(mode, records[mode]), True, options.epochs, done)
            for mode in NAMES
        }
        for epoch in range(done + 1, min(options.epochs, options.stop_after) + 1):
            for mode in NAMES:
                batches = jax.device_put(shuffled_batches(data, options, epoch), devices[mode])
                began = time.perf_counter()
                states[mode], loss = train_epoch(graphs[mode], optimizer, states[mode], *batches)
                record = {"loss": float(loss), "seconds": time.perf_counter() - began}
                weights = jax.device_get(states[mode][0])
                record["accuracy"] = float(accuracy(graphs["serial"], weights, *test))
                if mode == "parallel":
                    seen = inspect(graphs[mode], states[mode][0], *sample)
                    record |= {kind: float(seen[kind][-1]) for kind in ("forward", "adjoint")}
                records[mode].append(record)
                progress.update(
                    bars[mode], completed=epoch, description=describe(mode, records[mode])
                )
            saved = ocp.args.Composite(
                state=ocp.args.StandardSave(jax.device_get(states)),
                log=ocp.args.JsonSave({"settings": settings, "records": records}),
            )
            checkpoints.save(epoch, args=saved)
    checkpoints.close()
    return {mode: jax.device_get(state[0]) for mode, state in states.items()}, records


def make_table(records, errors):
    both = [records[mode] for mode in NAMES]
    seconds = [[epoch["seconds"] for epoch in r] for r in both]
    table = Table("", *NAMES.values(), title="Handwritten digits")
    table.add_row("test accuracy", *(f"{r[-1]['accuracy']:.2%}" for r in both))
    table.add_row("training loss", *(f"{r[-1]['loss']:.5f}" for r in both))
    for when, error in errors.items():
        table.add_row(f"gradient error, {when} of training", f"{error:.1e}", "exact")
    table.add_row("time of an epoch (median)", *(f"{np.median(s):.2f} s" for s in seconds))
    table.add_row("time of training, with compilation", *(f"{sum(s):.1f} s" for s in seconds))
    return table


def draw(path, options, records, seen):
    """Loss, residuals by iteration, and norms of states and adjoints across layers."""
    blue, orange = "#0072B2", "#D55E00"  # told apart by the colour-blind, too
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (loss, residuals), (states, adjoints) = figure.subplots(2, 2)

    epochs = range(1, options.epochs + 1)
    styles = {"lw": 5, "color": blue, "alpha": 0.5}, {"ls": "--", "color": "black"}
    for (mode, name), style in zip(NAMES.items(), styles, strict=True):
        loss.plot(epochs, [r["loss"] for r in records[mode]], label=name, **style)
    loss.set(title="Training loss", xlabel="epoch", ylabel="cross-entropy (smoothed labels)")

    used = options.iterations, options.adjoint_iterations
    for when, line in (("start", ":"), ("end", "-")):
        style = {"ls": line, "label": f"{when} of training"}
        states.plot(seen[when]["states"], color=blue, **style)
        adjoints.plot(seen[when]["adjoints"], color=orange, **style)
        for kind, n, form in zip(("forward", "adjoint"), used, ("o", "s"), strict=True):
            r = np.where(seen[when][kind] > 0, seen[when][kind], np.nan)  # the axis has no zero
            style = {"color": blue if kind == "forward" else orange, "marker": form, "ls": line}
            iterations = np.arange(1, len(r) + 1)
            residuals.plot(iterations, r, mfc="white", label=f"{kind}, {when}", **style)
            residuals.plot(iterations[n - 1 : n], r[n - 1 : n], ms=9, zorder=3, **style)
    residuals.set(title="MGRIT residual (filled: iterations used in training)")
    residuals.set(xlabel="iteration", ylabel="residual / norm of all states", yscale="log")
    states.set(title="States", xlabel="layer", ylabel="2-norm over the batch", ylim=(0, None))
    adjoints.set(title="Adjoint states", xlabel="layer", ylabel="2-norm over the batch")
    adjoints.set(yscale="log")
    for axes in (loss, residuals, states, adjoints):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def positive(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def mesh_shape(text):
    layer, batch = text.split("x")
    return [positive(layer), positive(batch)]


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, type=positive, metavar="N")
    add("--layers", default=64, help="layers of the stack (%(default)s)")
    add("--width", default=32, help="features of its state (%(default)s)")
    add("--levels", default=2, help="MGRIT levels; 1 is sequential (%(default)s)")
    add("--factor", default=4, help="coarsening factor (%(default)s)")
    add("--iterations", default=2, help="forward MGRIT iterations (%(default)s)")
    add("--adjoint-iterations", default=1, help="adjoint MGRIT iterations (%(default)s)")
    add("--mesh", default=[4, 2], type=mesh_shape, metavar="LxB", help="layer x batch axes (4x2)")
    add("--batch", default=128, help="images in a batch (%(default)s)")
    add("--epochs", default=20, help="(%(default)s)")
    add("--seed", default=0, type=int, help="of weights and of the order of images (%(default)s)")
    add("--out", default=Path("outputs/digits"), type=Path, metavar="DIR", help="(%(default)s)")
    add("--stop-after", default=10**9, help="end after this epoch, as an interruption would")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()
    if options.batch % options.mesh[1]:
        parser.error(f"--batch {options.batch}: must be a multiple of the batch axis of --mesh")
    return options


def make_mesh(layer, batch):
    """A mesh of layer x batch devices: virtual ones on the CPU, unless XLA_FLAGS has its own."""
    jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", layer * batch)
    devices = jax.devices()[: layer * batch]
    if len(devices) < layer * batch:
        raise SystemExit(f"--mesh {layer}x{batch}: XLA_FLAGS makes {len(devices)} devices only.")
    return Mesh(np.array(devices).reshape(layer, batch), ("layer", "batch"))


def main():
    options, console = parse_options(), Console()
    mesh = make_mesh(*options.mesh)
    data, test = load_data()
    graphs, start = make_networks(options, mesh)
    console.print("{} layers on {} x {} devices".format(options.layers, *options.mesh))
    weights, records = train(options, mesh, graphs, start, data, test, console)
    if len(records["serial"]) < options.epochs:
        console.print(f"stopped after epoch {options.stop_after}; go on with --resume")
        return

    errors, seen = {}, {}
    batch = data[0][: options.batch], data[1][: options.batch]
    for when, w in (("start", start), ("end", weights["parallel"])):
        seen[when] = inspect(graphs["converging"], place(w, mesh), *batch)
        inexact = inspect(graphs["parallel"], place(w, mesh), *batch)["gradient"]
        exact = inspect(graphs["serial"], w, *batch)["gradient"]
        errors[when] = gradient_error(inexact, exact)
    console.print(make_table(records, errors))
    draw(options.out / "digits.png", options, records, seen)
    console.print(f"picture: {options.out / 'digits.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
