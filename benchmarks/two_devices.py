"""Two devices on two cores: the time of an iteration relative to one device's.

    python -m benchmarks.two_devices

Every device is one core: XLA's threads may use both, so those of one device are held on one (on
Linux; what one device takes on both cores is told). What further iterations add to a solve counts,
T(1 + R) - T(1), over R, of one V-cycle with F-relaxation, two levels. Two devices wait for each
other in every cycle, so the cores must have nothing else to do: what other processes took of them
meanwhile is told.
"""

from __future__ import annotations

import contextlib
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
M = 32  # coarsening
LIMITS = """
The coarse solve is sequential, whatever the devices: with N/m of its N (1 + 2/m) evaluations a
cycle on two devices takes at least 0.52 of one device's time for m = 32, if
messages cost nothing, both cores are free, and they do not share what slows them (memory, clock).
"""


def mesh_of(devices: int) -> Any:
    axes = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("layer",), axes, devices=jax.devices()[:devices])


def config(iterations: int) -> MGRIT:
    return MGRIT(levels=2, coarsening=M, cf_relax=0, max_iters=iterations)


def mlp(devices: int, iterations: int, sizes: tuple[int, int, int]) -> Callable[[], Any]:
    mesh = mesh_of(devices)
    net = dense(*sizes, mesh=mesh)
    params = jax.device_put(net.params, NamedSharding(mesh, PartitionSpec("layer")))
    x = jax.device_put(net.x, NamedSharding(mesh, PartitionSpec()))
    options = config(iterations)
    run = jax.jit(lambda params, x: net.call(options, options, params, x))
    return lambda: run(params, x)


def heat(devices: int, iterations: int, sizes: tuple[int, int]) -> Callable[[], Any]:
    nt, nx = sizes
    p = problems.heat_1d(nx, (0.0, np.pi), t_end=1.0, nt=nt, dtype=np.float32)
    step, ts, u0 = p.step, jnp.asarray(p.ts), jnp.asarray(p.u0)
    mesh, options = mesh_of(devices), config(iterations)
    u0 = jax.device_put(u0, NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def run(u0: Any) -> Any:
        return jaxbraid.solve(step, u0, ts, args=p.args, config=options, mesh=mesh, save="final").u

    return lambda: run(u0)


def on_cores(count: int, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` with all threads of this process held on so many of its cores."""
    if not os.path.isdir("/proc/self/task"):
        return run
    cores = sorted(os.sched_getaffinity(0))[-count:]

    def held() -> Any:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # one that has ended meanwhile
                os.sched_setaffinity(int(thread), cores)
        return run()

    return held


def compared(name: str, make: Callable[..., Callable[[], Any]], sizes: Any, quick: bool) -> Row:
    kinds = {"one device": (1, 1), "two": (2, 2), "one on both cores": (1, 2)}  # devices, cores
    runs = {
        f"{kind} {n}": on_cores(cores, make(devices, n, sizes))
        for kind, (devices, cores) in kinds.items()
        for n in (1, 1 + MORE)
    }
    watch = os.path.exists("/proc/stat")
    before, start = others_work() if watch else 0.0, time.perf_counter()
    t = _bench.compare(runs, quick, 16.0)
    others = (others_work() - before) / (time.perf_counter() - start) / 2 if watch else 0.0
    times = {k: (t[f"{k} {1 + MORE}"].shortest - t[f"{k} 1"].shortest) / MORE for k in kinds}
    both = _bench.seconds(times.pop("one on both cores"))
    note = (
        f"one device on both cores: {both}; other processes took {max(0.0, others):.0%} of the two "
        "cores meanwhile"
    )
    return _bench.at_most(name, times, times["two"] / times["one device"], 0.6, note)


def rows(quick: bool) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if (cores or 1) < 2:
        yield Row("two devices", "", "only one core here", "<= 0.6x")
        return
    layers, width, batch = (64, 64, 16) if quick else (512, 256, 64)
    case = f"MLP {width}, batch {batch}, {layers} layers, m = {M}"
    yield compared(case, mlp, (layers, width, batch), quick)
    nt, nx = (256, 129) if quick else (1024, 24577)
    yield compared(f"heat 1D, {nx} points, {nt} steps, m = {M}", heat, (nt, nx), quick)


if __name__ == "__main__":
    _bench.main(rows, __doc__, cores=2, devices=2)
