"""The forward solve on one device: iterations, then the last sweep, which writes results out."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._check import check_steps
from jaxbraid._comm import Comm
from jaxbraid._cycle import Swept, arranged_rhs, march, source, starts, sweep
from jaxbraid._equations import Problem, ends_of_intervals, masked, to_owner, turn
from jaxbraid._hierarchy import Hierarchy
from jaxbraid._iterate import all_finite, iterate, make_stats
from jaxbraid._options import SavedStates
from jaxbraid._problem import Data, Inputs, Setup, counted, forward_problem, forward_step, start_of
from jaxbraid._stats import Stats
from jaxbraid._tree import Tree


class Want(NamedTuple):
    """Which results a solve is asked for; what is not asked for is not computed."""

    states: bool
    stats: bool
    aux: bool
    save: SavedStates | None = None  # for the adjoint solve, where this is its forward pass


class Forward(NamedTuple):
    """Results on one device; `states` are those where its slots start, `aux` of its steps."""

    u: Tree
    states: Tree
    aux: Tree
    stats: Any  # Stats, if asked for
    saved: Tree  # states for the adjoint solve, if asked for; see `adjoint_problem`


def solve_forward(
    setup: Setup, want: Want, comm: Comm, data: Data, guess: tuple[Tree, Tree] | None
) -> Forward:
    """March `u0` through all steps. `guess`: states where slots start and at the end of time."""
    h, _ = setup.hierarchies(comm.size)
    config = setup.forward
    p, space = forward_problem(setup, data, comm, start_of(config, guess is not None))
    check_steps(setup, space, p.levels, data.shared, want.save is not None)

    def initial(l: int) -> Tree:
        lp = p.levels[l]
        n = lp.level.intervals if l == 0 else lp.level.block
        if l == 0 and guess is not None:
            starts, end = (space.split[0](x)[0] for x in guess)
            return ends_of_intervals(p, lp.level.first_slots(starts), end)
        return _tree.repeat(_tree.zeros(_tree.shapes(lp.u0)), n)

    keep_all = want.states or want.save == "all"

    def body(u: Tree, xs: tuple[Inputs, None]) -> tuple[Tree, Any]:
        x, _ = xs
        value, aux = forward_step(setup, space, 0, x, u, data.shared)
        return masked(x.active, value, u), (u if keep_all else (), aux if want.aux else ())

    done, swept, stats = relaxed_solution(p, h, initial, body, None, want.stats)
    states, aux = h.levels[0].flatten(swept.outputs, False)
    u = _final(p, h, done, swept)
    if stats is not None:  # the norms do not see what lies behind the last C-point
        finite = stats.finite & all_finite(p, u)
        stats = dataclasses.replace(stats, finite=finite, converged=stats.converged & finite)
    first_closed = None
    if p.coarsest > 0 and config.final_relax == "FC":
        first_closed = _starts_closed(p, swept.starts, to_owner(p, 0, swept.ends))
    join = jax.vmap(lambda s: space.join(0, s))
    saved = ()
    if want.save == "coarse":
        saved = (join(swept.starts), *([] if first_closed is None else [join(first_closed)]))
    if keep_all:
        if first_closed is not None:
            states = h.levels[0].replace_first(states, first_closed)
        states = join(states)
        saved = (states,) if want.save == "all" else saved
    return Forward(space.join(0, u), states if want.states else (), aux, stats, saved)


def relaxed_solution(
    p: Problem, h: Hierarchy, initial: Any, body: Any, total: Tree | None, want_stats: bool
) -> tuple[Tree, Swept, Stats | None]:
    """Iterate, relax once more as `final_relax` says, and sweep with `body` for the results.

    `body` takes a batch of states and of `(inputs, right-hand side)`. Returns the C-points before
    that sweep, the sweep, and the statistics.
    """
    rhs = arranged_rhs(p, 0, source(p, 0))
    xs = (p.levels[0].swept, rhs)
    if p.coarsest == 0:
        swept = march(p, 0, starts(p, 0, ()), body, xs, total)
        return (), swept, _stats_of_direct_solve(p, swept.ends) if want_stats else None
    counts = counted(h, p)
    done = iterate(p, initial, counts, want_stats)
    if p.config.final_relax == "FCF":
        w = done.w if done.w is not None else sweep(p, 0, done.u, rhs)
        done = done._replace(u=w)
    swept = march(p, 0, starts(p, 0, done.u), body, xs, total)
    stats = None
    if want_stats:
        stats = make_stats(p, done, counts, to_owner(p, 0, swept.ends))
    return done.u, swept, stats


def _stats_of_direct_solve(p: Problem, ends: Tree) -> Stats:
    """Sequential stepping: one iteration that leaves no residual."""
    bad = sum(jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(ends))
    finite = p.comm.batch_sum(p.comm.sum(jnp.asarray(bad, jnp.int32))) == 0
    nan = jnp.full((max(1, p.config.max_iters),), jnp.nan)
    residual = jnp.where(finite, 0.0, jnp.nan)
    return Stats(nan.at[0].set(residual), nan[0], jnp.int32(1), finite, finite)


def _final(p: Problem, h: Hierarchy, u: Tree, swept: Swept) -> Tree:
    """The state at the end of time, on every device."""
    level = h.levels[0]
    device, slot = divmod(h.steps - 1, level.block)
    if p.coarsest == 0:
        return p.comm.broadcast(_tree.take(swept.ends, 0), device)
    k = level.intervals - 1 if level.bounds is not None else slot // level.length
    if h.last_is_c_point[0] and p.config.final_relax != "FC":
        return p.comm.broadcast(_tree.take(u, k), device // level.group * level.group)
    return p.comm.broadcast(_tree.take(swept.ends, k), device)


def _starts_closed(p: Problem, first: Tree, w: Tree) -> Tree:
    """The states that intervals (or parts of one) start from, with `w` at the C-points."""
    level = p.levels[0].level
    closed = starts(p, 0, w)
    return closed if level.group == 1 else _tree.where(turn(p, level) == 0, closed, first)
