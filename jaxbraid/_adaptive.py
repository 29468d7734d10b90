"""Time grids that are refined where the error of a step is too large."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxbraid import _check, _tree
from jaxbraid._layout import Layout
from jaxbraid._options import MGRIT, check_integer
from jaxbraid._richardson import richardson
from jaxbraid._solve import solve
from jaxbraid._stats import Stats

Step = Callable[..., Any]

LIMIT = 16  # parts that a step is divided into at most in one round: estimates far off mislead


@dataclasses.dataclass(frozen=True)
class AdaptiveRound:
    """One solve of an adaptive one: `steps`, the largest `error` of one, the solve's `stats`."""

    steps: int
    error: float
    stats: Stats


@dataclasses.dataclass(frozen=True)
class AdaptiveSolution:
    """Result of an adaptive solve; `print` it for the table of rounds.

    - `u`: the state at the end of time; `us`: the states at `ts`.
    - `ts`: the time grid that was arrived at.
    - `errors`: the estimated error of each of its steps, before it was extrapolated.
    - `rounds`: the solves.
    - `converged`: every solve has converged, and no step of the last has an error above `tol`.
    """

    u: PyTree
    us: PyTree
    ts: Float[np.ndarray, " points"]
    errors: Float[Array, " steps"]
    rounds: tuple[AdaptiveRound, ...]
    converged: bool

    def __str__(self) -> str:
        lines = ["round     steps  largest error  iterations    residual"]
        for i, r in enumerate(self.rounds):
            k = int(r.stats.iterations)
            residual = float(r.stats.residuals[k - 1]) if k else float(r.stats.initial_residual)
            lines.append(f"{i + 1:5d}  {r.steps:8d}  {r.error:13.4e}  {k:10d}  {residual:10.4e}")
        return "\n".join(lines + (["converged"] if self.converged else []))


def solve_adaptive(
    step: Step | Sequence[Step],
    u0: PyTree,
    ts: Float[Array, " steps_plus_1"],
    args: PyTree | None = None,
    *,
    order: int,
    tol: float,
    config: MGRIT | None = None,
    norm: Callable[[PyTree], Any] | None = None,
    factor: int = 2,
    max_rounds: int = 12,
    max_steps: int = 1 << 20,
    **options: Any,
) -> AdaptiveSolution:
    r"""Solve by MGRIT on a time grid that is refined until each step's error is at most `tol`.

    Every step is extrapolated (`richardson`), which gives an estimate $e$ of its error. A step with
    $e >$ `tol` is divided into $\lceil (e / \mathtt{tol})^{1/(p+1)} \rceil$, at most 16; the
    states, interpolated linearly in time, are the guess for the solve on the new grid, and so
    on. Grids are never coarsened: start with few steps. Not for `jit`, since shapes change;
    derivatives are had by `solve` on the grid that it returns.

    **Arguments**

    - `step`, `u0`, `args`: as in `jaxbraid.solve`; a sequence of steps has one a level. Steps
        with parameters of their own are not possible, as their number changes.
    - `ts`: the first time grid.
    - `order`: global order $p$ of the finest level's step.
    - `tol`: the error that one step may have, in `norm`, positive.
    - `config`: how to solve each time; by default two levels to a residual of `tol / 10` in at most
        50 iterations.
    - `norm`: of a state; `None` is the 2-norm over all leaves.
    - `factor`: of the extrapolation.
    - `max_rounds`, `max_steps`: end after so many solves, or before one with more steps.
    - `options`: further ones of `jaxbraid.solve`, such as `mesh`, `callback` or `progress`.

    **Returns**

    An `AdaptiveSolution`. That it has not `converged` within these limits is no error.

    **Raises**

    `ValueError` or `TypeError` naming the argument; `FloatingPointError` if an error estimate is
    not finite: the first grid was too coarse for the method to be stable.

    ??? cite "Reference"

        R. D. Falgout, T. A. Manteuffel, B. O'Neill, J. B. Schroder: Multigrid reduction in time
        with Richardson extrapolation. Electron. Trans. Numer. Anal. 54, 2021.
    """
    if isinstance(tol, bool) or not isinstance(tol, (int, float)) or not 0 < tol < math.inf:
        raise ValueError(f"tol={tol!r}: must be a positive number.")
    check_integer("max_rounds", max_rounds, 1)
    for name in ("params", "guess", "has_aux", "save"):
        if name in options:
            raise TypeError(f"{name}: not for solve_adaptive, which sets it.")
    if isinstance(options.get("mesh"), Layout):
        raise TypeError("mesh: must be a jax.sharding.Mesh or None; no MPI rank has all steps.")
    if config is None:
        config = MGRIT(levels=2, coarsening=4, max_iters=50, tol=tol / 10)
    _check.config("config", config)
    steps = tuple(step) if isinstance(step, Sequence) else (step,)
    _check.one_a_level("step", steps, config)
    finest = richardson(steps[0], order, factor, error=True, norm=norm)
    # a coarse step has the same kind of output, of which nothing is used
    coarse = tuple(_without_error(s) for s in (steps if len(steps) == 1 else steps[1:]))
    several = (finest, *(coarse[min(i, len(coarse) - 1)] for i in range(config.levels - 1)))
    points = np.asarray(_check.time_grid(ts), float)
    n = check_integer("max_steps", max_steps, len(points) - 1)

    guess, rounds = None, []
    while True:
        sol = solve(several, u0, points, None, args, config=config, guess=guess,  # pyright: ignore
                    has_aux=True, **options)  # fmt: skip
        errors = np.asarray(sol.aux, float)
        if not np.all(np.isfinite(errors)):
            raise FloatingPointError(
                f"the error estimate is not finite on a grid of {len(errors)} steps: start with "
                "more steps."
            )
        rounds.append(AdaptiveRound(len(errors), float(errors.max()), sol.stats))
        parts = np.ceil((errors / tol) ** (1 / (order + 1))).astype(int).clip(1, LIMIT)
        done = errors.max() <= tol
        if done or len(rounds) == max_rounds or parts.sum() > n:
            reached = done and (config.tol == 0 or all(bool(r.stats.converged) for r in rounds))
            return AdaptiveSolution(sol.u, sol.us, points, sol.aux, tuple(rounds), bool(reached))
        points, guess = _divide(points, parts, sol.us)


@functools.lru_cache(maxsize=256)
def _without_error(step: Step) -> Step:
    def plain(t0: Any, t1: Any, u: PyTree, params: PyTree, args: PyTree) -> tuple[PyTree, tuple]:
        return step(t0, t1, u, params, args), ()

    return plain


def _divide(ts: np.ndarray, parts: np.ndarray, us: PyTree) -> tuple[np.ndarray, PyTree]:
    """The grid with each step in so many `parts`, and the states there, linear in between."""
    step = np.repeat(np.arange(len(parts)), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    share = (np.arange(len(step)) - first) / parts[step]
    points = np.append(ts[step] + share * np.diff(ts)[step], ts[-1])

    def between(a: Any) -> Any:
        if not _tree.is_inexact(a):
            return np.concatenate([np.asarray(a)[step], np.asarray(a)[-1:]])
        a = np.asarray(a)
        w = share.reshape(-1, *(1,) * (a.ndim - 1)).astype(a.real.dtype)
        inner = a[step] + w * (a[step + 1] - a[step])
        return np.concatenate([inner, a[-1:]])

    return points, jax.tree.map(between, us)
