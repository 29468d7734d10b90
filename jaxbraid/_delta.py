r"""The first-order (Delta) correction of a coarse propagator, and the bases that it acts on.

Beside the FAS right-hand side, which makes the coarse equation exact at the present states $v$, the
Delta correction makes its derivative exact there, along the columns of an orthonormal basis
$\Psi$:

$$ u_k = \Phi_{l+1}(u_{k-1}) + \Delta_k (u_{k-1} - v_{k-1}) + \tau_k, \qquad
   \Delta_k = (D\Phi_l^m - D\Phi_{l+1})(v_{k-1})\, \Psi_{k-1} \Psi_{k-1}^T $$

With all unit vectors as the basis the iteration is Newton's. Basis vectors are states with an axis
before those of the state: `(slots, k, ...)`. Complex numbers count as two real ones.

??? cite "Reference"

    D. A. Vargas, R. D. Falgout, S. Günther, J. B. Schroder: Multigrid reduction in time for chaotic
    dynamical systems. SIAM J. Sci. Comput. 45(4), 2023.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._tree import Tree


class Delta(NamedTuple):
    """The correction of the steps into some slots: states, bases and changes of the derivative."""

    v: Tree  # (slots, ...): where the steps start at present
    basis: Tree  # (slots, k, ...)
    change: Tree  # (slots, k, ...): of the derivative along the basis

    def __call__(self, u: Tree) -> Tree:
        """`Delta (u - v)` of steps that start from `u`."""
        coefficients = _inner(self.basis, _tree.sub(u, self.v))

        def combine(a: jax.Array) -> jax.Array:
            c = coefficients.reshape(*coefficients.shape, *(1,) * (a.ndim - 2))
            return jnp.sum(c.astype(a.real.dtype) * a, axis=1)

        return jax.tree.map(combine, self.change)


def _inner(basis: Tree, d: Tree) -> jax.Array:
    """Real inner products of each slot's basis vectors with its `d`: `(slots, k)`."""

    def one(b: jax.Array, d: jax.Array) -> jax.Array:
        wide = jnp.promote_types(b.real.dtype, jnp.float32)
        product = jnp.real(jnp.conj(b) * d[:, None]).astype(wide)
        return product.reshape(*b.shape[:2], -1).sum(-1)

    terms = zip(jax.tree.leaves(basis), jax.tree.leaves(d), strict=True)
    return sum((one(b, d) for b, d in terms), jnp.zeros(()))


def dimension(shapes: Tree) -> int:
    """How many real numbers a state consists of."""
    return sum(
        math.prod(s.shape) * (2 if jnp.issubdtype(s.dtype, jnp.complexfloating) else 1)
        for s in jax.tree.leaves(shapes)
    )


def unit_vectors(shapes: Tree) -> Tree:
    """All unit vectors of the space of states, `(dimension, ...)`."""
    return _to_states(jnp.eye(dimension(shapes)), shapes)


def some_basis(shapes: Tree, k: int) -> Tree:
    """`k` orthonormal states, the same ones whenever they are asked for."""
    columns = jax.random.normal(jax.random.key(0), (dimension(shapes), k))
    return _to_states(jnp.linalg.qr(columns)[0].T, shapes)


def orthonormal(basis: Tree) -> tuple[Tree, jax.Array]:
    """Orthonormal vectors that span the same flag as each slot's, and how much each has grown."""
    q, r = jnp.linalg.qr(jnp.swapaxes(rows(basis), -1, -2))
    growth = jnp.diagonal(r, axis1=-2, axis2=-1)
    sign = jnp.where(growth < 0, -1, 1).astype(q.dtype)
    q = jnp.swapaxes(q * sign[..., None, :], -1, -2)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), basis)
    return jax.vmap(lambda x: _to_states(x, shapes))(q), jnp.abs(growth)


def rows(basis: Tree) -> jax.Array:
    """Each slot's basis as a real matrix with one vector a row: `(slots, k, dimension)`."""
    parts = []
    for a in jax.tree.leaves(basis):
        real = [a.real, a.imag] if jnp.iscomplexobj(a) else [a]
        wide = jnp.promote_types(a.real.dtype, jnp.float32)
        parts += [x.astype(wide).reshape(*a.shape[:2], -1) for x in real]
    return jnp.concatenate(parts, axis=-1)


def _to_states(rows: jax.Array, shapes: Tree) -> Tree:
    """The rows of a real matrix as states."""
    leaves, treedef = jax.tree.flatten(shapes)
    out, at = [], 0
    for s in leaves:
        n = math.prod(s.shape)
        parts = []
        for _ in range(2 if jnp.issubdtype(s.dtype, jnp.complexfloating) else 1):
            parts.append(rows[:, at : at + n].reshape(-1, *s.shape))
            at += n
        x = parts[0] if len(parts) == 1 else parts[0] + 1j * parts[1]
        out.append(x.astype(s.dtype))
    return treedef.unflatten(out)
