"""Classify solids on voxels by a 3D convolutional network, in parallel over its layers.

The solids are made by formulas: of revolution, polyhedra, a torus, rotated at random, with noise. A
layer is dx/dt = K * relu(norm(x)). The network is trained three times, from the same weights and on
the same batches: layer-parallel (2 MGRIT iterations forward, 1 backward, on a mesh of layer x batch
devices), the same with coarser voxels on the coarsest level, where a layer costs an eighth, and
serially.

    python examples/shapes.py
    python examples/shapes.py --coarsening injection    # or full_weighting, on --size 14 or 30
    python examples/shapes.py --levels 3 --noise 0.6
    python examples/shapes.py --quick                   # 12^3 voxels

Writes outputs/shapes/shapes.png (elsewhere: --out).
"""

import _shapes as shapes
import _training as training
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console

from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.nn import Conv, ConvBlock, spatial_coarsening

COARSE = "coarser voxels"


class Network(nnx.Module):
    def __init__(self, options, mesh, coarsening=None):
        rngs, c = nnx.Rngs(options.seed), options.channels
        transfers = None
        if coarsening:  # from the last but one level to the coarsest
            levels = [level == options.levels - 2 for level in range(options.levels - 1)]
            transfers = spatial_coarsening(coarsening, 3, levels)
        self.opening = Conv(1, c, (3, 3, 3), strides=2, rngs=rngs)
        self.stack = ParallelStack(
            lambda rngs: ConvBlock(c, (3, 3, 3), convolutions=1, norm="group", rngs=rngs),
            options.layers,
            rngs=rngs,
            smooth_init=True,  # coarse levels leave out layers, so neighbours should be alike
            t_final=4.0,
            transfers=transfers,
            **training.parallel_options(options, mesh),
        )
        self.norm = nnx.GroupNorm(c, num_groups=1, rngs=rngs)
        self.closing = nnx.Linear(2 * c, len(shapes.SOLIDS), rngs=rngs)

    def __call__(self, voxels):
        x = nnx.relu(self.norm(self.stack(self.opening(voxels[..., None]))))
        return self.closing(jnp.concatenate([x.mean((1, 2, 3)), x.max((1, 2, 3))], -1))


def loss(model, voxels, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, len(shapes.SOLIDS)), 0.05)
    return optax.softmax_cross_entropy(model(voxels), targets).mean()


def accuracy(model, voxels, labels):
    return jnp.mean(jnp.argmax(model(voxels), -1) == labels)


def draw(path, options, result, voxels):
    """One solid of each class, without noise, beside the curves."""
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    grid = left.subplots(2, 4, subplot_kw={"projection": "3d"})
    for axes, solid, name in zip(grid.flat, voxels, shapes.SOLIDS, strict=True):
        axes.voxels(solid > 0.5, facecolors="#56B4E9", edgecolors="#1B4965", linewidth=0.2)
        axes.set(xticks=[], yticks=[], zticks=[], box_aspect=(1, 1, 1))
        axes.set_title(name, fontsize="medium", y=0.98)
    left.suptitle(f"Solids on {options.size}³ voxels (before noise)")
    curve, score = right.subplots(2, 1)
    training.draw_curves(curve, result, "loss", "training loss")
    training.draw_curves(score, result, "score", "accuracy of the test")
    figure.savefig(path, dpi=130)


def main():
    parser = training.make_parser(__doc__, "shapes", layers=16, epochs=12, batch=32)
    kinds = ("average_pooling", "full_weighting", "injection")
    parser.add_argument("--size", type=training.positive, default=16, help="voxels an axis")
    parser.add_argument("--channels", type=training.positive, default=8)
    parser.add_argument("--solids", type=training.positive, default=1600, help="to train with")
    parser.add_argument("--noise", type=float, default=0.3, help="standard deviation")
    parser.add_argument("--coarsening", choices=kinds, default="average_pooling")
    options = training.parse(parser, size=12, layers=8, epochs=4, solids=640, mesh=[2, 1])
    console, mesh = Console(), training.make_mesh(options)

    data = shapes.make(options.solids, options.size, options.noise, options.seed)
    test = shapes.make(800, options.size, options.noise, options.seed + 1)
    model = Network(options, mesh)
    variants = {COARSE: Network(options, mesh, options.coarsening)}
    console.print(
        "{} solids; {} layers on {} x {} devices".format(
            len(data[0]), options.layers, *options.mesh
        )
    )
    result = training.compare(options, mesh, model, loss, accuracy, data, test, console, variants)
    training.print_table(console, f"Solids on {options.size}^3 voxels", result)
    clean, labels = shapes.make(len(shapes.SOLIDS), options.size, 0.0, options.seed)
    draw(options.out / "shapes.png", options, result, clean[labels.argsort()])
    console.print(f"picture: {options.out / 'shapes.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
