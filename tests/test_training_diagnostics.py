"""Norms across depth against a serial loop and its derivatives; they are free when off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxbraid import MGRIT, parallel_ode_net
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training import diagnose, diagnose_net, time_parts
from jaxbraid.training._timers import _covered
from nets import dense, dense_weights, mesh_of

N, M = 6, 2
EXACT = MGRIT(coarsening=M, max_iters=3)
W = dense_weights(N)
X = jax.random.normal(jax.random.key(0), (4, 3))


def loss(y):
    return jnp.sum(jnp.sin(y))


def truth(w=W, shape=None):
    """States, their adjoints by perturbing each, and the gradient, one layer after another."""

    def last(w, bumps):
        us = [X + bumps[0]]
        for n in range(N):
            us.append(us[-1] + jnp.tanh(us[-1] @ w[n]) / N + bumps[n + 1])
        return loss(us[-1]), jnp.stack(us)

    zero = jnp.zeros((N + 1, *X.shape))
    (grads, adjoints), us = jax.grad(last, argnums=(0, 1), has_aux=True)(w, zero)
    return us, adjoints, grads


def norms(a):
    return np.sqrt((np.asarray(a) ** 2).reshape(len(a), -1).sum(1))


def check(found, name, grads):
    us, adjoints, _ = truth()
    np.testing.assert_allclose(found.states, norms(us), rtol=1e-11)
    np.testing.assert_allclose(found.step_in, norms(us[:-1]), rtol=1e-11)
    np.testing.assert_allclose(found.step_out, norms(us[1:]), rtol=1e-11)
    np.testing.assert_allclose(found.increments, norms(us[1:] - us[:-1]), rtol=1e-11)
    np.testing.assert_allclose(found.adjoints, norms(adjoints), rtol=1e-6)
    np.testing.assert_allclose(found.weights[name], norms(W), rtol=1e-11)
    np.testing.assert_allclose(found.gradients[name], norms(grads), rtol=1e-11)


@pytest.mark.parametrize("mesh", [None, (4, 2)])
def test_norms_of_a_net(mesh):
    options = {"forward": EXACT}
    if mesh is not None:
        options |= {"mesh": mesh_of(*mesh), "layer_axis": "depth", "batch_axis": "data"}
    found = diagnose_net(parallel_ode_net(dense, W, **options), loss, X)
    check(found, "", truth()[2])
    assert found.forward.residuals.shape == (3,) and found.adjoint.residuals[-1] < 1e-12


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, use_bias=False, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def make_model():
    stack = ParallelStack(Block, N, rngs=nnx.Rngs(0), forward=EXACT)
    stack.blocks.linear.kernel[...] = W
    return nnx.Sequential(lambda x: x, stack)


def model_loss(model, x):
    return loss(model(x))


def training_step(model):
    graph, state = nnx.split(model)
    step = jax.value_and_grad(lambda state: model_loss(nnx.merge(graph, state), X))
    return jax.jit(step).lower(state).as_text()


def test_norms_of_the_stacks_in_a_model_and_a_training_step_that_knows_nothing_of_them():
    model = make_model()
    before = training_step(model)
    found = diagnose(model, model_loss, X)
    assert list(found) == ["layers.1"]
    check(found["layers.1"], "linear.kernel", truth()[2])
    assert training_step(model) == before


def test_table_and_plot(tmp_path):
    found = diagnose(make_model(), model_loss, X)["layers.1"]
    assert found.table().row_count == N and found.table(rows=3).row_count == 3
    console = Console(width=120)
    with console.capture() as captured:
        console.print(found.table())
    assert f"{norms(truth()[0])[0]:.3g}" in captured.get()
    figure = found.plot()
    figure.savefig(tmp_path / "norms.png")
    lines = figure.axes[0].get_lines()
    np.testing.assert_allclose(lines[0].get_ydata(), norms(truth()[0]), rtol=1e-11)


def test_stacks_that_are_not_called_once():
    class Twice(nnx.Module):
        def __init__(self):
            self.stack = ParallelStack(Block, N, rngs=nnx.Rngs(0), forward=EXACT)

        def __call__(self, x, times):
            for _ in range(times):
                x = self.stack(x)
            return x

    with pytest.raises(ValueError, match="'stack' is called twice"):
        diagnose(Twice(), lambda m, x: loss(m(x, 2)), X)
    with pytest.raises(ValueError, match="'stack' is not called"):
        diagnose(Twice(), lambda m, x: loss(m(x, 0)), X)
    with pytest.raises(ValueError, match="no ParallelStack"):
        diagnose(Block(nnx.Rngs(0)), model_loss, X)


@pytest.mark.slow
def test_times_and_the_share_of_communication():
    mesh = {"mesh": mesh_of(4), "layer_axis": "depth"}
    many = time_parts(parallel_ode_net(dense, W, forward=EXACT, **mesh), X, repeats=2)
    assert many.forward > 0 and many.total >= many.forward
    assert 0 < many.communication_forward < 1 and 0 < many.communication_gradient < 1
    one = time_parts(parallel_ode_net(dense, W, forward=EXACT), X, repeats=2)
    assert one.communication_forward == one.communication_gradient == 0
    table = many.table()
    assert table.row_count == 4


def test_overlapping_events_count_once():
    assert _covered([(3, 4), (0, 2), (1, 2.5), (1.5, 2)]) == 3.5
