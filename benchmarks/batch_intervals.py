"""How many intervals to step at once: a training step with `batch_intervals` all, 8 and one.

    python benchmarks/batch_intervals.py

Prints ratios to the serial training step (`MGRIT(levels=1)`) of the same network, medians of calls
that take turns, on one device. The rule of `batch_intervals="auto"` comes from this table.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp

import jaxbraid
from jaxbraid import MGRIT


def mlp(width: int, batch: int, layers: int):
    w = jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5
    return lambda w, x: jnp.tanh(x @ w), w, jnp.ones((batch, width))


def conv(channels: int, batch: int, layers: int):
    w = 0.1 * jax.random.normal(jax.random.key(0), (layers, 3, 3, channels, channels))

    def f(w, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims))

    return f, w, jnp.ones((batch, 14, 14, channels))


def gru(hidden: int, batch: int, steps: int):
    xs = jax.random.normal(jax.random.key(1), (steps, batch, 3 * hidden))
    w = jax.random.normal(jax.random.key(0), (hidden, 3 * hidden)) / hidden**0.5

    def f(p, h, args):
        r, z, n = jnp.split(p + h @ args, 3, axis=-1)
        return (1 - jax.nn.sigmoid(z)) * (jnp.tanh(n * jax.nn.sigmoid(r)) - h)

    return f, xs, jnp.zeros((batch, hidden)), w


PROBLEMS = {
    "2 numbers, 4096 steps": mlp(2, 1, 4096),
    "mlp 16 x 16, 512 layers": mlp(16, 16, 512),
    "mlp 64 x 64, 128 layers": mlp(64, 64, 128),
    "mlp 256 x 64, 64 layers": mlp(256, 64, 64),
    "gru 32 x 32, 512 steps": gru(32, 32, 512),
    "conv 4 channels, batch 8, 16 layers": conv(4, 8, 16),
    "conv 16 channels, batch 4, 16 layers": conv(16, 4, 16),
}


def training_step(problem, config: MGRIT):
    f, params, x, *args = problem

    @jax.jit
    def step(params, args):
        def loss(params, args):
            net = jaxbraid.parallel_ode_net(f, params, args=args, forward=config, adjoint=config)
            return jnp.sum(net(x) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(params, args)

    args = args[0] if args else None
    return lambda: jax.block_until_ready(step(params, args))


def medians(runs: list, repeats: int = 7) -> list[float]:
    """Median time of each of `runs`, taking turns so that a slow moment hits all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            times[i].append(time.perf_counter() - start)
    return [statistics.median(t) for t in times]


def main(names: list[str]) -> None:
    choices = ("all", 8, "one", "auto")
    print(f"{'problem':38} {'serial':>9}" + "".join(f"{c!s:>8}" for c in choices))
    for name, problem in PROBLEMS.items():
        if names and not any(n in name for n in names):
            continue
        configs = [MGRIT(levels=1)] + [
            MGRIT(coarsening=8, max_iters=1, cf_relax=0, batch_intervals=c, final_relax="FC")
            for c in choices
        ]
        serial, *times = medians([training_step(problem, c) for c in configs])
        row = "".join(f"{t / serial:8.2f}" for t in times)
        print(f"{name:38} {serial * 1e3:6.2f} ms{row}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
