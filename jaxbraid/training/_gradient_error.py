"""Estimates of the error of a gradient that a few MGRIT iterations give."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jaxbraid import _tree
from jaxbraid._iterate import squares
from jaxbraid._stats import AdjointStats
from jaxbraid.training._solvers import Solvers, set_solvers


class GradientError(NamedTuple):
    r"""An estimate of the error of a gradient.

    - `relative`: $\|\tilde g - g\| / \|g\|$.
    - `cosine`: of the angle between them; NaN if it is not known.
    - `norm`: $\|g\|$; NaN if it is not known.
    - `noise`: norm of the standard deviation of stochastic gradients, 0 without.
    """

    relative: Float[Array, ""] | float
    cosine: Float[Array, ""] | float = math.nan
    norm: Float[Array, ""] | float = math.nan
    noise: Float[Array, ""] | float = 0.0


@jax.jit
def gradient_error(
    gradient: PyTree, better: PyTree, noise: Float[Array, ""] | float = 0.0
) -> GradientError:
    """The error of a gradient, measured by a better one (serial, or of twice the iterations).

    Twice the iterations underestimate it where they converge slowly: by a factor rho of a doubling,
    the difference is between 1 - rho and 1 + rho times the error.

    **Arguments**

    - `gradient`, `better`: pytrees of the same structure; leaves that are not real or complex are
        left out.
    - `noise`: passed on; see `gradient_noise`.
    """
    a, b = (_wide(tree) for tree in (gradient, better))
    norm, own, error = (jnp.sqrt(squares(tree)) for tree in (b, a, _tree.sub(a, b)))
    product = sum((jnp.sum(jnp.real(jnp.conj(x) * y)) for x, y in zip(a, b, strict=True)), 0.0)
    return GradientError(error / norm, product / (norm * own), norm, jnp.asarray(noise))


@jax.jit
def gradient_noise(gradients: Sequence[PyTree]) -> Float[Array, ""]:
    """Norm of the standard deviation of gradients, one from each of some batches.

    **Raises**

    `ValueError` for fewer than two gradients.
    """
    if len(gradients) < 2:
        raise ValueError(f"gradients: there are {len(gradients)}, must be at least two.")
    stacked = [jnp.stack(leaves) for leaves in zip(*map(_wide, gradients), strict=True)]
    deviations = [a - a.mean(0) for a in stacked]
    return jnp.sqrt(squares(deviations) / (len(gradients) - 1))


def _wide(tree: PyTree) -> list[Any]:
    """Real and complex leaves, in at least single precision."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _tree.is_inexact(leaf)]
    return [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]


def adjoint_error(record: AdjointStats) -> GradientError:
    """The last residual of an adjoint solve, relative to the norm of all adjoint states.

    It comes with the gradient (see `AdjointStats`) and costs no other solve, but says less: nothing
    of the error of the states, which is what remains where the gradient vanishes. Choose `tol` by
    comparison with `gradient_error`.
    """
    last = record.residuals[jnp.maximum(record.iterations.astype(int), 1) - 1]
    return GradientError(last / jnp.linalg.norm(record.norms))


def model_gradient(
    model: nnx.Module, loss: Callable[..., Any], *batch: PyTree, wrt: Any = nnx.Param
) -> Callable[[Solvers], PyTree]:
    """`gradient(solvers)` of `loss(model, *batch)`, for `InexactnessControl.estimate`.

    It works on copies: statistics and PRNG counters of the model stay as they are, and all
    gradients are taken with the same dropout masks. `loss` must be the same function each time, or
    it is compiled anew.

    **Arguments**

    - `model`, `loss`, `batch`: as in `nnx.grad(loss)(model, *batch)`.
    - `wrt`: which variables.
    """
    graph, params, rest = nnx.split(model, wrt, ...)

    def gradient(solvers: Solvers) -> PyTree:
        copy = set_solvers(nnx.merge(graph, params, rest, copy=True), *solvers)
        return _gradient(nnx.graphdef(copy), loss, params, rest, batch)

    return gradient


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(graph: Any, loss: Callable[..., Any], params: Any, rest: Any, batch: Any) -> PyTree:
    def value(params: Any) -> Any:
        return loss(nnx.merge(graph, params, rest, copy=True), *batch)

    return jax.grad(value)(params)
