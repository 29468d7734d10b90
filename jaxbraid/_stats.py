"""What a solve reports about itself, and the table that prints it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Stats:
    """Convergence of one solve. `print` it for the table of iterations.

    - `residuals`: norm of the criterion (residual or jump) after each iteration; NaN where an
        iteration was not run.
    - `initial_residual`: residual norm of the initial guess (NaN if it was not computed).
    - `iterations`: iterations that were run.
    - `converged`: the last norm is finite and at most `tol`. With `tol=0` nothing is asked for, and
        it says whether the norm is exactly zero.
    - `finite`: no NaN or infinity was met.
    - `point_residuals`: the same norms over space alone, at each C-point (point `m`, `2m`, ...),
        row 0 for the initial guess, row `i` after iteration `i`; `None` if not asked for. NaN
        where one was not computed, and at the end of time, where that is no C-point.
    """

    residuals: Float[Array, " max_iters"]
    initial_residual: Float[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]
    finite: Bool[Array, ""]
    point_residuals: Float[Array, "max_iters_plus_1 c_points"] | None = None

    def block_residuals(self, blocks: int) -> Float[np.ndarray, "max_iters_plus_1 blocks"]:
        """The largest of the `point_residuals` in each of `blocks` parts of the time axis.

        Parts are consecutive and of equal length, but for the last ones, which may be shorter: as
        `blocks` devices share them. MGRIT converges from the beginning of time on, so early ones
        may have converged long before the last.

        **Raises**

        `ValueError` if `point_residuals` were not asked for, or for no or too many blocks.
        """
        if self.point_residuals is None:
            raise ValueError("there are no point_residuals: solve with point_residuals=True.")
        points = np.asarray(self.point_residuals)
        n = points.shape[1]
        if not 1 <= blocks <= n:
            raise ValueError(f"blocks={blocks}: must be between 1 and the {n} C-points.")
        size = -(-n // blocks)
        parts = [points[:, i : i + size] for i in range(0, n, size)]
        return np.stack([np.max(np.nan_to_num(x, nan=-np.inf), axis=1) for x in parts], axis=1)

    def factors(self) -> Float[np.ndarray, " iterations"]:
        """Convergence factor of each iteration: its residual over that before it."""
        r = np.concatenate([[self.initial_residual], np.asarray(self.residuals)])
        with np.errstate(divide="ignore", invalid="ignore"):
            return (r[1:] / r[:-1])[: int(self.iterations)]

    def raise_if_not_finite(self) -> None:
        """Raise `FloatingPointError` if the solve met NaN or infinity (outside `jit`)."""
        if not bool(self.finite):
            raise FloatingPointError(
                f"the solve met a non-finite value within {int(self.iterations)} iterations; "
                f"residuals: {np.asarray(self.residuals)}"
            )

    def __str__(self) -> str:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(self)):
            return f"Stats(traced, max_iters={self.residuals.shape[-1]})"
        if np.ndim(self.iterations):  # a batch of solves, from vmap
            return f"Stats(of {np.shape(self.iterations)} solves, iterations={self.iterations})"
        lines = ["iteration    residual    factor"]
        factors = self.factors()
        if np.isfinite(self.initial_residual):
            lines.append(f"        0  {float(self.initial_residual):10.4e}         -")
        for i in range(int(self.iterations)):
            factor = f"{factors[i]:.2e}" if np.isfinite(factors[i]) else "-"
            lines.append(f"{i + 1:9d}  {float(self.residuals[i]):10.4e}  {factor:>8}")
        if not bool(self.finite):
            lines.append("stopped: not finite")
        elif bool(self.converged):
            lines.append("converged")
        return "\n".join(lines)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity
class AdjointStats:
    """What the adjoint solve reports, as the "gradient" with respect to a probe.

    A backward pass returns nothing but gradients. `ParallelODENet.adjoint_probe()` makes an
    `AdjointStats` of zeros; passed to the net as `adjoint_probe=` it changes nothing, and its
    gradient is not a derivative but the record of the adjoint solve:

    - `residuals`: as in `Stats`, after each iteration; `iterations`: how many were run.
    - `norms`: 2-norm of the adjoint state (loss gradient w.r.t. the state) at every point 0..N.
    """

    residuals: Float[Array, " max_iters"]
    iterations: Float[Array, ""]
    norms: Float[Array, " steps_plus_1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Solution:
    """Result of a solve.

    - `u`: the state at the end of time.
    - `us`: the states at all points, leading axis `N + 1`; or only at some (see `save`), or `None`.
    - `stats`: convergence of the solve.
    - `aux`: auxiliary output of every step from the last sweep, leading axis `N`.
    - `ts`: the times of `us` (of time integration; a network's are `None`).
    - `lyapunov`: with a Delta correction, Lyapunov exponents: mean growth rates, in 1/time, of as
        many perturbations as it has directions, the fastest first. Averages over the time of the
        solve, so the longer that is the closer to the exponents of the system.
    """

    u: Any
    us: Any
    stats: Stats
    aux: Any = None
    ts: Float[Array, " points"] | None = None
    lyapunov: Float[Array, " k"] | None = None
