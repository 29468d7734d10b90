r"""Convolutions whose derivatives are fast within XLA's loops on CPU.

MGRIT steps layers within `lax.scan` and `lax.while_loop`. There, on CPU, XLA computes the gradients
of most convolutions, and all of 3D convolutions, by a naive loop (JAX issue 12868). The convolution
here is the same sum, with its channels last,

$$ y_p = \sum_o x_{s p + d o}\, K_o $$

in the way that is fastest there. With few channels, and in 3D: one matrix product of shifted pieces
of $x$, side by side, with slices of $K$, and a sum of shifted pieces of that. The gradient with
respect to $x$ is such a sum over the incoming gradient, with the flipped kernel; that with respect
to $K$ is one product of pieces of both. With many channels: XLA's convolution, which is fast where
it finds its own layout. Both gradients are written as such forward convolutions, that with respect
to $K$ as one in which channels and batch change places.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

# From here on XLA's own convolution of images is faster: of 28 x 28 pixels and a batch of 50, a
# layer forward and its kernel's gradient take XLA 2.5 and 2.4 ms, products 1.5 and 1.5, with 8
# channels; but 4.7 and 5.9 against 7.3 and 6.0 with 16.
_XLA_CHANNELS = 16
# Numbers of a state above which it is stepped alone, as MGRIT does with its intervals.
_LARGE = 8192


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
    def conv(x: Array, kernel: Array) -> Array:
        if _suits_xla(window, x, kernel):
            return _by_xla(window, x, kernel, window.strides, window.padding)
        return _by_products(window, x, kernel)

    return _batchable(conv, x)(x, kernel)


def _conv_forward(window: _Window, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _conv(window, x, kernel), (x, kernel)


def _conv_backward(window: _Window, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    dx = _input_gradient(window, x, kernel.astype(dy.dtype), dy)
    dkernel: Any = _kernel_gradient(window, kernel.shape[:-2], x.astype(dy.dtype), dy)
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype)


_conv.defvjp(_conv_forward, _conv_backward)


def _input_gradient(window: _Window, x: Array, kernel: Array, dy: Array) -> Array:
    flipped = jnp.swapaxes(lax.rev(kernel, range(kernel.ndim - 2)), -1, -2)
    return _conv(window.transposed(x, kernel, dy), dy, flipped)  # type: ignore[return-value]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel_gradient(window: _Window, size: tuple[int, ...], x: Array, dy: Array) -> Array:
    kernel = jax.ShapeDtypeStruct((*size, x.shape[-1], dy.shape[-1]), x.dtype)

    def gradient(x: Array, dy: Array) -> Array:
        if _suits_xla(window, x, kernel) and max(window.strides) == 1:
            return _kernel_gradient_by_xla(window, x, size, dy)
        return _kernel_gradient_by_products(window, x, kernel, dy)

    return _batchable(gradient, x)(x, dy)


def _kernel_gradient_forward(window: _Window, size: tuple[int, ...], x: Array, dy: Array) -> Any:
    return _kernel_gradient(window, size, x, dy), (x, dy)


def _kernel_gradient_backward(
    window: _Window, size: tuple[int, ...], saved: tuple[Array, Array], dkernel: Array
) -> tuple[Array, Array]:
    """Of a function that is linear in `x` and in `dy`."""
    x, dy = saved
    kernel = dkernel.astype(dy.dtype)
    ddy: Any = _conv(window, x, kernel)
    return _input_gradient(window, x, kernel, dy).astype(x.dtype), ddy.astype(dy.dtype)


_kernel_gradient.defvjp(_kernel_gradient_forward, _kernel_gradient_backward)


def _batchable(f: Callable[..., Array], x: Array) -> Callable[..., Array]:
    """How `jax.vmap` does `f` over many kernels: with large `x` in turn, which stays in the cache.

    XLA would take the naive loop for a batch of its convolutions.
    """
    return jax.custom_batching.sequential_vmap(f) if x.size > _LARGE else f


def _suits_xla(window: _Window, x: Array, kernel: Any) -> bool:
    """Whether this is a convolution of images that XLA is fast at, within loops as well."""
    return (
        x.ndim <= 4
        and x.dtype == jnp.float32
        and x.size > _LARGE
        and min(kernel.shape[-2:]) >= _XLA_CHANNELS
        and math.prod(kernel.shape[:-2]) > 1
        and all(d == 1 for d in window.lhs_dilation + window.rhs_dilation)
    )


def _by_xla(window: _Window, x: Array, kernel: Array, strides: Any, padding: Any) -> Array:
    """A convolution in the layout that XLA has fast code for, without dilations."""
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        dimension_numbers=_channels_last(x.ndim),
        precision=window.precision,
        preferred_element_type=window.preferred,
    )


def _kernel_gradient_by_xla(window: _Window, x: Array, size: tuple[int, ...], dy: Array) -> Array:
    """A convolution of `x` with a kernel as large as `dy`; its channels are what was the batch."""
    space = tuple(range(1, x.ndim - 1))
    padding = [
        (low, k + dy.shape[a] - 1 - x.shape[a] - low)
        for a, (low, _), k in zip(space, window.padding, size, strict=True)
    ]
    x = jnp.transpose(x, (x.ndim - 1, *space, 0))
    dy = jnp.transpose(dy, (*space, 0, dy.ndim - 1))
    dkernel = _by_xla(window, x, dy, (1,) * len(space), padding)
    return jnp.moveaxis(dkernel, 0, -2)


def _by_products(window: _Window, x: Array, kernel: Array) -> Array:
    """Pieces along the last spatial axis, times all of the kernel, summed along the other axes."""
    space = range(1, x.ndim - 1)
    one_channel = kernel.shape[-2] == 1  # whose pieces are small: nothing is left to sum
    summed = 0 if one_channel else len(space) - 1
    pieces = _pieces(window, _pad(window, x, space), kernel.shape, space[summed:])
    matrix = jnp.moveaxis(kernel, range(summed), range(-1 - summed, -1))
    products = _product(window, pieces, matrix.reshape(pieces.shape[-1], -1))
    terms = []
    for i, offsets in enumerate(np.ndindex(*kernel.shape[:summed])):
        term = lax.slice_in_dim(products, i * kernel.shape[-1], (i + 1) * kernel.shape[-1], 1, -1)
        for axis, offset in enumerate(offsets, 1):
            term = _cut(window, term, kernel.shape, axis, offset)
        terms.append(term)
    return sum(terms[1:], terms[0]).astype(window.preferred or x.dtype)


def _kernel_gradient_by_products(window: _Window, x: Array, kernel: Any, dy: Array) -> Array:
    """One product: of pieces of `dy` along the first spatial axis, of `x` along the others."""
    space, size, back = range(1, x.ndim - 1), kernel.shape, window.transposed(x, kernel, dy)
    split = 1 if len(space) > 1 else 0
    of_dy = _pieces(back, _pad(back, dy, space[:split]), size, space[:split])
    of_x = _pieces(window, _pad(window, x, space[split:]), size, space[split:])
    a, b = (p.reshape(-1, p.shape[-1]) for p in (of_dy, of_x))
    product = _product(window, a.T, b)
    product = product.reshape(*size[:split], size[-1], *size[split:-1])
    return lax.rev(jnp.moveaxis(product, split, -1), range(split))


def _pad(window: _Window, x: Array, axes: Sequence[int]) -> Array:
    config = [(0, 0, 0)] * x.ndim
    for a in axes:
        config[a] = (*window.padding[a - 1], window.lhs_dilation[a - 1] - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _cut(window: _Window, x: Array, size: Sequence[int], axis: int, offset: int) -> Array:
    """What stands at one offset within the window, at all positions along an axis of padded `x`."""
    stride, dilation = window.strides[axis - 1], window.rhs_dilation[axis - 1]
    positions = (x.shape[axis] - dilation * (size[axis - 1] - 1) - 1) // stride
    start = offset * dilation
    return lax.slice_in_dim(x, start, start + positions * stride + 1, stride, axis)


def _pieces(window: _Window, x: Array, size: Sequence[int], axes: Sequence[int]) -> Array:
    """All offsets along some axes of padded `x`, side by side before its features."""
    for axis in reversed(axes):
        x = jnp.concatenate([_cut(window, x, size, axis, o) for o in range(size[axis - 1])], -1)
    return x


def _product(window: _Window, a: Array, b: Array) -> Array:
    """The matrix product `a b`, whose sums over half precision are taken in single precision."""
    kept = jnp.promote_types(window.preferred or a.dtype, jnp.float32)
    return jnp.matmul(a, b, precision=window.precision, preferred_element_type=kept)
