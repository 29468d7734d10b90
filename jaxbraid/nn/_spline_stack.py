"""A stack of equal NNX blocks whose parameters are splines in depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxbraid._layout import pad_to
from jaxbraid._options import check_integer
from jaxbraid.flax._block import stacked_blocks
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.nn._spline import check_degree, spline_layers


class SplineStack(ParallelStack):
    r"""SpliNet: a `ParallelStack` whose parameters are $\theta_n = \sum_k B_k(t_n)\, c_k$.

    What is trained are the coefficients $c_k$ of B-splines in depth: fewer than the layers'
    parameters, smooth in depth (as coarse levels need), and not tied to the number of layers.

    **Arguments**

    - `make_block`, `layers`, `rngs`: as in `jaxbraid.flax.nnx.ParallelStack`. The parameters of
        the module `blocks` are the coefficients: each `nnx.Param` has the leading axis K. All
        other variables (statistics of BatchNorm, PRNG keys and counters) have one entry a layer,
        as there; they are no splines.
    - `n_basis`: K, the number of coefficients.
    - `degree`: of the splines, less than K. Degree 0 with K = N is a plain stack.
    - `smooth_init`: all coefficients are equal at first, so that all layers are. Otherwise each
        is drawn as a block's parameters are; that makes layers between knots smaller.
    - `options`: the others of `ParallelStack`: `t_final`, `form`, `forward`, `adjoint`,
        `transfers`, `mesh`, `layer_axis`, `batch_axis`. On a mesh each device makes the parameters
        of its own layers from the coefficients, which all devices have.

    `stack.layers = M` makes the network M layers deep, with the same coefficients, unless blocks
    have variables of another kind than `nnx.Param`.

    **Raises**

    `ValueError` or `TypeError` naming the argument at fault.

    ??? cite "Reference"

        S. Günther, W. Pazner, D. Qi: Spline parameterization of neural network controls for deep
        learning. arXiv:2103.00301, 2021.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        layers: int,
        *,
        n_basis: int,
        degree: int,
        rngs: nnx.Rngs,
        smooth_init: bool = False,
        **options: Any,
    ):
        self.n_basis = check_integer("n_basis", n_basis, 1)
        self.degree = check_degree(degree, self.n_basis)
        super().__init__(make_block, layers, rngs=rngs, smooth_init=smooth_init, **options)

    def _make_blocks(
        self, make_block: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs
    ) -> nnx.Module:
        blocks = stacked_blocks(make_block, self.n_basis, rngs)
        _, others = nnx.state(blocks, nnx.Param, ...)
        if jax.tree.leaves(others):
            one_a_layer = stacked_blocks(make_block, layers, rngs)
            nnx.update(blocks, nnx.state(one_a_layer, nnx.Param, ...)[1])
        return blocks

    def _of_layers(self, state: nnx.State) -> nnx.State:
        params, others = nnx.split_state(state, nnx.Param, ...)
        for leaf in jax.tree.leaves(others):
            if leaf.shape[0] != self.layers:
                raise ValueError(
                    f"layers={self.layers}: blocks have variables that are no nnx.Param, one for "
                    f"each of {leaf.shape[0]} layers; their number cannot change."
                )
        o = self.options
        mesh = None if self.serial else o.mesh
        params = spline_layers(
            params,
            self.layers,
            self.degree,
            mesh=mesh,
            forward=o.forward,
            adjoint=o.adjoint,
            layer_axis=o.layer_axis,
        )
        slots = jax.tree.leaves(params)[0].shape[0]
        return nnx.merge_state(params, pad_to(slots, others))
