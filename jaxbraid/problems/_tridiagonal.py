"""Tridiagonal systems, the work of implicit steps in one dimension, in a form that batches well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from jaxbraid.problems._elimination import Diagonals, solve_by_arrays, solve_by_numbers


def tridiagonal_solve(
    lower: Any, main: Any, upper: Any, b: Inexact[Array, " rows"]
) -> Inexact[Array, " rows"]:
    r"""Solve $l_i x_{i-1} + d_i x_i + c_i x_{i+1} = b_i$ with $x_{-1} = x_n = 0$.

    For steps of your own that are implicit in one dimension of space. MGRIT batches them over the
    intervals (as `jax.vmap` does). On a CPU this then takes about a tenth of the time of
    `jax.lax.linalg.tridiagonal_solve` where the three diagonals are numbers, half of it where they
    are arrays, and less than it for one system, too; it compiles longer, being many operations
    instead of one. Other devices use that function. It can be differentiated, forward and in
    reverse, by the diagonals and by `b`.

    On a CPU rows are not exchanged, which is safe for matrices that are diagonally dominant or
    symmetric and positive definite, as those of diffusion are.

    **Arguments**

    - `lower`, `main`, `upper`: the diagonals $l$, $d$, $c$: each a number, the same in all rows, or
        an array of as many numbers as `b` has; `lower[i]`, `main[i]` and `upper[i]` stand in row
        `i`. `lower[0]` and `upper[-1]` lie outside of the matrix and may be anything finite.
    - `b`: the right-hand side, one system's; batch with `jax.vmap`.

    **Returns**

    $x$, of the shape of `b` and the precision that all four promote to.

    **Raises**

    `ValueError` for wrong shapes, `TypeError` for what are not numbers.

    ??? cite "Reference"

        G. H. Golub, C. F. Van Loan: Matrix Computations, 4th edition, 4.3 and 4.5.
    """
    given = {"lower": lower, "main": main, "upper": upper, "b": b}
    lower, main, upper, b = _checked(given)

    def transposed() -> Diagonals:
        return _shifted(upper, 1), main, _shifted(lower, -1)

    return lax.custom_linear_solve(
        lambda x: _apply((lower, main, upper), x),
        b,
        lambda _, b: _solve((lower, main, upper), b),
        lambda _, b: _solve(transposed(), b),
    )


def _checked(given: dict[str, Any]) -> list[jax.Array]:
    """The diagonals and the right-hand side as arrays of one precision."""
    arrays = {}
    for name, value in given.items():
        try:
            arrays[name] = jnp.asarray(value)
        except (TypeError, ValueError) as e:
            raise TypeError(f"{name}={value!r}: must be a number or an array of numbers.") from e
        if not jnp.issubdtype(arrays[name].dtype, jnp.number):
            raise TypeError(f"{name} is of dtype {arrays[name].dtype}: must be of numbers.")
    b = arrays["b"]
    if b.ndim != 1 or not b.size:
        raise ValueError(
            f"b has shape {b.shape}: must be (rows,) with at least one row; batch with jax.vmap."
        )
    for name, value in arrays.items():
        if value.shape not in ((), b.shape):
            raise ValueError(f"{name} has shape {value.shape}: must be () or {b.shape}, as b's is.")
    dtype = jnp.result_type(*arrays.values())
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.result_type(float)
    return [a.astype(dtype) for a in arrays.values()]


def _shifted(d: jax.Array, by: int) -> jax.Array:
    return jnp.roll(d, by) if d.ndim else d


def _apply(matrix: Diagonals, x: jax.Array) -> jax.Array:
    lower, main, upper = matrix
    padded = jnp.pad(x, 1)
    return lower * padded[:-2] + main * x + upper * padded[2:]


def _solve(matrix: Diagonals, b: jax.Array) -> jax.Array:
    here = solve_by_arrays if any(d.ndim for d in matrix) else solve_by_numbers
    return lax.platform_dependent(*matrix, b, cpu=_on(here), default=_on(_library))


def _on(solve: Callable[[Diagonals, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda lower, main, upper, b: solve((lower, main, upper), b)


def _library(matrix: Diagonals, b: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(b.dtype, jnp.float32)
    lower, main, upper = (jnp.broadcast_to(d, b.shape).astype(dtype) for d in matrix)
    lower, upper = lower.at[0].set(0), upper.at[-1].set(0)
    x = lax.linalg.tridiagonal_solve(lower, main, upper, b.astype(dtype)[:, None])
    return x[:, 0].astype(b.dtype)
