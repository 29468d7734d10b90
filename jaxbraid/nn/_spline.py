r"""Weights as B-splines in depth: $\theta_n = \sum_k B_k(t_n)\, c_k$ at the layers' times $t_n$.

Of the K basis functions of degree d, on clamped uniform knots over $[0, T]$, at most d + 1 differ
from zero at a time, so a layer is made of d + 1 neighbouring coefficients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from jaxbraid import _check, _tree
from jaxbraid._ode_net import FORWARD, layers_hierarchy
from jaxbraid._options import MGRIT, check_integer


def check_degree(degree: Any, n_basis: int) -> int:
    """`degree`, if `n_basis` functions can have it."""
    degree = check_integer("degree", degree, 0)
    if degree >= n_basis:
        raise ValueError(
            f"degree={degree}: must be less than the number of basis functions, {n_basis}."
        )
    return degree


def _band(degree: int, n_basis: int, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """For each layer the first of its d + 1 basis functions, and their values `(layers, d + 1)`.

    Time is measured in knot intervals and kept as an integer part and a remainder, so that a layer
    lies exactly on the knot that it should lie on: the values there are exact, 1 and 0 for d <= 1.
    """
    intervals = n_basis - degree
    first, remainder = np.divmod(np.arange(layers) * intervals, layers)
    x = remainder / layers
    values = np.ones((layers, 1))
    for d in range(1, degree + 1):  # Cox and de Boor's recursion, from degree d - 1 to d
        raised = np.zeros((layers, d + 1))
        for j in range(d):
            # the knots on both sides of x that end the support of this function, clamped
            left = np.maximum(first + 1 - d + j, 0) - first
            right = np.minimum(first + 1 + j, intervals) - first
            share = values[:, j] / (right - left)
            raised[:, j] += (right - x) * share
            raised[:, j + 1] += (x - left) * share
        values = raised
    return first, values


def spline_basis(degree: int, n_basis: int, layers: int) -> Float[np.ndarray, "layers n_basis"]:
    r"""The basis functions at the times of the layers: $B_k(t_n)$, $t_n = nT/N$, in float64.

    **Arguments**

    - `degree`: d, the degree of the polynomial pieces; 0 is piecewise constant.
    - `n_basis`: K > d, the number of basis functions.
    - `layers`: N, the number of layers.

    **Returns**

    An array `(N, K)`. Its rows sum to 1 and have d + 1 entries that are not zero, at most.

    **Raises**

    `ValueError` or `TypeError` naming the argument.
    """
    n_basis = check_integer("n_basis", n_basis, 1)
    layers = check_integer("layers", layers, 1)
    first, values = _band(check_degree(degree, n_basis), n_basis, layers)
    basis = np.zeros((layers, n_basis))
    columns = first[:, None] + np.arange(degree + 1)
    np.put_along_axis(basis, columns, values, axis=1)
    return basis


def spline_layers(
    coefficients: PyTree[Float[Array, "n_basis ..."]],
    layers: int,
    degree: int,
    *,
    mesh: Mesh | None = None,
    forward: MGRIT = FORWARD,
    adjoint: MGRIT | None = None,
    layer_axis: str = "layer",
) -> PyTree[Float[Array, "layers ..."]]:
    r"""The parameters of all layers from the coefficients of a spline in depth.

    $\theta_n = \sum_k B_k(t_n)\, c_k$ at $t_n = nT/N$, with clamped uniform knots over $[0, T]$.
    The parameters at a knot are exact: with degree 1 the coefficients are the parameters at the
    knots; with degree 0 and K = N they are the layers' parameters.

    **Arguments**

    - `coefficients`: $c_k$, a pytree of real or complex arrays with leading axis K.
    - `layers`: N. The same coefficients make networks of any depth.
    - `degree`: of the spline, less than K.
    - `mesh`, `forward`, `adjoint`, `layer_axis`: with a mesh the parameters are split along
        `layer_axis` and each device makes those of its own layers; give here what
        `parallel_ode_net` is given.

    **Returns**

    A pytree with leading axis N: `params` for `jaxbraid.parallel_ode_net`. On a mesh the leading
    axis may be longer, so that devices have equal blocks; then give `layers=N` to it as well. The
    surplus entries repeat the last layer and get no gradient.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        S. Günther, W. Pazner, D. Qi: Spline parameterization of neural network controls for deep
        learning. arXiv:2103.00301, 2021.
    """
    coefficients = _check.arrays("coefficients", coefficients)
    n_basis = _check.common_leading_axis(
        "coefficients", coefficients, "the number of basis functions"
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(coefficients):
        if not _tree.is_inexact(leaf):
            raise TypeError(
                f"coefficients{jax.tree_util.keystr(path)} is of {leaf.dtype}: must be real or "
                "complex."
            )
    degree, layers = check_degree(degree, n_basis), check_integer("layers", layers, 1)
    first, values = _band(degree, n_basis, layers)
    slots = layers_hierarchy(layers, mesh, forward, adjoint, layer_axis).slots if mesh else layers
    index = np.minimum(np.arange(slots), layers - 1)
    first, values = _split(first[index], mesh, layer_axis), _split(values[index], mesh, layer_axis)

    def one(c: Array) -> Array:
        exact = jnp.promote_types(c.dtype, jnp.float32)  # half precision is rounded once, at last
        shape = (slots,) + (1,) * (c.ndim - 1)
        total = jnp.zeros((slots, *c.shape[1:]), exact)
        for j in range(degree + 1):
            value = values[:, j].astype(jnp.finfo(exact).dtype).reshape(shape)
            total = total + value * c[first + j].astype(exact)
        return _split(total.astype(c.dtype), mesh, layer_axis)

    return jax.tree.map(one, coefficients)


def _split(x: Any, mesh: Mesh | None, layer_axis: str) -> Array:
    """`x` with its leading axis along the mesh axis: what it is made of is made there, too."""
    x = jnp.asarray(x)
    if mesh is None:
        return x
    mesh = Mesh(mesh.devices, mesh.axis_names)  # whatever types the axes of the caller's have
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(layer_axis)))
