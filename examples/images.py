"""Classify images of 28 x 28 pixels with a residual network, in parallel over its layers.

A layer is a shift convolution: channels are moved to the four neighbouring positions, then mixed at
each. (It costs a matrix product; the gradients of XLA's own convolutions are very slow on CPUs
inside loops.) The network is trained twice, from the same weights and on the same batches:
layer-parallel (2 MGRIT iterations forward, 1 backward, on a mesh of layer x batch devices) and
serially.

    python examples/images.py                    # handwritten digits of scikit-learn, enlarged
    python examples/images.py --mnist FOLDER     # MNIST or Fashion-MNIST: IDX files in a folder
    python examples/images.py --animals          # silhouettes: pip install --no-deps animal-mnist
    python examples/images.py --spline 8         # SpliNet: 8 coefficients instead of all layers
    python examples/images.py --quick

Writes outputs/images/images.png (elsewhere: --out).
"""

import functools
import gzip
import importlib.util
import pickle
from pathlib import Path

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxbraid import datasets
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.nn import SplineStack

ANIMALS = ["bear", "bird", "cat", "cow", "dog", "elephant", "giraffe", "horse", "sheep", "zebra"]


def digits():
    """1797 digits of 8 x 8 pixels, enlarged."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) * (255 / 16)
    return np.asarray(jax.image.resize(images, (len(images), 28, 28), "cubic")), labels


class OnlyArrays(pickle.Unpickler):
    """Reads arrays and nothing else: a pickle from elsewhere could run anything."""

    def find_class(self, module, name):
        if (module.removeprefix("numpy.").split(".")[0], name) in (
            ("core", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        ):
            return np._core.multiarray._reconstruct if name[0] == "_" else getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no array")


def animals():
    """10 000 silhouettes that the package animal-mnist ships."""
    spec = importlib.util.find_spec("animal_mnist")
    if spec is None or spec.origin is None:
        raise SystemExit("--animals: pip install --no-deps animal-mnist")
    folder, arrays = Path(spec.origin).parent / "data" / "Animal_MNIST", []
    for name in ("data", "label"):
        with gzip.open(folder / f"animal_{name}_version_3.gz") as file:
            arrays.append(OnlyArrays(file).load())
    return tuple(arrays)


def load_data(options):
    """Images [n, 28, 28] in 0..1 and labels, to train with and to test with; names of classes."""
    names = [str(i) for i in range(10)]
    if options.mnist:
        parts = [datasets.load_mnist(options.mnist, split) for split in ("train", "test")]
    else:
        images, labels = animals() if options.animals else digits()
        names = ANIMALS if options.animals else names
        split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
        parts = [split[0::2], split[1::2]]
    data, test = (
        ((x[:n] / 255).astype(np.float32), y[:n].astype(np.int32))
        for (x, y), n in zip(parts, (options.images, 2000), strict=True)
    )
    return data, test, names


class Block(nnx.Module):
    """dx/dt = tanh(W s(x) + b), s: four fifths of the channels, moved to the neighbours."""

    def __init__(self, channels, rngs):
        self.linear = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, x):
        here, *moved = jnp.split(x, 5, axis=-1)
        padded = [jnp.pad(part, ((0, 0), (1, 1), (1, 1), (0, 0))) for part in moved]
        places = (slice(2, None), slice(1, -1)), (slice(None, -2), slice(1, -1))
        places += tuple(place[::-1] for place in places)
        parts = [part[:, i, j] for part, (i, j) in zip(padded, places, strict=True)]
        return jnp.tanh(self.linear(jnp.concatenate([here, *parts], axis=-1)))


class Network(nnx.Module):
    def __init__(self, options, mesh):
        rngs, c = nnx.Rngs(options.seed), options.channels
        if options.spline:
            stack = functools.partial(SplineStack, n_basis=options.spline, degree=2)
        else:
            stack = ParallelStack
        self.opening = nnx.Linear(16, c, rngs=rngs)
        self.stack = stack(
            functools.partial(Block, c),
            options.layers,
            rngs=rngs,
            smooth_init=True,  # coarse levels leave out layers, so neighbours should be alike
            t_final=2.0,
            **training.parallel_options(options, mesh),
        )
        self.closing = nnx.Linear(7 * 7 * c, 10, rngs=rngs)

    def __call__(self, images):
        """Patches of 4 x 4 pixels are the channels of 7 x 7 positions."""
        x = images.reshape(-1, 7, 4, 7, 4).swapaxes(2, 3).reshape(-1, 7, 7, 16)
        x = self.stack(jnp.tanh(self.opening(x)))
        return self.closing(x.reshape(len(x), -1))


def loss(model, images, labels):
    return training.cross_entropy(model(images), labels, smoothing=0.1)


def draw(path, result, images, truth, seen, names):
    """Test images, the wrong ones first, beside the curves."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1))
    order = np.argsort(seen == truth, kind="stable")[:15]
    for axes, i in zip(left.subplots(3, 5).flat, order, strict=True):
        axes.imshow(images[i], cmap="gray_r", vmin=0, vmax=1)
        wrong = seen[i] != truth[i]
        title = f"{names[truth[i]]}, told {names[seen[i]]}" if wrong else names[truth[i]]
        colour = training.ORANGE if wrong else "black"
        axes.set_title(title, fontsize="small", color=colour)
        axes.set(xticks=[], yticks=[])
    left.suptitle(f"Test images: {np.sum(seen != truth)} of {len(truth)} are told wrong")
    training.draw_training(right, result)
    figure.savefig(path, dpi=130)


def main():
    parser = training.make_parser(__doc__, "images", epochs=15)
    parser.add_argument("--channels", type=training.positive, default=20, help="a multiple of 5")
    parser.add_argument("--spline", type=int, default=0, metavar="K", help="use a SpliNet")
    parser.add_argument("--images", type=training.positive, default=10000, help="to train with")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--mnist", type=Path, metavar="FOLDER", help="with IDX files")
    source.add_argument("--animals", action="store_true", help="of the package animal-mnist")
    options = training.parse(parser, layers=16, epochs=3, channels=15, batch=64)
    if options.channels % 5:
        parser.error(f"--channels {options.channels}: must be a multiple of 5")
    console, mesh = Console(), training.make_mesh(options)

    data, test, names = load_data(options)
    model = Network(options, mesh)
    console.print(
        "{} images; {} layers on {} x {} devices".format(
            len(data[0]), options.layers, *options.mesh
        )
    )
    result = training.compare(options, mesh, model, loss, training.accuracy, data, test, console)
    training.print_table(console, "Images of 28 x 28 pixels", result)
    seen = np.argmax(jax.jit(result.models["parallel"])(test[0]), -1)
    draw(options.out / "images.png", result, *test, seen, names)
    console.print(f"picture: {options.out / 'images.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
