"""Options of one MGRIT solve: what is relaxed, how it is coarsened, when it stops.

`MGRIT` holds options only; it is frozen and hashable, so it can be a static argument of `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import numpy as np

Cycle = Literal["V", "F", "W"]
Criterion = Literal["residual", "jump"]
TemporalNorm = Literal["two", "one", "max"]
CoarseSolver = Literal["serial", "relax"]
FinalRelax = Literal["F", "FC", "FCF"]
BatchIntervals = Literal["auto", "all", "one"] | int
AdjointTransfers = Literal["transpose", "forward"]
Linearization = Literal["recompute", "keep"]
SavedStates = Literal["all", "coarse"]


@dataclasses.dataclass(frozen=True)
class MGRIT:
    r"""Multigrid reduction in time: the options of one solve.

    Options that say "one a level" take a single value for all levels or a sequence with one value
    for each level but the coarsest, finest first.

    **Arguments**

    - `levels`: number of time grids, the finest included; 1 is sequential time stepping. No
        level is made that would have fewer than `min_coarse` steps, so short time axes use fewer.
    - `coarsening`: the factor $m \ge 2$, one a level; or, for irregular coarsening, the increasing
        indices of a level's C-points, starting with 0, in place of a factor. With a sequence every
        level that it describes must exist: a time axis that is too short for it is an error.
    - `cf_relax`: the number $\nu$ of C-F relaxations after the first F-relaxation, one a level.
        0 is F-relaxation (two levels: Parareal), 1 is FCF-relaxation.
    - `cycle`: `"V"`, `"F"` or `"W"`.
    - `max_iters`: iterations; exactly so many when `tol` is 0.
    - `tol`: stop when the norm of `criterion` is at most `tol`. 0 runs without any
        data-dependent loop.
    - `c_weight`: weight of the C-relaxation, one a level.
    - `nested_iteration`: start from a solve on the coarsest level that is prolonged and improved
        by one V-cycle a level. Otherwise the C-points start from zero, or from a given guess.
    - `criterion`: `"residual"`, or `"jump"` (change of the C-points since the last iteration).
    - `temporal_norm`: `"two"`, `"one"` or `"max"` over the C-points.
    - `norm`: spatial norm of one state. `None` is the 2-norm over all leaves. A function maps a
        state to a real scalar; where a mesh splits the batch, its values on the parts are
        combined as the root of the sum of their squares.
    - `window`: AT-MGRIT: on the coarsest level every point is solved from the point `window - 1`
        before it, all at once.
    - `min_coarse`: fewest steps that a coarse level may have.
    - `skip_first_down`: the first iteration is only a coarse solve that is interpolated and
        F-relaxed on the way up (XBraid's "skip"). Applies when no guess is given, and takes the
        place of nested iteration.
    - `coarse_solver`: `"serial"`, or `"relax"`: on the coarsest level every point takes
        $1 + \nu$ steps from its neighbour at once, instead of an exact sequential solve.
    - `final_relax`: what ends the solve: `"F"` (C-points keep the corrected values), `"FC"` (they
        take the value of the step into them, which is known already) or `"FCF"`.
    - `delta`: first-order correction of the coarse propagators, for chaotic problems: their
        derivatives are made those of the fine propagator, in all directions of the state
        (`"full"`: as many derivatives as the state has numbers) or in those of a basis of so many
        vectors, which follows the fastest growing perturbations. Not with spatial coarsening, nor
        where a mesh splits states.
    - `coarse_rounds`: in a time-periodic problem, how many times the coarsest level is marched
        around at a visit.
    - `batch_intervals`: how many intervals a device steps at once: `"all"`, `"one"`, a number
        (rounded down to a divisor of the intervals), or `"auto"` (measured rule, see
        `docs/performance.md`).
    - `coarse_placement`: on several devices, the level from which on every device holds all points
        and computes them itself: one all-gather a visit (and one of the parameters a solve) in
        place of messages on these levels. `None`: no level; each point lies on one device. These
        levels may be coarsened irregularly.
    - `adjoint_transfers`: for an adjoint solve with spatial coarsening: `"transpose"` of the
        forward transfers, or the `"forward"` ones.
    - `linearization`: for an adjoint solve: `"recompute"` evaluates a step whenever its vjp is
        taken; `"keep"` linearises every step once, all at the same time, and holds what the vjps
        need: fewer evaluations, but the memory of all steps' intermediate values.
    - `remat`: with `linearization="keep"`, which intermediate values are held: a policy of
        `jax.checkpoint_policies`; the others are computed again. `None` holds all.
    - `saved_states`: which states the forward pass keeps for the adjoint solve: `"all"`, or
        `"coarse"`, the C-points of the finest level, from which every adjoint sweep recomputes
        the others, for `batch_intervals` intervals at once. (After `final_relax="FC"` they are
        kept twice, before and after it. An adjoint solve with other C-points, or one that keeps
        linearisations, recomputes all states at its beginning.)

    **Raises**

    `ValueError` or `TypeError` that names the option, its value and what is allowed.

    ??? cite "Reference"

        R. D. Falgout, S. Friedhoff, Tz. V. Kolev, S. P. MacLachlan, J. B. Schroder: Parallel time
        integration with multigrid. SIAM J. Sci. Comput. 36(6), 2014. AT-MGRIT: J. Hahne,
        B. Southworth, S. Friedhoff: Asynchronous truncated multigrid-reduction-in-time, 2022.
        Delta correction: D. A. Vargas, R. D. Falgout, S. Günther, J. B. Schroder: Multigrid
        reduction in time for chaotic dynamical systems. SIAM J. Sci. Comput. 45(4), 2023.
    """

    levels: int = 2
    coarsening: int | Sequence[int | Sequence[int]] = 4
    cf_relax: int | Sequence[int] = 1
    cycle: Cycle = "V"
    max_iters: int = 10
    tol: float = 0.0
    c_weight: float | Sequence[float] = 1.0
    nested_iteration: bool = True
    criterion: Criterion = "residual"
    temporal_norm: TemporalNorm = "two"
    norm: Callable[[Any], Any] | None = None
    window: int | None = None
    min_coarse: int = 2
    skip_first_down: bool = False
    coarse_solver: CoarseSolver = "serial"
    final_relax: FinalRelax = "F"
    delta: Literal["full"] | int | None = None
    coarse_rounds: int = 4
    batch_intervals: BatchIntervals = "auto"
    coarse_placement: int | None = None
    adjoint_transfers: AdjointTransfers = "transpose"
    linearization: Linearization = "recompute"
    remat: Callable[..., Any] | None = None
    saved_states: SavedStates = "all"

    def __post_init__(self) -> None:
        check_integer("levels", self.levels, 1)
        check_integer("max_iters", self.max_iters, 0)
        check_integer("min_coarse", self.min_coarse, 1)
        if self.window is not None:
            check_integer("window", self.window, 2)
        if self.coarse_placement is not None:
            check_integer("coarse_placement", self.coarse_placement, 1, " or None")
        check_integer("coarse_rounds", self.coarse_rounds, 1)
        if self.delta is not None and not (isinstance(self.delta, str) and self.delta == "full"):
            check_integer("delta", self.delta, 1, " or None, 'full'")
        named = isinstance(self.batch_intervals, str)
        if not named or self.batch_intervals not in ("auto", "all", "one"):
            check_integer("batch_intervals", self.batch_intervals, 1, " or 'auto', 'all', 'one'")
        check_choice("cycle", self.cycle, ("V", "F", "W"))
        check_choice("criterion", self.criterion, ("residual", "jump"))
        check_choice("temporal_norm", self.temporal_norm, ("two", "one", "max"))
        check_choice("coarse_solver", self.coarse_solver, ("serial", "relax"))
        check_choice("final_relax", self.final_relax, ("F", "FC", "FCF"))
        check_choice("adjoint_transfers", self.adjoint_transfers, ("transpose", "forward"))
        check_choice("linearization", self.linearization, ("recompute", "keep"))
        check_choice("saved_states", self.saved_states, ("all", "coarse"))
        if self.remat is not None and not callable(self.remat):
            raise TypeError(f"remat={self.remat!r}: must be None or a jax.checkpoint policy.")
        if self.remat is not None and self.linearization != "keep":
            raise ValueError("remat needs linearization='keep': otherwise nothing is held.")
        for name in ("nested_iteration", "skip_first_down"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be True or False.")
        if not _is_number(self.tol) or not 0 <= self.tol < math.inf:
            raise ValueError(f"tol={self.tol!r}: must be a finite number >= 0.")
        if self.norm is not None and not callable(self.norm):
            raise TypeError(f"norm={self.norm!r}: must be None or a function state -> scalar.")
        if not isinstance(self.norm, Hashable):
            raise TypeError(f"norm={self.norm!r}: must be hashable, as a plain function is.")
        if self.window is not None and self.coarse_solver == "relax":
            raise ValueError("window and coarse_solver='relax' exclude each other: give one.")

        _set(self, "tol", float(self.tol))
        _set(self, "coarsening", self._checked_coarsening())
        _set(self, "cf_relax", self._one_a_level("cf_relax", lambda n, v: check_integer(n, v, 0)))
        _set(self, "c_weight", self._one_a_level("c_weight", _positive))

    def _checked_coarsening(self) -> int | tuple[int | tuple[int, ...], ...]:
        value = self.coarsening
        if isinstance(value, (int, np.integer)):
            return check_integer("coarsening", value, 2)
        if isinstance(value, np.ndarray) and value.ndim != 1:
            raise TypeError(f"coarsening={value!r}: an array must be one list of C-point indices.")
        if isinstance(value, np.ndarray) and self.levels == 2:
            value = (value,)  # a bare index array: the C-points of the only transfer
        entries = _sequence("coarsening", value, self.levels - 1)
        return tuple(
            check_integer(f"coarsening[{i}]", e, 2)
            if isinstance(e, (int, np.integer))
            else _c_points(f"coarsening[{i}]", e)
            for i, e in enumerate(entries)
        )

    def _one_a_level(self, name: str, check: Callable[[str, Any], Any]) -> Any:
        value = getattr(self, name)
        if isinstance(value, (list, tuple, np.ndarray)):
            entries = _sequence(name, value, self.levels - 1)
            return tuple(check(f"{name}[{i}]", e) for i, e in enumerate(entries))
        return check(name, value)

    def at(self, name: str, level: int) -> Any:
        """The value of the per-level option `name` on `level`."""
        value = getattr(self, name)
        return value[level] if isinstance(value, tuple) else value


def _set(config: MGRIT, name: str, value: Any) -> None:
    object.__setattr__(config, name, value)  # the one way to normalise a frozen dataclass


def check_integer(name: str, value: Any, least: int, also: str = "") -> int:
    """`value` as an int of at least `least`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r}: must be an integer >= {least}{also}.")
    if value < least:
        raise ValueError(f"{name}={value}: must be >= {least}{also}.")
    return int(value)


def check_choice(name: str, value: Any, allowed: Sequence[str], also: str = "") -> str:
    """`value`, one of the names `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"{name}={value!r}: must be one of {names}{also}.")
    return value


def _is_number(value: Any) -> bool:
    real = (int, float, np.integer, np.floating)
    return isinstance(value, real) and not isinstance(value, bool)


def _positive(name: str, value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"{name}={value!r}: must be a positive number.")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: must be positive and finite.")
    return float(value)


def _sequence(name: str, value: Any, length: int) -> list[Any]:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise TypeError(f"{name}={value!r}: must be one value or a sequence with one a level.")
    if len(value) != length:
        raise ValueError(
            f"{name} has {len(value)} entries: must have levels - 1 = {length}, one for each level "
            "but the coarsest."
        )
    return list(value)


def _c_points(name: str, value: Any) -> tuple[int, ...]:
    try:
        points = np.asarray(value)
    except ValueError:  # ragged
        points = np.array("ragged")
    if points.ndim != 1 or not np.issubdtype(points.dtype, np.integer):
        raise TypeError(f"{name}={value!r}: must be a factor >= 2 or a list of C-point indices.")
    if len(points) < 2:
        raise ValueError(
            f"{name}={points.tolist()}: leaves nothing to coarsen; give >= 2 C-points."
        )
    if points[0] != 0 or np.any(np.diff(points) <= 0):
        raise ValueError(f"{name}={points.tolist()}: must start with 0 and increase.")
    return tuple(int(p) for p in points)
