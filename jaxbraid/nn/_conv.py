r"""Convolutions whose derivatives are fast within XLA's loops on CPU.

MGRIT steps layers within `lax.scan` and `lax.while_loop`. There, on CPU, XLA computes the gradients
of most convolutions, and all of 3D convolutions, by a naive loop (JAX issue 12868). The convolution
here is the same sum, with its channels last,

$$ y_p = \sum_o x_{s p + d o}\, K_o $$

written as matrix products: shifted pieces of $x$, side by side along the last spatial axis,
times slices of $K$. The gradient with respect to $x$ is such a sum with the flipped kernel, that
with respect to $K$ is the products of the same pieces with the incoming gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

# From here on XLA's own convolution of images is faster forward: in benchmarks/convolution.py, on
# 28 x 28 pixels, 4.5 ms against 5.3 by products with 16 channels, but 2.4 against 1.6 with 8.
# Smaller states may be batched over layers (`MGRIT.batch_intervals`), which it is slow at.
_XLA_CHANNELS = 16
_XLA_NUMBERS = 8192


@dataclasses.dataclass(frozen=True)
class _Window:
    """How a kernel moves over its input, and how exactly products are computed."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    precision: Any
    preferred: Any

    def transposed(self, x: Any, kernel: Any, y: Any) -> _Window:
        """The window of the gradient with respect to `x`, which moves over that of `y`."""
        padding = []
        for a, (low, _) in enumerate(self.padding):
            n, k, out = x.shape[a + 1], kernel.shape[a], y.shape[a + 1]
            reach = self.rhs_dilation[a] * (k - 1)
            before = reach - low
            size = self.lhs_dilation[a] * (n - 1) + 1 + reach
            padding.append((before, size - (self.strides[a] * (out - 1) + 1) - before))
        return dataclasses.replace(
            self, strides=self.lhs_dilation, lhs_dilation=self.strides, padding=tuple(padding)
        )


def conv_general_dilated(
    lhs: Float[Array, "batch *space features"],
    rhs: Float[Array, "*window features out"],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Float[Array, "batch *positions out"]:
    """`jax.lax.conv_general_dilated`, with gradients that are fast within loops on CPU.

    It takes the place of that function in Flax, `nnx.Conv(..., conv_general_dilated=...)` and
    `linen.Conv(conv_general_dilated=...)`; `Conv` is the former, ready made.

    Where JAX's default backend isn't a CPU, it is that function. On CPU too, for what isn't a
    floating point convolution with channels last and without groups. Otherwise results are equal
    to rounding, and only reverse-mode derivatives exist (of any order).

    **Arguments**

    As those of `jax.lax.conv_general_dilated`. Channels are last where `dimension_numbers` says
    so, as Flax does: `("NHWC", "HWIO", "NHWC")`.

    **Raises**

    What `jax.lax.conv_general_dilated` raises.
    """
    xla = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    if jax.default_backend() != "cpu":
        return xla(lhs, rhs)
    y = jax.eval_shape(xla, lhs, rhs)  # also checks the arguments
    space = range(1, lhs.ndim - 1)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    usual = (
        numbers == _channels_last(lhs.ndim)
        and feature_group_count == batch_group_count == 1
        and out_sharding is None
        and jnp.issubdtype(lhs.dtype, jnp.floating)
        and space
        and 0 not in (*lhs.shape, *rhs.shape, *y.shape)
    )
    if not usual:
        return xla(lhs, rhs)
    ones = (1,) * len(space)
    strides, inner, outer = (tuple(v or ones) for v in (window_strides, lhs_dilation, rhs_dilation))
    if isinstance(padding, str):
        reach = [d * (k - 1) + 1 for d, k in zip(outer, rhs.shape, strict=False)]
        padding = lax.padtype_to_pads([lhs.shape[a] for a in space], reach, strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    window = _Window(strides, pads, inner, outer, precision, preferred_element_type)
    return _conv(window, *_varying_alike(lhs, rhs))


class Conv(nnx.Conv):
    """`flax.nnx.Conv` whose gradients are fast within loops on CPU, such as those of MGRIT.

    Its arguments, variables and results are those of `flax.nnx.Conv`. On CPU its derivatives are
    reverse-mode ones only; see `conv_general_dilated`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("conv_general_dilated", conv_general_dilated)
        super().__init__(*args, **kwargs)


def _varying_alike(*arrays: Array) -> list[Array]:
    """Within `shard_map`, all arrays vary over the mesh axes over which one does.

    So does what is done to arrays by JAX itself; `custom_vjp` checks that a cotangent varies as its
    array does.
    """
    varying = [getattr(getattr(jax.typeof(a), "mat", None), "varying", set()) for a in arrays]
    missing = [tuple(set().union(*varying) - v) for v in varying]
    return [
        lax.pcast(a, axes, to="varying") if axes else a
        for a, axes in zip(arrays, missing, strict=True)
    ]


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    space = tuple(range(1, ndim - 1))
    lhs = (0, ndim - 1, *space)
    return lax.ConvDimensionNumbers(lhs, (ndim - 1, ndim - 2, *range(ndim - 2)), lhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(window: _Window, x: Array, kernel: Array) -> Array:
    if _suits_xla(window, x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            window.strides,
            window.padding,
            dimension_numbers=_channels_last(x.ndim),
            precision=window.precision,
            preferred_element_type=window.preferred,
        )
    matrices = kernel.reshape(*kernel.shape[: x.ndim - 3], -1, kernel.shape[-1])
    pieces = _pieces(window, x, kernel.shape[:-2])
    terms = [_product(window, piece, matrices[o]) for o, piece in pieces]
    out = window.preferred or x.dtype
    return sum(terms[1:], terms[0]).astype(out)


def _conv_forward(window: _Window, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _conv(window, x, kernel), (x, kernel)


def _conv_backward(window: _Window, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    flipped = jnp.swapaxes(lax.rev(kernel, range(kernel.ndim - 2)), -1, -2)
    dx: Any = _conv(window.transposed(x, kernel, dy), dy, flipped.astype(dy.dtype))
    pieces = _pieces(window, x.astype(dy.dtype), kernel.shape[:-2])
    dy = dy.reshape(-1, dy.shape[-1])
    parts = [_product(window, p.reshape(-1, p.shape[-1]).T, dy) for _, p in pieces]
    return dx.astype(x.dtype), jnp.stack(parts).reshape(kernel.shape).astype(kernel.dtype)


_conv.defvjp(_conv_forward, _conv_backward)


def _suits_xla(window: _Window, x: Array, kernel: Array) -> bool:
    """Whether this is a convolution of images that XLA is fast at, within loops as well."""
    return (
        x.ndim <= 4
        and x.dtype == jnp.float32
        and x.size > _XLA_NUMBERS
        and min(kernel.shape[-2:]) >= _XLA_CHANNELS
        and math.prod(kernel.shape[:-2]) > 1
        and all(d == 1 for d in window.lhs_dilation + window.rhs_dilation)
    )


def _pieces(
    window: _Window, x: Array, size: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Offsets within the window along all spatial axes but the last, and what of `x` stands there.

    The features of a piece are those of `x` at all offsets along the last spatial axis.
    """
    config = [
        (lo, hi, d - 1) for (lo, hi), d in zip(window.padding, window.lhs_dilation, strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])

    def cut(x: Array, axis: int, offset: int) -> Array:
        stride, start = window.strides[axis - 1], offset * window.rhs_dilation[axis - 1]
        reach = window.rhs_dilation[axis - 1] * (size[axis - 1] - 1)
        positions = (x.shape[axis] - reach - 1) // stride
        return lax.slice_in_dim(x, start, start + positions * stride + 1, stride, axis)

    last = x.ndim - 2
    x = jnp.concatenate([cut(x, last, o) for o in range(size[-1])], -1)
    for offsets in np.ndindex(*size[:-1]):
        piece = x
        for axis, offset in enumerate(offsets, 1):
            piece = cut(piece, axis, offset)
        yield offsets, piece


def _product(window: _Window, a: Array, b: Array) -> Array:
    """The matrix product `a b`, whose sums over half precision are taken in single precision."""
    kept = jnp.promote_types(window.preferred or a.dtype, jnp.float32)
    return jnp.matmul(a, b, precision=window.precision, preferred_element_type=kept)
