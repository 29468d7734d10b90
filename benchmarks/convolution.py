"""Gradients of convolutions within loops: `lax.conv_general_dilated` and that of `jaxbraid.nn`.

    taskset -c 0 python benchmarks/convolution.py         # on one core
    taskset -c 0 python benchmarks/convolution.py 3D      # settings whose name has "3D"

A `lax.scan` over four layers x + 0.1 tanh(K * x) with kernels three wide, in single precision: the
shortest of several times a layer. "forward" is the scan, "gradient" its reverse mode, the scan
included, "of 8" the time of one of eight such gradients at once by `jax.vmap`, each with kernels of
its own, as MGRIT batches intervals. The last column is how many times faster the gradient is.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
from jax import lax

from jaxbraid.nn import conv_general_dilated

LAYERS = 4
BATCHED = 8
DIMS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
SETTINGS = {  # (batch, *space), channels
    "1D 256, 8 channels, batch 50": ((50, 256), 8),
    "2D 28^2, 4 channels, batch 50": ((50, 28, 28), 4),
    "2D 28^2, 16 channels, batch 50": ((50, 28, 28), 16),
    "2D 28^2, 32 channels, batch 50": ((50, 28, 28), 32),
    "3D 16^3, 4 channels, batch 8": ((8, 16, 16, 16), 4),
    "3D 16^3, 8 channels, batch 8": ((8, 16, 16, 16), 8),
    "3D 16^3, 16 channels, batch 8": ((8, 16, 16, 16), 16),
}


def shortest(f, *args) -> float:
    """Seconds; after compiling, for at least half a second and three calls."""
    times: list[float] = []
    jax.block_until_ready(f(*args))
    while len(times) < 3 or sum(times) < 0.5:
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def setting(conv, shape, channels):
    """A scan over layers, its gradient, and what they are called with."""
    dims = len(shape) - 1
    kernels = 0.1 * jax.random.normal(
        jax.random.key(1), (LAYERS, *(3,) * dims, channels, channels), jnp.float32
    )
    x = jax.random.normal(jax.random.key(0), (*shape, channels), jnp.float32)

    def layer(x, kernel):
        y = conv(x, kernel, (1,) * dims, "SAME", dimension_numbers=DIMS[dims])
        return x + 0.1 * jnp.tanh(y), None

    def net(x, kernels):
        return lax.scan(layer, x, kernels)[0]

    return net, jax.grad(lambda x, kernels: jnp.sum(net(x, kernels) ** 2), (0, 1)), (x, kernels)


def times(conv, shape, channels) -> tuple[float, float]:
    """Milliseconds of a layer: forward, and with the gradient."""
    net, gradient, args = setting(conv, shape, channels)
    forward, both = (shortest(jax.jit(f), *args) for f in (net, gradient))
    return 1e3 * forward / LAYERS, 1e3 * both / LAYERS


def batched_time(conv, shape, channels) -> float:
    """Milliseconds of a layer with the gradient, in a batch that differs in kernels too."""
    _, gradient, args = setting(conv, shape, channels)
    batch = [jnp.stack([(1 + i / 8) * a for i in range(BATCHED)]) for a in args]
    return 1e3 * shortest(jax.jit(jax.vmap(gradient)), *batch) / (LAYERS * BATCHED)


def main(names: list[str]) -> None:
    head = f"{'forward':>9}{'gradient':>10}"
    print(f"{'ms a layer':34}{'lax':>19}{'jaxbraid.nn':>20}")
    print(f"{'':34}{head} {head}{f'of {BATCHED}':>8}{'ratio':>8}")
    for name, (shape, channels) in SETTINGS.items():
        if names and not any(n in name for n in names):
            continue
        xla = times(lax.conv_general_dilated, shape, channels)
        ours = times(conv_general_dilated, shape, channels)
        row = " ".join(f"{a:9.2f}{b:10.2f}" for a, b in (xla, ours))
        batched = batched_time(conv_general_dilated, shape, channels)
        print(f"{name:34}{row}{batched:8.2f}{xla[1] / ours[1]:8.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
