"""Cycles repeated until they have converged, and the norms that decide it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxbraid import _tree
from jaxbraid._cycle import coarse_start, correct, relax, relax_swept
from jaxbraid._equations import Points, Problem
from jaxbraid._stats import Stats
from jaxbraid._sweep import arranged_rhs, source, sweep, sweep_along
from jaxbraid._tree import Tree


class Record(NamedTuple):
    """Norms after some iterations: over space and time, and over space at each C-point."""

    norm: jax.Array
    points: Any = ()  # (..., C-points on this device), if asked for


class Iterate(NamedTuple):
    """C-points after the iterations, their sweep if it is known, and the norms so far."""

    x: Points
    w: Tree | None
    record: Record  # [0]: of the guess, [i]: after iteration i; NaN: not known
    iterations: jax.Array | int


def squares(x: Tree) -> jax.Array:
    """Squared 2-norm of one state, in at least single precision."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(x):
        for part in (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,):
            real = part.astype(jnp.promote_types(part.dtype, jnp.float32))
            total = total + jnp.sum(real * real)
    return total


def measure(p: Problem, x: Tree, counts: jax.Array, want_points: bool) -> Record:
    """Temporal norm over the C-points that `counts` marks of the spatial norm of `x`."""
    if p.norm is None:
        values = jnp.sqrt(p.comm.batch_sum(jax.vmap(squares)(x)))
    else:
        values = jax.vmap(p.norm)(x)
        if p.comm.batch_size() > 1:
            values = jnp.sqrt(p.comm.batch_sum(values**2))
    points = jnp.where(counts, values, jnp.nan) if want_points else ()
    values = jnp.where(counts, values, 0)
    kind = p.config.temporal_norm
    if kind == "max":
        worst = jnp.where(jnp.isnan(values), jnp.inf, values)
        return Record(p.comm.max(jnp.max(worst, initial=0)), points)
    if kind == "one":
        return Record(p.comm.sum(jnp.sum(values)), points)
    return Record(jnp.sqrt(p.comm.sum(jnp.sum(values**2))), points)


def iterate(
    p: Problem,
    guess: Callable[[int], Points],
    counts: jax.Array,
    track: bool,
    want_points: bool = False,
) -> Iterate:
    """The iterations of a solve with more than one level, up to its last sweep.

    `guess(l)` gives C-points of level 0 for `l = 0`, slots of the coarsest level otherwise; only
    level 0 is asked for where no coarse solve is wanted.
    """
    skipped = 0
    if p.start == "guess":
        x = guess(0)
    else:
        x = coarse_start(p, guess, improve=p.start == "nested")
        skipped = min(1, p.config.max_iters) if p.start == "coarse" else 0

    def norms_of(d: Tree) -> Record:
        return measure(p, d, counts, want_points)

    unknown = jax.tree.map(
        lambda a: jnp.full(a.shape, jnp.nan, a.dtype), jax.eval_shape(norms_of, x.u)
    )
    if p.config.tol == 0:
        return _so_many(p, x, skipped, norms_of if track else None, unknown)
    return _until_converged(p, x, skipped, norms_of, unknown)


def _so_many(
    p: Problem, x: Points, skipped: int, norms_of: Callable[[Tree], Record] | None, unknown: Record
) -> Iterate:
    """All iterations there may be, in a loop that does not look at data."""
    config, jump = p.config, p.config.criterion == "jump"
    rhs = arranged_rhs(p, 0, source(p, 0))

    def body(x: Points, i: jax.Array) -> tuple[Points, Record]:
        relaxed = relax(p, 0, x, rhs, keep_residual=norms_of is not None and not jump)
        new = correct(p, 0, relaxed.x, relaxed.w, config.cycle)
        if norms_of is None:
            return new, unknown
        # a body sees the residual before its cycle, but the jump after it
        norms = norms_of(_tree.sub(new.u, x.u) if jump else relaxed.residual)
        _report(p, i + jump, norms, new.u if jump else x.u)
        return new, norms

    x, record = lax.scan(body, x, skipped + jnp.arange(config.max_iters - skipped))
    return Iterate(x, None, _joined(_rows(unknown, skipped + jump), record), config.max_iters)


def _until_converged(
    p: Problem, x: Points, skipped: int, norms_of: Callable[[Tree], Record], unknown: Record
) -> Iterate:
    """Iterations until the norm is at most `tol`, or is not finite."""
    config, jump = p.config, p.config.criterion == "jump"
    rhs = arranged_rhs(p, 0, source(p, 0))
    # where no C-relaxation comes between, the sweep that gives the residual is the next cycle's
    along = config.at("cf_relax", 0) == 0

    def swept(x: Points) -> Points:
        return sweep_along(p, 0, x, rhs) if along else Points(sweep(p, 0, x.u, rhs))

    def proceed(state: tuple[jax.Array, Points, Points, Record]) -> jax.Array:
        i, _, _, record = state
        last = record.norm[i]
        unfinished = jnp.isfinite(last) & (last > config.tol)
        return (i < config.max_iters) & (unfinished | (jump & (i == skipped)))

    def advance(state: tuple[jax.Array, Points, Points, Record]):
        i, x, w, record = state
        new = correct(p, 0, *relax_swept(p, 0, x, w, rhs), config.cycle)
        w = swept(new)
        norms = norms_of(_tree.sub(new.u, x.u) if jump else _tree.sub(w.u, new.u))
        _report(p, i + 1, norms, new.u)
        return i + 1, new, w, _with_row(record, i + 1, norms)

    w = swept(x)
    record = _rows(unknown, config.max_iters + 1)
    if not jump:
        norms = norms_of(_tree.sub(w.u, x.u))
        _report(p, skipped, norms, x.u)
        record = _with_row(record, skipped, norms)
    i, x, w, record = lax.while_loop(proceed, advance, (jnp.int32(skipped), x, w, record))
    return Iterate(x, w.u, record, i)


def _report(p: Problem, i: jax.Array | int, norms: Record, u: Tree) -> None:
    if p.watch is not None:
        p.watch(i, norms.norm, u)


def _rows(row: Record, n: int) -> Record:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), row)


def _joined(a: Record, b: Record) -> Record:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), a, b)


def _with_row(record: Record, i: jax.Array | int, row: Record) -> Record:
    return jax.tree.map(lambda a, b: a.at[i].set(b), record, row)


def all_finite(p: Problem, x: Tree) -> jax.Array:
    """Whether a state that all devices of a row know is finite, in all parts of the batch."""
    bad = sum(jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(x))
    return p.comm.batch_sum(jnp.asarray(bad, jnp.int32)) == 0


def finished(p: Problem, done: Iterate, counts: jax.Array, w: Tree, want_points: bool) -> Iterate:
    """`done` with the norms of a last sweep that gave the values `w` at the C-points."""
    if p.config.tol != 0 or p.config.criterion != "residual":
        return done
    norms = measure(p, _tree.sub(w, done.x.u), counts, want_points)
    _report(p, p.config.max_iters, norms, done.x.u)
    row = jax.tree.map(lambda a: a[None], norms)
    return done._replace(record=_joined(done.record, row))


def make_stats(p: Problem, done: Iterate) -> Stats:
    """The record of a solve that has finished."""
    norms, n = done.record.norm, p.config.max_iters
    iterations = jnp.asarray(done.iterations, jnp.int32)
    last = norms[iterations]
    index = jnp.arange(n + 1)
    # NaN stands in the norms of iterations that were not run or leave nothing to compare
    first = int(p.start == "coarse") + (p.config.criterion == "jump")
    finite = jnp.all(jnp.isfinite(norms) | (index > iterations) | (index < first))
    return Stats(norms[1:], norms[0], iterations, finite & (last <= p.config.tol), finite)
