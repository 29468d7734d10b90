"""Sizes, products and random values of states, of which only real and complex leaves count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxbraid import _tree
from jaxbraid._tree import Tree


def _inexact(x: Tree) -> list[np.ndarray]:
    wide = [x for x in jax.tree.leaves(x) if _tree.is_inexact(x)]
    return [np.asarray(v, complex if jnp.iscomplexobj(v) else float) for v in wide]


def dot(x: Tree, y: Tree) -> complex:
    """$<x, y>$, linear in `y`."""
    pairs = zip(_inexact(x), _inexact(y), strict=True)
    return complex(sum(np.vdot(a, b) for a, b in pairs))


def pair(x: Tree, y: Tree) -> float:
    """The pairing of a cotangent with a tangent: the real part of the sum of products."""
    return float(sum(np.sum(a * b).real for a, b in zip(_inexact(x), _inexact(y), strict=True)))


def size_of(x: Tree) -> float:
    return float(np.sqrt(sum(np.sum(np.abs(a) ** 2) for a in _inexact(x))))


def difference(x: Tree, y: Tree) -> float:
    pairs = zip(_inexact(x), _inexact(y), strict=True)
    return float(np.sqrt(sum(np.sum(np.abs(a - b) ** 2) for a, b in pairs)))


def random_like(key: jax.Array, x: Tree) -> Tree:
    """Normal numbers in the real and complex leaves; the others as they are."""
    leaves, treedef = jax.tree.flatten(x)
    keys = jax.random.split(key, max(1, len(leaves)))
    pairs = zip(keys, leaves, strict=False)
    return treedef.unflatten(
        [
            jax.random.normal(k, jnp.shape(v), v.dtype) if _tree.is_inexact(v) else v
            for k, v in pairs
        ]
    )


def perturbed(x: Tree, h: float, direction: Tree, like: Tree) -> Tree:
    return jax.tree.map(
        lambda a, d, s: (a + h * d).astype(s.dtype) if _tree.is_inexact(a) else a,
        x,
        direction,
        like,
    )


def eps_of(u: Tree) -> float:
    return max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(u) if _tree.is_inexact(x))
