"""The adjoint solve on one device: the cycle marching in reverse, then one sweep of full vjps.

The last sweep takes one vjp a step for both its derivatives, with respect to the state (the adjoint
recurrence) and with respect to parameters and shared arguments (the gradients).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._adjoint_problem import adjoint_problem
from jaxbraid._comm import Comm
from jaxbraid._equations import Points, Rhs, apply_rhs, masked
from jaxbraid._forward import Track, relaxed_solution
from jaxbraid._iterate import squares
from jaxbraid._problem import Data, Inputs, PerStep, Setup
from jaxbraid._pullback import Kept
from jaxbraid._stats import AdjointStats
from jaxbraid._tree import Split, Tree


class Adjoint(NamedTuple):
    """Gradients on one device: inexact leaves only; `params` and `inputs` of its slots."""

    u0: Tree
    own: PerStep
    args: Tree
    side: Tree
    norms: Tree  # squared norms of the adjoint states at the slots' start, if asked for
    stats: Any  # AdjointStats, if asked for


@jax.named_scope("mgrit_adjoint")
def solve_adjoint(
    setup: Setup,
    want_stats: bool,
    comm: Comm,
    data: Data,
    saved: tuple[Tree, ...],
    kept: Kept | None,
    last: list[Any],
    source: list[Any] | None,
    aux_ct: list[Any],
) -> Adjoint:
    """Gradients from `last` = dL/du_N, `source` = dL/du_n in slots, and the cotangents of aux.

    For `saved` and `kept` see `adjoint_problem`.
    """
    _, h = setup.hierarchies(comm.size)
    p, pullback = adjoint_problem(setup, data, comm, saved, kept, last, source, aux_ct)

    def initial(l: int) -> Points:
        # C-points beyond the end of time already have their value, that of the end
        lp = p.levels[l]
        n = lp.level.intervals if l == 0 else lp.level.block
        known = _tree.repeat(lp.u0, n)
        inside = lp.inside if l == 0 else lp.inputs.active
        zeros = _tree.zeros(_tree.shapes(known))
        u = zeros if inside is None else _tree.where(inside, zeros, known)
        return p.points(u, n)

    @jax.named_scope("mgrit_gradient")
    def body(adjoint: Tree, xs: tuple[Inputs, Rhs | None]) -> tuple[Tree, Any, Any]:
        x, rhs = xs
        value, down, dargs, dside = pullback.full(x, adjoint)
        value = masked(x.active, apply_rhs(value, adjoint, rhs), adjoint)
        return value, (down, jax.vmap(squares)(value) if want_stats else ()), (dargs, dside)

    zero = _tree.zeros(pullback.shapes)
    track = Track() if want_stats else None
    done, swept, stats = relaxed_solution(p, h, initial, body, zero, track)
    down, norms = h.levels[0].flatten(swept.outputs, True)
    k = len(Split.of(data.own.params)(data.own.params)[0])
    dargs, dside = swept.total
    use_u = p.coarsest > 0 and setup.adjoint.final_relax != "FC"
    if p.periodic:  # u0 is but a guess
        du0 = _tree.zeros(_tree.shapes(last))
    else:
        du0 = comm.broadcast(_tree.take(done.u if use_u else swept.ends, 0), 0)
    record = None
    if want_stats:
        assert stats is not None
        norms = comm.batch_sum(norms)
        stats = stats[0]
        record = AdjointStats(stats.residuals, stats.iterations.astype(jnp.float32), norms)
    return Adjoint(
        du0,
        PerStep(comm.batch_sum(down[:k]), down[k:]),
        comm.batch_sum(comm.sum(dargs)),
        comm.sum(dside),
        norms,
        record,
    )
