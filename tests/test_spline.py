"""Splines in depth against `scipy.interpolate.BSpline`, and SpliNet against a serial network.

The serial network is a Python loop over layers whose parameters are made with SciPy's basis.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.interpolate import BSpline

import jaxbraid
from jaxbraid import MGRIT
from jaxbraid.nn import SplineStack, spline_basis, spline_layers
from nets import mesh_of, relative_error

N, K, DEGREE, WIDTH, BATCH = 10, 5, 2, 3, 4  # four devices have blocks of four: slots left over
EXACT = MGRIT(coarsening=2, max_iters=5)
X = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
CASES = [(0, 1), (0, 5), (1, 2), (1, 6), (2, 3), (2, 7), (3, 4), (3, 9), (5, 8)]


def scipy_basis(degree, n_basis, layers):
    intervals = n_basis - degree
    knots = np.concatenate([np.zeros(degree), np.arange(intervals + 1), np.full(degree, intervals)])
    return BSpline(knots / intervals, np.eye(n_basis), degree)(np.arange(layers) / layers)


@pytest.mark.parametrize("layers", [1, 7, 16])
@pytest.mark.parametrize(("degree", "n_basis"), CASES)
def test_basis(degree, n_basis, layers):
    basis = spline_basis(degree, n_basis, layers)
    np.testing.assert_allclose(basis, scipy_basis(degree, n_basis, layers), atol=1e-14)
    assert np.count_nonzero(basis, axis=1).max() <= degree + 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize(("degree", "n_basis"), CASES)
def test_layers_are_sums_of_basis_functions(degree, n_basis, dtype):
    """The tolerance is two roundings of the type, relative to coefficients of size 1."""
    c = np.random.default_rng(0).normal(size=(n_basis, 2, 3)).astype(np.float32)
    c = {"w": jnp.asarray(c, dtype), "b": jnp.asarray(c[:, 0, 0], dtype)}
    got = spline_layers(c, 11, degree)
    for name, leaf in got.items():
        assert leaf.dtype == dtype
        wide = np.asarray(c[name]).astype(complex if dtype == jnp.complex64 else float)
        truth = np.tensordot(scipy_basis(degree, n_basis, 11), wide, 1)
        np.testing.assert_allclose(
            np.asarray(leaf).astype(truth.dtype), truth, atol=8 * float(jnp.finfo(dtype).eps)
        )


@pytest.mark.parametrize("intervals", [3, 7, 10])
@pytest.mark.parametrize("between", [1, 3, 7])
def test_values_at_the_knots_to_the_bit(intervals, between):
    """Degree 1: a layer on a knot has the coefficient. (3, 7 and 10 intervals divide nothing.)"""
    c = jax.random.normal(jax.random.key(1), (intervals + 1, 2))
    layers = spline_layers(c, intervals * between, 1)
    np.testing.assert_array_equal(layers[::between], c[:-1])
    constant = spline_layers(c, (intervals + 1) * between, 0)
    np.testing.assert_array_equal(constant, np.repeat(c, between, axis=0))


def test_layers_of_a_constant_are_it():
    """Whatever the degree: the basis is a partition of unity."""
    for degree, n_basis in CASES:
        layers = spline_layers(jnp.full((n_basis, 1), 0.7), 13, degree)
        np.testing.assert_allclose(layers, 0.7, rtol=1e-15)


def test_each_device_makes_its_own_layers():
    """No device holds the parameters of more than its block of N = 64, nor does the gradient."""
    mesh, c = mesh_of(4, 2), jnp.ones((K, 6))

    def value(c):
        return spline_layers(c, 64, DEGREE, mesh=mesh, layer_axis="depth")

    layers = jax.jit(value)(c)
    assert {s.data.shape for s in layers.addressable_shards} == {(16, 6)}
    np.testing.assert_allclose(layers, 1, rtol=1e-15)
    assert value(c).sharding.is_equivalent_to(layers.sharding, 2)
    for f in (value, jax.grad(lambda c: jnp.sum(jnp.sin(value(c))))):
        text = jax.jit(f).lower(c).compile().as_text()
        assert "f64[16,6]" in text and "f64[64,6]" not in text


# ------------------------------------------------------------------------------- the stack


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=float)
        self.scale = nnx.Param(jnp.asarray(1.5))

    def __call__(self, x, t):
        return jnp.tanh(self.dense(x) + t) * self.scale.get_value()


class RandomBlock(nnx.Module):
    """With variables that are no parameters: statistics, keys and counters."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=float)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, param_dtype=float, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.drop(self.norm(self.dense(x))))


def place(mesh):
    if mesh is None:
        return {}
    return {"mesh": mesh_of(*mesh), "layer_axis": "depth", "batch_axis": "data"}


def make_stack(block=Block, layers=N, n_basis=K, degree=DEGREE, **options):
    options = {"forward": EXACT, "rngs": nnx.Rngs(1)} | options
    return SplineStack(block, layers, n_basis=n_basis, degree=degree, **options)


def loop(coefficients, x, layers=N, degree=DEGREE):
    """The network in sequence, its parameters made with SciPy's basis."""
    n_basis = len(coefficients["scale"])
    basis = scipy_basis(degree, n_basis, layers)
    p = jax.tree.map(lambda c: jnp.tensordot(basis, c, 1), coefficients)
    us = [x]
    for n in range(layers):
        z = us[-1] @ p["dense"]["kernel"][n] + p["dense"]["bias"][n] + n / layers
        us.append(us[-1] + jnp.tanh(z) * p["scale"][n] / layers)
    return jnp.stack(us)


def coefficients_of(stack):
    return nnx.to_pure_dict(nnx.state(stack.blocks, nnx.Param))


def loss(y):
    return jnp.sum(jnp.sin(y))


@pytest.mark.parametrize("mesh", [None, (4, 2)])
def test_value_and_gradient(mesh):
    """At full iterations they are those of the serial network, to a few hundred roundings."""
    stack = make_stack(**place(mesh))
    graphdef, state = nnx.split(stack)
    grad = jax.jit(jax.value_and_grad(lambda s, x: loss(nnx.merge(graphdef, s)(x)), (0, 1)))
    value, (by_state, by_x) = grad(state, X)
    expected, truth = jax.jit(jax.value_and_grad(lambda c, x: loss(loop(c, x)[-1]), (0, 1)))(
        coefficients_of(stack), X
    )
    np.testing.assert_allclose(value, expected, rtol=1e-13)
    got = nnx.to_pure_dict(by_state)["blocks"], by_x
    assert got[0]["dense"]["kernel"].shape == (K, WIDTH, WIDTH)
    assert relative_error(got, truth) < 1e-11


def test_gradient_is_the_slope():
    """Along a direction in the coefficients, by central differences, whose error is O(h^2)."""
    graphdef, state = nnx.split(make_stack())
    keys = jax.random.split(jax.random.key(2), 3)
    leaves, tree = jax.tree.flatten(state)
    pairs = zip(keys, leaves, strict=True)
    way = tree.unflatten([jax.random.normal(k, a.shape) for k, a in pairs])
    value = jax.jit(lambda s: loss(nnx.merge(graphdef, s)(X)))
    ahead, behind = (
        value(jax.tree.map(lambda a, d, h=h: a + h * d, state, way)) for h in (1e-5, -1e-5)
    )
    grad = jax.jit(jax.grad(lambda s: loss(nnx.merge(graphdef, s)(X))))(state)
    slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, grad, way)))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-8)


@pytest.mark.parametrize("mesh", [None, (4, 2)])
def test_error_falls_with_every_iteration(mesh):
    """That of the gradient; the guess is from one V-cycle, so the fourth iteration is exact."""
    errors = []
    for iterations in range(1, 5):
        config = MGRIT(coarsening=2, max_iters=iterations, cf_relax=0, final_relax="FC")
        stack = make_stack(forward=config, adjoint=config, t_final=2.0, **place(mesh))
        graphdef, state = nnx.split(stack)
        grad = jax.jit(jax.grad(lambda s, g=graphdef: loss(nnx.merge(g, s)(X))))
        errors.append(nnx.to_pure_dict(grad(state)["blocks"]))
    serial = make_stack(forward=MGRIT(levels=1), t_final=2.0)
    graphdef, state = nnx.split(serial)
    truth = jax.jit(jax.grad(lambda s: loss(nnx.merge(graphdef, s)(X))))(state)
    errors = [relative_error(e, nnx.to_pure_dict(truth["blocks"])) for e in errors]
    assert all(b < a / 2 for a, b in itertools.pairwise(errors)), errors
    assert errors[0] > 1e-5 and errors[-1] < 1e-12


def test_degree_0_with_a_coefficient_a_layer_is_the_plain_stack():
    plain = jaxbraid.flax.nnx.ParallelStack(Block, N, rngs=nnx.Rngs(1), forward=EXACT)
    stack = make_stack(n_basis=N, degree=0)
    nnx.update(stack, nnx.state(plain))
    np.testing.assert_array_equal(stack(X), plain(X))


@pytest.mark.parametrize("layers", [1, 7, 20])
def test_any_depth_with_the_same_coefficients(layers):
    stack = make_stack(forward=MGRIT(coarsening=2, max_iters=10))
    stack.layers = layers
    truth = loop(coefficients_of(stack), X, layers)
    np.testing.assert_allclose(stack.solve(X).us, truth, rtol=1e-13)


@pytest.mark.parametrize("mesh", [None, (4, 2)])
def test_other_variables_have_an_entry_a_layer(mesh):
    """Statistics and masks are those of a plain stack with the parameters of the spline."""
    stack = make_stack(RandomBlock, **place(mesh))
    plain = jaxbraid.flax.nnx.ParallelStack(
        RandomBlock, N, rngs=nnx.Rngs(2), forward=EXACT, **place(mesh)
    )
    basis = scipy_basis(DEGREE, K, N)
    statistics = nnx.state(stack, nnx.BatchStat)
    nnx.update(stack, jax.tree.map(lambda a: a.astype(float), statistics))  # Flax's are float32
    params, others = nnx.state(stack.blocks, nnx.Param, ...)
    assert {a.shape[0] for a in jax.tree.leaves(others)} == {N}
    nnx.update(plain.blocks, others)
    nnx.update(plain.blocks, jax.tree.map(lambda c: jnp.tensordot(basis, c, 1), params))
    assert len(np.unique(jax.random.key_data(stack.blocks.drop.rngs.key.get_value())[:, 0])) == N
    call = nnx.jit(lambda stack, x: stack(x))
    for _ in range(2):
        np.testing.assert_allclose(call(stack, X), call(plain, X), rtol=1e-11)
    got, truth = (nnx.state(s.blocks, (nnx.BatchStat, nnx.RngCount)) for s in (stack, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    assert np.all(stack.blocks.drop.rngs.count.get_value() == 2)
    stack.layers = N + 1
    with pytest.raises(ValueError, match=f"layers={N + 1}: .* one for each of {N} layers"):
        stack(X)


def test_serial_is_one_attribute():
    stack = make_stack(forward=MGRIT(coarsening=2, max_iters=1, cf_relax=0), **place((4, 2)))
    truth = loop(coefficients_of(stack), X)[-1]
    call = nnx.jit(lambda stack, x: stack(x))
    assert relative_error(call(stack, X), truth) > 1e-9
    stack.set_attributes(serial=True)
    assert relative_error(call(stack, X), truth) < 1e-13


def test_smooth_init():
    kernel = make_stack(smooth_init=True).blocks.dense.kernel.get_value()
    assert kernel.shape[0] == K and jnp.all(kernel == kernel[0])


def test_bad_input():
    with pytest.raises(ValueError, match=r"degree=3: must be less than .* 3"):
        spline_basis(3, 3, 5)
    with pytest.raises(ValueError, match="degree=-1"):
        make_stack(degree=-1)
    with pytest.raises(TypeError, match=r"n_basis=2\.5"):
        make_stack(n_basis=2.5)
    with pytest.raises(ValueError, match="layers=0"):
        spline_layers(jnp.ones((3, 2)), 0, 1)
    with pytest.raises(TypeError, match=r"coefficients\['i'\] is of int"):
        spline_layers({"i": jnp.arange(3)}, 4, 1)
    with pytest.raises(ValueError, match="number of basis functions"):
        spline_layers({"a": jnp.ones((3, 2)), "b": jnp.ones(4)}, 4, 1)
    with pytest.raises(ValueError, match="layer_axis='layer': must be one of"):
        spline_layers(jnp.ones((3, 2)), 4, 1, mesh=mesh_of(4, 2))
