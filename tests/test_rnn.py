"""Recurrent networks in parallel over the sequence against Flax's own, which steps through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nets
from jaxbraid import MGRIT
from jaxbraid.nn import RNN, GRUCell, ImplicitGRUCell, LSTMCell

BATCH, FEATURES, HIDDEN = 4, 3, 5
EXACT = MGRIT(levels=3, coarsening=2, max_iters=14)
ADJOINT = MGRIT(levels=3, coarsening=2, max_iters=14)


def sequences(n, batch=BATCH, dtype=jnp.float64):
    return jax.random.normal(jax.random.key(n), (batch, n, FEATURES), dtype)


def cell(kind, features=FEATURES, seed=0, **options):
    return kind(features, HIDDEN, param_dtype=jnp.float64, rngs=nnx.Rngs(seed), **options)


def on_mesh(mesh):
    if mesh is None:
        return {}
    return {"mesh": nets.mesh_of(*mesh), "layer_axis": "depth", "batch_axis": "data"}


def implicit_step(cell, h, x, dt):
    """Written out from the paper's formula."""
    zx, zh = cell.dense_i(x), cell.dense_h(h)
    k = HIDDEN
    r = jax.nn.sigmoid(zx[..., :k] + zh[..., :k])
    z = jax.nn.sigmoid(zx[..., k : 2 * k] + zh[..., k : 2 * k])
    n = jnp.tanh(zx[..., 2 * k :] + r * zh[..., 2 * k :])
    d = dt * (1 - z)
    return (h + d * n) / (1 + d)


class Stepwise(nnx.Module):
    """The truth: cells upon each other, one step after another."""

    def __init__(self, cells, dt=1.0):
        self.cells, self.dt = nnx.List(cells), dt

    def __call__(self, x, lengths=None):
        carries = [c.initialize_carry(x[:, 0].shape, nnx.Rngs(0)) for c in self.cells]
        outputs = []
        for n in range(x.shape[1]):
            y = x[:, n]
            for i, c in enumerate(self.cells):
                if isinstance(c, ImplicitGRUCell):
                    new = y = implicit_step(c, carries[i], y, self.dt)
                else:
                    new, y = c(carries[i], y)
                if lengths is not None:
                    on = (n < lengths)[:, None]
                    new = jax.tree.map(lambda a, b, on=on: jnp.where(on, a, b), new, carries[i])
                    y = new[1] if isinstance(new, tuple) else new
                carries[i] = new
            outputs.append(y)
        return tuple(carries), jnp.stack(outputs, 1)


def value_and_grads(model, x, *more):
    """A loss of outputs and carries, with the gradients of the cells and of the inputs."""
    graphdef, state = nnx.split(model)

    def loss(state, x):
        carry, y = nnx.merge(graphdef, state)(x, *more)
        ends = sum(jnp.sum(jnp.sin(c)) for c in jax.tree.leaves(carry))
        return jnp.sum(y**2) + ends, y

    (value, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    return value, y, (nnx.to_pure_dict(grads[0])["cells"], grads[1])


def assert_same(a, b, tol=1e-10):
    assert abs(a[0] - b[0]) < tol * abs(b[0])
    assert nets.relative_error(a[1], b[1]) < tol
    assert nets.relative_error(a[2], b[2]) < tol


@pytest.mark.parametrize(
    ("kind", "ahead"),
    [
        *(
            (kind, ahead)
            for kind in (GRUCell, ImplicitGRUCell, LSTMCell)
            for ahead in (False, True)
        ),
        *((kind, False) for kind in (nnx.GRUCell, nnx.LSTMCell, nnx.SimpleCell)),
    ],
)
def test_outputs_and_gradients_are_those_of_stepping_through(kind, ahead, monkeypatch):
    """Whether inputs are projected step by step, or for all steps at once."""
    if ahead:
        monkeypatch.setattr("jaxbraid.nn._rnn.FEW", 0)
    x = sequences(13)
    truth = Stepwise([cell(kind)])
    model = RNN(cell(kind), forward=EXACT, adjoint=ADJOINT, return_carry=True)
    tol = 1e-5 if kind is nnx.SimpleCell else 1e-10  # it computes in single precision
    assert_same(value_and_grads(model, x), value_and_grads(truth, x), tol)


@pytest.mark.parametrize("mesh", [(4, 2), (2, 1)])
@pytest.mark.parametrize("kind", [ImplicitGRUCell, LSTMCell])
def test_two_stacked_cells_on_a_mesh_with_ragged_sequences(kind, mesh):
    x, lengths = sequences(11), jnp.array([11, 1, 6, 9])
    cells = [cell(kind), cell(kind, HIDDEN, 1)]
    model = RNN(cells, dt=0.5, forward=EXACT, adjoint=ADJOINT, return_carry=True, **on_mesh(mesh))
    graphdef, state = nnx.split(model)

    def run(x):
        return nnx.merge(graphdef, state)(x, seq_lengths=lengths)

    def truth(x):
        return Stepwise(cells, 0.5)(x, lengths) if kind is ImplicitGRUCell else None

    if kind is ImplicitGRUCell:
        got, want = jax.jit(run)(x), truth(x)
        assert nets.relative_error(got, want) < 1e-11
        pull = [jax.grad(lambda x, f=f: jnp.sum(f(x)[1] ** 2))(x) for f in (run, truth)]
        assert nets.relative_error(*pull) < 1e-10
    else:  # a step of an LSTM of length 1/2 is no usual one
        half = RNN(cells, dt=0.5, forward=MGRIT(levels=1), return_carry=True)
        assert nets.relative_error(jax.jit(run)(x), half(x, seq_lengths=lengths)) < 1e-11


@pytest.mark.parametrize("kind", [GRUCell, LSTMCell])
def test_a_long_step_is_many_short_ones_where_gates_do_not_change(kind):
    """With no recurrent weights the gates depend on the input only."""
    c = cell(kind)
    c.dense_h.kernel[...] = jnp.zeros_like(c.dense_h.kernel[...])
    z = c.project(sequences(1)[:, 0])
    start = jax.tree.map(lambda a: a + 0.3, c.initialize_carry((BATCH, FEATURES), nnx.Rngs(0)))
    once, carry = c.step(start, z, 6.0), start
    for _ in range(6):
        carry = c.step(carry, z)
    assert nets.relative_error(once, carry) < 1e-12


def test_saturated_gates_stay_finite():
    c = cell(LSTMCell)
    z = jnp.full((BATCH, 4 * HIDDEN), 1e3)
    carry = c.initialize_carry((BATCH, FEATURES), nnx.Rngs(0))
    value, grad = jax.value_and_grad(lambda z: jnp.sum(c.step(carry, z, 4.0)[0]))(z)
    assert np.isclose(value, 4 * BATCH * HIDDEN) and np.all(np.isfinite(grad))


def test_the_error_falls_in_every_iteration():
    x = sequences(64)
    cells = [cell(ImplicitGRUCell), cell(ImplicitGRUCell, HIDDEN, 1)]
    truth = RNN(cells, dt=0.2, forward=MGRIT(levels=1))

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    y, g = truth(x), nnx.grad(loss, argnums=1)(truth, x)
    values, grads = [], []
    for k in range(1, 6):
        config = MGRIT(levels=2, coarsening=4, cf_relax=0, max_iters=k)
        model = RNN(cells, dt=0.2, forward=config, adjoint=config)
        values.append(nets.relative_error(model(x), y))
        grads.append(nets.relative_error(nnx.grad(loss, argnums=1)(model, x), g))
    for errors in (values, grads):
        assert np.all(np.diff(errors) < 0) and errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("options", [{"reverse": True}, {"reverse": True, "keep_order": True}])
@pytest.mark.parametrize("ragged", [False, True])
def test_backwards_and_in_both_directions_as_in_flax(options, ragged):
    x, c = sequences(7), cell(nnx.GRUCell)
    lengths = jnp.array([7, 2, 1, 5]) if ragged else None
    got = RNN(c, forward=EXACT)(x, seq_lengths=lengths, **options)
    want = nnx.RNN(c)(x, seq_lengths=lengths, **options)
    valid = jnp.ones((BATCH, 7), bool) if lengths is None else jnp.arange(7) < lengths[:, None]
    assert nets.relative_error(got * valid[..., None], want * valid[..., None]) < 1e-12
    two = nnx.Bidirectional(RNN(c, forward=EXACT), RNN(c, forward=EXACT))
    plain = nnx.Bidirectional(nnx.RNN(c), nnx.RNN(c))
    mask = valid[..., None]
    got, want = two(x, seq_lengths=lengths), plain(x, seq_lengths=lengths)
    assert nets.relative_error(got * mask, want * mask) < 1e-12


def test_an_initial_carry_is_used_and_differentiated():
    x, c = sequences(9), cell(GRUCell)
    h = jax.random.normal(jax.random.key(1), (BATCH, HIDDEN))

    def loss(model, h):
        return jnp.sum(model(x, initial_carry=h) ** 2)

    got, want = (nnx.grad(loss, argnums=1)(m, h) for m in (RNN(c, forward=EXACT), nnx.RNN(c)))
    assert nets.relative_error(got, want) < 1e-10


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 10])
def test_lower_precisions_and_batches_of_one(dtype, n):
    c = GRUCell(FEATURES, HIDDEN, dtype=dtype, rngs=nnx.Rngs(0))
    x = sequences(n, batch=1, dtype=dtype)
    y = RNN(c, forward=EXACT)(x)
    truth = nnx.RNN(c)(x)
    assert y.dtype == truth.dtype and y.shape == (1, n, HIDDEN)
    eps = float(jnp.finfo(dtype).eps)
    assert np.max(np.abs(np.asarray(y - truth, np.float64))) < 8 * eps


def test_serial_mode_and_time_first():
    x, c = sequences(12), cell(ImplicitGRUCell)
    few = MGRIT(levels=2, coarsening=4, max_iters=1)
    model = RNN(c, forward=few, time_major=True)
    inexact = model(jnp.moveaxis(x, 1, 0))
    model.set_attributes(serial=True)
    exact = model(jnp.moveaxis(x, 1, 0))
    truth = Stepwise([c])(x)[1]
    assert nets.relative_error(jnp.moveaxis(exact, 0, 1), truth) < 1e-12
    assert nets.relative_error(inexact, exact) > 1e-6


class Counting(nnx.Module):
    """A user's cell of no known kind, whose output is no part of its carry."""

    def __init__(self):
        self.w = nnx.Param(jnp.array(0.7))

    def __call__(self, carry, x, dt=1.0):
        c = carry["c"] * (1 - 0.5 * dt) + dt * self.w[...] * x.sum(-1)
        return {"c": c}, jnp.stack([c + carry["c"], x[..., 0]], -1)

    def initialize_carry(self, input_shape, rngs=None):
        return {"c": jnp.zeros(input_shape[:-1])}


def test_a_cell_of_the_users_own():
    x, lengths = sequences(10), jnp.array([10, 4, 7, 1])
    model = RNN(Counting(), forward=EXACT, return_carry=True)
    carry, y = model(x, seq_lengths=lengths)
    c, want = np.zeros(BATCH), np.zeros((BATCH, 10, 2))
    for n in range(10):
        on = n < np.asarray(lengths)
        new = np.where(on, 0.5 * c + 0.7 * np.asarray(x[:, n]).sum(-1), c)
        out = np.stack([new + c, np.asarray(x[:, n, 0])], -1)
        want[:, n] = np.where(on[:, None], out, want[:, n - 1])
        c = new
    assert nets.relative_error(y, want) < 1e-12
    assert nets.relative_error(carry["c"], c) < 1e-12


def test_solve_tells_how_far_it_has_converged():
    x = sequences(32)
    solution = RNN(cell(ImplicitGRUCell), forward=MGRIT(tol=1e-9, max_iters=20)).solve(x)
    assert solution.stats.converged and solution.us[0].shape == (33, BATCH, HIDDEN)


def test_bad_input_is_named():
    c = cell(GRUCell)
    with pytest.raises(TypeError, match=r"cells=.*recurrent cell"):
        RNN([])
    with pytest.raises(ValueError, match="dt=0: must be positive"):
        RNN(c, dt=0)
    model = RNN(c)
    with pytest.raises(ValueError, match=r"inputs has shape \(4, 3\): it must be \(batch"):
        model(jnp.ones((4, 3)))
    with pytest.raises(ValueError, match=r"seq_lengths has shape \(3,\).*\(4,\)"):
        model(sequences(5), seq_lengths=jnp.ones(3, int))
    with pytest.raises(ValueError, match="at least one step"):
        model(jnp.ones((4, 0, 3)))
    with pytest.raises(TypeError, match="carries of the 2 cells"):
        RNN([c, cell(GRUCell, HIDDEN)])(sequences(5), initial_carry=jnp.zeros((4, HIDDEN)))
