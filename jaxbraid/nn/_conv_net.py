r"""Convolutional layers of a stack, and the coarsening of their images on coarse levels.

The vector field of a layer is that of a pre-activated residual block,

$$ \dot x = K_2 * \sigma(n_2(K_1 * \sigma(n_1(x)))) $$

with norms $n$, an activation $\sigma$ and images whose channels are last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float

from jaxbraid._options import check_integer
from jaxbraid.nn._conv import Conv
from jaxbraid.transfers import Grid, Transfer, average_pooling, full_weighting, injection

Norm = Literal["group", "layer", "batch"]
Coarsening = Literal["full_weighting", "injection", "average_pooling"]


class ConvBlock(nnx.Module):
    r"""One or two convolutions of images in 1D, 2D or 3D, each after a norm and an activation.

    It is the vector field of a layer, for `ParallelStack`; kernels don't depend on an image's size,
    so coarse levels may use coarser images (`spatial_coarsening`).

    **Arguments**

    - `channels`: of the state, which has the shape `(batch, *space, channels)`.
    - `kernel_size`: of the convolutions, an odd or even number an axis of space: one for series or
        spectra, two for images, three for voxels.
    - `hidden`: channels between the convolutions; `channels` by default.
    - `convolutions`: 2, or 1: $\dot x = K * \sigma(n(x))$.
    - `norm`: `None`; `"group"` (8 groups, or as many as divide the channels and 8), `"layer"` (over
        channels), `"batch"` (over batch and space); or a function `norm(channels, rngs)` that makes
        a module. The batch's statistics are recorded from the finest level only.
    - `activation`: a function such as `nnx.relu`.
    - `dropout`: rate of a dropout before the last convolution. On coarser images the masks of a
        layer are other ones, so its iteration converges more slowly, to the same.
    - `padding`: as in `nnx.Conv`; it must keep the size of the images.
    - `batch_axis`: with a mesh that splits the batch, its axis, for BatchNorm's statistics to be
        those of the whole batch.
    - `dtype`, `param_dtype`: of the computation and of the parameters, as in Flax.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        K. He, X. Zhang, S. Ren, J. Sun: Identity mappings in deep residual networks. ECCV 2016.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Sequence[int] = (3, 3),
        *,
        hidden: int | None = None,
        convolutions: int = 2,
        norm: Norm | Callable[[int, nnx.Rngs], nnx.Module] | None = None,
        activation: Callable[[Array], Array] = nnx.relu,
        dropout: float = 0.0,
        padding: Any = "SAME",
        batch_axis: str | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        channels = check_integer("channels", channels, 1)
        hidden = channels if hidden is None else check_integer("hidden", hidden, 1)
        if not isinstance(kernel_size, Sequence) or not kernel_size:
            raise TypeError(f"kernel_size={kernel_size!r}: must be a tuple, one size an axis.")
        for size in kernel_size:
            check_integer("kernel_size", size, 1)
        if convolutions not in (1, 2):
            raise ValueError(f"convolutions={convolutions!r}: must be 1 or 2.")
        if not (norm is None or norm in ("group", "layer", "batch") or callable(norm)):
            raise ValueError(
                f"norm={norm!r}: must be None, 'group', 'layer', 'batch' or a function "
                "(channels, rngs) -> module."
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout!r}: must lie in [0, 1).")
        self.activation = activation
        widths = [channels] + [hidden] * (convolutions - 1) + [channels]
        types = {"dtype": dtype, "param_dtype": param_dtype}
        self.norms = nnx.List([_norm(norm, c, batch_axis, types, rngs) for c in widths[:-1]])
        self.convs = nnx.List(
            Conv(a, b, tuple(kernel_size), padding=padding, rngs=rngs, **types)
            for a, b in itertools.pairwise(widths)
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout > 0 else None)

    def __call__(
        self, x: Float[Array, "batch *space channels"]
    ) -> Float[Array, "batch *space channels"]:
        """The derivative of the state x."""
        for i, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True), 1):
            x = self.activation(x if norm is None else norm(x))
            x = conv(self.dropout(x) if i == len(self.convs) else x)
        return x


def _norm(norm: Any, channels: int, batch_axis: str | None, types: Any, rngs: nnx.Rngs) -> Any:
    if norm is None:
        return None
    if norm == "group":
        return nnx.GroupNorm(channels, num_groups=math.gcd(channels, 8), rngs=rngs, **types)
    if norm == "layer":
        return nnx.LayerNorm(channels, rngs=rngs, **types)
    if norm == "batch":
        return nnx.BatchNorm(channels, axis_name=batch_axis, rngs=rngs, **types)
    return norm(channels, rngs)


def spatial_coarsening(
    kind: Coarsening,
    dims: int,
    levels: Sequence[bool],
    *,
    grid: Grid = "vertex",
    prolongation: Literal["linear", "constant"] = "linear",
) -> tuple[Transfer | None, ...]:
    """The `transfers` of a stack whose coarse levels use coarser images, channels last.

    Each axis of space is halved at the levels chosen; the layers' kernels are used as they are.

    What belongs to samples and has a spatial shape itself: `side` is handed to all levels as it is,
    in the size of the finest images. A boolean or integer leaf of the state, such as a mask, is
    coarsened with the other leaves (by injection).

    **Arguments**

    - `kind`: `"average_pooling"` (images of any size), `"full_weighting"` or `"injection"`.
    - `dims`: axes of space, those before the last axis.
    - `levels`: for each level but the coarsest, finest first, whether the next one has coarser
        images: `(False, True)` coarsens from the second level to the third of three.
    - `grid`: for the latter two, see `jaxbraid.transfers`: `"vertex"` (odd sizes, zero outside, as
        with zero padding), `"nodes"` (odd sizes) or `"periodic"` (even sizes, circular padding).
    - `prolongation`: `"linear"` interpolation or `"constant"`; full weighting has the former only.

    With F-relaxation only (`cf_relax=0`), iterations don't end with the exact solution after N/m of
    them as they do otherwise: what is lost in coarse images is not made up for.

    **Returns**

    A `Transfer` or `None` for each level but the coarsest.

    **Raises**

    `ValueError` or `TypeError` naming the argument; when applied, for a size that can't be halved.
    """
    dims = check_integer("dims", dims, 1)
    axes = tuple(range(-dims - 1, -1))
    if kind == "average_pooling":
        transfer = average_pooling(axes, 2, prolongation)
    elif kind == "injection":
        transfer = injection(axes, 2, grid, prolongation)
    elif kind == "full_weighting":
        if prolongation != "linear":
            raise ValueError(f"prolongation={prolongation!r}: full weighting has 'linear' only.")
        transfer = full_weighting(axes, grid)
    else:
        raise ValueError(
            f"kind={kind!r}: must be 'average_pooling', 'full_weighting' or 'injection'."
        )
    if isinstance(levels, str) or not all(isinstance(level, bool) for level in levels):
        raise TypeError(f"levels={levels!r}: must be a sequence of True and False, one a level.")
    return tuple(transfer if level else None for level in levels)
