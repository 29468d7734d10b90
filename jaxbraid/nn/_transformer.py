r"""Transformer blocks as layers of a stack: the vector fields of pre-norm transformers.

With self-attention $A$, layer norms $L$ and a two-layer perceptron $M$, encoder and decoder-only:

$$\dot x = a + M(L_2(x + a)), \qquad a = A(L_1(x)).$$

A step of length one by forward Euler is the usual pre-norm layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float


def _weighted_values(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Flax's attention, but in double precision for double precision: `jax.nn`'s is in single."""
    if q.dtype != jnp.float64:
        return nnx.dot_product_attention(q, k, v, **options)
    return jnp.einsum("...hqk,...khd->...qhd", dot_product_attention_weights(q, k, **options), v)


def attend(features: int, heads: int, dropout: float, dtypes: Any, rngs: nnx.Rngs) -> Any:
    """Flax's attention; its dropout draws one mask for all samples, ours one for each."""
    return nnx.MultiHeadAttention(
        heads, features, decode=False, dropout_rate=dropout, deterministic=False,
        broadcast_dropout=False, attention_fn=_weighted_values, rngs=rngs, **dtypes,
    )  # fmt: skip


class MLP(nnx.Module):
    """Linear, activation, dropout, linear, dropout."""

    def __init__(
        self,
        features: int,
        hidden: int,
        activation: Callable[[Array], Array],
        dropout: float,
        dtypes: Any,
        rngs: nnx.Rngs,
    ):
        self.into = nnx.Linear(features, hidden, rngs=rngs, **dtypes)
        self.out = nnx.Linear(hidden, features, rngs=rngs, **dtypes)
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout > 0 else None)
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        return self.dropout(self.out(self.dropout(self.activation(self.into(x)))))


def real_tokens(mask: Array | None) -> Array | None:
    """A padding mask [batch, keys] as one of attention weights, [batch, 1, 1, keys]."""
    return None if mask is None else mask[:, None, None, :]


def earlier_tokens(length: int) -> Array:
    """The causal mask, [1, 1, length, length]: a token sees itself and those before it."""
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


class TransformerBlock(nnx.Module):
    r"""A pre-norm transformer layer as a vector field: an encoder's, or a decoder-only's.

    $\dot x = a + M(L_2(x + a))$ with $a = A(L_1(x))$; see `EncoderDecoderStack` for a decoder that
    attends to an encoder. Make a stack of it with `BufferedStack` or
    `jaxbraid.flax.nnx.ParallelStack`; with `t_final` = number of layers, a layer is the usual one.

    **Arguments**

    - `features`: features of a token, divisible by `heads`.
    - `heads`: attention heads.
    - `hidden`: width of the perceptron, by default four times `features`.
    - `causal`: a token attends to itself and to earlier ones only.
    - `dropout`: rate of dropout of attention weights and in the perceptron.
    - `activation`: that of the perceptron.
    - `dtype`, `param_dtype`: as in Flax's layers. Let `dtype` be that of the state.

    ??? cite "Reference"

        A. Vaswani and others: Attention is all you need. NeurIPS 2017. Pre-norm: R. Xiong and
        others: On layer normalization in the transformer architecture. ICML 2020.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        hidden: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        activation: Callable[[Array], Array] = nnx.gelu,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.norm = nnx.LayerNorm(features, rngs=rngs, **dtypes)
        self.attention = attend(features, heads, dropout, dtypes, rngs)
        self.mlp_norm = nnx.LayerNorm(features, rngs=rngs, **dtypes)
        self.mlp = MLP(features, hidden or 4 * features, activation, dropout, dtypes, rngs)
        self.causal = causal

    def __call__(
        self,
        x: Float[Array, "batch tokens features"],
        side: Bool[Array, "batch tokens"] | None = None,
    ) -> Float[Array, "batch tokens features"]:
        """The derivative of the state; `side` is true at real tokens, false at padding."""
        mask = nnx.combine_masks(
            earlier_tokens(x.shape[1]) if self.causal else None, real_tokens(side), dtype=bool
        )
        a = self.attention(self.norm(x), mask=mask)
        return a + self.mlp(self.mlp_norm(x + a))
