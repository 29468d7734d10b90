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

import contextlib
import dataclasses
import functools
import shutil

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxbraid import MGRIT
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training import gradient_error, set_solvers

SMOOTHING = 0.1  # of labels


class Block(nnx.Module):
    """The vector field of one layer: dx/dt = tanh(W x + b)."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Network(nnx.Module):
    def __init__(self, options, mesh):
        rngs = nnx.Rngs(options.seed)
        self.conv = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.opening = nnx.Linear(8 * 8 * 32, options.width, rngs=rngs)
        self.stack = ParallelStack(
            lambda rngs: Block(options.width, rngs),
            options.layers,
            rngs=rngs,
            smooth_init=True,  # coarse levels leave out layers, so neighbours should be alike
            t_final=2.0,
            **training.parallel_options(options, mesh, cf_relax=1),
        )
        self.closing = nnx.Linear(options.width, 10, rngs=rngs)

    def open(self, images):
        """From pixels [batch, 8, 8, 1] to the state that the stack propagates, [batch, width]."""
        x = nnx.relu(self.conv(images))
        return jnp.tanh(self.opening(x.reshape(len(x), -1)))

    def __call__(self, images):
        return self.closing(self.stack(self.open(images)))


def make_graphs(model, options):
    """The network (structure, mesh, options of MGRIT) as it is, with iterations to see, and exact.

    The weights of all are the same.
    """
    iterations = min(8, -(-options.layers // options.factor))  # no more than make it exact
    more = dataclasses.replace(model.stack.options.forward, max_iters=iterations)
    solvers = {"converging": more, "exact": MGRIT(levels=1)}
    graphs = {
        name: nnx.graphdef(set_solvers(nnx.clone(model), solver))
        for name, solver in solvers.items()
    }
    return {"parallel": nnx.graphdef(model)} | graphs


def loss(model, images, labels):
    return training.cross_entropy(model(images), labels, SMOOTHING)


@functools.partial(jax.jit, static_argnames="graph")
def inspect(graph, weights, images, labels):
    """The gradient on one batch, and how the forward and the adjoint solve for it went.

    Residuals are relative: divided by the norm of all states, or of all adjoint states.
    """

    def value(weights, probe):
        model = nnx.merge(graph, weights)
        solution = model.stack.solve(model.open(images), adjoint_probe=probe)
        return training.cross_entropy(model.closing(solution.u), labels, SMOOTHING), solution

    # The "gradient" with respect to the probe is the record of the adjoint solve.
    probe = nnx.merge(graph, weights).stack.adjoint_probe()
    (gradient, adjoint), forward = jax.grad(value, argnums=(0, 1), has_aux=True)(weights, probe)
    states = jnp.linalg.norm(forward.us, axis=(1, 2))
    return {
        "gradient": gradient,
        "states": states,
        "adjoints": adjoint.norms,
        "forward": forward.stats.residuals / jnp.linalg.norm(states),
        "adjoint": adjoint.residuals / jnp.linalg.norm(adjoint.norms),
    }


def load_data():
    """Images [n, 8, 8, 1] in 0..1 and labels: 1437 to train with, 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    split = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    return tuple(split[0::2]), tuple(split[1::2])


class Checkpoints:
    """What both trainings are after an epoch, to go on from with --resume."""

    def __init__(self, options):
        folder = options.out.absolute() / "checkpoints"
        if not options.resume:
            shutil.rmtree(folder, ignore_errors=True)
        keep = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder, options=keep)
        others = "out", "resume", "stop_after", "quick"
        self.settings = {k: v for k, v in vars(options).items() if k not in others}

    def restore(self, states, records):
        """Number of epochs, states and records of the last one; what is given if there is none."""
        epoch, args = self.manager.latest_step(), ocp.args
        if epoch is None:
            return 0, states, records
        log = self.manager.restore(epoch, args=args.Composite(log=args.JsonRestore())).log
        if log["settings"] != self.settings:
            raise SystemExit(f"--resume: the checkpoint has other settings: {log['settings']}")
        wanted = args.Composite(state=args.StandardRestore(states))
        return epoch, self.manager.restore(epoch, args=wanted).state, log["records"]

    def save(self, epoch, states, records):
        state = ocp.args.StandardSave(jax.device_get(states))
        log = ocp.args.JsonSave({"settings": self.settings, "records": records})
        self.manager.save(epoch, args=ocp.args.Composite(state=state, log=log))

    def close(self):
        self.manager.close()


def draw(path, options, result, seen):
    """Loss, residuals by iteration, and norms of states and adjoints across layers."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (loss, residuals), (states, adjoints) = figure.subplots(2, 2)
    training.draw_curves(loss, result, "loss", "cross-entropy (smoothed labels)")
    loss.set(title="Training loss")

    kinds = {
        "forward": (options.iterations, "o", training.BLUE),
        "adjoint": (options.adjoint_iterations, "s", training.ORANGE),
    }
    for when, line in (("start", ":"), ("end", "-")):
        style = {"ls": line, "label": f"{when} of training"}
        states.plot(seen[when]["states"], color=training.BLUE, **style)
        adjoints.plot(seen[when]["adjoints"], color=training.ORANGE, **style)
        for kind, (n, form, colour) in kinds.items():
            r = np.where(seen[when][kind] > 0, seen[when][kind], np.nan)  # the axis has no zero
            style = {"color": colour, "marker": form, "ls": line}
            iterations = np.arange(1, len(r) + 1)
            residuals.plot(iterations, r, mfc="white", label=f"{kind}, {when}", **style)
            residuals.plot(iterations[n - 1 : n], r[n - 1 : n], ms=9, zorder=3, **style)
    residuals.set(title="MGRIT residual (filled: iterations used in training)")
    residuals.set(xlabel="iteration", ylabel="residual / norm of all states", yscale="log")
    states.set(title="States", xlabel="layer", ylabel="2-norm over the batch", ylim=(0, None))
    adjoints.set(title="Adjoint states", xlabel="layer", ylabel="2-norm over the batch")
    adjoints.set(yscale="log")
    for axes in (residuals, states, adjoints):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def parse_options():
    parser = training.make_parser(__doc__, "digits", layers=64, epochs=20, rate=1e-2)
    add = functools.partial(parser.add_argument, type=training.positive, metavar="N")
    add("--width", default=32, help="features of the stack's state (%(default)s)")
    add("--stop-after", help="end after this epoch, as an interruption would")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return training.parse(parser, layers=16, epochs=4)


def main():
    options, console = parse_options(), Console()
    mesh = training.make_mesh(options)
    data, test = load_data()
    model = Network(options, mesh)
    graphs, start = make_graphs(model, options), nnx.state(model)
    sample = tuple(array[: options.batch] for array in data)

    def look(graph, weights):
        return inspect(graphs[graph], training.place(weights, mesh, options.layers), *sample)

    def residuals(mode, weights):
        seen = look(mode, weights) if mode == "parallel" else {}
        return {kind: float(seen[kind][-1]) for kind in ("forward", "adjoint") if seen}

    console.print("{} layers on {} x {} devices".format(options.layers, *options.mesh))
    with contextlib.closing(Checkpoints(options)) as checkpoints:
        result = training.compare(
            options, mesh, model, loss, training.accuracy, data, test, console,
            watch=residuals, checkpoints=checkpoints, stop_after=options.stop_after,
        )  # fmt: skip
    if len(result.records["serial"]) < options.epochs:
        console.print(f"stopped after epoch {options.stop_after}; go on with --resume")
        return

    rows, seen = [], {}
    for when, weights in (("start", start), ("end", nnx.state(result.models["parallel"]))):
        seen[when] = look("converging", weights)
        gradients = (look(graph, weights)["gradient"] for graph in ("parallel", "exact"))
        error = gradient_error(*gradients).relative
        rows.append((f"gradient error, {when} of training", f"{error:.1e}", "exact"))
    training.print_table(console, "Handwritten digits", result, rows=rows)
    draw(options.out / "digits.png", options, result, seen)
    console.print(f"picture: {options.out / 'digits.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
