"""MG/OPT against its definition: consistency, descent, line search, work, plain optimisers.

The networks are serial (one MGRIT level), so the loss is exact; the truth for a cycle is the same
cycle written out in NumPy-like steps, with matrices for the transfers.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxbraid import MGRIT, parallel_ode_net
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training import MGOPT, Backtracking, nested_iteration, smooth_layers, split_model
from jaxbraid.training._mgopt import _cycle, _Run
from nets import dense

SERIAL = MGRIT(levels=1)
LAYERED = {"open": False, "w": True}
X = jax.random.normal(jax.random.key(0), (4, 3))
BATCH = X, jnp.sin(2 * X[:, ::-1])


def loss(params, batch):
    x, y = batch
    net = parallel_ode_net(dense, params["w"], forward=SERIAL)
    return jnp.mean((net(x @ params["open"]) - y) ** 2)


def weights(layers):
    def init(key):
        return jax.random.normal(key, (3, 3))

    w = smooth_layers(jax.random.key(1), init, layers)
    return {"open": jnp.eye(3) + 0.1, "w": w}


def quadratic(params, batch):
    """A loss of any depth with the minimum 0 at equal layers: sum of dt (w_n - 1)^2."""
    return jnp.mean((params - 1) ** 2)


@pytest.mark.parametrize("order", ["constant", "linear"])
@pytest.mark.parametrize("restriction", ["average", "injection"])
def test_coarse_objective_is_consistent(order, restriction, layers=7, coarse=4):
    """A step of gradient descent on the coarse level, where it starts, is along P^T g.

    P^T g is had by differentiating f(theta + P e) with respect to e, at e = 0. The coarse level
    must come by it through v, not be handed it: so the cycle there is told nothing.
    """
    method = MGOPT(
        loss,
        optax.sgd(1.0),
        coarse=1,
        order=order,
        restriction=restriction,
        layered=LAYERED,
    )
    fine = weights(layers)
    low = method.restrict(fine, coarse)
    g = jax.grad(loss)(fine, BATCH)
    v = jax.tree.map(jnp.subtract, jax.grad(loss)(low, BATCH), method.restrict_gradient(g, coarse))
    run = _Run(method, (layers, coarse), lambda p: loss(p, BATCH))
    out = _cycle(run, 1, v, low, method.init(fine), None)

    def moved(e):
        return loss(jax.tree.map(jnp.add, fine, method.prolong(e, layers)), BATCH)

    expected = jax.grad(moved)(jax.tree.map(jnp.zeros_like, low))
    step = jax.tree.map(jnp.subtract, low, out.params)
    for a, b in zip(jax.tree.leaves(step), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


def test_a_cycle_written_out():
    """Two levels of 6 and 3 layers, two coarse steps and one after, by matrices."""
    method = MGOPT(loss, optax.sgd(0.2), coarse=2, pre=1, post=1, layered=LAYERED)
    theta = weights(6)
    got, _, info = method.step(theta, method.init(theta), BATCH)

    P = np.kron(np.eye(3), np.ones((2, 1)))
    apply = lambda a, t: {"open": t["open"], "w": jnp.tensordot(a, t["w"], 1)}  # noqa: E731
    add = lambda x, a, y: jax.tree.map(lambda p, q: p + a * q, x, y)  # noqa: E731
    grad = jax.grad(loss)
    theta = add(theta, -0.2, grad(theta, BATCH))
    low = start = apply(P.T / 2, theta)
    v = add(grad(low, BATCH), -1, apply(P.T, grad(theta, BATCH)))
    for _ in range(2):
        low = add(low, -0.2, add(grad(low, BATCH), -1, v))
    theta = add(theta, 1.0, apply(P, add(low, -1, start)))
    theta = add(theta, -0.2, grad(theta, BATCH))
    np.testing.assert_array_equal(info.step_lengths, [1.0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(theta), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11)


@pytest.mark.parametrize("coarse_state", ["restrict", "keep"])
def test_every_cycle_descends(coarse_state):
    """With small gradient steps on three levels, of 12, 6 and 2 layers."""
    method = MGOPT(
        loss,
        optax.sgd(0.05, momentum=0.1),
        levels=3,
        coarsening=(2, 3),
        coarse_state=coarse_state,
        layered=LAYERED,
    )
    params = weights(12)
    assert method.depths(params) == (12, 6, 2)
    state, losses = method.init(params), []
    for _ in range(8):
        params, state, info = method.step(params, state, BATCH)
        losses.append(info.loss)
    losses.append(loss(params, BATCH))
    assert np.all(np.diff(losses) < 0)
    plain = nested_iteration(
        loss, weights(12), method.optimizer, itertools.repeat(BATCH), [(12, 9)], layered=LAYERED
    )
    assert losses[-1] < 0.8 * plain.losses[-1]


@pytest.mark.parametrize(("pre", "post"), [(1, 0), (2, 1)])
def test_one_level_is_the_plain_optimiser(pre, post):
    optimizer, params = optax.adam(0.03), weights(5)
    method = MGOPT(loss, optimizer, levels=1, pre=pre, post=post, layered=LAYERED)
    state, steps = method.init(params), pre + post
    for _ in range(2):
        params, state, info = method.step(params, state, BATCH)
    data = itertools.repeat(BATCH)
    plain = nested_iteration(loss, weights(5), optimizer, data, [(5, 2 * steps)], layered=LAYERED)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    np.testing.assert_allclose(info.loss, plain.losses[steps], rtol=1e-12)
    assert info.work == 2 * 5 * steps and info.step_lengths.shape == (0,)


def test_a_bad_correction_is_rejected():
    """Coarse steps that climb, or are not numbers: the fine steps remain, exactly."""
    params = weights(6)
    plain = MGOPT(loss, optax.sgd(0.1), levels=1, layered=LAYERED)
    expected, *_ = plain.step(params, plain.init(params), BATCH)
    for rate in (-0.1, np.nan):
        method = MGOPT(loss, (optax.sgd(0.1), optax.sgd(rate)), layered=LAYERED)
        got, _, info = method.step(params, method.init(params), BATCH)
        assert info.step_lengths[0] == 0
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13)


@pytest.mark.parametrize(
    ("e", "length", "tries"), [(-1.0, 1, 1), (-3.0, 0.5, 2), (-27.0, 0.0625, 5), (-1e3, 0, 6)]
)
def test_line_search(e, length, tries):
    """For f = p^2 at 1 (slope 2 e): f(1 + alpha e) must fall to 1 + 0.1 alpha (2 e)."""
    search, f = Backtracking(slope=0.1), lambda p: p**2
    p, e = jnp.ones(()), jnp.asarray(e)
    assert search(f, p, f(p), 2 * e, e) == (length, tries)
    assert search(f, p, f(p), -2 * e, -e) == (0, 0)  # up


def test_work_is_counted():
    """Layer evaluations on levels of 8, 4 and 2 layers, counted by hand; see the comments."""
    method = MGOPT(quadratic, optax.sgd(0.1), levels=3, pre=1, post=1, coarse=5, min_layers=1)
    params = jnp.zeros((8, 2))
    _, _, info = method.step(params, method.init(params), None)
    np.testing.assert_array_equal(info.step_lengths, [1, 1])
    finest = 2 * 8 * 3 + 8  # gradients: before, for v, after; a loss in the line search
    middle = 2 * 4 * 3 + 4  # the same: v's is where the first step, with a known gradient, starts
    coarsest = 2 * 2 * (1 + 4)  # v's, and four of the five steps: the first gradient is known
    assert info.work == finest + middle + coarsest


@pytest.mark.parametrize("layers", [1, 2, 3, 11])
def test_any_depth(layers):
    """Short networks have fewer levels; others need no divisible depth."""
    method = MGOPT(loss, optax.adam(0.01), levels=4, coarsening=2, coarse=2, layered=LAYERED)
    params = weights(layers)
    assert method.depths(params) == {1: (1,), 2: (2,), 3: (3, 2), 11: (11, 6, 3, 2)}[layers]
    new, _, info = method.step(params, method.init(params), BATCH)
    assert new["w"].shape == (layers, 3, 3) and loss(new, BATCH) < info.loss


def test_lbfgs_and_float32():
    """A line-search optimiser gets what it asks for; types stay."""
    method = MGOPT(quadratic, optax.lbfgs(), coarse=3, coarse_state="keep")
    params = jnp.zeros((8, 2), jnp.float32)
    params, _, _ = method.step(params, method.init(params), None)
    assert params.dtype == jnp.float32
    np.testing.assert_allclose(params, 1, atol=1e-5)


class Tanh(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def test_nnx_model():
    """`split_model` makes a model such a function; the trained weights go back into it."""
    rngs = nnx.Rngs(0)
    stack = ParallelStack(Tanh, 8, rngs=rngs, smooth_init=True, forward=SERIAL)
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), stack, nnx.Linear(3, 3, rngs=rngs))
    params, merge, layered = split_model(model)

    def model_loss(params, batch):
        return jnp.mean((merge(params)(batch[0]) - batch[1]) ** 2)

    data = jax.tree.map(lambda a: a.astype(jnp.float32), BATCH)
    method = MGOPT(model_loss, optax.adam(0.01), layered=layered)
    state = method.init(params)
    for _ in range(5):
        params, state, info = method.step(params, state, data)
    nnx.update(model, params)
    assert jnp.mean((model(data[0]) - data[1]) ** 2) < info.loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 0}, "levels=0: must be >= 1"),
        ({"pre": 0, "post": 0}, "one of them must be at least 1"),
        ({"coarsening": 1}, "coarsening=1: must be >= 2"),
        ({"coarsening": (2, 2)}, "coarsening has 2 entries: must have 1"),
        ({"restriction": "transpose"}, "restriction='transpose': must be one of"),
        ({"coarse_state": "new"}, "coarse_state='new': must be one of"),
        ({"optimizer": (optax.sgd(1.0),)}, "optimizer has 1 entries: must have 2"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        MGOPT(**{"loss": loss, "optimizer": optax.sgd(1.0)} | options)


def test_more_errors():
    with pytest.raises(ValueError, match=r"slope=1.5: must be between 0 and 1"):
        Backtracking(slope=1.5)
    method = MGOPT(quadratic, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"params\['n'\] is of type int64: all weights"):
        method.init({"w": jnp.ones(4), "n": jnp.arange(4)})
    mixed = dataclasses.replace(method, optimizer=(optax.sgd(0.1), optax.adam(0.1)))
    with pytest.raises(ValueError, match="the levels' optimisers differ in kind"):
        mixed.init(jnp.ones(4))
