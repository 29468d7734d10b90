r"""The adjoint equations of all levels, which march in reverse and are given to the same cycle.

$\lambda_n = (\partial\Phi_n/\partial u)^T \lambda_{n+1} + g_n$, where $g_n$ is the derivative of
the loss with respect to $u_n$. On level $l$ the propagator is the vjp of the forward $\Phi_l$ at
the states of that level's points. Whether a vjp evaluates its step anew or uses a linearisation
that was kept, and whether the states inside intervals were saved or are recomputed, is decided
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxbraid import _tree
from jaxbraid._comm import Comm
from jaxbraid._equations import LevelProblem, Problem, masked
from jaxbraid._hierarchy import Hierarchy, Level
from jaxbraid._problem import (
    Data,
    Inputs,
    PerStep,
    Setup,
    Shared,
    Space,
    arrange_inputs,
    batched,
    first_basis,
    forward_one,
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
from jaxbraid._sweep import map_slots
from jaxbraid._tree import Split, Tree
from jaxbraid.transfers import Transfer, transpose


class Pullback:
    """The vjps of the steps of one level; of level 0, also with respect to what else they use.

    Either each call evaluates its steps, or `keep` has linearised all of them before.
    """

    def __init__(self, setup: Setup, space: Space, shared: Shared, l: int, own: PerStep):
        self.setup, self.space, self.l = setup, space, l
        self.split = [Split.of(x) for x in (own, shared.args, shared.side)]
        _, self.args, self.side = (
            s(x) for s, x in zip(self.split, (own, shared.args, shared.side), strict=True)
        )
        self.kept: tuple[Any, list[int | None]] | None = None

    def _step(self, evaluate: Callable[..., tuple[Tree, Tree]], x: Inputs) -> Callable[..., Tree]:
        """Steps as a function of `(u, own, args, side)`, of their inexact leaves only."""
        own_of, args_of, side_of = self.split
        fixed = own_of(x.own)[1]

        def step(u: Tree, own: list[Any], args: list[Any], side: list[Any]) -> Tree:
            shared = Shared(args_of.join(args, self.args[1]), side_of.join(side, self.side[1]))
            here = x._replace(own=own_of.join(own, fixed))
            value, aux = evaluate(self.setup, self.space, self.l, here, u, shared)
            if not jax.tree.leaves(x.aux_ct):
                return value
            return value, Split.of(aux)(aux)[0]

        return step

    def _operands(self, x: Inputs) -> tuple[Tree, list[Any], list[Any], list[Any]]:
        return x.state, self.split[0](x.own)[0], self.args[0], self.side[0]

    def _cotangents(self, x: Inputs, adjoint: Tree) -> Tree:
        return (adjoint, x.aux_ct) if jax.tree.leaves(x.aux_ct) else adjoint

    def state(self, x: Inputs, adjoint: Tree) -> Tree:
        """A batch of adjoint steps: cotangents of the next states to those of the states."""
        if self.kept is not None:
            return self._pull(x.vjp, self._cotangents(x, adjoint))[0]
        u, *others = self._operands(x)
        step = self._step(forward_step, x)
        return jax.vjp(lambda u: step(u, *others), u)[1](self._cotangents(x, adjoint))[0]

    def full(self, x: Inputs, adjoint: Tree) -> tuple[Tree, list[Any], list[Any], list[Any]]:
        """Cotangents of the states, of each step's own data, of shared arguments and side."""
        adjoint = self._cotangents(x, adjoint)
        if x.active is not None:
            adjoint = _tree.where(x.active, adjoint, _tree.zeros(_tree.shapes(adjoint)))
        if self.kept is None:
            return jax.vjp(self._step(forward_step, x), *self._operands(x))[1](adjoint)
        du, down, dargs, dside = self._pull(x.vjp, adjoint)
        return du, down, *jax.tree.map(lambda a: a.sum(0), (dargs, dside))

    def keep(self, inputs: Inputs, size: int) -> Inputs:
        """The inputs of slots with the linearisations of their steps, made `size` at once."""
        policy, shared = self.setup.adjoint.remat, self.args[0] + self.side[0]

        def linearize(x: Inputs) -> list[Any]:
            u, *others = self._operands(x)
            step = self._step(forward_one, x)
            if policy is not None:
                step = jax.checkpoint(step, policy=policy)
            if self.l == 0:
                vjp = jax.vjp(step, u, *others)[1]
            else:
                vjp = jax.vjp(lambda u: step(u, *others), u)[1]
            leaves, treedef = jax.tree.flatten(vjp)
            # what all steps share is not held once for each
            place = [next((k for k, s in enumerate(shared) if s is a), None) for a in leaves]
            self.kept = treedef, place
            return [a for a, k in zip(leaves, place, strict=True) if k is None]

        bare = inputs._replace(active=None)
        vjp = map_slots(jax.vmap(linearize), size, bare)
        return inputs._replace(own=PerStep(()), state=(), time=(), vjp=vjp)

    def _pull(self, kept: list[Any], adjoint: Tree) -> tuple[Any, ...]:
        assert self.kept is not None
        treedef, place = self.kept
        shared = self.args[0] + self.side[0]

        def one(kept: list[Any], ct: Tree) -> tuple[Any, ...]:
            own = iter(kept)
            return treedef.unflatten([next(own) if k is None else shared[k] for k in place])(ct)

        return batched(one)(kept, adjoint)


def adjoint_problem(
    setup: Setup,
    data: Data,
    comm: Comm,
    saved: tuple[Tree, ...],
    last: Tree,
    source: Tree | None,
    aux_ct: Tree,
) -> tuple[Problem, Pullback]:
    """The adjoint equations of all levels on this device, and the vjps of the finest steps.

    `saved` are the forward states where the slots of level 0 start; or, if only C-points were
    saved, those where its intervals start, and after an FC-relaxation the same as relaxed.
    `last` is the derivative of the loss w.r.t. the final state, `source` those
    w.r.t. the other states (slots), `aux_ct` those w.r.t. the auxiliary output.
    """
    config = setup.adjoint
    forward, h = setup.hierarchies(comm.size)
    space = Space.of(setup, data.u0, len(h.levels))
    recompute = _recomputation(setup, space, data.shared)
    levels, own, finest = [], data.own, None
    coarse_only, states = config.saved_states == "coarse", saved[-1]
    if coarse_only and (config.linearization == "keep" or forward.levels[0] != h.levels[0]):
        coarse_only, states = False, _all_states(setup, data, forward, comm, saved, recompute)
    for l, level in enumerate(h.levels):
        aux_ct = aux_ct if l == 0 else ()
        inputs = level_inputs(setup, data, h, l, comm, own)._replace(aux_ct=aux_ct)
        batch = interval_batch(config, level, last)
        expand = recompute if l == 0 and coarse_only else None
        pullback = Pullback(setup, space, data.shared, l, own)
        finest = pullback if finest is None else finest
        if expand is None:
            inputs = inputs._replace(state=states)
        if config.linearization == "keep":
            inputs = pullback.keep(inputs, level.slots_at_once(batch))
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
    assert finest is not None
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
    return p, finest


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

        _, others = lax.scan(step, first, _tree.take(inputs, slice(None, -1)))
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
