"""Tell materials in a hyperspectral image, pixel by pixel, with a SpliNet over the wavelengths.

A pixel is a spectrum: a mixture of materials, each with absorption bands of its own, under an
illumination that varies, with noise. All of it is generated. The network convolves along the
wavelengths; its stack is a SpliNet, whose weights are splines in depth with few coefficients.
It is trained twice from the same weights: layer-parallel (2 MGRIT iterations forward, 1 backward,
on a mesh of layer x batch devices) and serially.

    python examples/spectra.py                 # 32 layers made of 8 coefficients each
    python examples/spectra.py --basis 4 --degree 1 --layers 64 --levels 3
    python examples/spectra.py --quick

Writes outputs/spectra/spectra.png (elsewhere: --out).
"""

import functools

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from rich.console import Console
from scipy.ndimage import gaussian_filter

from jaxbraid.nn import SplineStack

BANDS = 64
WAVELENGTHS = np.linspace(0.4, 2.5, BANDS)  # micrometres
# Of each material: brightness, slope over the wavelengths, bands (centre, width, depth).
MATERIALS = {
    "vegetation": (0.45, 0.0, [(0.68, 0.07, 0.7), (1.45, 0.09, 0.45), (1.94, 0.11, 0.55)]),
    "clay": (0.55, 0.1, [(1.41, 0.04, 0.25), (1.91, 0.06, 0.3), (2.21, 0.05, 0.45)]),
    "carbonate": (0.6, 0.1, [(1.88, 0.06, 0.12), (2.00, 0.05, 0.15), (2.34, 0.06, 0.45)]),
    "iron oxide": (0.4, 0.2, [(0.53, 0.08, 0.6), (0.88, 0.12, 0.4)]),
    "concrete": (0.5, 0.05, [(1.45, 0.09, 0.1), (1.94, 0.11, 0.2), (2.31, 0.05, 0.1)]),
}
COLOURS = ("#009E73", "#E69F00", "#56B4E9", "#D55E00", "#999999")


def pure_spectra():
    """Reflectance of the materials, [materials, bands]."""
    x, spectra = WAVELENGTHS, []
    for brightness, slope, bands in MATERIALS.values():
        absorbed = [1 - d * np.exp(-(((x - c) / w) ** 2)) for c, w, d in bands]
        spectra.append((brightness + slope * (x - 0.4) / 2.1) * np.prod(absorbed, axis=0))
    return np.array(spectra)


def observe(rng, labels, noise):
    """What is measured where `labels` are the materials that dominate: [pixels, bands]."""
    n, m = len(labels), len(MATERIALS)
    others = rng.dirichlet(np.full(m, 0.5), n)
    share = rng.uniform(0.45, 0.95, (n, 1))  # of the material that dominates
    shares = (1 - share) * others + share * np.eye(m)[labels]
    light = rng.uniform(0.4, 1.3, (n, 1)) * (1 + rng.uniform(-0.2, 0.2, (n, 1)) * (WAVELENGTHS - 1))
    spectra = light * (shares @ pure_spectra()) + rng.normal(0, noise, (n, BANDS))
    level = spectra.mean(axis=1, keepdims=True)
    return ((spectra / level - 1) * 2).astype(np.float32), shares.argmax(axis=1)


def make_scene(rng, size):
    """Materials of the pixels of a landscape: where a smooth random field of each is largest."""
    fields = [gaussian_filter(rng.normal(size=(size, size)), size / 12) for _ in MATERIALS]
    return np.argmax(fields, axis=0)


class Block(nnx.Module):
    """dx/dt = tanh(a convolution of three wavelengths), as one product of shifted copies."""

    def __init__(self, channels, rngs):
        self.linear = nnx.Linear(3 * channels, channels, rngs=rngs)

    def __call__(self, x):
        padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        return jnp.tanh(self.linear(jnp.concatenate([padded[:, :-2], x, padded[:, 2:]], axis=-1)))


class Network(nnx.Module):
    def __init__(self, options, mesh):
        rngs, c = nnx.Rngs(options.seed), options.channels
        self.opening = nnx.Linear(4, c, rngs=rngs)
        self.stack = SplineStack(
            functools.partial(Block, c),
            options.layers,
            n_basis=options.basis,
            degree=options.degree,
            rngs=rngs,
            smooth_init=True,
            t_final=2.0,
            **training.parallel_options(options, mesh),
        )
        self.closing = nnx.Linear(BANDS // 4 * c, len(MATERIALS), rngs=rngs)

    def __call__(self, spectra):
        """Four neighbouring bands are channels of one position, [pixels, 16, 4] at first."""
        x = jnp.tanh(self.opening(spectra.reshape(len(spectra), -1, 4)))
        return self.closing(self.stack(x).reshape(len(x), -1))


def loss(model, spectra, labels):
    return training.cross_entropy(model(spectra), labels)


def draw(path, result, scene, spectra, truth, seen):
    figure = Figure(figsize=(12, 7), layout="constrained")
    (pure, mixed, curve), (true, told, score) = figure.subplots(2, 3)
    for (name, spectrum), colour in zip(
        zip(MATERIALS, pure_spectra(), strict=True), COLOURS, strict=True
    ):
        pure.plot(WAVELENGTHS, spectrum, color=colour, label=name)
    for label, colour in enumerate(COLOURS):
        for spectrum in spectra[truth == label][:3]:
            mixed.plot(WAVELENGTHS, spectrum, color=colour, lw=0.8)
    pure.set(title="Materials", xlabel="wavelength (µm)", ylabel="reflectance", ylim=(0, 1))
    pure.legend(ncols=2, fontsize="small", loc="upper right")
    mixed.set(title="Pixels, as the network sees them", xlabel="wavelength (µm)")
    mixed.set(ylabel="relative to their mean")
    for axes, labels, title in (
        (true, truth, "Material that dominates"),
        (told, seen, f"As told by the network: {np.mean(seen == truth):.1%} right"),
    ):
        axes.imshow(labels.reshape(scene.shape), cmap=ListedColormap(COLOURS), vmin=-0.5, vmax=4.5,
                    interpolation="nearest")  # fmt: skip
        axes.set(title=title, xticks=[], yticks=[])
    training.draw_curves(curve, result, "loss", "cross-entropy")
    training.draw_curves(score, result, "score", "accuracy on the scene")
    curve.set(title="Training loss", yscale="log")
    score.set(title="Accuracy")
    figure.savefig(path, dpi=130)


def main():
    parser = training.make_parser(__doc__, "spectra", epochs=12)
    parser.add_argument("--channels", type=training.positive, default=12, metavar="N")
    parser.add_argument("--basis", type=training.positive, default=8, metavar="K")
    parser.add_argument("--degree", type=int, default=2, metavar="D", help="of the splines")
    parser.add_argument("--pixels", type=training.positive, default=8192, help="to train with")
    parser.add_argument("--noise", type=float, default=0.006, help="standard deviation of noise")
    options = training.parse(parser, pixels=2048, epochs=5, layers=16, channels=8, basis=5)
    console, rng = Console(), np.random.default_rng(options.seed)
    mesh = training.make_mesh(options)

    data = observe(rng, rng.integers(0, len(MATERIALS), options.pixels), options.noise)
    scene = make_scene(rng, 64)
    test = observe(rng, scene.ravel(), options.noise)
    model = Network(options, mesh)
    console.print(
        "{} layers, made of {} coefficients each, on {} x {} devices".format(
            options.layers, options.basis, *options.mesh
        )
    )
    result = training.compare(options, mesh, model, loss, training.accuracy, data, test, console)
    training.print_table(console, "Materials in spectra", result)
    seen = np.argmax(jax.jit(result.models["parallel"])(test[0]), -1)
    draw(options.out / "spectra.png", result, scene, *test, seen)
    console.print(f"picture: {options.out / 'spectra.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
