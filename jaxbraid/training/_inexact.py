r"""Adaptive inexactness: how many iterations a gradient needs, found out while training.

A few MGRIT iterations give $\tilde g = g + b$. The bias $b$ does not vanish where $g$ does, so it
is harmless at first and stops the training in the end, when $\|b\|$ has come near $\|g\|$.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree
from rich.table import Table

from jaxbraid import _check, _tree
from jaxbraid._iterate import squares
from jaxbraid._ode_net import FORWARD, default_adjoint
from jaxbraid._options import MGRIT, check_integer
from jaxbraid._stats import AdjointStats
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.performance._show import describe


class Solvers(NamedTuple):
    """How a network is solved forward and backward; hashable, so a static argument of `jit`."""

    forward: MGRIT
    adjoint: MGRIT

    @property
    def serial(self) -> bool:
        """Whether both are sequential, and so exact."""
        return self.forward.levels == 1 and self.adjoint.levels == 1

    def doubled(self) -> Solvers:
        """Twice the iterations (and, where they stop at one, a tenth of the tolerance)."""
        return Solvers(*(_doubled(config) for config in self))

    def __str__(self) -> str:
        if self.serial:
            return describe(self.forward)
        return f"{describe(self.forward)} | {describe(self.adjoint)}"


def _doubled(config: MGRIT) -> MGRIT:
    if config.levels == 1:
        return config
    return dataclasses.replace(config, max_iters=2 * config.max_iters, tol=config.tol / 10)


def solver_ladder(
    forward: MGRIT = FORWARD, adjoint: MGRIT | None = None, *, layers: int
) -> tuple[Solvers, ...]:
    """Solvers from cheap to exact: the given ones, more relaxation, more iterations, serial.

    The second rung relaxes C-points on all levels (FCF), if the first does not; every further one
    doubles the iterations; and where as many would make MGRIT exact, sequential solves take their
    place, as the cheaper way. A rung costs about twice the one before it.

    **Arguments**

    - `forward`, `adjoint`: the cheapest solvers, as in `parallel_ode_net`.
    - `layers`: number of layers N.

    **Returns**

    A tuple of `Solvers` for `InexactnessControl`; the last is sequential.
    """
    _check.config("forward", forward)
    adjoint = default_adjoint(forward, adjoint)
    _check.config("adjoint", adjoint)
    layers = check_integer("layers", layers, 1)
    rungs = [Solvers(forward, adjoint)]
    relaxed = Solvers(*(_relaxed(config) for config in rungs[0]))
    if relaxed != rungs[0]:
        rungs.append(relaxed)
    more = rungs[-1].doubled()
    while not any(_is_exact(config, layers) for config in more):
        rungs.append(more)
        more = more.doubled()
    if not rungs[-1].serial:
        one = MGRIT(levels=1)
        rungs.append(Solvers(one, one))
    return tuple(rungs)


def _relaxed(config: MGRIT) -> MGRIT:
    if config.levels == 1:
        return config
    more = [max(1, config.at("cf_relax", level)) for level in range(config.levels - 1)]
    same = isinstance(config.cf_relax, int)
    return dataclasses.replace(config, cf_relax=more[0] if same else more)


def _is_exact(config: MGRIT, layers: int) -> bool:
    """Whether so many iterations carry exact values through all intervals."""
    if config.levels == 1 or config.max_iters == 0:
        return True
    m = config.at("coarsening", 0)
    intervals = -(-layers // m) if isinstance(m, int) else len(m)
    return config.max_iters * (1 + config.at("cf_relax", 0)) >= intervals


class GradientError(NamedTuple):
    r"""An estimate of the error of a gradient.

    - `relative`: $\|\tilde g - g\| / \|g\|$.
    - `cosine`: of the angle between them; NaN if it is not known.
    - `norm`: $\|g\|$; NaN if it is not known.
    - `noise`: norm of the standard deviation of stochastic gradients, 0 without.
    """

    relative: Float[Array, ""] | float
    cosine: Float[Array, ""] | float = math.nan
    norm: Float[Array, ""] | float = math.nan
    noise: Float[Array, ""] | float = 0.0


@jax.jit
def gradient_error(
    gradient: PyTree, better: PyTree, noise: Float[Array, ""] | float = 0.0
) -> GradientError:
    """The error of a gradient, measured by a better one (serial, or of twice the iterations).

    Twice the iterations underestimate it where they converge slowly: by a factor rho of a doubling,
    the difference is between 1 - rho and 1 + rho times the error.

    **Arguments**

    - `gradient`, `better`: pytrees of the same structure; leaves that are not real or complex are
        left out.
    - `noise`: passed on; see `gradient_noise`.
    """
    a, b = (_wide(tree) for tree in (gradient, better))
    norm, own, error = (jnp.sqrt(squares(tree)) for tree in (b, a, _tree.sub(a, b)))
    product = sum((jnp.sum(jnp.real(jnp.conj(x) * y)) for x, y in zip(a, b, strict=True)), 0.0)
    return GradientError(error / norm, product / (norm * own), norm, jnp.asarray(noise))


@jax.jit
def gradient_noise(gradients: Sequence[PyTree]) -> Float[Array, ""]:
    """Norm of the standard deviation of gradients, one from each of some batches.

    **Raises**

    `ValueError` for fewer than two gradients.
    """
    if len(gradients) < 2:
        raise ValueError(f"gradients: there are {len(gradients)}, must be at least two.")
    stacked = [jnp.stack(leaves) for leaves in zip(*map(_wide, gradients), strict=True)]
    deviations = [a - a.mean(0) for a in stacked]
    return jnp.sqrt(squares(deviations) / (len(gradients) - 1))


def _wide(tree: PyTree) -> list[Any]:
    """Real and complex leaves, in at least single precision."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _tree.is_inexact(leaf)]
    return [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]


def adjoint_error(record: AdjointStats) -> GradientError:
    """The last residual of an adjoint solve, relative to the norm of all adjoint states.

    It comes with the gradient (see `AdjointStats`) and costs no other solve, but says less: nothing
    of the error of the states, which is what remains where the gradient vanishes. Choose `tol` by
    comparison with `gradient_error`.
    """
    last = record.residuals[jnp.maximum(record.iterations.astype(int), 1) - 1]
    return GradientError(last / jnp.linalg.norm(record.norms))


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


def set_solvers(model: nnx.Module, forward: MGRIT, adjoint: MGRIT | None = None) -> nnx.Module:
    """Give all `ParallelStack`s in an NNX model other solvers, in place; returns the model.

    Call it outside `jit`: options are part of a model's graph.
    A `jit` that sees the model (or its graph) compiles anew, once for each pair of solvers. Of a
    `ParallelODENet`, `dataclasses.replace(net, forward=..., adjoint=...)` makes another.

    **Arguments**

    - `model`: a module that holds stacks, or is one.
    - `forward`, `adjoint`: as in `parallel_ode_net`. Stacks with spatial transfers, which belong to
        several levels, are made `serial` for `MGRIT(levels=1)`, all others parallel.

    **Raises**

    `ValueError` if there is no stack in the model.
    """
    _check.config("forward", forward)
    adjoint = default_adjoint(forward, adjoint)
    _check.config("adjoint", adjoint)
    stacks = [m for _, m in nnx.iter_modules(model) if isinstance(m, ParallelStack)]
    if not stacks:
        raise ValueError(f"model: there is no ParallelStack in {type(model).__name__}.")
    for stack in stacks:
        stack.serial = stack.options.transfers is not None and forward.levels == 1
        if not stack.serial:
            stack.options = dataclasses.replace(stack.options, forward=forward, adjoint=adjoint)
    return model


def model_gradient(
    model: nnx.Module, loss: Callable[..., Any], *batch: PyTree, wrt: Any = nnx.Param
) -> Callable[[Solvers], PyTree]:
    """`gradient(solvers)` of `loss(model, *batch)`, for `InexactnessControl.estimate`.

    It works on copies: statistics and PRNG counters of the model stay as they are, and all
    gradients are taken with the same dropout masks. `loss` must be the same function each time, or
    it is compiled anew.

    **Arguments**

    - `model`, `loss`, `batch`: as in `nnx.grad(loss)(model, *batch)`.
    - `wrt`: which variables.
    """
    graph, params, rest = nnx.split(model, wrt, ...)

    def gradient(solvers: Solvers) -> PyTree:
        copy = set_solvers(nnx.merge(graph, params, rest, copy=True), *solvers)
        return _gradient(nnx.graphdef(copy), loss, params, rest, batch)

    return gradient


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(graph: Any, loss: Callable[..., Any], params: Any, rest: Any, batch: Any) -> PyTree:
    def value(params: Any) -> Any:
        return loss(nnx.merge(graph, params, rest, copy=True), *batch)

    return jax.grad(value)(params)
