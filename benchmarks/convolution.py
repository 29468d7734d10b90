"""Gradients of convolutions within loops: `lax.conv_general_dilated` and that of `jaxbraid.nn`.

    taskset -c 0 python benchmarks/convolution.py         # on one core
    taskset -c 0 python benchmarks/convolution.py 3D      # settings whose name has "3D"

A `lax.scan` over four layers x + 0.1 tanh(K * x) with kernels three wide, in single precision: the
shortest of several times a layer. "forward" is the scan, "gradient" its reverse mode, the scan
included. The last column is how many times faster the gradient is.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
from jax import lax

from jaxbraid.nn import conv_general_dilated

LAYERS = 4
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


def times(conv, shape, channels) -> tuple[float, float]:
    """Milliseconds of a layer: forward, and with the gradient."""
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

    gradient = jax.jit(jax.grad(lambda x, kernels: jnp.sum(net(x, kernels) ** 2), (0, 1)))
    forward, both = shortest(jax.jit(net), x, kernels), shortest(gradient, x, kernels)
    return 1e3 * forward / LAYERS, 1e3 * both / LAYERS


def main(names: list[str]) -> None:
    head = f"{'forward':>9}{'gradient':>10}"
    print(f"{'ms a layer':34}{'lax':>19}{'jaxbraid.nn':>20}\n{'':34}{head} {head}{'ratio':>8}")
    for name, (shape, channels) in SETTINGS.items():
        if names and not any(n in name for n in names):
            continue
        xla = times(lax.conv_general_dilated, shape, channels)
        ours = times(conv_general_dilated, shape, channels)
        row = " ".join(f"{a:9.2f}{b:10.2f}" for a, b in (xla, ours))
        print(f"{name:34}{row}{xla[1] / ours[1]:8.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
