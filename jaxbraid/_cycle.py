r"""The multigrid cycle on one block of the time axis, for states marching either way.

Level $l$ poses $u_i = \Phi_l(u_{i-1}) + g_i$. Below level 0 the right-hand side is the FAS one,
$g_i = R r_i + v_i - \Phi_l(v_{i-1})$, kept as the pair `phi` $= \Phi_l(v_{i-1})$ and
`b` $= v_i + R r_i$, and applied as $(\Phi_l(u_{i-1}) - \mathtt{phi}) + \mathtt{b}$: where the
iteration has converged both brackets are exact, so a converged state is a fixed point to the bit.

The unknowns of a level are its C-points alone. F-points follow from them, and are stored only
where something needs them: on a coarse level, whose points are the finer level's C-points, and in
the last sweep. One *sweep* steps all intervals at once from their C-points and yields, for the
C-points that close them, $w_k = \Phi(u_{mk-1}) + g_{mk}$. That is at once the F-relaxation, the
residual $r = w - u$, the value of the next C-relaxation and the fine part of the FAS right-hand
side, so that no step is evaluated twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax

from jaxbraid import _tree
from jaxbraid._delta import Delta
from jaxbraid._equations import Points, Problem, Rhs, hand_down, hand_up, masked, to_owner
from jaxbraid._sweep import (
    all_points,
    arranged_rhs,
    before,
    march,
    orthonormalised,
    source,
    starts,
    step_all,
    sweep,
    sweep_along,
    with_rhs,
    writing,
)
from jaxbraid._tree import Tree


class Relaxed(NamedTuple):
    """C-points after relaxation, their sweep, and the residual that relaxation began with.

    The sweep has the derivatives along the bases that a correction is made of.
    """

    x: Points
    w: Points
    residual: Tree


def relax(p: Problem, l: int, x: Points, rhs: Rhs | None, keep_residual: bool = False) -> Relaxed:
    """F-relaxation and `cf_relax` C-F-relaxations, as one loop: the sweep is compiled once.

    With derivatives the last sweep is another program and stands behind the loop.
    """
    count, weight = p.config.at("cf_relax", l), p.config.at("c_weight", l)
    if count == 0:
        w = sweep_along(p, l, x, rhs)
        return Relaxed(x, w, _tree.sub(w.u, x.u) if keep_residual else ())

    def body(i: jax.Array, state: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
        u, w, residual = state
        u = _tree.where(i > 0, _tree.move(u, weight, w), u)
        w = sweep(p, l, u, rhs)
        residual = _tree.where(i > 0, residual, _tree.sub(w, u)) if keep_residual else ()
        return u, w, residual

    first = (x.u, x.u, x.u if keep_residual else ())
    u, w, residual = lax.fori_loop(0, count + (p.basis is None), body, first)
    if p.basis is None:
        return Relaxed(Points(u), Points(w), residual)
    x = x._replace(u=_tree.move(u, weight, w))
    return Relaxed(x, sweep_along(p, l, x, rhs), residual)


def relax_swept(p: Problem, l: int, x: Points, w: Points, rhs: Rhs | None) -> tuple[Points, Points]:
    """`relax` of C-points `x` whose sweep `w` is known: only the C-F-relaxations.

    Without any, the known sweep must have the derivatives.
    """
    count, weight = p.config.at("cf_relax", l), p.config.at("c_weight", l)
    if count == 0:
        return x, w

    def body(_: int, state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        u = _tree.move(state[0], weight, state[1])
        return u, sweep(p, l, u, rhs)

    u, v = lax.fori_loop(0, count - (p.basis is not None), body, (x.u, w.u))
    if p.basis is None:
        return Points(u), Points(v)
    x = x._replace(u=_tree.move(u, weight, v))
    return x, sweep_along(p, l, x, rhs)


def cycle(p: Problem, l: int, x: Points, rhs: Rhs | None, kind: str) -> Points:
    """Relax level `l` and correct it from the next."""
    relaxed = relax(p, l, x, rhs)
    return correct(p, l, relaxed.x, relaxed.w, kind)


def correct(p: Problem, l: int, x: Points, w: Points, kind: str) -> Points:
    """Solve the FAS equation on level `l + 1` and add the prolonged change to the C-points."""
    restrict, prolong = _batched(p.levels[l].restrict), _batched(p.levels[l].prolong)
    v = restrict(x.u)
    b = _tree.add(v, restrict(_tree.sub(w.u, x.u)))
    y, b, fine = hand_down(p, l, (Points(v, x.basis), b, w.basis))
    begin = p.with_basis(before(p, l + 1, y))
    coarse = step_all(p, l + 1, begin)
    delta = None
    if p.basis is not None:
        delta = Delta(*begin, _tree.sub(fine, coarse.basis))
    new = visit(p, l + 1, y, Rhs(coarse.u, b, delta), kind)
    change = hand_up(p, l, Points(_tree.sub(new.u, y.u), new.basis))
    return Points(_tree.add(x.u, prolong(change.u)), change.basis)


def _batched(fn: Callable[[Tree], Tree] | None) -> Callable[[Tree], Tree]:
    return (lambda x: x) if fn is None else jax.vmap(fn)


def visit(p: Problem, l: int, y: Points, rhs: Rhs | None, kind: str) -> Points:
    """One cycle on level `l > 0` from the values `y` of its slots; returns those of all slots."""
    if l == p.coarsest:
        return solve_coarsest(p, y, rhs)
    x = to_owner(p, l, p.levels[l].level.c_slots(y, p.reverse))
    rhs = arranged_rhs(p, l, rhs)

    if kind == "W":
        x = lax.fori_loop(0, 2, lambda _, x: cycle(p, l, x, rhs, "W"), x)
    else:
        x = cycle(p, l, x, rhs, kind)
        if kind == "F":
            x = cycle(p, l, x, rhs, "V")
    return all_points(p, l, x, rhs)


def solve_coarsest(p: Problem, y: Points, rhs: Rhs | None) -> Points:
    """The coarsest level: stepped in sequence, or relaxed at all points at once."""
    l = p.coarsest
    if p.config.window is not None or p.config.coarse_solver == "relax":
        if p.config.window is not None:
            sweeps = p.config.window - 1
        else:
            sweeps = 1 + (p.config.at("cf_relax", l - 1) if l > 0 else 0)

        def relax_all(_: int, y: Points) -> Points:
            return orthonormalised(p, step_all(p, l, before(p, l, y), rhs))

        return lax.fori_loop(0, sweeps, relax_all, y)

    lp = p.levels[l]
    step = with_rhs(lp.phi)
    body = writing(lambda x, given: orthonormalised(p, step(x, given)))
    xs = (lp.swept, arranged_rhs(p, l, rhs))

    def around(y: Points) -> Points:
        return lp.level.flatten(march(p, l, starts(p, l, y), body, xs).outputs, p.reverse)

    y = around(y)
    return lax.fori_loop(1, p.config.coarse_rounds, lambda _, y: around(y), y) if p.periodic else y


def coarse_start(p: Problem, guess: Callable[[int], Points], improve: bool) -> Points:
    """Nested iteration: solve the coarsest level, prolong, and `improve` by a V-cycle a level.

    `guess(l)` gives the slots of the coarsest level before it is solved (it matters to AT-MGRIT).
    Returns the C-points of level 0.
    """
    y = solve_coarsest(p, guess(p.coarsest), source(p, p.coarsest))
    for l in range(p.coarsest - 1, -1, -1):
        lp = p.levels[l]
        x = hand_up(p, l, y)
        # beyond the end of time (in reverse: before the beginning) nothing is to be approximated
        known = _tree.repeat(lp.u0, lp.level.intervals)
        x = x._replace(u=masked(lp.inside, _batched(lp.prolong)(x.u), known))
        if l == 0:
            return x
        rhs = arranged_rhs(p, l, source(p, l))
        if improve:
            x = cycle(p, l, x, rhs, "V")
        y = all_points(p, l, x, rhs)
    raise AssertionError("unreachable: a hierarchy of one level has no coarse start")
