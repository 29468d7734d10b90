"""Restriction and prolongation are the operators of the textbooks, on every shape, dtype and grid.

The truths are dense matrices that NumPy fills entry by entry from the definitions of the grids.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbraid import transfers
from jaxbraid.transfers import Transfer, average_pooling, full_weighting, injection, transpose

# A few operations on numbers of size one, in float64.
ROUNDING = dict(rtol=1e-14, atol=1e-14)

GRIDS = ("vertex", "nodes", "periodic")


def coarse_points(grid, n, f):
    """Fine indices of the coarse points."""
    return np.arange(f - 1, n, f) if grid == "vertex" else np.arange(0, n, f)


def injection_matrix(grid, n, f):
    points = coarse_points(grid, n, f)
    r = np.zeros((len(points), n))
    r[np.arange(len(points)), points] = 1
    return r


def weighting_matrix(grid, n):
    r = np.zeros((len(coarse_points(grid, n, 2)), n))
    for j, i in enumerate(coarse_points(grid, n, 2)):
        if grid == "nodes" and i in (0, n - 1):
            r[j, i] = 1
            continue
        for offset, weight in ((-1, 0.25), (0, 0.5), (1, 0.25)):
            r[j, (i + offset) % n] += weight
    return r


def linear_matrix(grid, n, f):
    """Hat functions of half-width f about the coarse points."""
    p = np.zeros((n, len(coarse_points(grid, n, f))))
    for j, centre in enumerate(coarse_points(grid, n, f)):
        for i in range(centre - f + 1, centre + f):
            if grid == "periodic":
                p[i % n, j] += 1 - abs(i - centre) / f
            elif 0 <= i < n:
                p[i, j] = 1 - abs(i - centre) / f
    return p


def nearest_matrix(grid, n, f):
    points = coarse_points(grid, n, f)
    p = np.zeros((n, len(points)))
    for i in range(n):
        distance = [abs(i - c) for c in points]
        if grid == "periodic":
            distance.append(n - i)  # to the first point of the next period
        p[i, int(np.argmin(distance)) % len(points)] = 1
    return p


def pooling_matrix(n, f):
    n_c = math.ceil(n / f)
    r = np.zeros((n_c, n))
    for j in range(n_c):
        cells = range(f * j, min(f * (j + 1), n))
        r[j, list(cells)] = 1 / len(cells)
    return r


def pooled_linear_matrix(n, f):
    """np.interp between the centres of mass of the coarse cells, of each unit vector."""
    centres = pooling_matrix(n, f) @ np.arange(n)
    return np.stack([np.interp(np.arange(n), centres, e) for e in np.eye(len(centres))], axis=1)


def sizes(grid, f):
    """The smallest size that can be coarsened, and a larger one."""
    least = {"vertex": 2 * f - 1, "nodes": f + 1, "periodic": f}[grid]
    return least, least + 3 * f


def cases():
    """Transfers on a line of n points with their matrices."""
    for grid, f in itertools.product(GRIDS, (2, 3, 4)):
        for n in sizes(grid, f):
            r, linear = injection_matrix(grid, n, f), linear_matrix(grid, n, f)
            yield f"injection-{grid}-{f}-{n}", injection(-1, f, grid), n, r, linear
            nearest = injection(factor=f, grid=grid, prolongation="constant")
            p = nearest_matrix(grid, n, f)
            yield f"injection-constant-{grid}-{f}-{n}", nearest, n, r, p
    for grid in GRIDS:
        for n in sizes(grid, 2):
            r, p = weighting_matrix(grid, n), linear_matrix(grid, n, 2)
            yield f"weighting-{grid}-{n}", full_weighting(grid=grid), n, r, p
    for f, n in itertools.product((2, 3), (2, 3, 7, 10)):
        r = pooling_matrix(n, f)
        p = (r > 0).T.astype(float)
        yield f"pooling-{f}-{n}", average_pooling(factor=f), n, r, p
        linear = average_pooling(factor=f, prolongation="linear")
        yield f"pooling-linear-{f}-{n}", linear, n, r, pooled_linear_matrix(n, f)


CASES = [pytest.param(*rest, id=name) for name, *rest in cases()]
# One of each kind, with sizes that make three axes affordable.
KINDS = [
    pytest.param(partial(injection, grid="vertex"), 7, id="injection-vertex"),
    pytest.param(partial(injection, grid="nodes", prolongation="constant"), 5, id="nearest-nodes"),
    pytest.param(partial(full_weighting, grid="vertex"), 7, id="weighting-vertex"),
    pytest.param(partial(full_weighting, grid="nodes"), 5, id="weighting-nodes"),
    pytest.param(partial(full_weighting, grid="periodic"), 6, id="weighting-periodic"),
    pytest.param(average_pooling, 6, id="pooling"),
    pytest.param(average_pooling, 7, id="pooling-odd"),
    pytest.param(partial(average_pooling, prolongation="linear"), 7, id="pooling-linear"),
]


@functools.cache
def matrices(transfer, n):
    """R and P on a line of n points, then those of the adjoint, P^T and R^T."""
    n_c = jax.eval_shape(transfer.restrict, shape(n)).size

    @jax.jit
    def columns():
        out = []
        for t in (transfer, transpose(transfer, shape(n))):
            out.append(jax.vmap(t.restrict, out_axes=1)(jnp.eye(n)))
            out.append(jax.vmap(lambda v: t.prolong(v, shape(n)), out_axes=1)(jnp.eye(n_c)))  # noqa: B023
        return out

    return jax.device_get(columns())


def shape(*dims, dtype=jnp.float64):
    return jax.ShapeDtypeStruct(dims, dtype)


def random(seed, *dims, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(dims)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal(dims)
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize(("transfer", "n", "r", "p"), CASES)
def test_operators_and_transposes_are_the_matrices_of_the_definitions(transfer, n, r, p):
    for got, want in zip(matrices(transfer, n), (r, p, p.T, r.T), strict=True):
        np.testing.assert_allclose(got, want, **ROUNDING)


@pytest.mark.parametrize("grid", ["vertex", "periodic"])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_full_weighting_is_the_scaled_transpose_of_linear_interpolation(grid, d):
    n = 7 if grid == "vertex" else 8
    transfer = full_weighting(axes=tuple(range(d)), grid=grid)
    u = random(0, *[n] * d)
    adjoint = transpose(transfer, u)
    got, want = jax.jit(lambda u: (transfer.restrict(u), adjoint.restrict(u) / 2**d))(u)
    np.testing.assert_allclose(got, want, **ROUNDING)


@pytest.mark.parametrize("factor", [2, 3])
def test_pooling_is_the_scaled_transpose_of_its_prolongation_where_sizes_divide(factor):
    transfer = average_pooling(axes=(0, 1), factor=factor)
    u = random(0, 2 * factor, 3 * factor)
    adjoint = transpose(transfer, u)
    got, want = jax.jit(lambda u: (transfer.restrict(u), adjoint.restrict(u) / factor**2))(u)
    np.testing.assert_allclose(got, want, **ROUNDING)


@pytest.mark.parametrize("n", [6, 7])
def test_pooling_undoes_its_constant_prolongation(n):
    transfer = average_pooling(axes=(0, 1))
    v = random(0, *transfer.restrict(jnp.zeros((n, n))).shape)
    np.testing.assert_array_equal(transfer.restrict(transfer.prolong(v, shape(n, n))), v)


@pytest.mark.parametrize(("transfer", "n", "r", "p"), CASES)
def test_constants_are_kept_except_beside_zero_ends(transfer, n, r, p):
    got_r, got_p, *_ = matrices(transfer, n)
    np.testing.assert_allclose(got_r.sum(1), 1, rtol=1e-15)
    sums = got_p.sum(1)
    line = transfer.prolong.line
    if line.grid == "vertex" and transfer.prolong.kind == "linear":
        ramp = np.arange(1, line.factor) / line.factor
        np.testing.assert_allclose(sums[: line.factor - 1], ramp, rtol=1e-15)
        np.testing.assert_allclose(sums[n - line.factor + 1 :], ramp[::-1], rtol=1e-15)
        sums = sums[line.factor - 1 : n - line.factor + 1]
    np.testing.assert_allclose(sums, 1, rtol=1e-15)


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("grid", GRIDS)
def test_linear_interpolation_reproduces_linear_functions(grid, factor):
    n = sizes(grid, factor)[-1]
    x = 2 * np.arange(n) - 5.0
    v = jnp.asarray(x[coarse_points(grid, n, factor)])
    u = injection(factor=factor, grid=grid).prolong(v, shape(n))
    # A line isn't periodic, nor zero at both ends: between the outermost coarse points it is kept.
    inside = slice(*coarse_points(grid, n, factor)[[0, -1]] + [0, 1])
    np.testing.assert_allclose(u[inside], x[inside], **ROUNDING)


@pytest.mark.parametrize("n", [6, 7, 8, 28])
@pytest.mark.parametrize("factor", [2, 3])
def test_linear_prolongation_of_means_reproduces_linear_functions(n, factor):
    transfer = average_pooling(factor=factor, prolongation="linear")
    x = 2 * np.arange(n) - 5.0
    v = transfer.restrict(jnp.asarray(x))
    u = np.asarray(transfer.prolong(v, shape(n)))
    inside = (x >= float(v[0])) & (x <= float(v[-1]))
    assert inside.sum() >= n - factor
    np.testing.assert_allclose(u[inside], x[inside], **ROUNDING)


def test_bilinear_interpolation_on_a_zero_boundary_by_hand():
    u = full_weighting(axes=(0, 1)).prolong(jnp.array([[16.0]]), shape(3, 3))
    np.testing.assert_array_equal(u, [[4, 8, 4], [8, 16, 8], [4, 8, 4]])
    v = full_weighting(axes=(0, 1)).restrict(jnp.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 10]]))
    np.testing.assert_array_equal(v, [[(1 + 3 + 7 + 10 + 2 * (2 + 4 + 6 + 8) + 4 * 5) / 16]])


LAYOUTS = [
    pytest.param((-2,), (3, None, 2), id="1d-batch-channels"),
    pytest.param((-3, -2), (2, None, None, 3), id="2d-batch-channels"),
    pytest.param((1, 3), (2, None, 3, None), id="2d-apart"),
    pytest.param((-1, -2, -3), (2, None, None, None), id="3d-batch"),
    pytest.param((0, 1, 2, 3), (None, None, None, None), id="4d"),
]


@pytest.mark.parametrize(("axes", "dims"), LAYOUTS)
@pytest.mark.parametrize(("build", "n"), KINDS)
def test_several_axes_are_the_tensor_product_of_one(build, n, axes, dims):
    r, p, *_ = matrices(build(axes=0), n)
    transfer = build(axes=axes)
    fine = tuple(d or n for d in dims)
    u = random(1, *fine)

    def along(matrix, x):
        for axis in axes:
            x = np.moveaxis(np.tensordot(matrix, np.moveaxis(x, axis, 0), 1), 0, axis)
        return x

    v, w = jax.jit(lambda u: (v := transfer.restrict(u), transfer.prolong(v, u)))(u)
    assert v.shape == tuple(d or len(r) for d in dims)
    np.testing.assert_allclose(v, along(r, np.asarray(u)), **ROUNDING)
    np.testing.assert_allclose(w, along(p, np.asarray(v)), **ROUNDING)


def test_one_transfer_serves_leaves_and_levels_of_different_sizes():
    transfer = average_pooling(axes=(-2, -1))
    u = {"image": random(0, 2, 28, 28), "rest": [random(1, 7, 5), random(2, 3, 1, 2, 4, 4)]}

    @jax.jit
    def down_and_up(u):
        v = transfer.restrict(u)
        w = transfer.restrict(v)
        # Arrays will do in place of their shapes.
        return v, w, transfer.prolong(w, v), transfer.prolong(w, jax.eval_shape(lambda: v))

    v, w, up, up_by_shapes = down_and_up(u)
    assert [x.shape for x in jax.tree.leaves(v)] == [(2, 14, 14), (4, 3), (3, 1, 2, 2, 2)]
    assert [x.shape for x in jax.tree.leaves(w)] == [(2, 7, 7), (2, 2), (3, 1, 2, 1, 1)]
    np.testing.assert_array_equal(up["rest"][0], np.kron(w["rest"][0], np.ones((2, 2)))[:, :3])
    jax.tree.map(np.testing.assert_array_equal, up, up_by_shapes)


DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@pytest.mark.parametrize(("build", "n"), KINDS)
def test_dtypes_are_kept_and_results_rounded_once(build, n):
    transfer = build(axes=(0, 1))
    u = {d: random(0, n, n, dtype=np.complex128 if "complex" in d else np.float64) for d in DTYPES}
    u = {d: x.astype(d) for d, x in u.items()}
    adjoint = transpose(transfer, u)

    @jax.jit
    def run(u, exact_u):
        v = transfer.restrict(u)
        rounded = v, transfer.prolong(v, u)
        wide = {d: x.astype(exact_u[d].dtype) for d, x in v.items()}
        exact = transfer.restrict(exact_u), transfer.prolong(wide, exact_u)
        return rounded, exact, (adjoint.restrict(u), adjoint.prolong(v, u))

    wide = {d: x.astype(np.complex128 if "complex" in d else np.float64) for d, x in u.items()}
    rounded, exact, adjoints = run(u, wide)
    for got, want in zip(rounded, exact, strict=True):
        for d in DTYPES:
            assert got[d].dtype == d
            # Sums of numbers of size one lose little more than the rounding of the result.
            tol = 2 * float(jnp.finfo(d).eps)
            np.testing.assert_allclose(got[d].astype(want[d].dtype), want[d], rtol=tol, atol=tol)
    for got in adjoints:
        assert {d: str(x.dtype) for d, x in got.items()} == {d: d for d in DTYPES}


def test_half_precision_means_do_not_overflow():
    u = jnp.full((4, 4), 60000.0, jnp.float16)
    np.testing.assert_array_equal(average_pooling(axes=(0, 1)).restrict(u), u[:2, :2])
    np.testing.assert_array_equal(full_weighting(grid="nodes").restrict(u[:, :3]), u[:, :2])


@pytest.mark.parametrize("grid", [*GRIDS, "cell"])
def test_masks_are_injected_and_counters_and_keys_pass(grid):
    transfer = average_pooling(factor=3) if grid == "cell" else injection(factor=3, grid=grid)
    n = {"vertex": 8, "nodes": 7, "periodic": 9, "cell": 8}[grid]
    mask = np.arange(n) % 4 == 2
    u = {
        "u": random(0, n),
        "mask": jnp.asarray(mask),
        "steps": jnp.asarray(5, jnp.int32),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), n),
    }
    points = coarse_points(grid, n, 3)
    v, w = jax.jit(lambda u: (v := transfer.restrict(u), transfer.prolong(v, u)))(u)
    np.testing.assert_array_equal(v["mask"], mask[points])
    assert v["mask"].dtype == bool and v["steps"] == 5 and v["steps"].dtype == jnp.int32
    assert bool(v["key"] == u["key"]) and bool(jnp.all(v["keys"] == u["keys"][points]))
    owner = np.arange(n) // 3 if grid == "cell" else nearest_matrix(grid, n, 3).argmax(1)
    np.testing.assert_array_equal(w["mask"], mask[points][owner])
    assert bool(w["key"] == u["key"]) and bool(jnp.all(w["keys"] == v["keys"][owner]))


@pytest.mark.parametrize(("build", "n"), KINDS)
def test_adjointness_of_inner_products(build, n):
    transfer = build(axes=(-2, -3))
    u = {"a": random(0, 2, n, n, 3), "b": random(1, n, n, 1, dtype=np.complex128)}
    adjoint = transpose(transfer, u)
    coarse = jax.eval_shape(transfer.restrict, u)
    v = jax.tree.map(lambda x: random(2, *x.shape, dtype=x.dtype), coarse)

    def dot(x, y):  # the plain transpose belongs to the product without conjugation
        return sum(jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True))

    @jax.jit
    def products(u, v):
        # The transpose of the transpose is the transfer again.
        again = transpose(adjoint, u)
        return (
            [dot(t.restrict(u), v) for t in (transfer, again)] + [dot(u, adjoint.prolong(v, u))],
            [dot(t.prolong(v, u), u) for t in (transfer, again)] + [dot(v, adjoint.restrict(u))],
        )

    for first, *others in products(u, v):
        np.testing.assert_allclose(others, first, rtol=1e-12)


def test_transpose_is_the_vjp_for_functions_of_a_user():
    def restrict(u):
        return {"low": jnp.fft.rfft(u["x"])[:4], "mean": jnp.mean(u["x"])}

    def prolong(v):
        return {"x": jnp.fft.irfft(v["low"], 16) + v["mean"]}

    u = {"x": random(0, 16)}
    v = {"low": random(1, 4, dtype=np.complex128), "mean": random(2)}
    adjoint = transpose(Transfer(restrict, prolong), u)

    @jax.jit
    def both(u, v):
        got = adjoint.prolong(v, u), adjoint.restrict(u)
        return got, (jax.vjp(restrict, u)[1](v)[0], jax.vjp(prolong, v)[1](u)[0])

    jax.tree.map(partial(np.testing.assert_allclose, **ROUNDING), *both(u, v))


@pytest.mark.parametrize(("build", "n"), KINDS)
def test_jacobians_inside_jit_and_vmap(build, n):
    """Forward and reverse mode of u -> P sin(R u), a batch at once: P diag(cos(R u)) R."""
    transfer = build()
    r, p, *_ = matrices(transfer, n)
    us = random(0, 2, n)

    def fn(u):
        return transfer.prolong(jnp.sin(transfer.restrict(u)), u)

    for jacobian in jax.jit(lambda us: [jax.vmap(j(fn))(us) for j in (jax.jacfwd, jax.jacrev)])(us):
        for got, u in zip(jacobian, us, strict=True):
            np.testing.assert_allclose(got, p @ np.diag(np.cos(r @ u)) @ r, **ROUNDING)


BUILDS = [
    lambda: injection(),
    lambda: injection(-2),
    lambda: injection((-2, -1)),
    lambda: injection(factor=3),
    lambda: injection(grid="nodes"),
    lambda: injection(prolongation="constant"),
    lambda: full_weighting(),
    lambda: full_weighting(grid="periodic"),
    lambda: average_pooling(),
    lambda: average_pooling(prolongation="linear"),
    lambda: transpose(injection(), {"a": shape(7)}),
    lambda: transpose(injection(), {"b": shape(7)}),
    lambda: transpose(injection(), {"a": shape(9)}),
    lambda: Transfer(jnp.ravel, np.ravel),
    lambda: Transfer(np.ravel, jnp.ravel),
]


def test_equal_arguments_make_equal_transfers_and_others_do_not():
    first, second = [b() for b in BUILDS], [b() for b in BUILDS]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            assert (a == b) == (i == j), (a, b)
        assert hash(a) == hash(second[i])
    assert len({*first, *second}) == len(BUILDS)


def test_ways_to_write_the_same_axes_are_equal():
    assert injection(-1) == injection((-1,)) == injection([-1]) == injection(np.int64(-1))
    assert average_pooling(factor=np.int32(2)) == average_pooling()


def test_equal_transfers_share_a_compiled_program():
    traces = []

    @partial(jax.jit, static_argnums=0)
    def down(transfer, u):
        traces.append(transfer)
        return transfer.restrict(u)

    down(full_weighting((0, 1)), jnp.zeros((7, 7)))
    down(full_weighting((0, 1)), jnp.ones((7, 7)))
    assert len(traces) == 1
    down(full_weighting((1,)), jnp.ones((7, 7)))
    assert len(traces) == 2


class Module:
    def __call__(self, v):
        return "one", v

    def method(self, v, like):
        return "two", v, like


class Opaque(Module):
    __signature__ = "none that inspect can read"


@pytest.mark.parametrize(
    "prolong",
    [
        lambda v: ("one", v),
        lambda v, scale=2.0: ("one", v),
        lambda v, *, scale=2.0: ("one", v),
        lambda v, *more: ("one", v),
        partial(lambda v, like: ("one", v), like=None),
        Module(),
        Opaque(),
    ],
)
def test_a_prolongation_of_one_argument_is_called_with_it(prolong):
    transfer = Transfer(jnp.ravel, prolong)
    assert transfer.prolong(1, 2) == ("one", 1)
    assert transfer == Transfer(jnp.ravel, prolong)
    assert dataclasses.replace(transfer, restrict=np.ravel).prolong(1, 2) == ("one", 1)


@pytest.mark.parametrize(
    "prolong",
    [
        lambda v, like: ("two", v, like),
        lambda v, like=None: ("two", v, like),
        lambda v, fine_shape: ("two", v, fine_shape),
        lambda v, like, scale=2.0: ("two", v, like),
        partial(lambda scale, v, like: ("two", v, like), 3.0),
        Module().method,
    ],
)
def test_a_prolongation_of_two_arguments_is_given_the_fine_shapes(prolong):
    assert Transfer(jnp.ravel, prolong).prolong(1, 2) == ("two", 1, 2)


def test_the_opaque_callable_is_one():
    with pytest.raises(TypeError):
        inspect.signature(Opaque())


def test_a_compiled_prolongation_is_looked_into():
    assert Transfer(jnp.ravel, jax.jit(lambda v: v + 1)).prolong(jnp.ones(()), None) == 2
    assert Transfer(jnp.ravel, jax.jit(lambda v, like: v + like)).prolong(1, 2) == 3


BAD_SIZES = [
    (injection(), 1, "2 k - 1 and at least 3"),
    (injection(), 6, "2 k - 1 and at least 3"),
    (injection(factor=4), 3, "4 k - 1 and at least 7"),
    (injection(grid="nodes"), 1, "2 k + 1 and at least 3"),
    (injection(grid="nodes"), 4, "2 k + 1 and at least 3"),
    (injection(grid="periodic"), 5, "2 k and at least 2"),
    (injection(grid="periodic"), 0, "2 k and at least 2"),
    (full_weighting(), 8, "2 k - 1 and at least 3"),
    (average_pooling(factor=3), 1, "at least 2"),
]


@pytest.mark.parametrize(("transfer", "n", "allowed"), BAD_SIZES)
def test_sizes_that_cannot_be_coarsened_are_named(transfer, n, allowed):
    with pytest.raises(ValueError) as e:
        transfer.restrict({"x": jnp.zeros((2, n))})
    said = str(e.value)
    for part in ("state['x']", f"size {n} on axis 1", f"(2, {n})", allowed + "."):
        assert part in said
    with pytest.raises(ValueError, match=f"size {n} on axis 1"):
        transfer.prolong({"x": jnp.zeros((2, 1))}, {"x": shape(2, n)})


def test_leaves_without_the_axes_are_named():
    for axes in ((-2, -1), (0, 1), 1):
        transfer = full_weighting(axes)
        with pytest.raises(ValueError, match=r"axes=\(.*\): state\['b'\] has shape \(7,\)"):
            transfer.restrict({"a": jnp.zeros((7, 7)), "b": jnp.zeros(7)})
    with pytest.raises(ValueError, match=r"axes=\(0, -1\): .* shape \(7,\), two are the same"):
        full_weighting((0, -1)).restrict(jnp.zeros(7))


def test_a_coarse_leaf_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"state\[0\] has shape \(4,\).*\(7,\).*be \(3,\)"):
        injection().prolong([jnp.zeros(4)], [shape(7)])
    with pytest.raises(ValueError, match=r"has shape \(2, 3\).*must be \(1, 3\)"):
        injection().prolong(jnp.zeros((2, 3)), shape(1, 7))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: injection(grid="cell"), ValueError, "grid='cell'.*'periodic'.*average_pooling"),
        (lambda: full_weighting(grid="edges"), ValueError, "grid='edges'.*'vertex'"),
        (lambda: injection(prolongation="cubic"), ValueError, "prolongation='cubic'.*'linear'"),
        (lambda: average_pooling(prolongation=3), ValueError, "prolongation=3.*'constant'"),
        (lambda: injection(factor=1), ValueError, "factor=1: must be at least 2"),
        (lambda: average_pooling(factor=2.0), TypeError, "factor=2.0: must be an integer"),
        (lambda: injection(axes=()), ValueError, r"axes=\(\): must be one or more"),
        (lambda: injection(axes=(1, 1)), ValueError, r"axes=\(1, 1\).*different"),
        (lambda: injection(axes=1.5), TypeError, "axes=1.5: must be an integer or a tuple"),
        (lambda: injection(axes="xy"), TypeError, "axes='xy'"),
        (lambda: Transfer(3, jnp.ravel), TypeError, "restrict=3: must be a function"),
        (lambda: Transfer(jnp.ravel, None), TypeError, "prolong=None: must be a function"),
    ],
)
def test_bad_options_are_refused_when_built(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_what_cannot_be_transposed_is_named():
    with pytest.raises(TypeError, match=r"fine\['n'\] has dtype int32: only real and complex"):
        transpose(injection(), {"n": shape(7, dtype=jnp.int32), "x": shape(7)})
    bent = Transfer(lambda u: jnp.sin(u[::2]), lambda v: jnp.repeat(v, 2))
    adjoint = transpose(bent, shape(4))
    np.testing.assert_array_equal(adjoint.restrict(jnp.ones(4)), [2, 2])
    with pytest.raises(NotImplementedError) as e:
        adjoint.prolong(jnp.ones(2))
    assert any("transfer's `restrict`, which must be linear" in note for note in e.value.__notes__)


def test_all_public_names_exist():
    assert set(transfers.__all__) == {
        "Transfer",
        "transpose",
        "injection",
        "full_weighting",
        "average_pooling",
    }
    assert all(hasattr(transfers, name) for name in transfers.__all__)
