"""What a user does first, with jaxbraid as it is installed; run by `make dist`.

The environment is empty, and `python -I` keeps the current folder and this one off the path.
"""

import importlib
import importlib.metadata
import pathlib
import pkgutil
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxbraid
from jaxbraid.flax.nnx import ParallelStack

OPTIONAL = {"jaxbraid.mpi"}  # needs mpi4py; jaxbraid.plot asks for Matplotlib when it draws


def installed():
    """The package is that of the environment, whole, with its version and its licence."""
    here = pathlib.Path(jaxbraid.__file__)
    assert here.is_relative_to(sys.prefix), here
    assert (here.parent / "py.typed").is_file()
    distribution = importlib.metadata.distribution("jaxbraid")
    assert distribution.version == jaxbraid.__version__
    assert any(f.name == "LICENSE" for f in distribution.files)
    for module in pkgutil.walk_packages(jaxbraid.__path__, "jaxbraid."):
        if module.name not in OPTIONAL:
            importlib.import_module(module.name)


def integrates():
    """u' = -u from 1 over a unit of time, and its derivative."""

    def step(t0, t1, u, params, args):
        return u / (1 + args * (t1 - t0))

    def end(rate):
        ts = jnp.linspace(0.0, 1.0, 1025)
        return jaxbraid.solve(step, 1.0, ts, args=rate, config=jaxbraid.MGRIT(max_iters=3)).u

    value, slope = jax.value_and_grad(end)(1.0)
    exact = float(jnp.exp(-1.0))
    assert abs(value - exact) < 1e-3 and abs(slope + exact) < 1e-3, (value, slope)


def trains():
    """Some steps of a layer-parallel network make its loss smaller."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x))

    @nnx.jit
    def update(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - jnp.sin(x)) ** 2))(model)
        optimizer.update(model, grads)
        return value

    model = ParallelStack(Block, layers=16, rngs=nnx.Rngs(0), smooth_init=True)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (32, 4))
    losses = [float(update(model, optimizer, x)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0], losses


if __name__ == "__main__":
    installed()
    integrates()
    trains()
    print(f"jaxbraid {jaxbraid.__version__}, as installed: passed")
