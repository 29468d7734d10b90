r"""The adjoint equations of all levels, which march in reverse and are given to the same cycle.

$\lambda_n = (\partial\Phi_n/\partial u)^T \lambda_{n+1} + g_n$, where $g_n$ is the derivative of
the loss with respect to $u_n$. On level $l$ the propagator is the vjp of the forward $\Phi_l$ at
the states of that level's points. Whether the states inside intervals were saved or are recomputed
is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from jaxbraid import _tree
from jaxbraid._comm import Comm
from jaxbraid._equations import LevelProblem, Problem, masked
from jaxbraid._hierarchy import Hierarchy, Level
from jaxbraid._problem import (
    Data,
    Inputs,
    Setup,
    Shared,
    Space,
    arrange_inputs,
    first_basis,
    forward_step,
    interval_batch,
    level_inputs,
    norm_of_state,
    owner_of_next,
    row_of,
    start_of,
    to_next,
    within_time,
)
from jaxbraid._pullback import Kept, Pullback
from jaxbraid._sweep import scan_steps
from jaxbraid._tree import Tree
from jaxbraid.transfers import Transfer, transpose


def adjoint_problem(
    setup: Setup,
    data: Data,
    comm: Comm,
    saved: tuple[Tree, ...],
    kept: Kept | None,
    last: Tree,
    source: Tree | None,
    aux_ct: Tree,
) -> tuple[Problem, Pullback]:
    """The adjoint equations of all levels on this device, and the vjps of the finest steps.

    `saved` are the forward states where the slots of level 0 start; or, if only C-points were
    saved, those where its intervals start, and after an FC-relaxation the same as relaxed. `kept`
    are the linearisations of its steps if the forward solve made them.
    `last` is the derivative of the loss w.r.t. the final state, `source` those
    w.r.t. the other states (slots), `aux_ct` those w.r.t. the auxiliary output.
    """
    config = setup.adjoint
    forward, h = setup.hierarchies(comm.size)
    space = Space.of(setup, data.u0, len(h.levels))
    recompute = _recomputation(setup, space, data.shared)
    levels, own, pullbacks = [], data.own, []
    coarse_only, states = config.saved_states == "coarse", saved[-1]
    if coarse_only and (config.linearization == "keep" or forward.levels[0] != h.levels[0]):
        coarse_only, states = False, _all_states(setup, data, forward, comm, saved, recompute)
    for l, level in enumerate(h.levels):
        inputs = level_inputs(setup, data, h, l, comm, own)
        inputs = inputs._replace(aux_ct=aux_ct if l == 0 else ())
        batch = interval_batch(config, level, last)
        expand = recompute if l == 0 and coarse_only else None
        pullback = Pullback(setup, space, data.shared, l, own)
        pullbacks.append(pullback)
        if expand is None:
            inputs = inputs._replace(state=states)
            inputs = _linearised(setup, pullback, inputs, batch, level, kept if l == 0 else None)
        swept = arrange_inputs(level, inputs, batch, True)
        if expand is not None:
            swept = swept._replace(state=_in_places(level, saved, batch))
        coarsest = l == len(h.levels) - 1
        restrict, prolong = (None, None) if coarsest else _adjoint_transfers(setup, space, l)
        lp = LevelProblem(
            level,
            row_of(h, l, comm),
            pullback.state,
            inputs,
            swept,
            last,
            batch,
            restrict,
            prolong,
            source,
            within_time(h, l, comm),
            owner_of_next(h, l),
            expand,
            h.last_slot(l),
            h.last_c_point(l),
        )
        levels.append(lp)
        if coarsest:
            break
        own = level.first_slots(own)
        states = _mapped(space.restrict(setup, l), states if expand else level.first_slots(states))
        if source is not None:
            source = _mapped(restrict, interval_sums(lp, source))
        last = last if restrict is None else restrict(last)
        own, states, source = to_next(h, l, comm, (own, states, source))
    p = Problem(
        tuple(levels),
        config,
        comm,
        start_of(config),
        norm_of_state(config, space),
        reverse=True,
        basis=first_basis(config, space),
        periodic=setup.periodic,
    )
    return p, pullbacks[0]


def _linearised(
    setup: Setup, pullback: Pullback, inputs: Inputs, batch: int, level: Level, kept: Kept | None
) -> Inputs:
    """The inputs with linearisations that are to be kept: those that are there, or new ones."""
    if kept is not None:
        return pullback.kept(inputs, kept)
    if setup.adjoint.linearization == "keep":
        return pullback.keep(inputs, level.slots_at_once(batch))
    return inputs


def _mapped(transfer: Callable[[Tree], Tree] | None, x: Tree) -> Tree:
    return x if transfer is None else jax.vmap(transfer)(x)


def _recomputation(setup: Setup, space: Space, shared: Shared) -> Callable[[Inputs], Inputs]:
    """From inputs of some intervals with their saved states to those with all states."""

    def expand(inputs: Inputs) -> Inputs:
        saved = inputs.state
        first = _tree.take(saved[0], 0)
        inputs = inputs._replace(state=())

        def step(u: Tree, x: Inputs) -> tuple[Tree, Tree]:
            u = masked(x.active, forward_step(setup, space, 0, x, u, shared)[0], u)
            return u, u

        _, others = scan_steps(step, first, _tree.take(inputs, slice(None, -1)), False)
        return inputs._replace(state=_tree.concatenate([saved[-1], others]))

    return expand


def _in_places(level: Level, x: Tree, batch: int) -> Tree:
    """Entries of intervals to places `(groups, 1, batch, ...)`."""
    n = level.intervals // batch
    return jax.tree.map(lambda a: a.reshape(n, 1, batch, *a.shape[1:]), x)


def _all_states(
    setup: Setup,
    data: Data,
    h: Hierarchy,
    comm: Comm,
    saved: tuple[Tree, ...],
    expand: Callable[[Inputs], Inputs],
) -> Tree:
    """States where slots start from those saved for the intervals of the forward hierarchy `h`."""
    level = h.levels[0]
    batch = interval_batch(setup.adjoint, level, _tree.take(saved[0], 0))
    inputs = level_inputs(setup, data, h, 0, comm, data.own)
    placed = arrange_inputs(level, inputs, batch, True)
    placed = placed._replace(state=_in_places(level, saved, batch))
    return level.flatten(lax.map(lambda x: expand(x).state, placed), True)


def _adjoint_transfers(setup: Setup, space: Space, l: int):
    """`(restrict, prolong)` of the adjoint: P^T and R^T, or on request R and P; or none."""
    restrict, prolong = space.restrict(setup, l), space.prolong(setup, l)
    if restrict is None or prolong is None:
        return None, None
    if setup.adjoint.adjoint_transfers == "forward":
        return restrict, prolong
    fine = _tree.shapes(space.first[l])
    adjoint = transpose(Transfer(restrict, prolong), fine)
    return adjoint.restrict, lambda v: adjoint.prolong(v, fine)


def interval_sums(lp: LevelProblem, x: Tree) -> Tree:
    """Sums of slot values over each interval, on the device of its first slot."""
    level = lp.level
    arranged = level.arrange(x, lp.batch, True)
    if level.padded():
        arranged = _tree.where(
            level.occupied(lp.batch, True), arranged, _tree.zeros(_tree.shapes(arranged))
        )
    sums = jax.tree.map(lambda a: a.sum(1).reshape(-1, *a.shape[3:]), arranged)
    part = sums
    nothing = _tree.zeros(_tree.shapes(sums))
    for _ in range(level.group - 1):
        part = lp.comm.shift(part, -level.stride, nothing)
        sums = _tree.add(sums, part)
    return sums
