"""Classify solids on voxels by a 3D convolutional network, in parallel over its layers.

The solids are made by formulas: of revolution, polyhedra, a torus, rotated at random, with noise. A
layer is dx/dt = K * relu(norm(x)). The network is trained three times, from the same weights and on
the same batches: layer-parallel (2 MGRIT iterations forward, 1 backward, on a mesh of layer x batch
devices), the same with one more level whose voxels are coarser, so that its layers cost an eighth,
and serially.

Without coarser voxels F-relaxation is enough. With them it is FCF-relaxation: what coarse voxels
lose is brought to the next interval by C-relaxation only. And the first two levels have the finest
voxels, for the same reason: two levels, one of them coarser, converge far too slowly.

    python examples/shapes.py
    python examples/shapes.py --coarsening injection    # or full_weighting, on --size 14 or 22
    python examples/shapes.py --noise 0.3
    python examples/shapes.py --quick                   # 8^3 voxels, four classes

Writes outputs/shapes/shapes.png (elsewhere: --out).
"""

import dataclasses

import _shapes as shapes
import _training as training
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console

from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.nn import Conv, ConvBlock, spatial_coarsening

COARSE = "coarser voxels"


class Network(nnx.Module):
    def __init__(self, options, mesh, coarsening=None):
        rngs, c = nnx.Rngs(options.seed), options.channels
        given = training.parallel_options(options, mesh)
        if coarsening:  # on a level more
            levels = options.levels + 1
            chosen = [level == levels - 2 for level in range(levels - 1)]
            given["transfers"] = spatial_coarsening(coarsening, 3, chosen)
            for solve in ("forward", "adjoint"):
                given[solve] = dataclasses.replace(given[solve], levels=levels, cf_relax=1)
        self.opening = Conv(1, c, (4, 4, 4), strides=2, rngs=rngs)
        self.stack = ParallelStack(
            lambda rngs: ConvBlock(c, (3, 3, 3), convolutions=1, norm="group", rngs=rngs),
            options.layers,
            rngs=rngs,
            smooth_init=True,  # coarse levels leave out layers, so neighbours should be alike
            t_final=2.0,
            **given,
        )
        self.norm = nnx.GroupNorm(c, num_groups=1, rngs=rngs)
        self.closing = nnx.Linear(2 * c, options.classes, rngs=rngs)

    def __call__(self, voxels):
        x = nnx.relu(self.norm(self.stack(self.opening(voxels[..., None]))))
        return self.closing(jnp.concatenate([x.mean((1, 2, 3)), x.max((1, 2, 3))], -1))


def loss(model, voxels, labels):
    return training.cross_entropy(model(voxels), labels)


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
    training.draw_training(right, result)
    figure.savefig(path, dpi=130)


def main():
    parser = training.make_parser(__doc__, "shapes", layers=16, epochs=8, batch=16, rate=0.02)
    parser.set_defaults(factor=2)
    kinds = ("average_pooling", "full_weighting", "injection")
    parser.add_argument("--size", type=training.positive, default=12, help="voxels an axis")
    parser.add_argument("--channels", type=training.positive, default=8)
    parser.add_argument("--solids", type=training.positive, default=1000, help="to train with")
    parser.add_argument("--classes", type=training.positive, default=8, help="of solids, 2 to 8")
    parser.add_argument("--noise", type=float, default=0.1, help="standard deviation")
    parser.add_argument("--coarsening", choices=kinds, default="average_pooling")
    quick = {"size": 8, "layers": 8, "mesh": [1, 1], "classes": 4}
    options = training.parse(parser, **quick, solids=640, epochs=4)
    console, mesh = Console(), training.make_mesh(options)

    kind = options.size, options.noise
    data = shapes.make(options.solids, *kind, options.seed, options.classes)
    test = shapes.make(800, *kind, options.seed + 1, options.classes)
    model = Network(options, mesh)
    variants = {COARSE: Network(options, mesh, options.coarsening)}
    console.print(
        "{} solids; {} layers on {} x {} devices".format(
            len(data[0]), options.layers, *options.mesh
        )
    )
    result = training.compare(
        options, mesh, model, loss, training.accuracy, data, test, console, variants
    )
    training.print_table(console, f"Solids on {options.size}^3 voxels", result)
    clean, labels = shapes.make(len(shapes.SOLIDS), options.size, 0.0, options.seed)
    draw(options.out / "shapes.png", options, result, clean[labels.argsort()])
    console.print(f"picture: {options.out / 'shapes.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
