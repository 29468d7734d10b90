"""The forward solve on one device: iterations, then the last sweep, which writes results out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._check import check_steps
from jaxbraid._comm import Comm
from jaxbraid._delta import orthonormal, rows
from jaxbraid._equations import (
    Points,
    Problem,
    ends_of_intervals,
    gather,
    masked,
    takes_part,
    to_owner,
    turn,
)
from jaxbraid._hierarchy import Hierarchy
from jaxbraid._iterate import all_finite, finished, iterate, make_stats
from jaxbraid._options import SavedStates
from jaxbraid._problem import (
    Data,
    Inputs,
    Setup,
    Space,
    batched,
    counted,
    forward_problem,
    forward_step,
    start_of,
)
from jaxbraid._pullback import Form, Kept, Pullback
from jaxbraid._stats import Stats
from jaxbraid._sweep import Swept, arranged_rhs, march, source, starts, sweep, sweep_along, when
from jaxbraid._tree import Tree


class Watch(NamedTuple):
    """A function on the host that is told of every iteration: `fn(i, norm, states)`."""

    fn: Callable[[Any, Any, Any], None]
    states: bool  # whether it is given the states at the C-points, or None


class Track(NamedTuple):
    """How a solve's convergence is recorded."""

    points: bool = False  # also at each C-point
    watch: tuple[Watch, ...] = ()


class Want(NamedTuple):
    """Which results a solve is asked for; what is not asked for is not computed."""

    states: SavedStates | None
    track: Track | None
    aux: bool
    save: SavedStates | None = None  # for the adjoint solve, where this is its forward pass
    keep: bool = False  # the linearisations of the last sweep's steps, for the adjoint solve
    growth: bool = False


class Forward(NamedTuple):
    """Results on one device, as far as they are asked for.

    - `states`: those where its slots (or only its intervals) start; `aux`: of its steps.
    - `points`: norms at its C-points, `(C-points, max_iters + 1)`.
    - `saved`, `kept`: states and linearisations for the adjoint solve, see `adjoint_problem`.
    - `growth`: logarithms of how much the vectors of the basis grow over all time, `(k,)`.
    """

    u: Tree
    states: Tree
    aux: Tree
    stats: Any
    points: Any
    saved: Tree
    kept: Any  # Kept, if asked for
    growth: Any


@jax.named_scope("mgrit_forward")
def solve_forward(
    setup: Setup, want: Want, comm: Comm, data: Data, guess: tuple[Tree, Tree] | None
) -> Forward:
    """March `u0` through all steps. `guess`: states where slots start and at the end of time."""
    h, _ = setup.hierarchies(comm.size)
    config = setup.forward
    p, space = forward_problem(setup, data, comm, start_of(config, guess is not None))
    check_steps(setup, space, p.levels, data.shared, want.save is not None)

    join = jax.vmap(lambda s: space.join(0, s))
    p = dataclasses.replace(p, watch=_watch(h, p, join, want.track))

    def initial(l: int) -> Points:
        lp = p.levels[l]
        n = lp.level.intervals if l == 0 else lp.level.block
        if l == 0 and guess is not None:
            starts, end = (space.split[0](x)[0] for x in guess)
            return p.points(ends_of_intervals(p, lp.level.first_slots(starts), end), n)
        u = lp.u0 if p.periodic else _tree.zeros(_tree.shapes(lp.u0))
        return p.points(_tree.repeat(u, n), n)

    keep_all = "all" in (want.states, want.save)

    evaluate, form = _last_step(setup, want, space, data, p)

    def body(u: Tree, xs: tuple[Inputs, None]) -> tuple[Tree, Any]:
        x, _ = xs
        (value, aux), held = evaluate(x, u)
        return masked(x.active, value, u), (u if keep_all else (), aux if want.aux else (), held)

    done, swept, record = relaxed_solution(p, h, initial, body, None, want.track)
    states, aux, held = h.levels[0].flatten(swept.outputs, False)
    u = _final(p, h, done.u, swept)
    stats, points = None, ()
    if record is not None:  # the norms do not see what lies behind the last C-point
        stats, points = record
        finite = stats.finite & all_finite(p, u)
        stats = dataclasses.replace(stats, finite=finite, converged=stats.converged & finite)
    first, closed = swept.starts, None
    if p.coarsest > 0 and config.final_relax == "FC":
        closed = _starts_closed(p, first, to_owner(p, 0, swept.ends))
    coarse = join(first), *([] if closed is None else [join(closed)])
    if keep_all:
        states = join(states if closed is None else h.levels[0].replace_first(states, closed))
    return Forward(
        space.join(0, u),
        {None: (), "all": states, "coarse": coarse[-1]}[want.states],
        aux,
        stats,
        points,
        {None: (), "all": (states,), "coarse": coarse}[want.save],
        None if form is None else Kept(held, form),
        _growth(p, h, done) if want.growth else (),
    )


def _last_step(
    setup: Setup, want: Want, space: Space, data: Data, p: Problem
) -> tuple[Callable[[Inputs, Tree], Any], Form | None]:
    """A batch of the last sweep's steps: `((next states, aux), what linearisations hold)`."""
    if not want.keep:
        return lambda x, u: (forward_step(setup, space, 0, x, u, data.shared), []), None
    pullback = Pullback(setup, space, data.shared, 0, data.own)
    like = p.levels[0].inputs._replace(active=None, state=_tree.repeat(p.levels[0].u0, 1))
    step = pullback.linearized(like, setup.has_aux and want.aux)

    def evaluate(x: Inputs, u: Tree) -> Any:
        return batched(lambda x, u: step(x._replace(state=u)))(x._replace(active=None), u)

    return evaluate, step.form


def _watch(
    h: Hierarchy, p: Problem, join: Callable[[Tree], Tree], track: Track | None
) -> Callable[[Any, jax.Array, Tree], None] | None:
    """What tells the host of an iteration: the first device does."""
    if track is None or not track.watch:
        return None

    def tell(i: Any, norm: jax.Array, u: Tree) -> None:
        states = None
        if any(w.states for w in track.watch):
            if p.coarsest == 0:
                u = p.comm.broadcast(u, (h.steps - 1) // h.levels[0].block)
            else:
                u = gather(h.owned(1), p.comm, len(h.c_points()), u)
            u = _tree.concatenate([_tree.repeat(p.levels[0].u0, 1), u])
            states = p.comm.batch_gather(join(u))

        def call() -> tuple[()]:
            for fn, wants in track.watch:
                jax.debug.callback(fn, i, norm, states if wants else None)
            return ()

        when(p.comm.is_first, call, lambda: ())

    return tell


def _growth(p: Problem, h: Hierarchy, x: Points) -> jax.Array:
    """Logarithms of the growth of the basis' vectors over all time."""
    ends = sweep_along(p, 0, x, arranged_rhs(p, 0, source(p, 0))).basis
    if p.moves_basis:
        here = (h.owned(1).start(p.comm.index, h.steps) < h.steps) & takes_part(p, h.owned(1))
        logs = jnp.log(orthonormal(ends)[1])
        return p.comm.sum(jnp.sum(jnp.where(here[:, None], logs, 0), axis=0))
    transposed = gather(h.owned(1), p.comm, len(h.c_points()), rows(ends))

    def push(q: jax.Array, jacobian: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, r = jnp.linalg.qr(jacobian.T @ q)
        return q, jnp.log(jnp.abs(jnp.diagonal(r)))

    _, logs = jax.lax.scan(push, jnp.eye(transposed.shape[-1], dtype=transposed.dtype), transposed)
    return logs.sum(0)


def relaxed_solution(
    p: Problem,
    h: Hierarchy,
    initial: Callable[[int], Points],
    body: Any,
    total: Tree | None,
    track: Track | None,
) -> tuple[Points, Swept, tuple[Stats, Any] | None]:
    """Iterate, relax once more as `final_relax` says, and sweep with `body` for the results.

    `body` takes a batch of states and of `(inputs, right-hand side)`. Returns the C-points before
    that sweep, the sweep, and what is tracked: the statistics, and the norms at each C-point.
    """
    rhs = arranged_rhs(p, 0, source(p, 0))
    xs = (p.levels[0].swept, rhs)
    if p.coarsest == 0:
        swept = march(p, 0, starts(p, 0, Points(())).u, body, xs, total)
        return Points(()), swept, None if track is None else _direct_solve(p, swept.ends, track)
    counts = counted(h, p)
    want_points = track is not None and track.points
    done = iterate(p, initial, counts, track is not None, want_points)
    if p.config.final_relax == "FCF":
        w = done.w if done.w is not None else sweep(p, 0, done.x.u, rhs)
        done = done._replace(x=done.x._replace(u=w))
    swept = march(p, 0, starts(p, 0, Points(done.x.u)).u, body, xs, total)
    record = None
    if track is not None:
        done = finished(p, done, counts, to_owner(p, 0, swept.ends), want_points)
        points = jax.tree.map(lambda a: a.T, done.record.points)
        record = make_stats(p, done), points
    return done.x, swept, record


def _direct_solve(p: Problem, ends: Tree, track: Track) -> tuple[Stats, Any]:
    """Sequential stepping: one iteration that leaves no residual."""
    bad = sum(jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(ends))
    finite = p.comm.batch_sum(p.comm.sum(jnp.asarray(bad, jnp.int32))) == 0
    nan = jnp.full((max(1, p.config.max_iters),), jnp.nan)
    residual = jnp.where(finite, 0.0, jnp.nan)
    stats = Stats(nan.at[0].set(residual), nan[0], jnp.int32(1), finite, finite)
    points = jnp.zeros((0, len(nan) + 1), nan.dtype) if track.points else ()
    if p.watch is not None:
        p.watch(1, residual, ends)
    return stats, points


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
    closed = starts(p, 0, Points(w)).u
    return closed if level.group == 1 else _tree.where(turn(p, level) == 0, closed, first)
