"""How a network is solved forward and backward: pairs of options, from cheap to exact."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from flax import nnx

from jaxbraid import _check
from jaxbraid._ode_net import FORWARD, default_adjoint
from jaxbraid._options import MGRIT, check_integer
from jaxbraid.performance._show import describe
from jaxbraid.training._stacks import stacks_of


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
    for stack in stacks_of(model).values():
        stack.serial = stack.options.transfers is not None and forward.levels == 1
        if not stack.serial:
            stack.options = dataclasses.replace(stack.options, forward=forward, adjoint=adjoint)
    return model
