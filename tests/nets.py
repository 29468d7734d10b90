"""Small networks for the tests, each with its independent truth: a plain `lax.scan`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh


def mesh_of(layers: int, batch: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: layers * batch]).reshape(layers, batch)
    return Mesh(devices, ("depth", "data"))


def field(p, x, t, args):
    """A vector field on a pytree, with shared arguments and a time dependence."""
    a = jnp.tanh(x["a"] @ p["w"] + p["b"] + args["c"] * x["s"][:, None])
    return {"a": a, "s": jnp.sin(x["a"].sum(-1) + t) * p["g"]}


def tree_net(layers: int, batch: int = 4):
    """`(params, args, x)` for `field`."""
    k = jax.random.split(jax.random.key(layers), 5)
    params = {
        "w": jax.random.normal(k[0], (layers, 3, 3)),
        "b": jax.random.normal(k[1], (layers, 3)),
        "g": jax.random.normal(k[2], (layers,)),
    }
    x = {"a": jax.random.normal(k[3], (batch, 3)), "s": jax.random.normal(k[4], (batch,))}
    return params, {"c": jnp.array([0.3, 0.2, 0.1])}, x


def serial_field(params, args, x, t_final=1.0):
    """Forward Euler through `field`, one layer after another."""
    n = params["g"].shape[0]
    h = t_final / n

    def layer(u, inputs):
        p, i = inputs
        u = jax.tree.map(lambda a, b: a + h * b, u, field(p, u, i * h, args))
        return u, u

    return jax.lax.scan(layer, x, (params, jnp.arange(n)))


def dense(w, x):
    return jnp.tanh(x @ w)


def dense_weights(layers: int, width: int = 3, dtype=None):
    w = jax.random.normal(jax.random.key(layers), (layers, width, width), jnp.float64)
    return w if dtype is None else w.astype(dtype)


def serial_dense(w, x):
    h = jnp.asarray(1 / w.shape[0], x.dtype)
    return jax.lax.scan(lambda u, w: (u + h * jnp.tanh(u @ w), None), x, w)[0]


def relative_error(a, b) -> float:
    """Largest error of a leaf relative to the leaf's largest entry."""
    a, b = jax.tree.map(np.asarray, (a, b))  # from whatever devices they are on
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for x, y in pairs)
