r"""Tridiagonal systems, the work of implicit steps in one dimension, in a form that batches well.

LAPACK's solver takes one system after another. The two algorithms here are array operations over
all the systems that `jax.vmap` makes of one:

- *Sweeps* (Thomas' algorithm): Gaussian elimination from the first row to the last and back, as two
  loops over the rows.
- *Groups*: with diagonals that are numbers, rows are put in groups of four, whose first three
  unknowns follow from the fourths on either side. What they take of them is the same in all groups,
  and the fourths solve a system of the same kind, of a quarter of the size, which is solved alike
  until sweeps are as fast.

Neither exchanges rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

SWEPT_ROWS = 32  # systems of so many rows or fewer are swept, see benchmarks/tridiagonal.py

Diagonals = tuple[jax.Array, jax.Array, jax.Array]  # lower, main, upper: () or (rows,)


def tridiagonal_solve(
    lower: Any, main: Any, upper: Any, b: Inexact[Array, " rows"]
) -> Inexact[Array, " rows"]:
    r"""Solve $l_i x_{i-1} + d_i x_i + c_i x_{i+1} = b_i$ with $x_{-1} = x_n = 0$.

    For steps of your own that are implicit in one dimension of space. MGRIT batches them over the
    intervals (as `jax.vmap` does), and there this is several times as fast on a CPU as
    `jax.lax.linalg.tridiagonal_solve`, which it uses on other devices. It is fastest where the
    three diagonals are numbers. It can be differentiated, forward and in reverse, by the diagonals
    and by `b`.

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
    constant = all(d.ndim == 0 for d in matrix)
    here = _groups if constant else _sweeps
    return lax.platform_dependent(*matrix, b, cpu=_on(here), default=_on(_library))


def _on(solve: Callable[[Diagonals, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda lower, main, upper, b: solve((lower, main, upper), b)


def _library(matrix: Diagonals, b: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(b.dtype, jnp.float32)
    lower, main, upper = (jnp.broadcast_to(d, b.shape).astype(dtype) for d in matrix)
    lower, upper = lower.at[0].set(0), upper.at[-1].set(0)
    x = lax.linalg.tridiagonal_solve(lower, main, upper, b.astype(dtype)[:, None])
    return x[:, 0].astype(b.dtype)


# -- sweeps ---------------------------------------------------------------------------------------


def _sweeps(matrix: Diagonals, b: jax.Array) -> jax.Array:
    """Rows become x_i + c_i x_{i+1} = d_i one after another, and are solved backwards.

    Under `vmap` the batch comes last in memory, and a row of all systems is one vector operation.
    """
    numbers = [None if d.ndim else d for d in matrix]  # not written out for every row
    rows = [d if d.ndim else None for d in matrix]

    def down(above: tuple[jax.Array, jax.Array], row: Any) -> tuple[Any, Any]:
        (c, d), (given, b) = above, row
        lower, main, upper = (
            number if own is None else own for number, own in zip(numbers, given, strict=True)
        )
        scale = 1 / (main - lower * c)
        out = upper * scale, (b - lower * d) * scale
        return out, out

    def up(below: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        c, d = row
        x = d - c * below
        return x, x

    zero = jnp.zeros((), b.dtype)
    _, reduced = lax.scan(down, (zero, zero), (rows, b))
    return lax.scan(up, zero, reduced, reverse=True)[1]


# -- groups ---------------------------------------------------------------------------------------


def _groups(matrix: Diagonals, b: jax.Array) -> jax.Array:
    lower, main, upper = matrix
    return _grouped(lower / main, upper / main, None, b, 1 / main)


def _grouped(
    a: jax.Array, g: jax.Array, last: jax.Array | None, b: jax.Array, scale: jax.Array | float
) -> jax.Array:
    """Solve a x_{i-1} + x_i + g x_{i+1} = scale b_i; in the last row `last`, if given, times x_i.

    Of the `groups`, each three rows and a fourth, x_i = (G scale b)_i - a G_i0 left - g G_i2 fourth
    for the three, with `left` the fourth unknown of the group before. Up to three rows, the `rest`,
    come behind the last group.
    """
    if b.shape[0] <= SWEPT_ROWS:
        main = jnp.ones_like(b) if last is None else jnp.ones_like(b).at[-1].set(last)
        return _sweeps((a, main, g), scale * b)
    b = _written(b)
    groups, rest = divmod(b.shape[0], 4)
    inner = _inverse(a, g, None, 3)
    as_all = last is None and rest == 3  # the last group's rows are followed as those of others
    behind = inner if as_all else _inverse(a, g, last, rest)
    # the fourths' system, and the value by which its rows are divided
    pivot = 1 - a * g * (inner[2][2] + inner[0][0])
    ends = (1 if last is None else last) if rest == 0 else 1 - a * g * behind[0][0]
    last_pivot = None if as_all else (ends - a * g * inner[2][2]) / pivot
    y = _fourths(a, g, inner, behind, b) * (scale / pivot)
    between = -a * a * inner[2][0] / pivot, -g * g * inner[0][2] / pivot
    fourth = _grouped(*between, last_pivot, y, 1.0)
    left = _written(jnp.pad(fourth, (1, 0)))
    left, fourth = left[:-1], left[1:]

    zero, one = jnp.zeros_like(a), jnp.ones_like(a)
    columns = [[scale * inner[i][j] for i in range(3)] + [zero] for j in range(3)]
    columns.append([-a * inner[i][0] for i in range(3)] + [zero])
    columns.append([-g * inner[i][2] for i in range(3)] + [one])
    # one array of them, lest XLA compute them anew in every row
    table = jnp.stack([entry for column in columns for entry in column]).reshape(5, 4)
    given = b[: 4 * groups].reshape(groups, 4)
    x = sum((given[:, j, None] * table[j] for j in range(3)), left[:, None] * table[3])
    x = (x + fourth[:, None] * table[4]).reshape(-1)
    if rest == 0:
        return x
    tail = b[4 * groups :]
    ending = [
        scale * sum(behind[i][j] * tail[j] for j in range(rest)) - a * behind[i][0] * fourth[-1]
        for i in range(rest)
    ]
    return jnp.concatenate([x, jnp.stack(ending)])


def _fourths(a: Any, g: Any, inner: Any, behind: Any, b: jax.Array) -> jax.Array:
    """The fourths' right-hand side: b less what the rows on both sides take of theirs."""
    n = b.shape[0]
    groups, rest = divmod(n, 4)

    def every(start: int, count: int) -> jax.Array:
        return b[start : start + 4 * count - 3 : 4]

    before = sum(a * inner[2][j] * every(j, groups) for j in range(3))
    if behind is inner:
        return (
            every(3, groups)
            - before
            - sum(g * inner[0][j] * every(4 + j, groups) for j in range(3))
        )
    after = sum(g * inner[0][j] * every(4 + j, groups - 1) for j in range(3))
    ending = sum((g * behind[0][j] * b[4 * groups + j] for j in range(rest)), jnp.zeros_like(b[0]))
    return every(3, groups) - before - jnp.append(after, ending)


def _written(x: jax.Array) -> jax.Array:
    """`x`, by way of a loop that leaves it as it is.

    On a CPU XLA (which drops `lax.optimization_barrier` too early) would compute what `x` is made
    of anew for each of the uses of its numbers, of which there are up to seven.
    """

    def same(i: jax.Array, x: jax.Array) -> jax.Array:
        return x.at[i].set(jnp.where(i < 2, x[i], 0))

    return lax.fori_loop(0, 2, same, x)


def _inverse(a: jax.Array, g: jax.Array, last: jax.Array | None, rows: int) -> list[list[Any]]:
    """The inverse of the first rows of that matrix, with `last` as its last diagonal entry."""
    p, e = a * g, 1.0 if last is None else last
    if rows == 0:
        return []
    if rows == 1:
        return [[1 / e + 0 * a]]
    if rows == 2:
        d = 1 / (e - p)
        return [[e * d, -g * d], [-a * d, d]]
    d = 1 / (e * (1 - p) - p)
    return [
        [(e - p) * d, -g * e * d, g * g * d],
        [-a * e * d, e * d, -g * d],
        [a * a * d, -a * d, (1 - p) * d],
    ]
