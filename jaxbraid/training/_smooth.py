r"""Weights that are smooth in depth, which coarse levels need: a penalty and an initialisation."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from jaxbraid import _tree
from jaxbraid._options import check_integer
from jaxbraid.training._depth import Layered, Order, depth, prolong_layers, which_layered


def depth_penalty(
    params: PyTree, t_final: float = 1.0, *, layered: Layered = True
) -> Float[Array, ""]:
    r"""How rough weights are in depth: $\sum_n \|\theta_{n+1} - \theta_n\|^2 / (2 \Delta t)$.

    With $\Delta t = T/N$ this is half the integral of $|d\theta/dt|^2$, so a factor in front of it
    means the same at any depth. Only neighbouring layers meet in it, also on a mesh.

    **Arguments**

    - `params`: weights with leading axis N; leaves that are not real or complex do not count.
    - `t_final`: the end of time $T$.
    - `layered`: which leaves have a layer axis, as in `prolong_layers`; the others do not count.

    **Returns**

    A scalar; 0 for one layer, or equal ones.

    ??? cite "Reference"

        S. Guenther, L. Ruthotto, J. B. Schroder, E. C. Cyr, N. R. Gauger: Layer-parallel training
        of deep residual neural networks. SIAM J. Math. Data Sci. 2(1), 2020.
    """
    if not t_final > 0:
        raise ValueError(f"t_final={t_final!r}: must be positive.")
    layers = depth("params", params, layered)

    def rough(a: Array, has_layers: bool) -> Array | float:
        if not has_layers or not _tree.is_inexact(a):
            return 0.0
        # Rolled, not sliced: slices would split a sharded layer axis unevenly.
        step = _tree.where(jnp.arange(layers) < layers - 1, jnp.roll(a, -1, 0) - a, 0 * a)
        return jnp.sum(jnp.abs(step) ** 2)

    terms = jax.tree.map(rough, params, which_layered(params, layered))
    return jnp.asarray(sum(jax.tree.leaves(terms)) * (layers / (2 * t_final)))


def smooth_layers(
    key: PRNGKeyArray,
    init: Callable[[PRNGKeyArray], PyTree],
    layers: int,
    *,
    knots: int = 4,
    order: Order = "linear",
) -> PyTree:
    """Random weights that are smooth in depth: random at a few layers, interpolated between them.

    **Arguments**

    - `key`: a PRNG key.
    - `init`: `init(key)` gives the weights of one layer.
    - `layers`: the number of layers, at least 1.
    - `knots`: how many layers are random; 1 makes all layers equal, `layers` all independent.
    - `order`: how the others follow, as in `prolong_layers`. (Between knots, `"linear"` has a
        smaller variance than `init`: half of it midway.)

    **Returns**

    The weights, leading axis `layers`.
    """
    knots = min(check_integer("knots", knots, 1), check_integer("layers", layers, 1))
    return prolong_layers(jax.vmap(init)(jax.random.split(key, knots)), layers, order)
