"""A backtracking line search that may reject its direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxbraid._options import check_integer


@dataclasses.dataclass(frozen=True)
class Backtracking:
    r"""Armijo's line search: the first of $1, s, s^2, \dots$ that lowers the objective enough.

    A step $\alpha$ along $e$ is enough if $f(\theta + \alpha e) \le f(\theta) + c\,\alpha \langle
    g, e\rangle$. If none of `max_tries` is, or $e$ is no descent direction, $\alpha = 0$.

    - `slope`: $c$, in (0, 1). `shrink`: $s$, in (0, 1). `max_tries`: at least 1.
    """

    slope: float = 1e-4
    shrink: float = 0.5
    max_tries: int = 6

    def __post_init__(self) -> None:
        for name in ("slope", "shrink"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be between 0 and 1.")
        check_integer("max_tries", self.max_tries, 1)

    def __call__(
        self, f: Callable[[PyTree], Array], params: PyTree, value: Array, slope: Array, e: PyTree
    ) -> tuple[Array, Array]:
        """The step length along `e`, and how often `f` was evaluated.

        `value` is `f(params)`, `slope` the inner product of its gradient with `e`.
        """

        def fails(alpha: Array, new: Array) -> Array:
            return ~(new <= value + self.slope * alpha * slope)  # also if not a number

        def again(state: tuple[Array, Array, Array]) -> Array:
            alpha, new, tries = state
            return fails(alpha, new) & (tries < self.max_tries) & (slope < 0)

        def shorter(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            alpha, _, tries = state
            alpha = jnp.where(tries == 0, 1.0, alpha * self.shrink).astype(value.dtype)
            return alpha, f(along(params, alpha, e)), tries + 1

        start = jnp.zeros_like(value), jnp.full_like(value, jnp.inf), jnp.zeros((), int)
        alpha, new, tries = jax.lax.while_loop(again, shorter, start)
        return jnp.where(fails(alpha, new), 0, alpha), tries


def along(params: PyTree, alpha: Array, e: PyTree) -> PyTree:
    """`params + alpha e`, exactly `params` where alpha is 0, whatever `e` is."""
    return jax.tree.map(
        lambda p, d: jnp.where(alpha == 0, p, p + (alpha * d).astype(p.dtype)), params, e
    )
