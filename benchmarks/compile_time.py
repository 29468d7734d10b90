"""Compile time of a network's gradient: with its layers, devices and levels.

    python -m benchmarks.compile_time

Traced, lowered and compiled anew each time, nothing cached; the shortest of a few. The devices are
virtual ones on the CPU. "serial" is the gradient of a plain `lax.scan` over the layers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _bench
from benchmarks._bench import Row
from benchmarks._nets import Net, convolutions, convolutions_layer, dense, dense_layer, gradient
from benchmarks.training_step import config

LIMITS = """
A level compiles the layer several times: in its relaxation, in its right-hand side, in the sweep
that keeps the points on the way up, and in nested iteration; the adjoint does the same with the
layer's vjp. The gradient of a scan has the layer once and its vjp once.
"""
GROWTH = 1.1  # what "does not grow" allows: the times themselves vary so much


def compiling(net: Net, levels: int, iterations: tuple[int, int] = (2, 1)) -> Callable[[], None]:
    configs = [config(levels, n) for n in iterations]
    return lambda: compile_gradient(gradient(net, *configs), net)


def compile_gradient(jitted: Any, net: Net) -> None:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (net.params, net.x))
    jitted.lower(*shapes).compile()


def compiling_scan(net: Net, f: Callable[[Any, Any], Any]) -> Callable[[], None]:
    def loss(params: Any, x: Any) -> Any:
        dt = jnp.float32(1 / net.layers)
        y, _ = jax.lax.scan(lambda x, p: (x + dt * f(p, x), None), x, params)
        return jnp.mean(y**2)

    return lambda: compile_gradient(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), net)


def compare(runs: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            jax.clear_caches()
            gc.collect()
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def mesh_of(devices: int) -> Any:
    axes = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("layer",), axes, devices=jax.devices()[:devices])


def rows(quick: bool) -> Iterator[Row]:
    repeats = 1 if quick else 3
    jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()  # JAX loads parts of itself at first
    counts = (64, 256) if quick else (64, 256, 1024)
    t = compare({f"{n} layers": compiling(dense(n), 3) for n in counts}, repeats)
    growth = list(t.values())[-1] / t["64 layers"]
    yield _bench.at_most("dense, 3 levels, layers", t, growth, GROWTH)

    devices = (2, 4) if quick else (1, 2, 4, 8)
    t = compare(
        {f"{d} devices": compiling(dense(256, mesh=mesh_of(d)), 3) for d in devices}, repeats
    )
    growth = list(t.values())[-1] / t["2 devices"]
    note = ""
    if not quick:
        note = f"a mesh of two devices against one: {t['2 devices'] / t['1 devices']:.2f}x"
    yield _bench.at_most("dense, 3 levels, devices (last / 2)", t, growth, GROWTH, note)

    nets: list[tuple[str, Net, Callable]] = [("dense", dense(256), dense_layer)]
    if not quick:
        nets.append(("convolutions", convolutions(4, 256), convolutions_layer))
    for name, net, f in nets:
        levels = (1, 2, 3) if quick else (1, 2, 3, 4)
        runs = {"serial": compiling_scan(net, f)}
        runs |= {f"{l} levels": compiling(net, l) for l in levels}
        t = compare(runs, repeats)
        ratio = t["3 levels"] / t["serial"] / 3
        steps = [t[f"{l + 1} levels"] - t[f"{l} levels"] for l in levels[1:-1]]
        note = "each level more adds " + ", ".join(_bench.seconds(s) for s in steps)
        yield _bench.at_most(f"{name}: 3 levels / (3 x serial)", t, ratio, 1.5, note)


if __name__ == "__main__":
    _bench.main(rows, __doc__, devices=8)
