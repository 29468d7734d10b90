"""What the NNX and Linen stacks share: how a block's signature becomes that of the engine's `f`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

BY_NAME = ("t", "dt", "side")


def extras(call: Callable[..., Any]) -> tuple[str, ...]:
    """Which of `t`, `dt` and `side` a block's `__call__` takes by name."""
    return tuple(n for n in BY_NAME if n in inspect.signature(call).parameters)


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
