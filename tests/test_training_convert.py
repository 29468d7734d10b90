"""Conversion between parallel and plain serial networks, and resumed training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxbraid import MGRIT
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.nn import SplineStack
from jaxbraid.training import SerialStack, restore_training, save_training, to_parallel, to_serial
from nets import mesh_of

N, WIDTH = 5, 3
EXACT = MGRIT(coarsening=2, max_iters=3)
ROUGH = MGRIT(coarsening=2, max_iters=1, cf_relax=0)
X = jax.random.normal(jax.random.key(0), (4, WIDTH))
SIDE = jnp.linspace(0.5, 1, 4)


class Block(nnx.Module):
    """Everything that a block may have: BatchNorm, Dropout, time, step and side input."""

    def __init__(self, rngs, axis_name=None):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, axis_name=axis_name, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x, t, dt, side):
        y = jnp.tanh(self.norm(self.drop(self.linear(x))) + t)
        return y * side[:, None] + 0.1 * dt * x


class Model(nnx.Module):
    def __init__(self, stack, also=()):
        self.stack = stack
        self.also = nnx.List(also)
        self.close = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(3))

    def __call__(self, x, side):
        for stack in (self.stack, *self.also):
            x = stack(x, side=side)
        return self.close(x)


def double(module):
    state = nnx.state(module)
    cast = lambda a: a.astype(float) if jnp.issubdtype(a.dtype, jnp.floating) else a  # noqa: E731
    nnx.update(module, jax.tree.map(cast, state))
    return module


def make_stack(block=Block, **options):
    options = {"forward": EXACT, "t_final": 2.0} | options
    return double(ParallelStack(block, N, rngs=nnx.Rngs(1), **options))


def loss(model, x, side):
    return jnp.sum(jnp.sin(model(x, side)))


def close(a, b, rtol=1e-11):
    a, b = (jax.tree.leaves(nnx.to_pure_dict(s)) for s in (a, b))
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-13)


def test_serial_network_has_the_same_outputs_gradients_statistics_and_masks():
    """Training mode, twice, so that statistics and PRNG counters have moved on alike."""
    stack = make_stack()
    model = double(Model(stack, [stack]))  # the same stack twice
    serial = to_serial(model)
    assert isinstance(serial.stack, SerialStack) and serial.also[0] is serial.stack
    assert isinstance(model.stack, ParallelStack), "the model itself stays as it is"
    assert not any(isinstance(m, ParallelStack) for _, m in nnx.iter_modules(serial))
    for _ in range(2):
        value, grads = nnx.value_and_grad(loss)(model, X, SIDE)
        expected, truth = nnx.value_and_grad(loss)(serial, X, SIDE)
        np.testing.assert_allclose(value, expected, rtol=1e-11)
        path = next(k for k in nnx.to_pure_dict(grads) if k in ("also", "stack"))
        got = nnx.to_pure_dict(grads)[path]
        got = got[0]["blocks"] if path == "also" else got["blocks"]
        truth_dict = nnx.to_pure_dict(truth)[path]
        blocks = (truth_dict[0] if path == "also" else truth_dict)["blocks"]
        want = jax.tree.map(lambda *a: jnp.stack(a), *[blocks[n] for n in range(N)])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)
    close(nnx.state(to_serial(model)), nnx.state(serial))
    close(nnx.state(to_parallel(serial, forward=EXACT)), nnx.state(model))


def test_there_and_back_is_the_same_model():
    stack = make_stack()
    back = to_parallel(to_serial(stack), forward=EXACT)
    assert back.options == stack.options and back.layers == N
    close(nnx.state(back), nnx.state(stack), rtol=0)
    np.testing.assert_array_equal(back(X, side=SIDE), stack(X, side=SIDE))


def test_from_a_mesh_to_one_device_and_back():
    """BatchNorm of the whole batch: axis_name goes and comes; masks are off, as parts differ."""
    mesh = {"mesh": mesh_of(4, 2), "layer_axis": "depth", "batch_axis": "data"}
    stack = make_stack(lambda rngs: Block(rngs, "data"), **mesh)
    stack.set_attributes(deterministic=True)
    nnx.update(stack, jax.device_put(nnx.state(stack), NamedSharding(mesh["mesh"], P())))
    serial = to_serial(stack)
    assert {len(a.devices()) for a in jax.tree.leaves(nnx.state(serial))} == {1}
    expected = stack(X, side=SIDE)
    np.testing.assert_allclose(serial(X, side=SIDE), expected, rtol=1e-11)
    close(nnx.state(to_serial(stack)), nnx.state(serial))
    back = to_parallel(serial, forward=EXACT, **mesh)
    assert back.blocks.norm.axis_name == "data" and serial.blocks[0].norm.axis_name is None
    np.testing.assert_allclose(back(X, side=SIDE), stack(X, side=SIDE), rtol=1e-11)


class Driven(nnx.Module):
    """A block with an input of its own in each layer, and time."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, t, inputs):
        return jnp.tanh(self.linear(x) + t * inputs)


def test_inputs_of_layers_and_a_later_start():
    stack = make_stack(Driven, t_start=0.5)
    inputs = jax.random.normal(jax.random.key(2), (N, *X.shape))
    serial = to_serial(stack)
    expected = stack(X, inputs=inputs)
    np.testing.assert_allclose(serial(X, inputs=inputs), expected, rtol=1e-11)
    back = to_parallel(serial, forward=EXACT)
    np.testing.assert_array_equal(back(X, inputs=inputs), expected)


def test_splines_become_the_layers_that_they_describe():
    stack = double(SplineStack(Driven, N, rngs=nnx.Rngs(1), n_basis=3, degree=1, forward=EXACT))
    inputs = jnp.ones((N, *X.shape))
    got, expected = to_serial(stack)(X, inputs=inputs), stack(X, inputs=inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-11)


def test_steps_and_half_precision():
    def step(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.bfloat16)

    stack = ParallelStack(step, N, rngs=nnx.Rngs(0), form="step", forward=EXACT)
    x = X.astype(jnp.bfloat16)
    got = to_serial(stack)(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(float), stack(x).astype(float), rtol=0.05, atol=0.01)


def test_serial_network_can_be_exported():
    serial = to_serial(make_stack())
    serial.eval()
    graph, state = nnx.split(serial)
    data = nnx.to_pure_dict(nnx.filter_state(state, (nnx.Param, nnx.BatchStat)))
    rest = nnx.filter_state(state, nnx.RngState)

    @jax.jit
    def apply(data, x):
        params = nnx.state(serial, (nnx.Param, nnx.BatchStat))
        nnx.replace_by_pure_dict(params, data)
        return nnx.merge(graph, params, rest)(x, side=SIDE)

    exported = jax.export.export(apply)(data, X)
    np.testing.assert_allclose(exported.call(data, X), serial(X, side=SIDE), rtol=1e-12)


def test_what_cannot_be_converted_is_named():
    serial = SerialStack(
        [nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))]
    )
    with pytest.raises(ValueError, match=r"blocks\[1\] differs"):
        to_parallel(serial)
    block = linen.Dense(3)
    with pytest.raises(TypeError, match=r"is a Dense: .* NNX module\. .*serial=True"):
        to_serial(block)


def test_stacks_in_dicts_lists_and_modules_of_modules():
    stacks = [ParallelStack(lambda r: nnx.Linear(3, 3, rngs=r), N, rngs=nnx.Rngs(0)) for _ in "ab"]
    model = nnx.Sequential(nnx.Dict(inner=stacks[0])["inner"], nnx.Sequential(stacks[1]))
    model.extra = nnx.Dict(one=stacks[0])
    serial = to_serial(model)
    kinds = [type(m) for _, m in nnx.iter_modules(serial)]
    assert kinds.count(SerialStack) == 2 and ParallelStack not in kinds
    assert serial.extra["one"] is serial.layers[0]
    model.extra = nnx.data((stacks[0], stacks[1]))
    model.layers = nnx.List([])
    with pytest.raises(TypeError, match="is in a tuple"):
        to_serial(model)


def test_stacks_within_blocks_stay():
    def inner(rngs):
        return ParallelStack(lambda r: nnx.Linear(3, 3, rngs=r), 3, rngs=rngs, forward=EXACT)

    stack = ParallelStack(inner, N, rngs=nnx.Rngs(0), forward=EXACT)
    serial = to_serial(stack)
    assert all(isinstance(block, ParallelStack) for block in serial.blocks)
    np.testing.assert_allclose(serial(X.astype("f")), stack(X.astype("f")), rtol=1e-5)


# --------------------------------------------------------------------- checkpoints


def make_training(forward=ROUGH, mesh=None):
    place = {} if mesh is None else {"mesh": mesh, "layer_axis": "depth"}
    model = double(Model(make_stack(forward=forward, **place)))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer):
    optimizer.update(model, nnx.grad(loss)(model, X, SIDE))


def train(model, optimizer, steps):
    for _ in range(steps):
        train_step(model, optimizer)


@pytest.mark.slow
def test_resumed_training_is_bit_identical(tmp_path):
    whole, parts = make_training(), make_training()
    train(*whole, 3)
    train(*parts, 1)
    save_training(tmp_path / "1", *parts, notes={"step": 1})
    resumed = make_training()
    train(*resumed, 2)  # whatever it was before
    assert restore_training(tmp_path / "1", *resumed) == {"step": 1}
    train(*resumed, 2)
    for a, b in zip(whole, resumed, strict=True):
        close(nnx.state(a), nnx.state(b), rtol=0)
    assert int(resumed[1].step[...]) == 3


def test_warm_restart_elsewhere(tmp_path):
    """On a mesh, with other options, and with a new optimizer: the network is the same."""
    model, optimizer = make_training()
    train(model, optimizer, 1)
    save_training(tmp_path / "1", model, optimizer)
    mesh = mesh_of(4)
    other, fresh = make_training(EXACT, mesh)
    nnx.update(other, jax.device_put(nnx.state(other), NamedSharding(mesh, P())))
    assert restore_training(tmp_path / "1", other) is None
    kernel = other.stack.blocks.linear.kernel[...]
    assert kernel.sharding == NamedSharding(mesh, P()) and int(fresh.step[...]) == 0
    np.testing.assert_allclose(other(X, SIDE), to_serial(model)(X, SIDE), rtol=1e-11)


def test_another_model_is_refused_and_stays(tmp_path):
    model, optimizer = make_training()
    save_training(tmp_path / "1", model, optimizer)
    other = double(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    before = nnx.state(nnx.clone(other))
    with pytest.raises(ValueError, match="like: model/"):
        restore_training(tmp_path / "1", other)
    close(nnx.state(other), before, rtol=0)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        restore_training(tmp_path / "2", model)
