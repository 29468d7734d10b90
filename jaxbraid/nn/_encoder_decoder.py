r"""An encoder and a decoder as one stack, so that both are parallel over all their layers.

The state is a pair $(x, y)$. The first layers change $x$ only, the others $y$ only, while $x$ stays
what the encoder left: that is what they attend to. With the layer's own stream $h$, self-attention
$A$, cross-attention $C$ (decoder only), layer norms $L$ and perceptron $M$,

$$\dot h = d + M(L_3(h + d)), \qquad d = a + C(L_2(h + a), L_4(x)), \qquad a = A(L_1(h)).$$

All layers have the same variables, or they could not have a leading axis; a boolean says which kind
a layer is. The stream is selected before it is computed with, padded to the length of the longer:
batched over layers, a branch (`lax.cond`) becomes a selection after both sides have been computed,
which is an attention and a perceptron more in every layer. So an encoder layer costs one unused
cross-attention, and has parameters for it whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float

from jaxbraid._options import check_integer
from jaxbraid.nn._buffered import BufferedStack
from jaxbraid.nn._transformer import MLP, attend, earlier_tokens, real_tokens

Streams = tuple[Array, Array]


class LayerKind(nnx.Variable):
    """Whether a layer belongs to the decoder."""


class EncoderDecoderBlock(nnx.Module):
    """A layer of an `EncoderDecoderStack`, which says which kind it is (`decodes`).

    Arguments are those of `TransformerBlock`.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        activation: Callable[[Array], Array] = nnx.gelu,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}

        def norm() -> nnx.LayerNorm:
            return nnx.LayerNorm(features, rngs=rngs, **dtypes)

        self.norm, self.cross_norm, self.memory_norm, self.mlp_norm = (norm() for _ in range(4))
        self.attention = attend(features, heads, dropout, dtypes, rngs)
        self.cross = attend(features, heads, dropout, dtypes, rngs)
        self.mlp = MLP(features, hidden or 4 * features, activation, dropout, dtypes, rngs)
        self.decodes = LayerKind(jnp.asarray(False))

    def __call__(self, state: Streams, side: tuple[Array | None, Array | None]) -> Streams:
        """The derivative of the state, zero in the stream that is not this layer's."""
        (x, y), (x_mask, y_mask) = state, side
        decodes = self.decodes.get_value()
        length = max(x.shape[1], y.shape[1])
        h = jnp.where(decodes, _lengthen(y, length), _lengthen(x, length))
        real = jnp.where(decodes, _real(y, y_mask, length), _real(x, x_mask, length))
        seen = real_tokens(real) & (earlier_tokens(length) | ~decodes)

        a = self.attention(self.norm(h), mask=seen)
        c = self.cross(self.cross_norm(h + a), self.memory_norm(x), mask=real_tokens(x_mask))
        d = a + jnp.where(decodes, c, 0)
        d = d + self.mlp(self.mlp_norm(h + d))
        dx = jnp.where(decodes, 0, d[:, : x.shape[1]])
        return dx, jnp.where(decodes, d[:, : y.shape[1]], 0)


def _lengthen(x: Array, length: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


def _real(x: Array, mask: Array | None, length: int) -> Array:
    return _lengthen(jnp.ones(x.shape[:2], bool) if mask is None else mask, length)


class EncoderDecoderStack(nnx.Module):
    r"""Encoder and decoder layers in one stack; the decoder sees the final state of the encoder.

    With an encoder and a decoder in one stack, all their layers are computed in parallel, on one
    layer axis. Decoder layers attend causally to their own stream and to what the encoder left.

    **Arguments**

    - `make_block`: `make_block(rngs)` makes an `EncoderDecoderBlock`, perhaps in a wrapper.
    - `encoder_layers`, `decoder_layers`: their numbers. Coarse levels describe the two best where
        the coarsening factor divides `encoder_layers` less the first of `buffers`.
    - `rngs`, `options`: as in `BufferedStack`; $\Delta t = T / N$ with N all layers.

    **Raises**

    `ValueError` or `TypeError` naming the argument.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        encoder_layers: int,
        decoder_layers: int,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        check_integer("encoder_layers", encoder_layers, 1)
        check_integer("decoder_layers", decoder_layers, 1)
        layers = encoder_layers + decoder_layers
        self.stack = BufferedStack(make_block, layers, rngs=rngs, **options)
        start = 0
        for stack in self.stack.stacks():
            decodes = jnp.arange(start, start + stack.layers) >= encoder_layers
            kinds = nnx.state(stack, LayerKind)
            if not jax.tree.leaves(kinds):
                raise TypeError("make_block: must make an EncoderDecoderBlock.")
            nnx.update(stack, jax.tree.map(lambda _, d=decodes: d, kinds))
            start += stack.layers

    def __call__(
        self,
        x: Float[Array, "batch x_tokens features"],
        y: Float[Array, "batch y_tokens features"],
        *,
        x_mask: Bool[Array, "batch x_tokens"] | None = None,
        y_mask: Bool[Array, "batch y_tokens"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "batch x_tokens features"], Float[Array, "batch y_tokens features"]]:
        """Final states of encoder and decoder. Masks are true at real tokens, false at padding.

        `options` are those of calling a `BufferedStack` (`guess`, `adjoint_probe`).
        """
        return self.stack((x, y), side=(x_mask, y_mask), **options)
