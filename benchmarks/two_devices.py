"""Two devices on two cores: the time of an iteration relative to one device's.

    python -m benchmarks.two_devices

Every device is one core. What further iterations add to a solve counts, T(1 + R) - T(1), over R, of
one V-cycle with F-relaxation, two levels. Two devices wait for each other in every cycle, so the
cores must have nothing else to do: what other processes took of them meanwhile is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxbraid
from benchmarks import _bench
from benchmarks._bench import Row
from benchmarks._nets import dense
from benchmarks.performance_model import others_work
from jaxbraid import MGRIT, problems

MORE = 4
LIMITS = """
The coarse solve is sequential, whatever the devices: with N/m of its N (1 + 2/m) evaluations a
cycle on two devices takes at least 0.53 of one device's time for m = 16, if
messages cost nothing, both cores are free, and they do not share what slows them (memory, clock).
"""


def mesh_of(devices: int) -> Any:
    axes = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("layer",), axes, devices=jax.devices()[:devices])


def config(iterations: int, m: int) -> MGRIT:
    return MGRIT(levels=2, coarsening=m, cf_relax=0, max_iters=iterations)


def mlp(devices: int, iterations: int, sizes: tuple[int, int, int]) -> Callable[[], Any]:
    mesh = mesh_of(devices)
    net = dense(*sizes, mesh=mesh)
    params = jax.device_put(net.params, NamedSharding(mesh, PartitionSpec("layer")))
    x = jax.device_put(net.x, NamedSharding(mesh, PartitionSpec()))
    options = config(iterations, 16)
    run = jax.jit(lambda params, x: net.call(options, options, params, x))
    return lambda: run(params, x)


def heat(devices: int, iterations: int, sizes: tuple[int, int]) -> Callable[[], Any]:
    nt, nx = sizes
    p = problems.heat_1d(nx, (0.0, np.pi), t_end=1.0, nt=nt, dtype=np.float32)
    step, ts, u0 = p.step, jnp.asarray(p.ts), jnp.asarray(p.u0)
    mesh, options = mesh_of(devices), config(iterations, 16)
    u0 = jax.device_put(u0, NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def run(u0: Any) -> Any:
        return jaxbraid.solve(step, u0, ts, args=p.args, config=options, mesh=mesh, save="final").u

    return lambda: run(u0)


def compared(name: str, make: Callable[..., Callable[[], Any]], sizes: Any, quick: bool) -> Row:
    runs = {(d, n): make(d, n, sizes) for d in (1, 2) for n in (1, 1 + MORE)}
    watch = os.path.exists("/proc/stat")
    before, start = others_work() if watch else 0.0, time.perf_counter()
    t = _bench.compare({f"{d} {n}": run for (d, n), run in runs.items()}, quick, 12.0)
    others = (others_work() - before) / (time.perf_counter() - start) / 2 if watch else 0.0
    one, two = ((t[f"{d} {1 + MORE}"].shortest - t[f"{d} 1"].shortest) / MORE for d in (1, 2))
    times = {"one device": one, "two": two}
    note = f"other processes took {max(0.0, others):.0%} of the two cores meanwhile"
    return _bench.at_most(name, times, two / one, 0.6, note)


def rows(quick: bool) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if (cores or 1) < 2:
        yield Row("two devices", "", "only one core here", "<= 0.6x")
        return
    layers, width, batch = (32, 64, 16) if quick else (256, 256, 64)
    case = f"MLP {width}, batch {batch}, {layers} layers, m = 16"
    yield compared(case, mlp, (layers, width, batch), quick)
    nt, nx = (256, 129) if quick else (2048, 4097)
    yield compared(f"heat 1D, {nx} points, {nt} steps, m = 16", heat, (nt, nx), quick)


if __name__ == "__main__":
    _bench.main(rows, __doc__, cores=2, devices=2)
