"""Tridiagonal systems: solutions and derivatives, held against those of dense matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbraid.problems import _elimination, _tridiagonal, tridiagonal_solve

GROUPED = 4 * _elimination.SWEPT_ROWS  # more rows than this are put in groups twice


def dense(lower, main, upper, n):
    """The matrix, of diagonals that are numbers or arrays."""
    lower, main, upper = (np.broadcast_to(np.asarray(d), (n,)) for d in (lower, main, upper))
    return np.diag(main) + np.diag(lower[1:], -1) + np.diag(upper[:-1], 1)


def some(rng, shape, dtype):
    """Numbers of the unit disk, or of [-1, 1]."""
    x = rng.uniform(-1, 1, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = (x + 1j * rng.uniform(-1, 1, shape)) / 2**0.5
    return jnp.asarray(x, dtype)


def system(n, arrays="", dtype=np.float64, seed=0):
    """A diagonally dominant one; the diagonals named in `arrays` (of "lmu") are arrays."""
    rng = np.random.default_rng(seed)
    off = [some(rng, (n,) if d in arrays else (), dtype) for d in "lu"]
    main = some(rng, (n,) if "m" in arrays else (), dtype)
    main = main + 2.5 * jnp.where(main.real < 0, -1, 1).astype(dtype)
    return off[0], main, off[1], some(rng, n, dtype)


def double(x):
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def error(x, lower, main, upper, b):
    """The largest error of x over the largest entry."""
    lower, main, upper, b = (double(v) for v in (lower, main, upper, b))
    truth = np.linalg.solve(dense(lower, main, upper, b.size), b)
    return np.max(np.abs(double(x) - truth)) / np.max(np.abs(truth))


solve = jax.jit(tridiagonal_solve)
ARRAYS = ["", "l", "mu", "lmu"]
# none to three rows follow the last group, in the given system and in that of the fourths
ROWS = [1, 2, 3, 4, 32, 33, 34, 35, 36, 70, 132, 137, 142, 147, 1025]


def test_numbers_on_the_diagonals_whatever_the_number_of_rows():
    for n in ROWS:
        given = system(n, seed=n)
        assert error(solve(*given), *given) < 1e-14, f"{n} rows"


@pytest.mark.parametrize("arrays", ARRAYS[1:])
def test_arrays_on_the_diagonals(arrays):
    for n in [1, 2, 17, 33, 34, 35, 36, 1025]:
        given = system(n, arrays, seed=n)
        assert error(solve(*given), *given) < 1e-14, f"{n} rows"


@pytest.mark.parametrize("arrays", ["", "lmu"])
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.float32, np.float64, np.complex64, np.complex128]
)
def test_precisions(dtype, arrays):
    """An error of a few units in the last place; the condition number is below 10."""
    given = system(GROUPED + 7, arrays, dtype)
    x = solve(*given)
    assert x.dtype == dtype and error(x, *given) < 16 * jnp.finfo(dtype).eps


def test_the_precision_is_what_all_promote_to():
    b = jnp.ones(3, np.float32)
    assert tridiagonal_solve(-1, 4, -1.0, b).dtype == np.float32
    assert tridiagonal_solve(-1, np.float64(4), -1, b).dtype == np.float64
    assert tridiagonal_solve(-1, 4, 1j, b).dtype == np.complex64
    whole = tridiagonal_solve([0, -1, -1], [4, 4, 4], -1, [1, 2, 3])
    assert whole.dtype == np.float64 and error(whole, -1, 4, -1, [1.0, 2.0, 3.0]) < 1e-15


LENGTHS = (1e-12, 1.0, 1e3, 1e12)
STEPS = [(s, stencil) for s in LENGTHS for stencil in ((-1, 2, -1), (-1, 1, 0), (0, 1, -1))]


@pytest.mark.parametrize(("length", "stencil"), [*STEPS, (1.0, (-0.5, 0, 0.5))])
def test_steps_short_and_long(length, stencil):
    """Implicit steps of diffusion and of transport, upwind and by central differences.

    The error is at most that of the condition, which is up to 1e5.
    """
    lower, main, upper = (length * d for d in stencil)
    main, n = 1 + main, 510
    b = np.random.default_rng(0).standard_normal(n)
    condition = np.linalg.cond(dense(lower, main, upper, n))
    assert error(solve(lower, main, upper, b), lower, main, upper, b) < 1e-15 * (10 + condition)


def test_what_stands_outside_of_the_matrix_does_not_count():
    for arrays in ("lmu", "u"):
        lower, main, upper, b = system(9, arrays)
        lower = lower.at[0].set(1e6) if lower.ndim else lower
        x = solve(lower, main, upper.at[-1].set(-1e6), b)
        assert error(x, lower, main, upper, b) < 1e-14


@pytest.mark.parametrize("along", [(None, None, None, 0), (0, None, 0, None), (0, 0, 0, 0)])
@pytest.mark.parametrize("arrays", ["", "lu"])
def test_vmap(arrays, along):
    """Over the right-hand side, over diagonals, over all."""
    systems = [system(43, arrays, seed=seed) for seed in range(3)]
    own = [
        jnp.stack(x) if axis == 0 else x[0]
        for x, axis in zip(zip(*systems, strict=True), along, strict=True)
    ]
    xs = jax.jit(jax.vmap(tridiagonal_solve, in_axes=along))(*own)
    for i, x in enumerate(xs):
        assert (
            error(x, *(v if axis is None else v[i] for v, axis in zip(own, along, strict=True)))
            < 1e-14
        )


@pytest.mark.parametrize("arrays", ["", "lu"])
def test_vmap_of_vmap(arrays):
    """Diagonals along the outer axis, right-hand sides along both; the axes exchanged behind."""
    *matrix, _ = zip(*(system(43, arrays, seed=seed) for seed in range(3)), strict=True)
    b = some(np.random.default_rng(0), (2, 3, 43), np.float64)
    inner = jax.vmap(tridiagonal_solve, in_axes=(None, None, None, 0))
    xs = jax.jit(jax.vmap(inner, in_axes=(0, 0, 0, 1)))(*map(jnp.stack, matrix), b)
    assert xs.shape == (3, 2, 43)
    for i in range(3):
        for j in range(2):
            assert error(xs[i, j], *(d[i] for d in matrix), b[j, i]) < 1e-14


def dense_solve(lower, main, upper, b):
    """By a dense matrix, of which JAX knows the derivatives."""
    n = b.shape[0]
    lower, main, upper = (jnp.broadcast_to(d, (n,)) for d in (lower, main, upper))
    return jnp.linalg.solve(jnp.diag(main) + jnp.diag(lower[1:], -1) + jnp.diag(upper[:-1], 1), b)


@pytest.mark.parametrize(
    ("arrays", "dtype"),
    [("", np.float64), ("l", np.float64), ("lmu", np.float64), ("", np.complex128)],
)
def test_derivatives_are_those_of_a_dense_solve(arrays, dtype):
    """By all arguments at once, forward and in reverse, there also batched."""
    given, along = (system(38, arrays, dtype, seed) for seed in (0, 1))
    weights = some(np.random.default_rng(2), 38, dtype)

    def derivatives(fn):
        def pull(b):
            return jax.vjp(fn, *given[:3], b)[1](weights)

        @jax.jit
        def run(given, along, weights):
            return jax.jvp(fn, given, along)[1], jax.vmap(pull)(jnp.stack([given[3], along[3]]))

        return jax.tree.leaves(run(given, along, weights))

    for ours, theirs in zip(derivatives(tridiagonal_solve), derivatives(dense_solve), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * np.max(np.abs(theirs)))


@pytest.mark.parametrize("arrays", ["", "lmu"])
def test_second_derivatives_are_those_of_a_dense_solve(arrays):
    def hessian(fn):
        return jax.jit(jax.hessian(lambda *given: jnp.sum(fn(*given) ** 3), (0, 1, 2, 3)))

    given = system(34, arrays)
    pairs = zip(
        *(jax.tree.leaves(hessian(fn)(*given)) for fn in (tridiagonal_solve, dense_solve)),
        strict=True,
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * np.max(np.abs(theirs)))


@pytest.mark.parametrize("arrays", ARRAYS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32, np.complex128])
def test_other_devices_use_the_solver_of_jax(arrays, dtype):
    """It is the same function of diagonals that are numbers or arrays."""
    *matrix, b = system(19, arrays, dtype)
    x = jax.jit(_tridiagonal._library)(tuple(matrix), b)
    assert x.dtype == dtype and error(x, *matrix, b) < 16 * jnp.finfo(dtype).eps


@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        ((1, 2, 1, jnp.ones((3, 2))), ValueError, r"b has shape \(3, 2\).*batch with jax.vmap"),
        ((1, 2, 1, 3.0), ValueError, r"b has shape \(\).*batch with jax.vmap"),
        ((1, 2, 1, jnp.ones(0)), ValueError, r"b has shape \(0,\).*at least one row"),
        ((jnp.ones(2), 2, 1, jnp.ones(3)), ValueError, r"lower has shape \(2,\): .*\(3,\)"),
        ((1, jnp.ones((3, 3)), 1, jnp.ones(3)), ValueError, r"main has shape \(3, 3\)"),
        ((1, 2, jnp.ones(4), jnp.ones(3)), ValueError, r"upper has shape \(4,\)"),
        ((1, 2, jnp.ones(3, bool), jnp.ones(3)), TypeError, "upper is of dtype bool"),
        ((1, None, 1, jnp.ones(3)), TypeError, "main=None: must be a number or an array"),
        (("1", 2, 1, jnp.ones(3)), TypeError, "lower='1': must be a number or an array"),
    ],
)
def test_errors(given, kind, match):
    with pytest.raises(kind, match=match):
        tridiagonal_solve(*given)
