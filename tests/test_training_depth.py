"""Change of depth: transfers against their definitions, optimisers and NNX models after it.

The truth for a transfer is a loop over layers in exact fractions of layer time.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxbraid import MGRIT, parallel_ode_net
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training import (
    deepen,
    deepen_optimizer,
    depth_penalty,
    nested_iteration,
    prolong_layers,
    prolong_optimizer_state,
    restrict_layers,
    restrict_optimizer_state,
    smooth_layers,
    split_model,
)
from nets import dense, dense_weights, mesh_of

SIZES = [(1, 5), (4, 8), (3, 8), (5, 12), (6, 4), (7, 7)]
SERIAL = MGRIT(levels=1)


def constant(a, to):
    """The layer n that covers the time i / to, n / N <= i / to < (n + 1) / N."""
    n = len(a)
    return np.stack([a[int(Fraction(i, to) * n)] for i in range(to)])


def linear(a, to):
    """Piecewise linear through the values at n / N, constant after the last of them."""
    times = np.arange(len(a)) / len(a)
    flat = a.reshape(len(a), -1)
    columns = [np.interp(np.arange(to) / to, times, column) for column in flat.T]
    return np.stack(columns, axis=1).reshape(to, *a.shape[1:])


def average(a, to):
    """Mean of the piecewise constant function over each new layer's time, on a common grid."""
    fine = np.repeat(a, to, axis=0)
    return fine.reshape(to, len(a), *a.shape[1:]).mean(1)


def tree_of(n):
    """Leaves of several kinds and shapes with leading axis n."""
    w = dense_weights(n)
    return {"w": w, "c": w[:, 0] + 1j * w[:, 1], "s": w[:, 0, 0].astype(jnp.float32)}


@pytest.mark.parametrize(("n", "to"), SIZES)
@pytest.mark.parametrize("truth", [constant, linear])
def test_prolongation_of_any_number_of_layers(n, to, truth):
    tree = tree_of(n)
    got = prolong_layers(tree, to, truth.__name__)
    for name, leaf in tree.items():
        assert got[name].dtype == leaf.dtype
        expected = truth(np.asarray(leaf), to) if name != "c" or truth is constant else None
        if expected is None:  # np.interp along each part
            expected = truth(np.asarray(leaf.real), to) + 1j * truth(np.asarray(leaf.imag), to)
        rounding = 1e-6 if name == "s" else 1e-14
        np.testing.assert_allclose(got[name], expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(("n", "to"), SIZES)
def test_restriction_of_any_number_of_layers(n, to):
    """Injection, mean, and a transpose: <P x, y> = <x, P^T y> for all x and y."""
    w = dense_weights(n)
    np.testing.assert_array_equal(restrict_layers(w, to), constant(np.asarray(w), to))
    got = restrict_layers(w, to, "average")
    np.testing.assert_allclose(got, average(np.asarray(w), to), rtol=1e-13, atol=1e-15)
    for order in ("constant", "linear"):
        x = jax.random.normal(jax.random.key(1), (to, 3, 3))
        seen = restrict_layers(w, to, "transpose", order=order)
        there = jnp.vdot(prolong_layers(x, n, order), w)
        np.testing.assert_allclose(jnp.vdot(x, seen), there, rtol=1e-12)


def test_injection_undoes_prolongation_and_other_leaves_are_injected():
    keys, ints = jax.random.split(jax.random.key(0), 4), jnp.arange(4)
    tree = {"w": dense_weights(4), "key": keys, "count": ints, "on": ints > 1}
    fine = prolong_layers(tree, 12, "linear")
    np.testing.assert_array_equal(fine["count"], np.repeat(np.arange(4), 3))
    assert fine["on"].dtype == bool
    back = restrict_layers(fine, 4)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert jnp.all(a == b)


def test_bfloat16_is_averaged_with_one_rounding():
    w = jnp.linspace(1, 2, 512).astype(jnp.bfloat16)[:, None]
    got = restrict_layers(w, 1, "average")
    assert got.dtype == jnp.bfloat16
    assert float(got[0, 0]) == float(jnp.bfloat16(np.asarray(w, np.float64).mean()))


@pytest.mark.parametrize(
    "layered",
    [
        {"open": False, "stack": True},
        {"open": False, "stack": {"w": True}},
        lambda path, leaf: path.startswith("stack/"),
    ],
)
def test_only_layered_leaves_change(layered):
    tree = {"open": jnp.ones(3), "stack": {"w": dense_weights(2)}}
    got = prolong_layers(tree, 4, layered=layered)
    assert got["open"] is tree["open"] and got["stack"]["w"].shape == (4, 3, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prolong_layers(jnp.ones(()), 3), r"tree has shape \(\).*leading axis"),
        (lambda: prolong_layers(jnp.ones(2), 0), "layers=0: must be >= 1"),
        (lambda: prolong_layers(jnp.ones(2), 3, "cubic"), "order='cubic': must be one of"),
        (lambda: restrict_layers(jnp.ones(2), 1, "sum"), "kind='sum': must be one of"),
        (lambda: prolong_layers(jnp.ones(2), 3, layered=[True]), "is no prefix of the weights"),
        (lambda: depth_penalty({"a": jnp.ones(2), "b": jnp.ones(3)}), "one number of layers"),
        (lambda: depth_penalty(jnp.ones(2), 0.0), "t_final=0.0: must be positive"),
        (lambda: deepen(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), 2), "Linear has no ParallelStack"),
        (lambda: nested_iteration(dense, jnp.ones((2, 1)), optax.sgd(1), [], [(3, 1)]), "starts"),
        (lambda: nested_iteration(dense, jnp.ones((2, 1)), optax.sgd(1), [], [(2, 1)]), "only 0"),
        (lambda: nested_iteration(dense, jnp.ones((2, 1)), optax.sgd(1), [], []), "pairs"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------------------------ optimisers


def test_adams_moments_follow_and_counters_stay():
    """With `scale`, Adam's next step is that of the old network, interpolated.

    A layer's gradient is half as large in a network of twice the depth, so the state must be as if
    half the gradients had been seen; the loss here has exactly such gradients.
    """
    optimizer = optax.adam(0.1, eps=1e-30)
    layered = {"w": True, "shared": False}

    def gradient(n):
        g = prolong_layers(dense_weights(4), n) * (4 / n)
        return {"w": g, "shared": jnp.arange(3.0)}

    def weights(n):
        return {"w": jnp.zeros((n, 3, 3)), "shared": jnp.zeros(3)}

    states = {}
    for n in (4, 8):
        state = optimizer.init(weights(n))
        for _ in range(3):
            _, state = optimizer.update(gradient(n), state)
        states[n] = state
    deep = prolong_optimizer_state(optimizer, states[4], 8, layered=layered)
    assert deep[0].count == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), deep, states[8])
    back = restrict_optimizer_state(optimizer, states[8], 4, layered=layered)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), back, states[4])
    plain = prolong_optimizer_state(optimizer, states[4], 8, layered=layered, scale=False)
    expected = prolong_layers(states[4][0].nu["w"], 8)
    np.testing.assert_array_equal(plain[0].nu["w"], expected)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(0.1))),
        optax.inject_hyperparams(optax.rmsprop)(0.1),
        optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    ],
)
def test_states_of_many_optimisers_fit_the_deeper_weights(optimizer):
    def weights(n):
        return {"w": jnp.ones((n, 2)), "b": jnp.ones((n, 1))}

    state = prolong_optimizer_state(optimizer, optimizer.init(weights(3)), 7)
    expected = jax.eval_shape(optimizer.init, weights(7))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (b.shape, b.dtype)
    optimizer.update(weights(7), state, weights(7))


def test_a_state_that_holds_weights_otherwise_is_an_error():
    optimizer = optax.scale_by_lbfgs(memory_size=5)
    with pytest.raises(ValueError, match="state: layered leaves have the leading axes"):
        prolong_optimizer_state(optimizer, optimizer.init(jnp.ones((3, 2))), 6)


# ---------------------------------------------------------------------------------- smooth


def test_penalty_is_the_integral_of_the_squared_derivative():
    """For theta(t) = sin t: half the integral of cos^2 over [0, T], to first order in 1/N."""
    n, t_final = 2000, 2.0
    theta = jnp.sin(jnp.arange(n) * t_final / n)
    exact = (t_final + np.sin(2 * t_final) / 2) / 4
    tree = {"a": theta, "b": 1j * theta[:, None], "count": jnp.arange(n), "shared": jnp.ones(3)}
    layered = lambda path, leaf: path != "shared"  # noqa: E731
    np.testing.assert_allclose(depth_penalty(tree, t_final, layered=layered), 2 * exact, rtol=1e-3)
    assert depth_penalty(jnp.ones((1, 3))) == 0


def test_penalty_and_its_gradient_on_a_mesh():
    """Against differences in NumPy, and central differences of the value."""
    w = dense_weights(8)
    truth = 8 / (2 * 3.0) * np.sum(np.diff(np.asarray(w), axis=0) ** 2)
    there = jax.device_put(w, NamedSharding(mesh_of(4, 2), PartitionSpec("depth")))
    value, gradient = jax.jit(jax.value_and_grad(depth_penalty), static_argnums=1)(there, 3.0)
    np.testing.assert_allclose(value, truth, rtol=1e-13)
    e = jax.random.normal(jax.random.key(0), w.shape)
    slope = (depth_penalty(w + 1e-3 * e, 3.0) - depth_penalty(w - 1e-3 * e, 3.0)) / 2e-3
    np.testing.assert_allclose(jnp.vdot(gradient, e), slope, rtol=1e-9)  # a quadratic: exact


def test_smooth_layers():
    """One knot: all equal; as many knots as layers: independent; between: smoother than that."""

    def init(key):
        return {"w": jax.random.normal(key, (50,))}

    w = {k: smooth_layers(jax.random.key(0), init, 12, knots=k)["w"] for k in (1, 3, 12)}
    assert jnp.all(w[1] == w[1][0])
    np.testing.assert_array_equal(w[3][::4], w[3][jnp.array([0, 4, 8])])
    np.testing.assert_allclose(w[3][2], (w[3][0] + w[3][4]) / 2, rtol=1e-12)
    assert 0 < 4 * depth_penalty(w[3]) < depth_penalty(w[12])


# ------------------------------------------------------------------------------------- NNX


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.drop(self.norm(self.linear(x))))


class Tanh(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, layers, block=Block):
        rngs = nnx.Rngs(0)
        self.opening = nnx.Linear(2, 3, rngs=rngs)
        self.stack = ParallelStack(block, layers, rngs=rngs, forward=SERIAL, t_final=2.0)
        self.closing = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.closing(self.stack(self.opening(x)))


X = jax.random.normal(jax.random.key(0), (4, 2), jnp.float32)
Y = jnp.sin(X[:, :1])


def mse(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def test_deepen_a_model_with_statistics_and_dropout():
    model = Net(3)
    model(X)  # statistics and counters move
    deep = deepen(model, lambda n: 2 * n, "linear")
    old, new = model.stack.blocks, deep.stack.blocks
    assert model.stack.layers == 3 and deep.stack.layers == 6
    for get in (lambda b: b.linear.kernel, lambda b: b.norm.mean, lambda b: b.norm.scale):
        expected = linear(np.asarray(get(old).get_value()), 6)
        np.testing.assert_allclose(get(new).get_value(), expected, rtol=1e-6)
    np.testing.assert_array_equal(new.drop.rngs.count.get_value(), 1)
    assert len({*map(bytes, np.asarray(jax.random.key_data(new.drop.rngs.key.get_value())))}) == 6
    np.testing.assert_array_equal(deep.opening.kernel, model.opening.kernel)
    assert deep.stack.options == model.stack.options
    y = deep(X)
    assert y.shape == (4, 1) and jnp.all(jnp.isfinite(y))


def test_a_deeper_network_of_equal_weights_is_the_same_flow():
    """The output after deepening differs by Euler's error only: twice the depth, half the rest."""
    model = Net(8, Tanh)
    y = [deepen(model, n)(X) for n in (64, 128, 256)]
    ratio = jnp.abs(y[0] - y[1]).max() / jnp.abs(y[1] - y[2]).max()
    assert 1.8 < ratio < 2.2


def test_deepen_an_optimizer():
    """Its next update is that of an optimiser that has followed the deeper weights' moments."""
    model = Net(3, Tanh)
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.grad(mse)(model, (X, Y)))
    deep = deepen(model, 6)
    after = deepen_optimizer(optimizer, deep)
    assert after.step[...] == 2
    old, new = optimizer.opt_state[0], after.opt_state[0]
    assert new.count[...] == 2
    kernel = lambda s: np.asarray(s["stack"]["blocks"]["linear"]["kernel"][...])  # noqa: E731
    np.testing.assert_allclose(kernel(new.mu), constant(kernel(old.mu), 6) / 2, rtol=1e-6)
    np.testing.assert_allclose(kernel(new.nu), constant(kernel(old.nu), 6) / 4, rtol=1e-6)
    np.testing.assert_array_equal(new.mu["opening"]["bias"][...], old.mu["opening"]["bias"][...])
    before = kernel(nnx.state(deep))
    after.update(deep, nnx.grad(mse)(deep, (X, Y)))
    assert np.all(kernel(nnx.state(deep)) != before)


def test_split_model_is_a_function_of_weights_of_any_depth():
    model = Net(4)
    model.eval()
    params, merge, layered = split_model(model)
    coarse = restrict_layers(params, 2, layered=layered)
    expected = deepen(model, 2)(X)
    got = jax.jit(lambda p: merge(p)(X))(coarse)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: mse(merge(p), (X, Y))))(coarse)
    shapes = [a.shape for a in jax.tree.leaves(gradient)]
    assert shapes == [a.shape for a in jax.tree.leaves(coarse)]
    assert all(jnp.any(a != 0) for a in jax.tree.leaves(gradient["stack"]["blocks"]["norm"]))


# ------------------------------------------------------------------------- nested iteration


def net_loss(w, batch):
    return jnp.mean((parallel_ode_net(dense, w, forward=SERIAL)(batch) - 1) ** 2)


def test_nested_iteration_is_training_with_interpolation_between():
    """Against the same loop by hand, with the optimiser's state prolonged in between."""
    w, optimizer = dense_weights(2), optax.sgd(0.3, momentum=0.9)
    data = [jax.random.normal(jax.random.key(i), (4, 3)) for i in range(5)]
    steps = []
    got = nested_iteration(net_loss, w, optimizer, data, [(2, 3), (6, 2)], callback=steps.append)

    state, losses = optimizer.init(w), []
    for i, batch in enumerate(data):
        if i == 3:
            trace = jnp.repeat(state[0].trace, 3, axis=0) / 3
            w, state = jnp.repeat(w, 3, axis=0), (state[0]._replace(trace=trace), state[1])
        value, g = jax.value_and_grad(net_loss)(w, batch)
        updates, state = optimizer.update(g, state)
        w = optax.apply_updates(w, updates)
        losses.append(value)
    np.testing.assert_allclose(got.params, w, rtol=1e-12)
    np.testing.assert_allclose(got.losses, losses, rtol=1e-12)
    np.testing.assert_array_equal(got.layers, [2, 2, 2, 6, 6])
    np.testing.assert_array_equal(got.work, [4, 8, 12, 24, 36])  # forward and backward
    assert [(s.stage, s.step, s.work) for s in steps[2:4]] == [(0, 2, 12), (1, 0, 24)]
    assert steps[3].params.shape == (6, 3, 3)


def test_nested_iteration_of_a_model():
    """Statistics move, all stages train, and the caller's model stays as it was."""
    model = Net(2)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    got = nested_iteration(
        mse, model, optax.adam(0.01), itertools.repeat((X, Y)), [(2, 20), (4, 20)], order="linear"
    )
    assert got.params.stack.layers == 4 and got.optimizer_state.step[...] == 40
    np.testing.assert_array_equal(got.params.stack.blocks.drop.rngs.count.get_value(), 40)
    assert got.losses[-5:].mean() < 0.7 * got.losses[:5].mean()
    after = nnx.state(model, nnx.Param)
    assert all(map(jnp.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
