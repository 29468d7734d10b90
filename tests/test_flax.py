"""The NNX and Linen stacks against a Python loop over their single blocks.

The loop applies one block after another with its slice of the stack's variables; it shares nothing
with the engine. Stacks iterate to exactness, N/m iterations, where MGRIT is a direct solver. The
tolerance is a few hundred roundings: the operations are the same, but batched over layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxbraid.flax
from jaxbraid import MGRIT
from nets import mesh_of

N, M, WIDTH, BATCH = 5, 2, 3, 4
EXACT = MGRIT(coarsening=M, max_iters=-(-N // M))
INEXACT = MGRIT(coarsening=M, max_iters=1, cf_relax=0)
MESHES = (None, (2, 2))
X = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
SIDE = jnp.linspace(0.5, 1.0, BATCH)


def place(mesh):
    """Options of a stack for the mesh `(layers, batch)` or one device."""
    if mesh is None:
        return {}
    return {"mesh": mesh_of(*mesh), "layer_axis": "depth", "batch_axis": "data"}


def batch_axis(mesh):
    return None if mesh is None else "data"


def close(got, expected, rtol=1e-11):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-13)


def loss(y):
    return jnp.sum(jnp.sin(y))


def double(tree):
    """Everything real in float64; Flax makes parameters and statistics in float32."""
    return jax.tree.map(
        lambda a: a.astype(float) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def layer(tree, n):
    return jax.tree.map(lambda a: a[n], tree)


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def parts_of(x, parts):
    return enumerate(jnp.split(x, parts))


# ---------------------------------------------------------------------------------- NNX


class NnxBlock(nnx.Module):
    """Takes everything that a block may take by name."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, t, dt, side):
        return jnp.tanh(self.dense(x) + t) * side[:, None] + 0.1 * dt * x


class NnxNormBlock(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.dense(x)))


class NnxDropBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.drop(self.dense(x)))


def nnx_stack(make_block, **options):
    options = {"forward": EXACT} | options
    stack = jaxbraid.flax.nnx.ParallelStack(make_block, N, rngs=nnx.Rngs(1), **options)
    nnx.update(stack, double(nnx.state(stack)))
    return stack


def nnx_loop(stack, x, *, extras=False, part=None):
    """The blocks of `stack` in turn: `(states, the blocks' variables afterwards)`."""
    graphdef, state = nnx.split(stack.blocks)
    us, after = [x], []
    for n in range(N):
        one = layer(state, n)
        if part is not None:
            one = nnx.map_state(lambda _, v: with_part(v, part), one)
        block = nnx.merge(graphdef, one, copy=True)
        given = {"t": n / N, "dt": 1 / N, "side": SIDE} if extras else {}
        us.append(us[-1] + block(us[-1], **given) / N)
        after.append(nnx.state(block))
    return us, stacked(after)


def with_part(variable, part):
    """The variable as a part of a split batch sees it: the part's number is folded into keys."""
    if not isinstance(variable, nnx.RngKey):
        return variable
    return variable.replace(jax.random.fold_in(variable.get_value(), part))


def nnx_counts_and_statistics(module):
    return nnx.to_pure_dict(nnx.state(module, (nnx.BatchStat, nnx.RngCount)))


@pytest.mark.parametrize("mesh", MESHES)
def test_nnx_value_and_gradients(mesh):
    """Also: `t`, `dt` and `side` are taken by name."""
    stack = nnx_stack(NnxBlock, **place(mesh))
    graphdef, params = nnx.split(stack)

    def parallel(params, x, side):
        return loss(nnx.merge(graphdef, params)(x, side=side))

    def serial(params, x):
        return loss(nnx_loop(nnx.merge(graphdef, params), x, extras=True)[0][-1])

    grad, expected = (jax.jit(jax.value_and_grad(f, (0, 1))) for f in (parallel, serial))
    close(grad(params, X, SIDE), expected(params, X))


@pytest.mark.parametrize("mesh", MESHES)
def test_nnx_batch_norm(mesh):
    """Statistics move once a call, as in the loop; so do gradients through them. Eval: neither."""
    stack = nnx_stack(lambda rngs: NnxNormBlock(rngs, batch_axis(mesh)), **place(mesh))
    truth = nnx_stack(NnxNormBlock)  # the same parameters, normalised over the one whole batch
    split = {name: nnx.split(s, nnx.Param, ...) for name, s in (("net", stack), ("loop", truth))}

    def value(params, rest, name):
        stack = nnx.merge(split[name][0], params, rest, copy=True)
        if name == "net":
            y = stack(X)
        else:
            us, after = nnx_loop(stack, X)
            y = us[-1]
            nnx.update(stack.blocks, after)
        return loss(y), nnx_counts_and_statistics(stack)

    grad = jax.jit(jax.value_and_grad(value, has_aux=True), static_argnums=2)
    _, params, rest = split["net"]
    got = grad(params, rest, "net")
    close(got, grad(params, rest, "loop"))
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).min()), got[0][1], nnx_counts_and_statistics(stack)
    )
    assert all(distance > 0 for distance in jax.tree.leaves(moved))

    for s in (stack, truth):
        s.eval()
    before = nnx_counts_and_statistics(stack)
    close(nnx.jit(lambda stack, x: stack(x))(stack, X), nnx_loop(truth, X)[0][-1])
    close(nnx_counts_and_statistics(stack), before, rtol=0)


def test_nnx_batch_norm_by_parts():
    """Without an axis name each part has statistics of its own; their mean is recorded."""
    stack = nnx_stack(NnxNormBlock, **place((2, 2)))
    loops = [nnx_loop(stack, x) for _, x in parts_of(X, 2)]
    y = nnx.jit(lambda stack, x: stack(x))(stack, X)
    close(y, jnp.concatenate([us[-1] for us, _ in loops]))
    means = [nnx.to_pure_dict(nnx.filter_state(after, nnx.BatchStat)) for _, after in loops]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *means)
    close(nnx.to_pure_dict(nnx.state(stack.blocks, nnx.BatchStat)), mean)


@pytest.mark.parametrize("iterations", [-(-N // M), -(-N // M) + 3])
def test_nnx_dropout(iterations):
    """One mask a layer and call, however many iterations; the next call draws anew; eval: none."""
    forward = MGRIT(coarsening=M, max_iters=iterations)
    stack, truth = nnx_stack(NnxDropBlock, forward=forward), nnx_stack(NnxDropBlock)
    call = nnx.jit(lambda stack, x: stack(x))
    ys = []
    for _ in range(2):
        us, after = nnx_loop(truth, X)
        nnx.update(truth.blocks, after)
        ys.append(call(stack, X))
        close(ys[-1], us[-1])
        close(nnx_counts_and_statistics(stack), nnx_counts_and_statistics(truth), rtol=0)
    assert jnp.all(jnp.abs(ys[0] - ys[1]).max(1) > 1e-3)

    stack.eval(), truth.eval()
    close(call(stack, X), nnx_loop(truth, X)[0][-1])
    close(nnx_counts_and_statistics(stack), nnx_counts_and_statistics(truth), rtol=0)


def test_nnx_dropout_gradient_uses_the_masks_of_the_value():
    graphdef, params, rest = nnx.split(nnx_stack(NnxDropBlock), nnx.Param, ...)

    def parallel(params, rest):
        return loss(nnx.merge(graphdef, params, rest, copy=True)(X))

    def serial(params, rest):
        return loss(nnx_loop(nnx.merge(graphdef, params, rest, copy=True), X)[0][-1])

    got, expected = (jax.jit(jax.grad(f))(params, rest) for f in (parallel, serial))
    close(got, expected)


def test_nnx_dropout_on_a_split_batch():
    """Parts of a batch draw different masks, and each one mask a layer."""
    stack = nnx_stack(NnxDropBlock, **place((2, 2)))
    x = jnp.tile(X[: BATCH // 2], (2, 1))  # both parts are the same
    loops = [nnx_loop(stack, part, part=i) for i, part in parts_of(x, 2)]
    y = nnx.jit(lambda stack, x: stack(x))(stack, x)
    close(y, jnp.concatenate([us[-1] for us, _ in loops]))
    assert jnp.all(jnp.abs(y[:2] - y[2:]).max(1) > 1e-3)
    counts = nnx.to_pure_dict(nnx.filter_state(loops[0][1], nnx.RngCount))
    close(nnx_counts_and_statistics(stack.blocks), counts, rtol=0)


class NnxNet(nnx.Module):
    """Opening layer, a stack, a wider stack, closing layer."""

    def __init__(self, rngs, trace, **options):
        def block(width):
            def make(rngs):
                return NnxTrained(width, trace, rngs)

            return make

        stack = jaxbraid.flax.nnx.ParallelStack
        self.opening = nnx.Linear(2, 3, rngs=rngs)
        self.first = stack(block(3), 4, rngs=rngs, smooth_init=True, **options)
        self.between = nnx.Linear(3, 5, rngs=rngs)
        self.second = stack(block(5), 5, rngs=rngs, **options)
        self.closing = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        x = self.between(self.first(self.opening(x)))
        return self.closing(self.second(x))


class NnxTrained(nnx.Module):
    def __init__(self, width, trace, rngs):
        self.dense = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.trace = trace

    def __call__(self, x):
        self.trace()
        return jnp.tanh(self.drop(self.norm(self.dense(x))))


class Trace:
    """Counts how often it is called, that is how often a block is traced."""

    count = 0

    def __call__(self):
        self.count += 1


def on_mesh(tree, mesh):
    """On all devices of the mesh: where a step returns it, else the second step traces again."""
    if mesh is None:
        return tree
    return jax.device_put(tree, NamedSharding(mesh_of(*mesh), PartitionSpec()))


def regression_data():
    """In float32, as models are trained: float64 would change the type of statistics."""
    x = jax.random.normal(jax.random.key(5), (8, 2), jnp.float32)
    return x, jnp.sin(x[:, :1] - x[:, 1:])


@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2), marks=pytest.mark.slow)])
def test_nnx_training(mesh):
    """Loss falls, a second step traces nothing, counters and statistics move in both stacks."""
    trace = Trace()
    model = NnxNet(nnx.Rngs(0), trace, forward=INEXACT, **place(mesh))
    nnx.update(model, on_mesh(nnx.state(model), mesh))
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
    x, y = on_mesh(regression_data(), mesh)

    @nnx.jit
    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer, x, y))]
    first = trace.count
    losses += [float(step(model, optimizer, x, y)) for _ in range(9)]
    assert first > 0 and trace.count == first
    assert np.all(np.isfinite(losses)) and losses[-1] < 0.7 * losses[0]
    for stack in (model.first, model.second):
        assert np.all(stack.blocks.drop.rngs.count.get_value() == 10)
        assert jnp.all(jnp.abs(stack.blocks.norm.mean.get_value()) > 0)


def test_nnx_serial():
    """One attribute makes every stack exact and sequential, and parallel again."""
    stack = nnx_stack(NnxBlock, forward=INEXACT, **place((2, 2)))
    model = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), stack)
    exact = nnx_loop(stack, model.layers[0](X), extras=True)[0][-1]

    @nnx.jit
    def call(model, x):
        return model.layers[1](model.layers[0](x), side=SIDE)

    def error():
        return float(jnp.abs(call(model, X) - exact).max())

    assert error() > 1e-8
    params = nnx.state(model)
    model.set_attributes(serial=True)
    assert error() < 1e-14
    close(nnx.state(model), params, rtol=0)
    model.set_attributes(serial=False)
    assert error() > 1e-8


def test_nnx_serial_with_statistics_of_the_whole_batch():
    """BatchNorm that sums over a mesh's batch axis does so in serial mode too, where it has one."""
    stack = nnx_stack(lambda rngs: NnxNormBlock(rngs, "data"), forward=EXACT, **place((2, 2)))
    parallel = stack(X)
    after = nnx.state(stack)
    fresh = nnx_stack(lambda rngs: NnxNormBlock(rngs, "data"), forward=EXACT, **place((2, 2)))
    fresh.set_attributes(serial=True)
    close(fresh(X), parallel)
    close(nnx.state(fresh), after)
    close(nnx_stack(NnxNormBlock, forward=EXACT)(X), parallel)


def test_nnx_solve_and_adjoint_probe():
    stack = nnx_stack(NnxDropBlock, **place((2, 2)) | {"batch_axis": None})
    us, after = nnx_loop(stack, X)
    graphdef, state = nnx.split(stack)

    def parallel(probe, state):
        stack = nnx.merge(graphdef, state, copy=True)
        solution = stack.solve(X, adjoint_probe=probe)
        return loss(solution.u), (solution, nnx_counts_and_statistics(stack.blocks))

    grad = jax.jit(jax.grad(parallel, has_aux=True))
    record, (solution, counts) = grad(stack.adjoint_probe(), state)
    close(solution.us, jnp.stack(us))
    close(solution.u, us[-1])
    close(counts, nnx.to_pure_dict(nnx.filter_state(after, nnx.RngCount)), rtol=0)
    assert int(solution.stats.iterations) == EXACT.max_iters
    assert solution.stats.residuals[-1] < 1e-13

    def from_states(perturbations, state):
        u = X + perturbations[0]
        for n in range(N):
            u = u + nnx.merge(graphdef, layer(state, n), copy=True)(u) / N + perturbations[n + 1]
        return loss(u)

    graphdef, state = nnx.split(stack.blocks)
    adjoints = jax.jit(jax.grad(from_states))(jnp.zeros((N + 1, BATCH, WIDTH)), state)
    close(record.norms, jnp.linalg.norm(adjoints, axis=(1, 2)))
    assert int(record.iterations) == EXACT.max_iters and record.residuals[-1] < 1e-13


def test_nnx_smooth_init():
    """Equal parameters in all blocks, yet masks of their own; without it, different parameters."""
    smooth, rough = nnx_stack(NnxDropBlock, smooth_init=True), nnx_stack(NnxDropBlock)
    kernel, other = (s.blocks.dense.kernel.get_value() for s in (smooth, rough))
    assert kernel.shape == (N, WIDTH, WIDTH)
    assert jnp.all(kernel == kernel[0]) and jnp.all(jnp.abs(kernel[0]).sum() > 0)
    keys = jax.random.key_data(smooth.blocks.drop.rngs.key.get_value())
    for distinct in (other.reshape(N, -1), keys):
        assert len(np.unique(distinct, axis=0)) == N


class NnxWrongShape(nnx.Module):
    def __init__(self, width, rngs):
        self.dense = nnx.Linear(WIDTH, width, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


class NnxGrows(NnxWrongShape):
    def __call__(self, x):
        self.hidden = nnx.Intermediate(x)
        return self.dense(x)


def test_nnx_bad_input():
    for layers in (0, 2.0):
        with pytest.raises(ValueError, match="layers="):
            jaxbraid.flax.nnx.ParallelStack(NnxDropBlock, layers, rngs=nnx.Rngs(0))
    for width in (1, 5):  # 1 would broadcast
        stack = nnx_stack(lambda rngs, width=width: NnxWrongShape(width, rngs))
        with pytest.raises(ValueError, match=rf"NnxWrongShape returns.*\(4, {width}\).*\(4, 3\)"):
            stack(X)
    with pytest.raises(ValueError, match="makes the variable hidden"):
        nnx_stack(lambda rngs: NnxGrows(WIDTH, rngs))(X)
    with pytest.raises(ValueError, match="mesh axis 'data' of size 2"):
        nnx_stack(NnxDropBlock, **place((2, 2)))(X[:3])


# -------------------------------------------------------------------------------- Linen


class LinenBlock(linen.Module):
    """Takes everything that a block may take by name."""

    @linen.compact
    def __call__(self, x, t, dt, side):
        h = linen.Dense(WIDTH)(x)
        return jnp.tanh(h + t) * side[:, None] + 0.1 * dt * x


class LinenNormBlock(linen.Module):
    axis_name: str | None = None

    @linen.compact
    def __call__(self, x, train=False):
        h = linen.Dense(WIDTH)(x)
        norm = linen.BatchNorm(not train, momentum=0.8, axis_name=self.axis_name)
        return jnp.tanh(norm(h))


class LinenDropBlock(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        h = linen.Dense(WIDTH)(x)
        return jnp.tanh(linen.Dropout(0.5, deterministic=not train)(h))


class LayerKeys(linen.Module):
    """The keys that a stack at the top of a model gives to its layers."""

    @linen.compact
    def __call__(self):
        return jax.random.split(self.make_rng("dropout"), N)


def linen_stack(block, **options):
    options = {"forward": EXACT} | options
    return jaxbraid.flax.linen.ParallelStack(block, N, **options)


def linen_loop(block, variables, x, *, key=None, part=None, mutable=(), extras=False, **kwargs):
    """`block` with the variables of one layer after another: `(states, changed collections)`."""
    keys = None if key is None else LayerKeys().apply({}, rngs={"dropout": key})
    us, after = [x], []
    for n in range(N):
        rngs = {}
        if keys is not None:
            rngs["dropout"] = keys[n] if part is None else jax.random.fold_in(keys[n], part)
        own = {name: layer(entries["blocks"], n) for name, entries in variables.items()}
        given = {"t": n / N, "dt": 1 / N, "side": SIDE} if extras else {}
        value, changed = block.apply(own, us[-1], rngs=rngs, mutable=mutable, **given, **kwargs)
        us.append(us[-1] + value / N)
        after.append(changed)
    return us, {name: {"blocks": value} for name, value in stacked(after).items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_linen_value_and_gradients(mesh):
    """Also: `t`, `dt` and `side` are taken by name."""
    block = LinenBlock()
    stack = linen_stack(block, **place(mesh))
    variables = double(stack.init(jax.random.key(1), X, side=SIDE))

    def parallel(v, x):
        return loss(stack.apply(v, x, side=SIDE))

    def serial(v, x):
        return loss(linen_loop(block, v, x, extras=True)[0][-1])

    got, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(variables, X) for f in (parallel, serial)
    )
    close(got, expected)


@pytest.mark.parametrize("mesh", MESHES)
def test_linen_batch_norm(mesh):
    """Statistics move once a call, as in the loop; so do gradients through them. Eval: neither."""
    stack = linen_stack(LinenNormBlock(batch_axis(mesh)), **place(mesh))
    block = LinenNormBlock()  # normalised over the one whole batch
    variables = double(stack.init(jax.random.key(1), X))

    def parallel(params):
        v = variables | {"params": params}
        y, changed = stack.apply(v, X, train=True, mutable=["batch_stats"])
        return loss(y), changed

    def serial(params):
        v = variables | {"params": params}
        us, changed = linen_loop(block, v, X, train=True, mutable=["batch_stats"])
        return loss(us[-1]), changed

    got, expected = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(variables["params"])
        for f in (parallel, serial)
    )
    close(got, expected)
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).min()),
        got[0][1]["batch_stats"],
        variables["batch_stats"],
    )
    assert all(distance > 0 for distance in jax.tree.leaves(moved))

    trained = variables | got[0][1]
    y, changed = jax.jit(lambda v: stack.apply(v, X, mutable=["batch_stats"]))(trained)
    close(y, linen_loop(block, trained, X)[0][-1])
    close(changed["batch_stats"], trained["batch_stats"], rtol=0)


@pytest.mark.parametrize("iterations", [-(-N // M), -(-N // M) + 3])
def test_linen_dropout(iterations):
    """One mask a layer and call, however many iterations; another key, others; eval: none."""
    block = LinenDropBlock()
    stack = linen_stack(block, forward=MGRIT(coarsening=M, max_iters=iterations))
    variables = double(stack.init(jax.random.key(1), X))
    call = jax.jit(lambda v, key: stack.apply(v, X, train=True, rngs={"dropout": key}))
    keys = [jax.random.key(i) for i in (3, 4)]
    ys = [call(variables, key) for key in keys]
    for y, key in zip(ys, keys, strict=True):
        close(y, linen_loop(block, variables, X, key=key, train=True)[0][-1])
    assert jnp.all(jnp.abs(ys[0] - ys[1]).max(1) > 1e-3)
    evaluated = jax.jit(lambda v: stack.apply(v, X, rngs={"dropout": keys[0]}))(variables)
    close(evaluated, linen_loop(block, variables, X)[0][-1])


def test_linen_dropout_on_a_split_batch():
    """Parts of a batch draw different masks, and each one mask a layer."""
    block, key = LinenDropBlock(), jax.random.key(3)
    stack = linen_stack(block, **place((2, 2)))
    variables = double(stack.init(jax.random.key(1), X))
    x = jnp.tile(X[: BATCH // 2], (2, 1))  # both parts are the same
    y = jax.jit(lambda v: stack.apply(v, x, train=True, rngs={"dropout": key}))(variables)
    expected = [
        linen_loop(block, variables, half, key=key, part=i, train=True)[0][-1]
        for i, half in parts_of(x, 2)
    ]
    close(y, jnp.concatenate(expected))
    assert jnp.all(jnp.abs(y[:2] - y[2:]).max(1) > 1e-3)


class LinenTrained(linen.Module):
    trace: Trace

    @linen.compact
    def __call__(self, x, train):
        self.trace()
        h = linen.BatchNorm(not train)(linen.Dense(x.shape[-1])(x))
        return jnp.tanh(linen.Dropout(0.1, deterministic=not train)(h))


class LinenNet(linen.Module):
    """Opening layer, a stack, a wider stack, closing layer."""

    trace: Trace
    options: dict

    @linen.compact
    def __call__(self, x, train):
        stack = jaxbraid.flax.linen.ParallelStack
        x = linen.Dense(3)(x)
        x = stack(LinenTrained(self.trace), 4, smooth_init=True, **self.options)(x, train=train)
        x = linen.Dense(5)(x)
        x = stack(LinenTrained(self.trace), 5, **self.options)(x, train=train)
        return linen.Dense(1)(x)


@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2), marks=pytest.mark.slow)])
def test_linen_training(mesh):
    """Loss falls, a second step traces nothing, statistics move in both stacks."""
    trace, (x, y) = Trace(), regression_data()
    model = LinenNet(trace, {"forward": INEXACT, **place(mesh)})
    variables = on_mesh(model.init(jax.random.key(0), x, True), mesh)
    params, stats = variables["params"], variables["batch_stats"]
    optimizer = optax.adam(0.02)

    @jax.jit
    def step(params, stats, opt_state, key):
        def objective(params):
            v = {"params": params, "batch_stats": stats}
            out, new = model.apply(v, x, True, rngs={"dropout": key}, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        (value, stats_), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return value, optax.apply_updates(params, updates), stats_, opt_state

    trace.count, opt_state, losses, traces = 0, optimizer.init(params), [], []
    for key in jax.random.split(jax.random.key(1), 10):
        value, params, stats, opt_state = step(params, stats, opt_state, key)
        losses.append(float(value))
        traces.append(trace.count)
    assert traces[0] > 0 and len(set(traces)) == 1
    assert np.all(np.isfinite(losses)) and losses[-1] < 0.7 * losses[0]
    assert len(stats) == 2
    assert all(jnp.all(jnp.abs(s["blocks"]["BatchNorm_0"]["mean"]) > 0) for s in stats.values())


def test_linen_serial():
    """`serial=True` is the exact sequential network, with the same variables."""
    block = LinenBlock()
    stack = linen_stack(block, forward=INEXACT, **place((2, 2)))
    variables = double(stack.init(jax.random.key(1), X, side=SIDE))
    exact = linen_loop(block, variables, X, extras=True)[0][-1]

    def error(stack):
        y = jax.jit(lambda v: stack.apply(v, X, side=SIDE))(variables)
        return float(jnp.abs(y - exact).max())

    assert error(stack) > 1e-8
    assert error(stack.clone(serial=True)) < 1e-14


def test_linen_solve_and_adjoint_probe():
    block = LinenNormBlock()
    stack = linen_stack(block, **place((2, 2)) | {"batch_axis": None})
    variables = double(stack.init(jax.random.key(1), X))

    def parallel(probe):
        solution, changed = stack.apply(
            variables,
            X,
            train=True,
            adjoint_probe=probe,
            method="solve",
            mutable=["batch_stats"],
        )
        return loss(solution.u), (solution, changed)

    record, (solution, changed) = jax.jit(jax.grad(parallel, has_aux=True))(stack.adjoint_probe())
    us, after = linen_loop(block, variables, X, train=True, mutable=["batch_stats"])
    close(solution.us, jnp.stack(us))
    close(changed, after)
    assert solution.stats.residuals[-1] < 1e-13

    def from_input(x):
        return loss(linen_loop(block, variables, x, train=True, mutable=["batch_stats"])[0][-1])

    close(record.norms[0], jnp.linalg.norm(jax.grad(from_input)(X)))
    close(record.norms[-1], jnp.linalg.norm(jnp.cos(us[-1])))
    assert record.norms.shape == (N + 1,) and record.residuals[-1] < 1e-13


def test_linen_smooth_init():
    smooth = linen_stack(LinenDropBlock(), smooth_init=True).init(jax.random.key(1), X)
    rough = linen_stack(LinenDropBlock()).init(jax.random.key(1), X)
    kernel, other = (v["params"]["blocks"]["Dense_0"]["kernel"] for v in (smooth, rough))
    assert kernel.shape == (N, WIDTH, WIDTH)
    assert jnp.all(kernel == kernel[0]) and jnp.abs(kernel[0]).sum() > 0
    assert len(np.unique(other.reshape(N, -1), axis=0)) == N


class LinenWrongShape(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.width)(x)


def test_linen_bad_input():
    stack = jaxbraid.flax.linen.ParallelStack
    for layers in (0, 2.0):
        with pytest.raises(ValueError, match="layers="):
            stack(LinenDropBlock(), layers).init(jax.random.key(0), X)
    for width in (1, 5):  # 1 would broadcast
        with pytest.raises(ValueError, match=rf"LinenWrongShape returns.*\(4, {width}\)"):
            stack(LinenWrongShape(width), N).init(jax.random.key(0), X)
    variables = linen_stack(LinenDropBlock()).init(jax.random.key(0), X)
    with pytest.raises(TypeError, match="train has the type"):
        linen_stack(LinenDropBlock()).apply(variables, X, train=jnp.ones(2))
    with pytest.raises(ValueError, match="solve cannot make variables"):
        linen_stack(LinenDropBlock()).init(jax.random.key(0), X, method="solve")
