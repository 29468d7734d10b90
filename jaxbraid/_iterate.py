"""Cycles repeated until they have converged, and the norms that decide it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxbraid import _tree
from jaxbraid._cycle import arranged_rhs, coarse_start, correct, relax, relax_swept, source, sweep
from jaxbraid._equations import Problem
from jaxbraid._stats import Stats
from jaxbraid._tree import Tree


class Iterate(NamedTuple):
    """C-points after the iterations, their sweep if it is known, and the norms so far."""

    u: Tree
    w: Tree | None
    norms: jax.Array  # norms[0]: of the guess, norms[i]: after iteration i; NaN: not known
    iterations: jax.Array | int


def squares(x: Tree) -> jax.Array:
    """Squared 2-norm of one state, in at least single precision."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(x):
        real = jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf
        real = real.astype(jnp.promote_types(real.dtype, jnp.float32))
        total = total + jnp.sum(real * real)
    return total


def space_time_norm(p: Problem, x: Tree, counts: jax.Array) -> jax.Array:
    """Temporal norm over the C-points that `counts` marks of the spatial norm of `x`."""
    if p.norm is None:
        values = jnp.sqrt(p.comm.batch_sum(jax.vmap(squares)(x)))
    else:
        values = jax.vmap(p.norm)(x)
        if p.comm.batch_size() > 1:
            values = jnp.sqrt(p.comm.batch_sum(values**2))
    values = jnp.where(counts, values, 0)
    kind = p.config.temporal_norm
    if kind == "max":
        worst = jnp.where(jnp.isnan(values), jnp.inf, values)
        return p.comm.max(jnp.max(worst, initial=0))
    if kind == "one":
        return p.comm.sum(jnp.sum(values))
    return jnp.sqrt(p.comm.sum(jnp.sum(values**2)))


def iterate(p: Problem, guess: Callable[[int], Tree], counts: jax.Array, track: bool) -> Iterate:
    """The iterations of a solve with more than one level, up to its last sweep.

    `guess(l)` gives C-points of level 0 for `l = 0`, slots of the coarsest level otherwise; only
    level 0 is asked for where no coarse solve is wanted.
    """
    config = p.config
    rhs = arranged_rhs(p, 0, source(p, 0))
    skipped = 0
    if p.start == "guess":
        u = guess(0)
    else:
        u = coarse_start(p, guess, improve=p.start == "nested")
        skipped = min(1, config.max_iters) if p.start == "coarse" else 0
    count = config.max_iters - skipped
    jump = config.criterion == "jump"

    def norm(x: Tree) -> jax.Array:
        return space_time_norm(p, x, counts)

    nan = jnp.full((), jnp.nan, jax.eval_shape(norm, u).dtype)

    if config.tol == 0:

        def body(u: Tree, _: None) -> tuple[Tree, jax.Array]:
            relaxed = relax(p, 0, u, rhs, keep_residual=track and not jump)
            new = correct(p, 0, relaxed.u, relaxed.w, config.cycle)
            if not track:
                return new, nan
            return new, norm(_tree.sub(new, u) if jump else relaxed.residual)

        u, norms = lax.scan(body, u, length=count)
        # a body sees the residual before its cycle, but the jump after it
        before = jnp.full((skipped + jump,), nan)
        return Iterate(u, None, jnp.concatenate([before, norms]), config.max_iters)

    def proceed(state: tuple[jax.Array, Tree, Tree, jax.Array]) -> jax.Array:
        i, _, _, norms = state
        last = norms[i]
        unfinished = jnp.isfinite(last) & (last > config.tol)
        return (i < config.max_iters) & (unfinished | (jump & (i == skipped)))

    def advance(state: tuple[jax.Array, Tree, Tree, jax.Array]):
        i, u, w, norms = state
        new = correct(p, 0, *relax_swept(p, 0, u, w, rhs), config.cycle)
        w = sweep(p, 0, new, rhs)
        value = norm(_tree.sub(new, u) if jump else _tree.sub(w, new))
        return i + 1, new, w, norms.at[i + 1].set(value)

    w = sweep(p, 0, u, rhs)
    norms = jnp.full((config.max_iters + 1,), nan)
    if not jump:
        norms = norms.at[skipped].set(norm(_tree.sub(w, u)))
    i, u, w, norms = lax.while_loop(proceed, advance, (jnp.int32(skipped), u, w, norms))
    return Iterate(u, w, norms, i)


def all_finite(p: Problem, x: Tree) -> jax.Array:
    """Whether a state that all devices of a row know is finite, in all parts of the batch."""
    bad = sum(jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(x))
    return p.comm.batch_sum(jnp.asarray(bad, jnp.int32)) == 0


def make_stats(p: Problem, done: Iterate, counts: jax.Array, w: Tree) -> Stats:
    """The record of a solve whose last sweep gave the values `w` at the C-points."""
    norms, n = done.norms, p.config.max_iters
    if p.config.tol == 0 and p.config.criterion == "residual":
        norms = jnp.append(norms, space_time_norm(p, _tree.sub(w, done.u), counts))
    iterations = jnp.asarray(done.iterations, jnp.int32)
    last = norms[iterations]
    index = jnp.arange(n + 1)
    # NaN stands in the norms of iterations that were not run or leave nothing to compare
    first = int(p.start == "coarse") + (p.config.criterion == "jump")
    finite = jnp.all(jnp.isfinite(norms) | (index > iterations) | (index < first))
    return Stats(norms[1:], norms[0], iterations, finite & (last <= p.config.tol), finite)
