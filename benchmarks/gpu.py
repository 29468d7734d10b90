"""Batched MGRIT on one device against `lax.scan`: on a GPU where JAX has one, else on a CPU core.

    python -m benchmarks.gpu

A forward pass of one iteration, and training steps of two forward iterations and one adjoint. On a
CPU core the sizes are smaller; that shows that they run, not what a GPU does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbraid
from benchmarks import _bench
from benchmarks._bench import Row
from benchmarks._nets import dense, gru, training_step, transformer
from jaxbraid import MGRIT, problems

SERIAL = MGRIT(levels=1)


def device() -> jax.Device:
    return jax.devices()[0]


def ode(nt: int, m: int) -> dict[str, Callable[[], Any]]:
    """All states of the Brusselator in single precision; one iteration is enough for it."""
    p = problems.brusselator(t_end=24.0, nt=nt, dtype=np.float32)
    step, ts, u0 = p.step, jnp.asarray(p.ts, jnp.float32), jnp.asarray(p.u0)

    @functools.partial(jax.jit, static_argnames="unroll")
    def scan(u0: Any, ts: Any, unroll: int) -> Any:
        def body(u: Any, t: Any) -> Any:
            u = step(*t, u, None, p.args)
            return u, u

        return jax.lax.scan(body, u0, (ts[:-1], ts[1:]), unroll=unroll)[1]

    config = MGRIT(coarsening=m, cf_relax=0, max_iters=1, final_relax="FC")

    @jax.jit
    def mgrit(u0: Any, ts: Any) -> Any:
        return jaxbraid.solve(step, u0, ts, args=p.args, config=config).us

    ways = _bench.compare({str(n): lambda n=n: scan(u0, ts, n) for n in (1, 8)}, True)
    unroll = int(min(ways, key=lambda way: ways[way].shortest))
    return {"scan": lambda: scan(u0, ts, unroll), "MGRIT": lambda: mgrit(u0, ts)}


def compared(case: str, runs: dict[str, Callable[[], Any]], quick: bool, note: str = "") -> Row:
    t = _bench.compare(runs, quick)
    first, second = runs
    ratio = t[first].shortest / t[second].shortest
    return Row(f"{case} ({device().platform})", _bench.told(t), f"{ratio:.2f}x", "", None, note)


def rows(quick: bool) -> Iterator[Row]:
    large = device().platform != "cpu" and not quick
    kind = getattr(device(), "device_kind", device().platform)
    if device().platform == "cpu":
        kind = "no GPU at hand: one CPU core, smaller sizes"
    yield Row("device", "", str(kind))
    nt, m = (2**20, 1024) if large else (2**16, 256)
    yield compared(f"Brusselator, {nt} steps, m = {m}: scan / MGRIT", ode(nt, m), quick)
    nets = [
        ("MLP 64, batch 8", dense(*((4096, 64, 8) if large else (256, 64, 8))), 3, 16),
        ("GRU 2 x 100, batch 32", gru(*((16384, 32) if large else (256, 32))), 3, 16),
        ("transformer 64, batch 4", transformer(*((256, 4, 128) if large else (16, 4, 16))), 2, 4),
    ]
    for name, net, levels, m in nets[:1] if quick else nets:
        config = [
            MGRIT(levels=levels, coarsening=m, cf_relax=0, max_iters=n, final_relax="FC")
            for n in (2, 1)
        ]
        runs = {"serial": training_step(net, SERIAL), "MGRIT": training_step(net, *config)}
        case = f"training step, {name}, {net.layers} layers, m = {m}: serial / MGRIT"
        yield compared(case, runs, quick)


if __name__ == "__main__":
    _bench.main(rows, __doc__)
