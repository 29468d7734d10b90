"""How many intervals to step at once: a training step with `batch_intervals` all, 8, one and auto.

    python -m benchmarks.batch_intervals

One device, two levels, factor 8, F-relaxation, one iteration each way. Times are relative to the
best of the three fixed choices; the rule of `batch_intervals="auto"` comes from this table.
"serial" is the same network's step with `MGRIT(levels=1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbraid
from benchmarks import _bench
from benchmarks._bench import Row
from benchmarks._nets import F32, convolutions, dense, gru, training_step
from jaxbraid import MGRIT, problems

LIMITS = """
The rule knows the backend and the size of a state, not what a step does with it.
"""
CHOICES = ("all", 8, "one", "auto")


def config(choice: Any) -> MGRIT:
    return MGRIT(coarsening=8, max_iters=1, cf_relax=0, batch_intervals=choice, final_relax="FC")


def heat(nx: int, nt: int) -> Callable[[MGRIT], Callable[[], Any]]:
    """Gradient of a norm of all states by the diffusivity and the initial value."""
    p = problems.heat_1d(nx, (0.0, np.pi), t_end=1.0, nt=nt, dtype=np.float32)
    step, ts = p.step, jnp.asarray(p.ts)

    def make(config: MGRIT) -> Callable[[], Any]:
        @jax.jit
        def run(args: Any, u0: Any) -> Any:
            def loss(args: Any, u0: Any) -> Any:
                us = jaxbraid.solve(step, u0, ts, args=args, config=config).us
                return jnp.mean(us**2)

            return jax.value_and_grad(loss, argnums=(0, 1))(args, u0)

        args = {"a": jnp.ones((), F32)}
        return lambda: run(args, p.u0)

    return make


def cases(quick: bool) -> Iterator[tuple[str, Callable[[MGRIT], Callable[[], Any]]]]:
    nets: list[tuple[str, Callable, tuple[int, ...]]] = [
        ("MLP of 2 numbers, 4096 layers", dense, (4096, 2, 1)),
        ("MLP 16, batch 16, 512 layers", dense, (512, 16, 16)),
        ("MLP 64, batch 64, 128 layers", dense, (128, 64, 64)),
        ("MLP 256, batch 64, 64 layers", dense, (64, 256, 64)),
        ("GRU 2 x 32, batch 32, 512 steps", gru, (512, 32, 32, 96)),
        ("GRU 2 x 100, batch 100, 128 steps", gru, (128, 100)),
        ("convolutions, 4 channels, 14 x 14, batch 8, 32 layers", convolutions, (4, 32, 8, 14)),
        ("convolutions, 16 channels, 14 x 14, batch 8, 32 layers", convolutions, (16, 32, 8, 14)),
    ]
    for name, make, sizes in [] if quick else nets:
        net = make(*sizes)
        yield name, lambda config, net=net: training_step(net, config)
    nx, nt = (33, 128) if quick else (1025, 1024)
    yield f"heat 1D, {nx} points, {nt} steps", heat(nx, nt)


def rows(quick: bool) -> Iterator[Row]:
    for name, make in cases(quick):
        runs = {str(c): make(config(c)) for c in CHOICES} | {"serial": make(MGRIT(levels=1))}
        t = _bench.compare(runs, quick)
        best = min(t[str(c)].shortest for c in CHOICES[:-1])
        relative = ", ".join(f"{c} {t[str(c)].shortest / best:.2f}" for c in CHOICES)
        ratio = t["auto"].shortest / best
        told = {"best": best, "serial": t["serial"]}
        yield _bench.at_most(f"{name}: auto / best", told, ratio, 1.1, relative)


if __name__ == "__main__":
    _bench.main(rows, __doc__)
