"""Checks of a restriction and prolongation, and of a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbraid import _check, _tree
from jaxbraid._measure import difference, dot, eps_of, random_like, size_of
from jaxbraid._report import Finding
from jaxbraid._tree import Tree
from jaxbraid.transfers import Transfer

Map = Callable[[Tree], Tree]
_Told = tuple[Any, str, float | None]  # status, what is to be said, and the number behind it
TINY = 1e-300


def check_transfer(
    transfer: Transfer, u: Tree, level: int, key: jax.Array
) -> tuple[list[Finding], Tree | None]:
    """Findings about a transfer from `level` down, and the state restricted, if that works."""
    where, like = f"transfer from level {level}", _tree.shapes(u)

    def named(name: str, finding: _Told) -> Finding:
        return Finding(f"{where}: {name}", *finding)

    try:
        v = transfer.restrict(u)
        back = transfer.prolong(v, like)
    except Exception as e:
        text = f"restrict or prolong fails: {type(e).__name__}: {e}"
        return [named("shapes", ("error", text, None))], None
    who = "prolong, applied to restrict(u),"
    wrong = _check.differs(back, like, f"state on level {level}", who)
    if wrong is not None:
        return [named("shapes", ("error", str(wrong), None))], None
    sizes = [sum(x.size for x in jax.tree.leaves(t)) for t in (u, v)]

    def restrict(x: Tree) -> Tree:
        return transfer.restrict(x)

    def prolong(x: Tree) -> Tree:
        return transfer.prolong(x, like)

    pair, keys = (restrict, prolong, u, v), jax.random.split(key, 4)
    return [
        named("shapes", ("ok", f"{sizes[0]} numbers a state become {sizes[1]}.", None)),
        named("restrict linear", _linear("restrict", restrict, u, keys[0])),
        named("prolong linear", _linear("prolong", prolong, v, keys[1])),
        named("constants", _constants(restrict, u, v)),
        named("R = c P^T", _adjoint(*pair, keys[2])),
        named("R P", _round_trip(*pair, keys[3])),
    ], v


def _linear(name: str, fn: Map, x: Tree, key: jax.Array) -> _Told:
    a, b = (random_like(k, x) for k in jax.random.split(key))
    apart = _combine(2.0, fn(a), -3.0, fn(b))
    gap = difference(fn(_combine(2.0, a, -3.0, b)), apart) / (size_of(apart) + TINY)
    if gap <= _tolerance(x):
        return "ok", f"{name} is linear.", gap
    text = f"{name} is not linear: {name}(2 a - 3 b) and 2 {name}(a) - 3 {name}(b) differ by "
    text += f"{gap:.1e} of their size. Corrections and residuals need linear transfers: no "
    return "error", text + "offsets, limiters or clipping.", gap


def _constants(restrict: Map, u: Tree, v: Tree) -> _Told:
    of_ones, ones = restrict(_ones(u)), _ones(v)
    if difference(of_ones, ones) / size_of(ones) <= _tolerance(u):
        return "ok", "restrict keeps constants.", 1.0
    mean = float(np.real(dot(of_ones, ones) / dot(ones, ones)))
    text = f"restrict does not keep constants: it takes 1 to {mean:.4g} on average. It acts on "
    return "warning", text + "states, too, so its weights should have the sum 1 (scale it).", mean


def _adjoint(restrict: Map, prolong: Map, u: Tree, v: Tree, key: jax.Array) -> _Told:
    ratios = []
    for i in jax.random.split(key, 3):
        a, b = (random_like(k, x) for k, x in zip(jax.random.split(i), (u, v), strict=True))
        ratios.append((dot(restrict(a), b), dot(a, prolong(b)), size_of(a) * size_of(prolong(b))))
    c = sum(r * np.conj(p) for r, p, _ in ratios) / (sum(abs(p) ** 2 for _, p, _ in ratios) + TINY)
    gap = max(abs(r - c * p) / (abs(c) * s + TINY) for r, p, s in ratios)
    if gap <= _tolerance(u):
        c = float(np.real(c))
        return "ok", f"restrict is {c:.6g} times the transpose of prolong.", c
    text = "restrict is no multiple of the transpose of prolong. Forward solves don't need it "
    text += "(injection with linear interpolation is such a pair); if it is meant to be one, "
    text += "<R u, v> and <u, P v> show that a weight, the boundary or the order is wrong."
    return "warning", text, float(gap)


def _round_trip(restrict: Map, prolong: Map, u: Tree, v: Tree, key: jax.Array) -> _Told:
    x, ones = random_like(key, v), _ones(v)
    gap = difference(restrict(prolong(x)), x) / size_of(x)
    flat = difference(restrict(prolong(ones)), ones) / size_of(ones)
    if gap <= _tolerance(u):
        return "ok", "restrict undoes prolong: R P = I.", gap
    if flat > 0.5:
        text = f"R P changes constants by {100 * flat:.0f} %: a correction that is prolonged and "
        return "warning", text + "restricted again should come back about as it was.", flat
    return "ok", f"R P is not the identity, but changes constants by {100 * flat:.2g} % only.", flat


def _tolerance(x: Tree) -> float:
    return 1e3 * eps_of(x)


def check_norm(norm: Callable[[Any], Any], u: Tree, key: jax.Array) -> list[Finding]:
    """Findings about a spatial norm."""

    def result(status: Any, text: str, value: float | None = None) -> list[Finding]:
        return [Finding("norm", status, text, value)]

    keys = jax.random.split(key)
    a, b = random_like(keys[0], u), random_like(keys[1], u)
    try:
        out = norm(a)
    except Exception as e:
        return result("error", f"norm fails for a state like u0: {type(e).__name__}: {e}")
    if jnp.shape(out) != () or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
        text = f"norm returns shape {jnp.shape(out)} and dtype {jnp.result_type(out)}: must be a "
        return result("error", text + "real scalar. Sum over all axes; take abs of complex values.")
    x, y, both, larger, zero = (
        float(norm(s)) for s in (a, b, _combine(1.0, a, 1.0, b), _combine(-3.0, a, 0, b), _zeros(u))
    )
    tol = _tolerance(u)
    if not np.all(np.isfinite([x, y, both, larger, zero])):
        return result("error", "norm returns NaN or infinity for finite states.")
    if min(x, y, both, larger) < 0:
        return result("error", f"norm is negative ({min(x, y, both, larger):.3g}): no norm is.")
    if zero > tol * x:
        return result("error", f"norm of the zero state is {zero:.3g}: must be 0.", zero)
    if x == 0 or y == 0:
        return result("warning", "norm is 0 for a random state: it does not see all of it.")
    if abs(larger - 3 * x) > tol * larger:
        text = f"norm is not homogeneous: for -3 u it is {larger / x:.4g} times that for u, not 3 "
        text += "times. If it is a sum of squares, take its root; an offset has no place in it."
        return result("error", text, larger / x)
    # also of two states that share no entry, which tells more than two that are alike
    part = _every_other(a)
    rest = _combine(1.0, a, -1.0, part)
    if both > (x + y) * (1 + tol) or x > float(norm(part) + norm(rest)) * (1 + tol):
        return result("error", "norm breaks the triangle inequality |u + v| <= |u| + |v|.")
    return result("ok", "norm is a real scalar, homogeneous and zero for zero.", x)


def _combine(x: float, a: Tree, y: float, b: Tree) -> Tree:
    return jax.tree.map(
        lambda p, q: (x * p + y * q).astype(p.dtype) if _tree.is_inexact(p) else p, a, b
    )


def _every_other(u: Tree) -> Tree:
    """Every other entry of `u`, 0 in between."""
    leaves, treedef = jax.tree.flatten(u)

    def one(i: int, x: jax.Array) -> jax.Array:
        mask = (jnp.arange(x.size) + i) % 2
        return jnp.where(mask.reshape(x.shape) > 0, x, 0) if _tree.is_inexact(x) else x

    return treedef.unflatten([one(i, x) for i, x in enumerate(leaves)])


def _ones(u: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.ones_like(x) if _tree.is_inexact(x) else x, u)


def _zeros(u: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros_like(x) if _tree.is_inexact(x) else x, u)
