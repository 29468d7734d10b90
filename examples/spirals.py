"""A continuous normalizing flow on two spirals, parallel in time.

Points of the plane flow for a unit of time, dz/dt = f(theta(t), z), from the data to a normal
distribution; along the way d(log p)/dt = -tr(df/dz), which in the plane is exact and cheap. The
weights are splines in time (a SpliNet) with few coefficients. Each step is one of Runge and Kutta's
method of order 4, and all steps are computed at once by MGRIT. The flow is trained twice from the
same weights: parallel in time (3 MGRIT iterations forward, 2 backward, on a mesh of time x batch
devices) and step by step. A flow gets steep as it learns, and then needs more iterations than a
residual network: in a trial with 2 and 1, on tighter spirals and at a higher rate, it broke down.

    python examples/spirals.py
    python examples/spirals.py --layers 64 --levels 3     # a finer grid in time
    python examples/spirals.py --quick

Writes outputs/spirals/spirals.png (elsewhere: --out).
"""

import dataclasses
import functools

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console

from jaxbraid.nn import SplineStack


def two_spirals(rng, n):
    """Points near two arms, [n, 2]."""
    turn = np.sqrt(rng.uniform(0.02, 1, n)) * 2 * np.pi
    arm = rng.choice([-1, 1], n)
    points = arm * turn / np.pi * np.array([np.cos(turn), np.sin(turn)])
    return (points.T + rng.normal(0, 0.1, (n, 2))).astype(np.float32)


class Flow(nnx.Module):
    """A step of the state (z, log p's change): Runge and Kutta's, with the weights of its time."""

    def __init__(self, width, rngs):
        self.inner = nnx.Linear(2, width, rngs=rngs)
        self.outer = nnx.Linear(width, 2, rngs=rngs, kernel_init=nnx.initializers.normal(0.1))

    def field(self, state):
        z, _ = state
        h = jnp.tanh(self.inner(z))
        # tr(df/dz): the sum of (1 - h^2) times what each hidden unit passes on to itself
        own = jnp.sum(self.inner.kernel.get_value() * self.outer.kernel.get_value().T, axis=0)
        return self.outer(h), -(1 - h**2) @ own

    def __call__(self, state, dt):
        def ahead(slope, by):
            return jax.tree.map(lambda u, k: u + by * dt * k, state, slope)

        a = self.field(state)
        b = self.field(ahead(a, 0.5))
        c = self.field(ahead(b, 0.5))
        d = self.field(ahead(c, 1.0))
        mean = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, a, b, c, d)
        return ahead(mean, 1.0)


class Density(nnx.Module):
    def __init__(self, options, mesh):
        self.stack = SplineStack(
            functools.partial(Flow, options.width),
            options.layers,
            n_basis=options.basis,
            degree=options.degree,
            rngs=nnx.Rngs(options.seed),
            form="step",
            **training.parallel_options(options, mesh),
        )

    def __call__(self, points):
        """The logarithm of the density at the points."""
        z, change = self.stack((points, jnp.zeros(len(points))))
        normal = -jnp.sum(z**2, axis=-1) / 2 - jnp.log(2 * jnp.pi)
        return normal - change

    def sample(self, key, n):
        """Points from the normal distribution, carried back through time: negative steps."""
        net = self.stack.net()
        back = dataclasses.replace(
            net,
            params=jax.tree.map(lambda a: a[::-1], net.params),
            f=(lambda params, x, dt: net.f[0](params, x, dt=-dt),),
        )
        state = jax.random.normal(key, (n, 2)), jnp.zeros(n)
        return back(state)[0][0]


def loss(model, points):
    return -model(points).mean()


def log_likelihood(model, points):
    return model(points).mean()


def draw(path, result, points, samples):
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (data, density, drawn), (serial, curve, score) = figure.subplots(2, 3)
    x = np.linspace(-2.6, 2.6, 120, dtype=np.float32)
    grid = np.stack(np.meshgrid(x, x), axis=-1).reshape(-1, 2)
    for axes, mode in ((density, "parallel"), (serial, "serial")):
        p = np.exp(jax.jit(result.models[mode])(grid)).reshape(len(x), len(x))
        axes.imshow(p, origin="lower", extent=(-2.6, 2.6) * 2, cmap="viridis", vmax=0.5)
        axes.set(title=f"Density, {training.NAMES[mode]}")
    for axes, shown, title in ((data, points, "Data"), (drawn, samples, "Samples of the flow")):
        axes.plot(*np.asarray(shown).T, ".", ms=2, color=training.BLUE)
        axes.set(title=title, aspect="equal")
    for axes in (data, density, drawn, serial):
        axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
    training.draw_curves(curve, result, "loss", "negative log-likelihood (nats)")
    training.draw_curves(score, result, "score", "log-likelihood of the test (nats)")
    curve.set(title="Training loss")
    score.set(title="Test")
    figure.savefig(path, dpi=130)


def main():
    parser = training.make_parser(
        __doc__,
        "spirals",
        layers=32,
        epochs=40,
        batch=256,
        rate=8e-3,
        iterations=3,
        adjoint_iterations=2,
    )
    parser.add_argument("--width", type=training.positive, default=64, help="of the field")
    parser.add_argument("--basis", type=training.positive, default=4, metavar="K")
    parser.add_argument("--degree", type=int, default=1, metavar="D", help="of the splines")
    parser.add_argument("--points", type=training.positive, default=8192, help="to train with")
    options = training.parse(parser, layers=16, epochs=4, width=32, points=4096)
    console, rng = Console(), np.random.default_rng(options.seed)
    mesh = training.make_mesh(options)

    data, test = two_spirals(rng, options.points), two_spirals(rng, 2048)
    model = Density(options, mesh)
    console.print("{} steps on {} x {} devices".format(options.layers, *options.mesh))
    result = training.compare(options, mesh, model, loss, log_likelihood, (data,), (test,), console)
    training.print_table(console, "Two spirals", result, "log-likelihood of the test", "{:.4f}")
    flow = result.models["parallel"]
    samples = flow.sample(jax.random.key(1), 2048)
    draw(options.out / "spirals.png", result, test, samples)
    console.print(f"picture: {options.out / 'spirals.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
