r"""Adaptive inexactness: how many iterations a gradient needs, found out while training.

A few MGRIT iterations give $\tilde g = g + b$. The bias $b$ does not vanish where $g$ does, so it
is harmless at first and stops the training in the end, when $\|b\|$ has come near $\|g\|$.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float, PyTree
from rich.table import Table

from jaxbraid import _check
from jaxbraid._options import check_integer
from jaxbraid.training._gradient_error import GradientError, gradient_error
from jaxbraid.training._solvers import Solvers


class Decision(NamedTuple):
    """What a control found and did; `rung` is that of the solvers from then on."""

    step: int
    relative: float
    cosine: float
    norm: float
    noise: float
    action: str  # "keep", "raise" or "serial"
    rung: int


class ControlState(NamedTuple):
    """State of an `InexactnessControl`: plain numbers and strings."""

    rung: int
    next_check: int
    decisions: tuple[Decision, ...]

    def to_json(self) -> dict[str, Any]:
        """As lists and dicts, for a checkpoint."""
        return self._asdict() | {"decisions": [list(d) for d in self.decisions]}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> ControlState:
        """The inverse of `to_json`."""
        decisions = tuple(Decision(*d) for d in saved["decisions"])
        return cls(saved["rung"], saved["next_check"], decisions)


@dataclasses.dataclass(frozen=True)
class InexactnessControl:
    r"""Chooses solvers while training goes on: goes up `ladder` when the gradient's bias hurts.

    The bias hurts where $\|\tilde g - g\| > \mathrm{tol} \cdot \max(\|g\|, \sigma)$, with $\sigma$
    the noise of stochastic gradients, if it is known. Then the next rung's solvers are used, and
    checked at once; otherwise it looks again after `every` steps. A gradient that is not
    finite leads to the last rung at once.

        control = InexactnessControl(solver_ladder(layers=64), tol=0.3, every=100)
        state = control.init()
        for step, batch in enumerate(batches):
            while control.due(state, step):
                estimate = control.estimate(state, lambda s: gradient(s, params, batch))
                state, decision = control.update(state, step, estimate)
            grads = gradient(control.solvers(state), params, batch)

    where `gradient` is jitted with the `Solvers` as a static argument: options of MGRIT are static,
    so each rung is compiled once. For NNX see `set_solvers` and `model_gradient`.

    **Arguments**

    - `ladder`: `Solvers` from cheap to exact, such as `solver_ladder` makes.
    - `tol`: largest error; below 1, steps go downhill.
    - `every`: steps from one check to the next. A check costs about three gradients.

    **Raises**

    `ValueError` or `TypeError` that names the argument.
    """

    ladder: Sequence[Solvers]
    tol: float = 0.3
    every: int = 100

    def __post_init__(self) -> None:
        rungs = tuple(Solvers(*rung) for rung in self.ladder)
        if not rungs:
            raise ValueError("ladder is empty: must have at least one pair of solvers.")
        for rung in rungs:
            _check.config("ladder: forward", rung.forward)
            _check.config("ladder: adjoint", rung.adjoint)
        if not isinstance(self.tol, (int, float)) or not 0 < self.tol < math.inf:
            raise ValueError(f"tol={self.tol!r}: must be a positive, finite number.")
        check_integer("every", self.every, 1)
        object.__setattr__(self, "ladder", rungs)

    def init(self) -> ControlState:
        """The state before the first step: the cheapest solvers, a check at once."""
        return ControlState(0, 0, ())

    def solvers(self, state: ControlState) -> Solvers:
        """The solvers to use."""
        return self.ladder[state.rung]

    def due(self, state: ControlState, step: int) -> bool:
        """Whether this step asks for an estimate; never where there is nothing to raise."""
        return state.rung < len(self.ladder) - 1 and step >= state.next_check

    def estimate(
        self,
        state: ControlState,
        gradient: Callable[[Solvers], PyTree],
        noise: Float[Array, ""] | float = 0.0,
    ) -> GradientError:
        """`gradient_error` of `gradient(solvers)` against that with twice the iterations."""
        solvers = self.solvers(state)
        return gradient_error(gradient(solvers), gradient(solvers.doubled()), noise)

    def update(
        self, state: ControlState, step: int, estimate: GradientError
    ) -> tuple[ControlState, Decision]:
        """The state after an estimate at `step`, and what was decided."""
        relative, cosine, norm, noise = (float(x) for x in estimate)
        last = len(self.ladder) - 1
        harm = relative / max(1.0, noise / norm if noise > 0 else 0.0)
        if harm <= self.tol:
            rung = state.rung
        else:
            rung = min(state.rung + 1, last) if math.isfinite(harm) else last
        raised = rung > state.rung
        action = ("serial" if self.ladder[rung].serial else "raise") if raised else "keep"
        decision = Decision(step, relative, cosine, norm, noise, action, rung)
        wait = 0 if raised else self.every
        return ControlState(rung, step + wait, (*state.decisions, decision)), decision

    def table(self, state: ControlState, keeps: bool = True) -> Table:
        """The decisions so far, to print with rich; without `keeps` only those to change."""
        table = Table("step", "relative error", "cosine", "norm", "action", "solvers from then on")
        for d in (d for d in state.decisions if keeps or d.action != "keep"):
            numbers = (f"{x:.2g}" for x in (d.relative, d.cosine, d.norm))
            table.add_row(str(d.step), *numbers, d.action, str(self.ladder[d.rung]))
        return table
