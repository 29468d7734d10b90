"""Stacks of convolutional blocks against plain layers, one after another.

The truth loops over the layers with XLA's convolutions. Where iterations are exact, the tolerance
is a few hundred roundings.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxbraid
from jaxbraid import MGRIT
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.nn import ConvBlock, spatial_coarsening
from nets import mesh_of, relative_error

N, M, CHANNELS, BATCH = 8, 2, 3, 4
EXACT = MGRIT(coarsening=M, max_iters=N // M)
X = jax.random.normal(jax.random.key(0), (BATCH, 3, 3, 3, CHANNELS), float)
MESHES = {"one device": {}, "4 x 2": {"mesh": (4, 2), "layer_axis": "depth", "batch_axis": "data"}}
KINDS = (None, "average_pooling", "full_weighting", "injection")


def stack_of(make_block, *, mesh=None, **options):
    if mesh is not None:
        options["mesh"] = mesh_of(*mesh)
    options = {"forward": EXACT} | options
    return ParallelStack(make_block, N, rngs=nnx.Rngs(1), t_final=2.0, **options)


def block(rngs, kernel=(3, 3, 3), **options):
    return ConvBlock(CHANNELS, kernel, activation=jnp.tanh, param_dtype=float, rngs=rngs, **options)


def transfers(kind, levels=(True,)):
    return None if kind is None else spatial_coarsening(kind, 3, levels)


def plain_conv(conv, x):
    space = "DHW"[-len(conv.kernel_size) :]
    dims = (f"N{space}C", f"{space}IO", f"N{space}C")
    ones = (1,) * len(space)
    y = jax.lax.conv_general_dilated(x, conv.kernel[...], ones, "SAME", dimension_numbers=dims)
    return y + conv.bias[...]


def plain_field(block, x):
    """The formula of a layer."""
    norms, convs = list(block.norms), list(block.convs)
    for i, (norm, conv) in enumerate(zip(norms, convs, strict=True)):
        x = jnp.tanh(x if norm is None else norm(x))
        x = plain_conv(conv, block.dropout(x) if i + 1 == len(convs) else x)
    return x


def loop(stack, x):
    """The truth: states of all layers, and the blocks' variables afterwards."""
    graphdef, state = nnx.split(stack.blocks)
    us, after = [x], []
    for n in range(N):
        one = nnx.merge(graphdef, jax.tree.map(lambda a, n=n: a[n], state), copy=True)
        us.append(us[-1] + 2 / N * plain_field(one, us[-1]))
        after.append(nnx.state(one))
    return us, jax.tree.map(lambda *a: jnp.stack(a), *after)


def loss(y):
    return jnp.sum(jnp.sin(y) * jnp.arange(1.0, 1 + y.shape[-1]))


def value_and_grads(f, stack, x=X):
    """Of `loss(f(stack, x))`, and what other variables are afterwards."""
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)

    def value(params, x):
        stack = nnx.merge(graphdef, params, rest, copy=True)
        y = f(stack, x)
        kept = nnx.to_pure_dict(nnx.state(stack, (nnx.BatchStat, nnx.RngCount)))
        return loss(y), (y, kept)

    grad = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
    return jax.device_get(grad(params, x))


def serial(stack, x):
    us, after = loop(stack, x)
    nnx.update(stack.blocks, after)
    return us[-1]


def parallel(stack, x):
    return stack(x)


@functools.cache
def expected(norm, convolutions=2):
    """Value and gradients of the stack in sequence."""
    make = functools.partial(block, norm=norm, convolutions=convolutions)
    return value_and_grads(serial, stack_of(make))


def close(got, expected, rtol=1e-11):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "kind"), [("one device", k) for k in KINDS] + [("4 x 2", k) for k in KINDS[:2]]
)
def test_3d_value_and_gradients(mesh, kind):
    """N/m iterations are exact, with coarser voxels on the coarse level as well."""
    stack = stack_of(block, transfers=transfers(kind), **MESHES[mesh])
    close(value_and_grads(parallel, stack), expected(None))


@pytest.mark.parametrize("kind", [None, "average_pooling"])
def test_3d_error_falls_with_every_iteration(kind):
    """Of output and gradient, on three levels, the last with coarser voxels."""
    errors = []
    make = functools.partial(block, kernel=(3, 1, 3), convolutions=1)
    (_, (truth, _)), true_grads = value_and_grads(serial, stack_of(make))
    for iters in (1, 2, 4):
        config = MGRIT(levels=3, coarsening=M, max_iters=iters, cf_relax=(0, 1))
        stack = stack_of(make, forward=config, transfers=transfers(kind, (False, True)))
        (_, (y, _)), grads = value_and_grads(parallel, stack)
        errors.append([relative_error(y, truth), relative_error(grads[1], true_grads[1])])
    errors = np.array(errors)
    assert np.all(errors[1:] < errors[:-1])
    assert np.all(errors[-1] < 1e-11)


@pytest.mark.parametrize("mesh", MESHES)
def test_batch_norm(mesh):
    """Statistics of the whole batch, moved once; coarse images have no part in them."""
    make = functools.partial(
        block, norm="batch", batch_axis="data" if mesh != "one device" else None
    )
    stack = stack_of(make, transfers=transfers("average_pooling"), **MESHES[mesh])
    got, truth = value_and_grads(parallel, stack), expected("batch")
    close(got, truth)
    before = nnx.to_pure_dict(nnx.state(stack, nnx.BatchStat))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), got[0][1][1]["blocks"], before["blocks"])
    assert min(jax.tree.leaves(moved)) > 0
    stack.eval()
    if mesh == "one device":
        close(nnx.jit(parallel)(stack, X), loop(stack, X)[0][-1])


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_other_norms(norm):
    make = functools.partial(block, norm=norm, convolutions=1)
    close(value_and_grads(parallel, stack_of(make)), expected(norm, 1))


@pytest.mark.parametrize("kind", [None, "average_pooling"])
def test_dropout(kind):
    """One mask a layer, in value and gradient, whatever the masks on the coarse level are."""
    make = functools.partial(block, dropout=0.3, convolutions=1)
    got = value_and_grads(parallel, stack_of(make, transfers=transfers(kind)))
    close(got, value_and_grads(serial, stack_of(make)))
    assert relative_error(got[0][1][0], expected(None, 1)[0][1][0]) > 1e-3


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ((3,), {}),
        ((5,), {"convolutions": 1, "norm": "layer"}),
        ((3, 3), {"hidden": 3, "norm": "group"}),
        ((3, 1, 3), {"norm": lambda c, rngs: nnx.RMSNorm(c, param_dtype=float, rngs=rngs)}),
    ],
    ids=["1D", "1D, one convolution", "2D", "3D, a norm of one's own"],
)
def test_formula_of_the_block(kernel, options):
    one = block(nnx.Rngs(0), kernel, **options)
    x = jax.random.normal(jax.random.key(1), (2, *range(4, 4 + len(kernel)), CHANNELS), float)
    close(one(x), plain_field(one, x), rtol=1e-12)
    assert len(one.convs) == options.get("convolutions", 2)
    assert one.convs[0].kernel.shape[-1] == options.get("hidden", CHANNELS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_block_in_other_precisions(dtype):
    one = ConvBlock(CHANNELS, (3, 3), norm="group", dtype=dtype, rngs=nnx.Rngs(0))
    assert one(jnp.ones((1, 4, 4, CHANNELS), dtype)).dtype == dtype
    assert one.convs[0].kernel.dtype == jnp.float32


def test_spatial_coarsening():
    """Axes before the channels, on the levels chosen; pooling keeps means over the blocks."""
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 3))
    pool, none = spatial_coarsening("average_pooling", 2, (True, False))
    means = x.reshape(2, 2, 2, 3, 2, 3).mean((2, 4))
    np.testing.assert_allclose(pool.restrict(x), means, rtol=1e-6)
    assert none is None
    (constant,) = spatial_coarsening("average_pooling", 2, [True], prolongation="constant")
    fine = jax.ShapeDtypeStruct(x.shape, x.dtype)
    np.testing.assert_allclose(constant.prolong(means, fine), means.repeat(2, 1).repeat(2, 2))
    (weighted,) = spatial_coarsening("full_weighting", 1, [True])
    u = np.arange(7.0)[None, :, None]
    np.testing.assert_allclose(weighted.restrict(u)[0, :, 0], [1, 3, 5])
    (taken,) = spatial_coarsening("injection", 1, [True], grid="nodes")
    np.testing.assert_allclose(taken.restrict(u)[0, :, 0], [0, 2, 4, 6])


def test_masks_of_coarse_images():
    """A mask in the state is coarsened with it; `side` comes to all levels as it is."""
    seen = set()

    def f(p, u, side):
        seen.add((u["x"].shape[1], u["mask"].shape[1], side.shape[1]))
        return {"x": p * u["x"] * u["mask"], "mask": jnp.zeros_like(u["mask"])}

    coarser = spatial_coarsening("injection", 1, (True,))
    net = jaxbraid.parallel_ode_net(f, jnp.ones(N), forward=EXACT, transfers=coarser)
    u = {"x": jnp.ones((BATCH, 7, 1)), "mask": jnp.arange(7)[None, :, None] < 4}
    u["mask"] = jnp.broadcast_to(u["mask"], u["x"].shape)
    y = net(u, side=jnp.ones((BATCH, 7, 1)))
    assert seen == {(7, 7, 7), (3, 3, 7)}
    inside = (1 + 1 / N) ** N
    np.testing.assert_allclose(y["x"], jnp.where(u["mask"], inside, 1.0), rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: block(nnx.Rngs(0), 3), TypeError, "kernel_size=3"),
        (lambda: block(nnx.Rngs(0), (3, 0)), ValueError, "kernel_size=0"),
        (lambda: block(nnx.Rngs(0), norm="instance"), ValueError, "norm='instance'"),
        (lambda: block(nnx.Rngs(0), convolutions=3), ValueError, "convolutions=3"),
        (lambda: block(nnx.Rngs(0), hidden=0), ValueError, "hidden=0"),
        (lambda: block(nnx.Rngs(0), dropout=1.0), ValueError, "dropout=1.0"),
        (lambda: spatial_coarsening("pooling", 2, (True,)), ValueError, "kind='pooling'"),
        (lambda: spatial_coarsening("injection", 0, (True,)), ValueError, "dims=0"),
        (lambda: spatial_coarsening("injection", 2, (1, 2)), TypeError, r"levels=\(1, 2\)"),
        (
            lambda: spatial_coarsening("full_weighting", 1, [True], prolongation="constant"),
            ValueError,
            "prolongation='constant'",
        ),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
