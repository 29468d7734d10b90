"""Networks and time steppers that several benchmarks share, as their users would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jaxbraid
from jaxbraid import MGRIT
from jaxbraid.nn import RNN, ImplicitGRUCell, conv_general_dilated

F32 = jnp.float32


class Net(NamedTuple):
    """`call(forward, adjoint, params, x)`: the output; it is differentiated by the last two."""

    layers: int
    params: Any
    x: Any
    call: Callable[[MGRIT, MGRIT, Any, Any], Any]


def _normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(seed), shape, F32)


def _stack(f: Callable[..., Any], layers: int, params: Any, x: Any, mesh: Any = None) -> Net:
    def call(forward: MGRIT, adjoint: MGRIT, params: Any, x: Any) -> Any:
        net = jaxbraid.parallel_ode_net(f, params, forward=forward, adjoint=adjoint, mesh=mesh)
        return net(x)

    return Net(layers, params, x, call)


def dense_layer(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"])


def dense(layers: int, width: int = 64, batch: int = 64, mesh: Any = None) -> Net:
    """Layers x + dt tanh(W x + b)."""
    params = {
        "w": _normal(0, layers, width, width, scale=width**-0.5),
        "b": jnp.zeros((layers, width), F32),
    }
    return _stack(dense_layer, layers, params, _normal(1, batch, width), mesh)


def convolutions_layer(p: Any, x: Any) -> Any:
    for one in p:
        dims = ("NHWC", "HWIO", "NHWC")
        y = conv_general_dilated(x, one["k"], (1, 1), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(y + one["b"])
    return x


def convolutions(channels: int, layers: int = 32, batch: int = 50, size: int = 28) -> Net:
    """Layers x + dt relu(K2 * relu(K1 * x + b1) + b2) with kernels three wide."""

    params = [
        {
            "k": _normal(i, layers, 3, 3, channels, channels, scale=(9 * channels) ** -0.5),
            "b": jnp.zeros((layers, channels), F32),
        }
        for i in range(2)
    ]
    return _stack(convolutions_layer, layers, params, _normal(2, batch, size, size, channels))


def gru(steps: int, batch: int, hidden: int = 100, features: int = 9, stacked: int = 2) -> Net:
    """Implicit GRU cells upon each other, over a sequence; its last outputs."""
    rngs = nnx.Rngs(0)
    sizes = [features] + [hidden] * (stacked - 1)
    cells = nnx.List([ImplicitGRUCell(n, hidden, rngs=rngs) for n in sizes])
    graph, params = nnx.split(cells)

    def call(forward: MGRIT, adjoint: MGRIT, params: Any, x: Any) -> Any:
        cells = list(nnx.merge(graph, params))
        return RNN(cells, forward=forward, adjoint=adjoint, time_major=True)(x)[-1]

    return Net(steps, params, _normal(3, steps, batch, features), call)


def transformer(layers: int, batch: int, length: int, width: int = 64, heads: int = 4) -> Net:
    """Layers of self-attention and a perceptron, each after a normalisation."""

    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)

    def f(p: Any, x: Any) -> Any:
        def split(a: Any) -> Any:
            return a.reshape(*a.shape[:-1], heads, width // heads)

        q, k, v = (split(a) for a in jnp.split(norm(x) @ p["qkv"], 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]
        return y + jax.nn.gelu(norm(x + y) @ p["up"]) @ p["down"]

    scale = width**-0.5
    params = {
        "qkv": _normal(0, layers, width, 3 * width, scale=scale),
        "out": _normal(1, layers, width, width, scale=scale),
        "up": _normal(2, layers, width, 4 * width, scale=scale),
        "down": _normal(3, layers, 4 * width, width, scale=scale / 2),
    }
    return _stack(f, layers, params, _normal(4, batch, length, width))


def gradient(net: Net, forward: MGRIT, adjoint: MGRIT | None = None) -> Any:
    """The jitted gradient of a loss by parameters and input, all of it as in training."""
    adjoint = forward if adjoint is None else adjoint

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(net.call(forward, adjoint, params, x) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def training_step(net: Net, forward: MGRIT, adjoint: MGRIT | None = None) -> Callable[[], Any]:
    step = gradient(net, forward, adjoint)
    return lambda: step(net.params, net.x)


def forward_pass(net: Net, forward: MGRIT) -> Callable[[], Any]:
    run = jax.jit(lambda params, x: net.call(forward, forward, params, x))
    return lambda: run(net.params, net.x)
