"""Arithmetic on pytrees, and their split into leaves that can be differentiated and others."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def add(x: Tree, y: Tree) -> Tree:
    return jax.tree.map(operator.add, x, y)


def sub(x: Tree, y: Tree) -> Tree:
    return jax.tree.map(operator.sub, x, y)


def move(x: Tree, weight: float, y: Tree) -> Tree:
    """`x + weight (y - x)`: exactly `x` where `y = x`, exactly `y` for weight 1."""
    if weight == 1.0:
        return y
    return jax.tree.map(lambda a, b: a + (weight * (b - a)).astype(a.dtype), x, y)


def where(mask: jax.Array | bool, x: Tree, y: Tree) -> Tree:
    """Select along the leading axes: `mask` is broadcast over the trailing axes of each leaf."""

    def select(a: jax.Array, b: jax.Array) -> jax.Array:
        m = jnp.asarray(mask)
        return jnp.where(m.reshape(m.shape + (1,) * (jnp.ndim(a) - m.ndim)), a, b)

    return jax.tree.map(select, x, y)


def zeros(shapes: Tree) -> Tree:
    """Zeros of the shapes and dtypes in a pytree of arrays or `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def repeat(x: Tree, n: int) -> Tree:
    """`n` copies of `x` along a new leading axis."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *jnp.shape(a))), x)


def take(x: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda a: a[index], x)


def concatenate(parts: list[Tree]) -> Tree:
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def shapes(x: Tree) -> Tree:
    """Shapes and dtypes of the leaves."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), x)


def is_inexact(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    dtype = jnp.result_type(leaf) if dtype is None else dtype
    return jnp.issubdtype(dtype, jnp.inexact)


def precision(u: Tree) -> Any:
    """The real type that all real and complex leaves together have."""
    return jnp.finfo(jnp.result_type(*(x for x in jax.tree.leaves(u) if is_inexact(x)))).dtype


def euler_step(u: Tree, dt: jax.Array, dudt: Tree) -> Tree:
    """`u + dt * dudt` in the precision of `u`; what is neither real nor complex stays."""

    def step(u: Any, dudt: Any) -> Any:
        return u + dt.astype(jnp.finfo(u.dtype).dtype) * dudt if is_inexact(u) else u

    return jax.tree.map(step, u, dudt)


def on_data(fn: Callable[[jax.Array], jax.Array], x: Tree) -> Tree:
    """`fn` of each leaf; of a PRNG key, `fn` of the numbers in it."""

    def one(a: jax.Array) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return fn(a)
        return jax.random.wrap_key_data(fn(jax.random.key_data(a)), impl=jax.random.key_impl(a))

    return jax.tree.map(one, x)


@dataclasses.dataclass(frozen=True)
class Split:
    """Which leaves of a pytree are inexact (real or complex numbers): those that derivatives see.

    `diff, rest = split(tree)` are lists of leaves, `split.join(diff, rest)` is the tree again.
    """

    treedef: Any
    mask: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Tree) -> Split:
        leaves, treedef = jax.tree.flatten(tree)
        return cls(treedef, tuple(is_inexact(leaf) for leaf in leaves))

    def __call__(self, tree: Tree) -> tuple[list[Any], list[Any]]:
        leaves = self.treedef.flatten_up_to(tree)
        diff = [x for x, m in zip(leaves, self.mask, strict=True) if m]
        rest = [x for x, m in zip(leaves, self.mask, strict=True) if not m]
        return diff, rest

    def join(self, diff: list[Any], rest: list[Any]) -> Tree:
        d, r = iter(diff), iter(rest)
        return self.treedef.unflatten([next(d) if m else next(r) for m in self.mask])


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of `n` that is at most `limit`."""
    return max(d for d in range(1, max(1, min(n, limit)) + 1) if n % d == 0)
