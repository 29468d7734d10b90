"""What stacks share: a block's signature as that of the engine's `f`, and blocks stacked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

BY_NAME = ("t", "dt", "side", "inputs")


def extras(call: Callable[..., Any]) -> tuple[str, ...]:
    """Which of `t`, `dt`, `side` and `inputs` a block's `__call__` takes by name.

    The state is none of them, whatever it is called (in Flax's own layers, `inputs`).
    """
    own = list(inspect.signature(call).parameters)[2:]  # after self and the state
    return tuple(n for n in BY_NAME if n in own)


def signature(names: tuple[str, ...]) -> inspect.Signature:
    """`(params, x, *, names...)`, as `parallel_ode_net` reads it."""
    P = inspect.Parameter
    return inspect.Signature(
        [P("params", P.POSITIONAL_ONLY), P("x", P.POSITIONAL_ONLY)]
        + [P(n, P.KEYWORD_ONLY) for n in names]
    )


def own_key(key: jax.Array, batch_axis: str | None) -> jax.Array:
    """A PRNG key for this part of the batch, so that no two parts share a dropout mask."""
    if batch_axis is None:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(batch_axis))


def check_shape(block: str, x: PyTree, value: PyTree) -> None:
    """A block keeps the structure and the shapes of its input: nothing may be broadcast."""
    if jax.tree.structure(x) != jax.tree.structure(value):
        raise TypeError(
            f"{block} returns the structure {jax.tree.structure(value)}: it must be that of its "
            f"input, {jax.tree.structure(x)}."
        )
    shapes, given = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (value, x))
    if shapes != given:
        raise ValueError(
            f"{block} returns the shapes {shapes}: they must be those of its input, {given}."
        )


def stacked_blocks(
    make_block: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs
) -> nnx.Module:
    """`count` blocks as one module, whose variables have that as their leading axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return make_block(rngs)

    return make(rngs)
