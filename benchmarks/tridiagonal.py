"""Tridiagonal systems: `problems.tridiagonal_solve` and that of `jax.lax.linalg`, one or many.

    python -m benchmarks.tridiagonal

In double precision, time a system. As in a solve by MGRIT the systems come from `jax.vmap`, and are
solved again and again in a loop, each with the solution of the last as right-hand side. The
diagonals are numbers, each system's own, or arrays. "swept at once" are the rows at which grouping
ends (`SWEPT_ROWS` in `jaxbraid/problems/_elimination.py`): what other choices would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _bench
from benchmarks._bench import Row
from jaxbraid.problems import _elimination, _tridiagonal, tridiagonal_solve

SWEPT = (8, 16, 32, 64, 128)


def library(*given: Any) -> Any:
    lower, main, upper, b = (jnp.asarray(d, jnp.float64) for d in given)
    return _tridiagonal._library((lower, main, upper), b)


def solver(solve: Callable, systems: int, rows: int, arrays: bool, times: int) -> Callable[[], Any]:
    """So many implicit steps of diffusion, of each system's own length."""

    def step(b: Any, scale: Any) -> Any:
        return solve(-scale, 1 + 2 * scale, -scale, b)

    batched = step if systems == 1 else jax.vmap(step)

    @jax.jit
    def run(b: Any, scale: Any) -> Any:
        return jax.lax.scan(lambda b, _: (batched(b, scale), None), b, None, length=times)[0]

    rng = np.random.default_rng(0)
    batch = () if systems == 1 else (systems,)
    scale = jnp.asarray(40 + rng.random((*batch, rows) if arrays else batch))
    b = jnp.asarray(rng.standard_normal((*batch, rows)))
    return lambda: run(b, scale)


def a_system(runs: dict[str, Callable[[], Any]], quick: bool, solves: int) -> dict[str, float]:
    t = _bench.compare(runs, quick, 2.0)
    return {name: t[name].shortest / solves for name in t}


def rows(quick: bool) -> Iterator[Row]:
    n, total = (129, 64) if quick else (1023, 4096)
    for arrays in (False, True):
        for systems in (1, 16) if quick else (1, 16, 64, 256, 1024):
            times = total // max(systems, 16)
            solvers = {"jax.lax": library, "jaxbraid": tridiagonal_solve}
            runs = {k: solver(f, systems, n, arrays, times) for k, f in solvers.items()}
            t = a_system(runs, quick, times * systems)
            case = f"{n} rows, {'arrays' if arrays else 'numbers'}, {systems} systems"
            ratio = t["jax.lax"] / t["jaxbraid"]
            yield Row(case, _bench.told(t), f"{ratio:.2f}x")
    for systems in (1, 16) if quick else (1, 256):
        times, runs = total // max(systems, 16), {}
        for swept in SWEPT:
            _elimination.SWEPT_ROWS = swept
            runs[f"{swept}"] = solver(tridiagonal_solve, systems, n, False, times)
            runs[f"{swept}"]()  # compiled with this choice
        _elimination.SWEPT_ROWS = 32
        t = a_system(runs, quick, times * systems)
        yield Row(f"{n} rows, swept at once, {systems} systems", _bench.told(t), "")


if __name__ == "__main__":
    _bench.main(rows, __doc__, x64=True)
