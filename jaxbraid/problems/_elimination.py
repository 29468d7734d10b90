r"""Tridiagonal systems as array operations, over all the systems that `jax.vmap` makes of one.

LAPACK's solver takes one system after another. Here the rows of a system are put in groups of four,
whose first three unknowns follow from the fourths on either side. The fourths solve a tridiagonal
system of a quarter of the size, which is solved alike until it is small. With diagonals that are
numbers all groups are the same (`solve_by_numbers`), otherwise each has its own coefficients
(`solve_by_arrays`).

Small systems are *swept* (Thomas' algorithm): Gaussian elimination from the first row to the last
and back, as two loops over the rows. Rows are never exchanged.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SWEPT_ROWS = 32  # systems of so many rows or fewer are swept, see benchmarks/tridiagonal.py

Diagonals = tuple[jax.Array, jax.Array, jax.Array]  # lower, main, upper: () or (rows,)


def _sweeps(matrix: Diagonals, b: jax.Array) -> jax.Array:
    """Rows become x_i + c_i x_{i+1} = d_i one after another, and are solved backwards.

    Under `vmap` the batch comes last in memory, and a row of all systems is one vector operation.
    """

    def down(above: tuple[jax.Array, jax.Array], row: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        (c, d), (lower, main, upper, b) = above, row
        scale = 1 / (main - lower * c)
        out = upper * scale, (b - lower * d) * scale
        return out, out

    def up(below: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        c, d = row
        x = d - c * below
        return x, x

    zero = jnp.zeros((), b.dtype)
    rows = (*(jnp.broadcast_to(d, b.shape) for d in matrix), b)
    _, reduced = lax.scan(down, (zero, zero), rows)
    return lax.scan(up, zero, reduced, reverse=True)[1]


# -- diagonals that are numbers -------------------------------------------------------------------


def solve_by_numbers(matrix: Diagonals, b: jax.Array) -> jax.Array:
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
    (b,) = _written([b])
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
    left, fourth = _sides(fourth)

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


# -- diagonals that are arrays --------------------------------------------------------------------


def solve_by_arrays(matrix: Diagonals, b: jax.Array) -> jax.Array:
    """Solve l x_{i-1} + d x_i + c x_{i+1} = b, with numbers of each row's own.

    In a group, with rows divided by d so that they read a_i x_{i-1} + x_i + g_i x_{i+1} = b_i, the
    three unknowns are G applied to (b_0 - a_0 left, b_1, b_2 - g_2 fourth).
    """
    n = b.shape[0]
    if n <= SWEPT_ROWS:
        return _sweeps(matrix, b)
    lower, main, upper = matrix
    scale = 1 / main
    rows = [jnp.broadcast_to(v * scale, (n,)) for v in (lower, upper, b)]
    # behind the last row stand those of unknowns that are zero
    rows = _written([jnp.pad(v, (0, -n % 4)) for v in rows])
    a, g, own = ([v[i::4] for i in range(4)] for v in rows)
    (d,) = _written([1 / (1 - a[1] * g[0] - a[2] * g[1])])
    first = (1 - a[2] * g[1]) * d, -g[0] * d, g[0] * g[1] * d  # rows of G
    third = a[1] * a[2] * d, -a[2] * d, (1 - a[1] * g[0]) * d

    def from_next(x: jax.Array) -> jax.Array:
        return jnp.append(x[1:], jnp.zeros_like(x[:1]))

    def times(row: tuple[jax.Array, ...], of: list[jax.Array]) -> jax.Array:
        return row[0] * of[0] + row[1] * of[1] + row[2] * of[2]

    between = (
        -a[3] * third[0] * a[0],
        1 - a[3] * third[2] * g[2] - g[3] * from_next(first[0] * a[0]),
        -g[3] * from_next(first[2] * g[2]),
    )
    y = own[3] - a[3] * times(third, own) - g[3] * from_next(times(first, own))
    left, fourth = _sides(solve_by_arrays(between, y))
    given = [own[0] - a[0] * left, own[1], own[2] - g[2] * fourth]
    second = (given[1] - a[1] * given[0] - g[1] * given[2]) * d
    x = jnp.stack([times(first, given), second, times(third, given), fourth], axis=1)
    return x.reshape(-1)[:n]


# -- both -----------------------------------------------------------------------------------------


def _sides(fourth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The fourth unknowns of the groups before, and of the groups themselves."""
    (x,) = _written([jnp.pad(fourth, (1, 0))])
    return x[:-1], x[1:]


def _written(xs: list[jax.Array]) -> list[jax.Array]:
    """`xs`, by way of a loop that leaves them as they are.

    On a CPU XLA would compute what they are made of anew for each of the uses of their numbers, of
    which there are up to seven, on every level: a step of the heat equation on 1023 points, of many
    systems, takes 2 us with this, 18 us without. `lax.optimization_barrier` is dropped too early
    (4 us), and so is a loop that runs once.
    """

    def same(i: jax.Array, xs: list[jax.Array]) -> list[jax.Array]:
        return [x.at[i].set(jnp.where(i < 2, x[i], 0)) for x in xs]

    return lax.fori_loop(0, 2, same, xs)
