r"""Sweeps: all intervals of a level stepped at once from their C-points.

A sweep yields, for the C-points that close the intervals, $w_k = \Phi(u_{mk-1}) + g_{mk}$; where it
is asked for, what it stepped through (`all_points`) or its derivatives along bases (`sweep_along`).
An interval that spans several devices is stepped by each in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxbraid import _tree
from jaxbraid._delta import orthonormal
from jaxbraid._equations import (
    Ends,
    Marks,
    Points,
    Problem,
    Rhs,
    Step,
    apply_rhs,
    from_owner,
    known_beyond,
    last_entry,
    masked,
    neighbour,
    predecessors,
    starting,
    takes_part,
    to_owner,
    turn,
)
from jaxbraid._tree import Tree


class Swept(NamedTuple):
    """Values at the ends of the intervals, what the sweep wrote out, and what it summed up."""

    starts: Tree  # (intervals, ...): what this device stepped its intervals, or parts, from
    ends: Tree  # (intervals, ...), on the device where each interval ends
    outputs: Tree
    total: Tree


def when(
    predicate: jax.Array | bool,
    run: Callable[[], Tree],
    otherwise: Callable[[], Tree],
    lockstep: bool = False,
) -> Tree:
    """`lax.cond` that is decided at once where the predicate is known.

    In `lockstep`, `run` exchanges messages that all devices must take part in, so all do it.
    """
    if isinstance(predicate, bool):
        return run() if predicate else otherwise()
    if lockstep:
        return _tree.where(predicate, run(), otherwise())
    return lax.cond(predicate, run, otherwise)


def with_rhs(phi: Step) -> Callable[[Points, tuple[Any, Rhs | None]], Points]:
    """A step with its right-hand side, and its derivative along the basis that is carried."""

    def step(x: Points, given: tuple[Any, Rhs | None]) -> Points:
        inputs, rhs = given

        def to_next(u: Tree) -> Tree:
            return masked(inputs.active, apply_rhs(phi(inputs, u), u, rhs), u)

        if not jax.tree.leaves(x.basis):
            return Points(to_next(x.u))
        u, push = jax.linearize(to_next, x.u)
        return Points(u, jax.vmap(push, in_axes=1, out_axes=1)(x.basis))

    return step


def starts(p: Problem, l: int, x: Points) -> Points:
    """What each interval is swept from: the C-points before it, first of all the initial value."""
    lp, level = p.levels[l], p.levels[l].level
    if l == p.coarsest:
        return _tree.repeat(starting(p, l, x, lp.last), 1)
    first = starting(p, l, x, lp.last_c)
    x = known_beyond(p, lp.inside, x, first)
    if p.reverse:
        before = neighbour(p, l, last_entry(p, x), first)
    else:
        before = lp.comm.shift(last_entry(p, x), level.group * level.stride, first)
    return predecessors(p, x, before)


def march(
    p: Problem,
    l: int,
    start: Tree,
    body: Callable[[Tree, Any], tuple[Tree, ...]],
    xs: Any,
    total: Tree | None = None,
) -> Swept:
    """Step every interval of level `l` from its `start`, in groups of `batch` intervals at once.

    `body(u, x) -> (u, outputs)` steps a batch; with a `total` it returns
    `(u, outputs, summands)`, and the summands of all steps are added up. `xs` are arranged
    `(groups, length, batch, ...)`. An interval that spans several devices is stepped by each
    in turn.
    """
    lp, level = p.levels[l], p.levels[l].level

    def step(carry: tuple[Tree, Tree], x: Any) -> tuple[tuple[Tree, Tree], Tree]:
        u, total = carry
        if total is None:
            u, out = body(u, x)
            return (u, total), out
        u, out, summands = body(u, x)
        return (u, _tree.add(total, summands)), out

    def group(total: Tree, x: tuple[Tree, Any]) -> tuple[Tree, tuple[Tree, Tree]]:
        start, xs = x
        if lp.expand is not None:
            xs = (lp.expand(xs[0]), *xs[1:])
        (end, total), out = scan_steps(step, (start, total), xs, p.reverse)
        return total, (end, out)

    def run(start: Tree) -> Swept:
        n = level.intervals
        grouped = jax.tree.map(lambda a: a.reshape(n // lp.batch, lp.batch, *a.shape[1:]), start)
        if n == lp.batch:
            sum_, (end, out) = group(total, _tree.take((grouped, xs), 0))
            end, out = jax.tree.map(lambda a: a[None], (end, out))
        else:
            sum_, (end, out) = lax.scan(group, total, (grouped, xs), reverse=p.reverse)
        end = jax.tree.map(lambda a: a.reshape(n, *a.shape[2:]), end)
        return Swept(start, end, out, sum_)

    def idle() -> Swept:
        return _tree.zeros(jax.eval_shape(run, start))

    part = takes_part(p, level)
    if level.group == 1:
        return when(part, lambda: run(start), idle, p.comm.lockstep)

    mine = jnp.where(part, turn(p, level), -1)

    def stage(i: jax.Array, carry: tuple[Tree, Swept]) -> tuple[Tree, Swept]:
        x, done = carry
        done = when(mine == i, lambda: run(x), lambda: done, p.comm.lockstep)
        return neighbour(p, l, done.ends, x), done

    return lax.fori_loop(0, level.group, stage, (start, idle()))[1]


def scan_steps(step: Callable[..., Any], carry: Tree, xs: Any, reverse: bool) -> Any:
    """`lax.scan` over steps in places; a step's part of `Marks` are its two ends."""
    leaves, treedef = jax.tree.flatten(xs, is_leaf=lambda x: isinstance(x, Marks))
    marks = [x.of for x in leaves if isinstance(x, Marks)]
    if not marks:
        return lax.scan(step, carry, xs, reverse=reverse)

    def at(carry: Tree, x: tuple[jax.Array, list[Any]]) -> tuple[Tree, Tree]:
        i, others = x[0], iter(x[1])
        ends = iter([Ends(m[i], m[i + 1]) for m in marks])
        given = [next(ends if isinstance(a, Marks) else others) for a in leaves]
        return step(carry, treedef.unflatten(given))

    others = [x for x in leaves if not isinstance(x, Marks)]
    return lax.scan(at, carry, (jnp.arange(len(marks[0]) - 1), others), reverse=reverse)


def arranged_rhs(p: Problem, l: int, rhs: Rhs | None) -> Rhs | None:
    lp = p.levels[l]
    return None if rhs is None else lp.level.arrange(rhs, lp.batch, p.reverse)


def sweep(p: Problem, l: int, u: Tree, rhs: Rhs | None) -> Tree:
    """F-relaxation and the step that closes each interval: the new values of the C-points."""
    return _sweep_from(p, l, starts(p, l, Points(u)), rhs).u


def sweep_along(p: Problem, l: int, x: Points, rhs: Rhs | None) -> Points:
    """A sweep with its derivatives along the bases where intervals start, if there are any."""
    return _sweep_from(p, l, p.with_basis(starts(p, l, x)), rhs)


def _sweep_from(p: Problem, l: int, start: Points, rhs: Rhs | None) -> Points:
    step = with_rhs(p.levels[l].phi)
    xs = (p.levels[l].swept, rhs)
    return to_owner(p, l, march(p, l, start, lambda x, given: (step(x, given), ()), xs).ends)


def all_points(p: Problem, l: int, x: Points, rhs: Rhs | None) -> Points:
    """F-relaxation that keeps what it steps to: the values of all slots, given the C-points `x`."""
    lp, level = p.levels[l], p.levels[l].level
    xs = (lp.swept, rhs)
    place = 0 if p.reverse else level.length - 1  # of the step into a C-point
    if level.group == 1:  # that step is not needed
        xs = jax.tree.map(lambda a: a[:, 1:] if p.reverse else a[:, :-1], xs)
    out = march(p, l, starts(p, l, x), writing(with_rhs(lp.phi)), xs).outputs
    x = from_owner(p, l, x)

    def close(a: jax.Array, c: jax.Array) -> jax.Array:
        c = c.reshape(level.intervals // lp.batch, 1, lp.batch, *c.shape[1:])
        if level.group > 1:
            closing = turn(p, level) == level.group - 1
            return a.at[:, place : place + 1].set(jnp.where(closing, c, a[:, place : place + 1]))
        return jnp.concatenate([c, a] if p.reverse else [a, c], axis=1)

    return orthonormalised(p, level.flatten(jax.tree.map(close, out, x), p.reverse))


def orthonormalised(p: Problem, x: Points) -> Points:
    return x._replace(basis=orthonormal(x.basis)[0]) if p.moves_basis else x


def writing(step: Callable[[Points, Any], Points]) -> Callable[[Points, Any], tuple[Points, Any]]:
    """`step`, writing out what it steps to."""

    def run(x: Points, given: Any) -> tuple[Points, Points]:
        x = step(x, given)
        return x, x

    return run


def map_slots(fn: Callable[[Any], Tree], size: int, xs: Any) -> Tree:
    """`fn`, which takes a batch, of all slots, `size` of them at once."""
    block = jax.tree.leaves(xs)[0].shape[0]
    if size == block:
        return fn(xs)
    xs = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), xs)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), lax.map(fn, xs))


def before(p: Problem, l: int, x: Points) -> Points:
    """What the step into each slot of level `l` starts from."""
    first = starting(p, l, x, p.levels[l].last)
    x = known_beyond(p, p.levels[l].inputs.active, x, first)
    return predecessors(p, x, neighbour(p, l, last_entry(p, x), first))


def step_all(p: Problem, l: int, x: Points, rhs: Rhs | None = None) -> Points:
    """One step into all slots of level `l` at once (as many as `batch` allows) from values `x`."""
    lp, level = p.levels[l], p.levels[l].level
    step = with_rhs(lp.phi)

    def run() -> Points:
        size = level.slots_at_once(lp.batch)
        return map_slots(lambda x: step(*x), size, (x, (lp.inputs, rhs)))

    idle = _tree.zeros(_tree.shapes(x))
    return when(takes_part(p, level), run, lambda: idle, p.comm.lockstep)


def source(p: Problem, l: int) -> Rhs | None:
    """The original equation's right-hand side on level `l`, in slots."""
    g = p.levels[l].source
    return None if g is None else Rhs(None, g)
