"""Train a residual network on handwritten digits, in parallel over its layers.

The network is an opening layer, a stack of layers x <- x + dt f(theta_n, x), and a closing layer. It
is trained twice, from the same seed and on the same batches: layer-parallel (a few MGRIT iterations
forward and backward, on a mesh of layer x batch devices) and serially (exact).

    python examples/digits.py                     # 64 layers on a mesh of 4 x 2 devices
    python examples/digits.py --iterations 1      # a cheaper and less exact forward solve
    python examples/digits.py --layers 128 --levels 3 --mesh 8x1
    python examples/digits.py --stop-after 5      # an interruption ...
    python examples/digits.py --resume            # ... that changes nothing about the final weights

The devices are virtual ones on the CPU, so this runs anywhere; as they share its cores, the times tell
nothing about speed-up. JAX_PLATFORMS=cuda takes real ones, if there are enough. Checkpoints and the
picture digits.png go to outputs/digits (elsewhere: --out).
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
CLASSES = 10


class Opening(nnx.Module):
    """From 8 x 8 pixels to the state of the stack: 3 x 3 convolutions, then a linear layer."""

    def __init__(self, channels: int, width: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, channels, (3, 3), rngs=rngs)
        self.linear = nnx.Linear(64 * channels, width, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.conv(images))
        return jnp.tanh(self.linear(x.reshape(len(x), -1)))


class Block(nnx.Module):
    """The vector field of one layer: dx/dt = tanh(W x + b)."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Network(nnx.Module):
    """Opening layer, stack of layers, closing layer."""

    def __init__(self, options, mesh: Mesh, iterations: int, adjoint_iterations: int):
        rngs = nnx.Rngs(options.seed)
        solve = functools.partial(
            jaxbraid.MGRIT, levels=options.levels, coarsening=options.factor, final_relax="FC"
        )
        self.opening = Opening(32, options.width, rngs)
        self.stack = ParallelStack(
            lambda rngs: Block(options.width, rngs),
            options.layers,
            rngs=rngs,
            smooth_init=True,  # coarse levels leave out layers, so neighbours should be alike
            t_final=2.0,
            forward=solve(max_iters=iterations),
            adjoint=solve(max_iters=adjoint_iterations),
            mesh=mesh,
            batch_axis="batch",
        )
        self.closing = nnx.Linear(options.width, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.closing(self.stack(self.opening(images)))


def mean_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# The functions below take a network as its graph (static: structure, mesh, MGRIT options) and its
# weights. The parallel and the serial network differ in the graph only.


@functools.partial(jax.jit, static_argnames=("graph", "optimizer"))
def train_epoch(graph, optimizer, state, images, labels):
    """One Optax step for each batch: (weights, optimizer's state) and the mean loss."""

    def step(state, batch):
        weights, opt_state = state
        images, labels = batch

        def loss(weights):
            return mean_loss(nnx.merge(graph, weights)(images), labels)

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, opt_state = optimizer.update(gradient, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), value

    state, losses = jax.lax.scan(step, state, (images, labels))
    return state, losses.mean()


@functools.partial(jax.jit, static_argnames="graph")
def accuracy(graph, weights, images, labels):
    return (nnx.merge(graph, weights)(images).argmax(-1) == labels).mean()


@functools.partial(jax.jit, static_argnames="graph")
def inspect(graph, weights, images, labels):
    """The gradient on one batch, and how the forward and adjoint solves for it went.

    Residuals are relative: divided by the norm of all states, or of all adjoint states.
    """

    def loss(weights, probe):
        model = nnx.merge(graph, weights)
        solution = model.stack.solve(model.opening(images), adjoint_probe=probe)
        return mean_loss(model.closing(solution.u), labels), solution

    # The "gradient" of the probe is the record of the adjoint solve.
    probe = nnx.merge(graph, weights).stack.adjoint_probe()
    (gradient, adjoint), forward = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, probe)
    norms = jnp.linalg.norm(forward.us, axis=(1, 2))
    return {
        "gradient": gradient,
        "states": norms,
        "adjoints": adjoint.norms,
        "forward": forward.stats.residuals / jnp.linalg.norm(norms),
        "adjoint": adjoint.residuals / jnp.linalg.norm(adjoint.norms),
    }


def gradient_error(inexact, exact):
    """Difference of two gradients in the 2-norm, relative to the exact one."""
    difference = jax.tree.map(np.subtract, jax.device_get(inexact), jax.device_get(exact))
    return float(optax.tree.norm(difference) / optax.tree.norm(jax.device_get(exact)))


def load_data():
    """Images [n, 8, 8, 1] in 0..1 and labels: 1437 to train with, 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    split = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return (train_images, train_labels), (test_images, test_labels)


def shuffled_batches(data, options, epoch):
    """All batches of an epoch, shuffled by (seed, epoch); what fills no batch is left out."""
    images, labels = data
    batches = len(images) // options.batch
    order = np.random.default_rng((options.seed, epoch)).permutation(len(images))
    order = order[: batches * options.batch].reshape(batches, options.batch)
    return images[order], labels[order]


def first_batch(data, options):
    images, labels = data
    return images[: options.batch], labels[: options.batch]


def place(state, mesh):
    """Weights and optimizer's state on the mesh, those of the stack split over its layers."""

    def put(path, leaf):
        split = "stack" in jax.tree_util.keystr(path) and len(leaf) % mesh.shape["layer"] == 0
        return jax.device_put(leaf, NamedSharding(mesh, P("layer") if split else P()))

    return jax.tree_util.tree_map_with_path(put, state)


def make_networks(options, mesh):
    """The weights from the seed and the graphs: parallel, serial, and one for a close look."""
    exact = min(8, -(-options.layers // options.factor))  # iterations to show in the picture
    looked_at = Network(options, mesh, exact, exact)
    model = Network(options, mesh, options.iterations, options.adjoint_iterations)
    parallel, weights = nnx.split(model)
    model.set_attributes(serial=True)
    graphs = {"parallel": parallel, "serial": nnx.graphdef(model)}
    return graphs | {"close look": nnx.graphdef(looked_at)}, jax.device_get(weights)


def restore(checkpoints, settings, state):
    """Epoch, networks' states and records of the last checkpoint, if there is one."""
    epoch = checkpoints.latest_step()
    if epoch is None:
        return 0, state, {mode: [] for mode in NAMES}
    wanted = ocp.args.Composite(log=ocp.args.JsonRestore(), state=ocp.args.StandardRestore(state))
    saved = checkpoints.restore(epoch, args=wanted)
    if saved.log["settings"] != settings:
        raise SystemExit(f"--resume: the checkpoint has other settings, {saved.log['settings']}")
    return epoch, saved.state, saved.log["records"]


def train(options, mesh, graphs, weights, data, test, console):
    """Train both networks in turn, epoch by epoch; returns weights and a record of each epoch."""
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
    states = {
        "parallel": place(states["parallel"], mesh),
        "serial": jax.device_put(states["serial"], jax.devices()[0]),
    }
    placement = {
        "parallel": NamedSharding(mesh, P(None, "batch")),  # [batches, batch, ...]
        "serial": jax.devices()[0],
    }

    line = (
        "{task.description:14} loss {task.fields[loss]:6.4f}  accuracy {task.fields[accuracy]:5.1%}"
        "  residuals {task.fields[forward]:.0e}, {task.fields[adjoint]:.0e}"
    )
    empty = dict.fromkeys(("loss", "accuracy", "forward", "adjoint"), float("nan"))
    last = min(options.epochs, options.stop_after or options.epochs)
    with Progress(
        MofNCompleteColumn(), BarColumn(12), TextColumn(line), console=console
    ) as progress:
        bars = {
            mode: progress.add_task(
                name, total=options.epochs, completed=done, **(records[mode] or [empty])[-1]
            )
            for mode, name in NAMES.items()
        }
        for epoch in range(done + 1, last + 1):
            for mode in NAMES:
                batches = shuffled_batches(data, options, epoch)
                batches = jax.device_put(batches, placement[mode])
                began = time.perf_counter()
                states[mode], loss = jax.block_until_ready(
                    train_epoch(graphs[mode], optimizer, states[mode], *batches)
                )
                record = {"loss": float(loss), "seconds": time.perf_counter() - began}
                weights = states[mode][0]
                look = inspect(graphs[mode], weights, *first_batch(data, options))
                record |= {name: float(look[name][-1]) for name in ("forward", "adjoint")}
                record["accuracy"] = float(
                    accuracy(graphs["serial"], jax.device_get(weights), *test)
                )
                records[mode].append(record)
                progress.update(bars[mode], completed=epoch, **record)
            saved = ocp.args.Composite(
                state=ocp.args.StandardSave(jax.device_get(states)),
                log=ocp.args.JsonSave({"settings": settings, "records": records}),
            )
            checkpoints.save(epoch, args=saved)
    checkpoints.close()
    return {mode: jax.device_get(state[0]) for mode, state in states.items()}, records


def report(records, errors):
    """The table of results."""
    table = Table("", *NAMES.values(), title="Handwritten digits")
    both = [records[mode] for mode in NAMES]
    table.add_row("test accuracy", *(f"{r[-1]['accuracy']:.2%}" for r in both))
    table.add_row("training loss", *(f"{r[-1]['loss']:.5f}" for r in both))
    table.add_row("gradient error at the start", f"{errors['start']:.1e}", "exact")
    table.add_row("gradient error at the end", f"{errors['end']:.1e}", "exact")
    seconds = [[e["seconds"] for e in r] for r in both]
    table.add_row("time of an epoch (median)", *(f"{np.median(s):.2f} s" for s in seconds))
    table.add_row("time of training, with compilation", *(f"{sum(s):.1f} s" for s in seconds))
    return table


def draw(path, options, records, looks):
    """The picture: loss, residuals by iteration, norms of states and adjoints across layers."""
    blue, orange, grey = "#0072B2", "#D55E00", "#777777"  # told apart by the colour-blind too
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (loss, residual), (states, adjoints) = figure.subplots(2, 2)

    epochs = range(1, len(records["serial"]) + 1)
    for mode, style in (
        ("parallel", {"color": blue, "lw": 4, "alpha": 0.5}),
        ("serial", {"color": "black", "ls": "--"}),
    ):
        loss.plot(epochs, [r["loss"] for r in records[mode]], label=NAMES[mode], **style)
    loss.set(title="Loss", xlabel="epoch", ylabel="mean cross-entropy", yscale="log")

    used = {"forward": options.iterations, "adjoint": options.adjoint_iterations}
    for kind, color, marker in (("forward", blue, "o"), ("adjoint", orange, "s")):
        for when, style in (("start", ":"), ("end", "-")):
            values = np.asarray(looks[when][kind])
            values = np.where(values > 0, values, np.nan)  # 0 has no place on a logarithmic axis
            count = range(1, len(values) + 1)
            label = f"{kind}, {when} of training"
            residual.plot(count, values, color=color, ls=style, marker=marker, mfc="w", label=label)
            n = min(used[kind], len(values))
            residual.plot(n, values[n - 1], color=color, marker=marker, ms=9)
    residual.set(title="MGRIT residual (filled: used in training)", xlabel="iteration")
    residual.set(ylabel="residual / norm of the solution", yscale="log")

    for axes, key, color in ((states, "states", blue), (adjoints, "adjoints", orange)):
        for when, style in (("start", ":"), ("end", "-")):
            axes.plot(looks[when][key], color=color, ls=style, label=f"{when} of training")
        axes.set(title=f"{key.capitalize()} across layers", xlabel="layer")
        axes.set(ylabel="2-norm over the batch", ylim=(0, None))
    for axes in (loss, residual, states, adjoints):
        axes.grid(color=grey, alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_options():
    def positive(text):
        if int(text) < 1:
            raise ValueError
        return int(text)

    def shape(text):
        layer, batch = text.split("x")
        return [positive(layer), positive(batch)]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, metavar="N", type=positive)
    add("--layers", default=64, help="layers of the stack (default: %(default)s)")
    add("--width", default=32, help="features of its state (%(default)s)")
    add("--levels", default=2, help="MGRIT levels; 1 is sequential (%(default)s)")
    add("--factor", default=4, help="coarsening factor (%(default)s)")
    add("--iterations", default=2, help="forward MGRIT iterations (%(default)s)")
    add("--adjoint-iterations", default=1, help="adjoint MGRIT iterations (%(default)s)")
    add("--mesh", default=[4, 2], type=shape, metavar="LxB", help="layer x batch devices (4x2)")
    add("--batch", default=128, help="images in a batch (%(default)s)")
    add("--epochs", default=20, help="(%(default)s)")
    add("--seed", default=0, type=int, help="of weights and order of images (%(default)s)")
    add("--out", default=Path("outputs/digits"), type=Path, metavar="DIR", help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    add("--stop-after", help="end after this epoch, as an interruption would")
    options = parser.parse_args()
    if options.batch % options.mesh[1]:
        parser.error(f"--batch {options.batch}: must be a multiple of the batch axis of --mesh")
    return options


def make_mesh(layer, batch):
    """A mesh of layer x batch devices: virtual ones on the CPU, unless the environment says else."""
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", layer * batch)
    devices = jax.devices()
    if len(devices) < layer * batch:
        raise SystemExit(f"--mesh {layer}x{batch}: there are {len(devices)} devices only")
    return Mesh(np.array(devices[: layer * batch]).reshape(layer, batch), ("layer", "batch"))


def main():
    options = parse_options()
    console = Console()
    mesh = make_mesh(*options.mesh)
    data, test = load_data()
    graphs, start = make_networks(options, mesh)
    console.print(
        f"{options.layers} layers on {options.mesh[0]} x {options.mesh[1]} devices; residuals are "
        "those of the last forward and adjoint iteration"
    )
    weights, records = train(options, mesh, graphs, start, data, test, console)
    if len(records["serial"]) < options.epochs:
        console.print(f"stopped after epoch {len(records['serial'])}; go on with --resume")
        return

    looks, errors = {}, {}
    batch = first_batch(data, options)
    for when, w in (("start", start), ("end", weights["parallel"])):
        looks[when] = inspect(graphs["close look"], place(w, mesh), *batch)
        inexact = inspect(graphs["parallel"], place(w, mesh), *batch)["gradient"]
        exact = inspect(graphs["serial"], jax.device_put(w, jax.devices()[0]), *batch)["gradient"]
        errors[when] = gradient_error(inexact, exact)
    console.print(report(records, errors))
    draw(options.out / "digits.png", options, records, looks)
    console.print(f"picture: {options.out / 'digits.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
