"""No step twice: evaluations of Phi and of its vjp, counted as they run.

    python -m benchmarks.evaluations

A step of 64 that tells the host whenever it is evaluated, on two and three levels, m = 4, forward
and adjoint, residual norms included. The formula, for N steps, m an interval, nu C-F-relaxations:
(1 + nu) N on the finest level and 2 N / m on the next a cycle, the last sweep N (which yields
states, outputs, auxiliary data and gradients in one pass), nested iteration once its coarse solves.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxbraid
from benchmarks import _bench
from benchmarks._bench import Row
from jaxbraid import MGRIT

N, M = 64, 4


def telling_step(counts: collections.Counter[tuple[str, int]]) -> Callable[..., Any]:
    """A nonlinear step that tells the host of each evaluation, and on which level it was."""

    def tell(kind: str) -> Callable[[Any], None]:
        def note(dt: Any) -> None:
            counts[kind, round(float(dt) * N)] += 1

        return note

    @jax.custom_vjp
    def phi(dt: Any, u: Any) -> Any:
        jax.debug.callback(tell("forward"), dt)
        return u + dt * jnp.sin(u)

    def ahead(dt: Any, u: Any) -> Any:
        return u + dt * jnp.sin(u), (dt, u)

    def back(saved: Any, ct: Any) -> Any:
        dt, u = saved
        jax.debug.callback(tell("adjoint"), dt)
        return jnp.zeros_like(dt), ct * (1 + dt * jnp.cos(u))

    phi.defvjp(ahead, back)

    def step(t0: Any, t1: Any, u: Any, params: Any, args: Any) -> Any:
        return phi(t1 - t0, u), jnp.cos(u)  # with auxiliary output

    return step


def counted(config: MGRIT, direction: str) -> list[int]:
    """Evaluations of a solve, level by level."""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    step = telling_step(counts)
    ts = jnp.linspace(0, 1, N + 1)

    def run(u0: Any) -> Any:
        sol = jaxbraid.solve(step, u0, ts, config=config, has_aux=True)
        return jnp.sum(sol.us) + jnp.sum(sol.aux)

    f = run if direction == "forward" else jax.grad(run)
    jax.block_until_ready(f(jnp.asarray(1.0)))
    jax.effects_barrier()
    return [counts[direction, M**l] for l in range(config.levels)]


def cycle_formula(levels: int, nu: int) -> list[int]:
    """A V-cycle's, level by level."""
    out, n = [(1 + nu) * N], N
    for l in range(1, levels):
        n //= M
        # one for the right-hand side; then the solve, or relaxation and F-points on the way up
        out.append(2 * n if l == levels - 1 else n + (1 + nu) * n + n - n // M)
    return out


def rows(quick: bool) -> Iterator[Row]:
    for direction in ("forward", "adjoint"):
        for levels, nu in ((2, 0), (2, 1), (3, 1))[: 1 if quick else 3]:
            several = (1, 2) if quick else (1, 3)
            counts = [
                counted(MGRIT(levels=levels, coarsening=M, cf_relax=nu, max_iters=n), direction)
                for n in several
            ]
            more = several[1] - several[0]
            cycle = [(b - a) // more for a, b in zip(*counts, strict=True)]
            last = counts[0][0] - cycle[0]
            formula = cycle_formula(levels, nu)
            yield Row(
                f"{direction}, {levels} levels, {('F', 'FCF')[nu]}: a cycle, level by level",
                f"last sweep: {last}, formula {N}",
                " + ".join(map(str, cycle)),
                "= " + " + ".join(map(str, formula)),
                cycle == formula and last == N,
            )


if __name__ == "__main__":
    _bench.main(rows, __doc__, x64=True)
