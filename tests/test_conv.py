"""`jaxbraid.nn.Conv` against `lax.conv_general_dilated` and Flax's own layers."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxbraid
from jaxbraid import MGRIT, nn
from nets import mesh_of, relative_error

DIMS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def arrays(space, window, channels=(3, 4), batch=2, dtype=float):
    keys = jax.random.split(jax.random.key(len(space)), 2)
    x = jax.random.normal(keys[0], (batch, *space, channels[0]))
    return x.astype(dtype), jax.random.normal(keys[1], (*window, *channels)).astype(dtype)


def value_and_gradients(conv, x, kernel, *args, **options):
    """The output and its products with a fixed cotangent, differentiated."""
    y, pull = jax.vjp(lambda x, k: conv(x, k, *args, **options), x, kernel)
    return y, *pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))


SETTINGS = {
    "1D": ((7,), (3,), (1,), "SAME", {}),
    "1D, even window": ((7,), (4,), (1,), "SAME", {}),
    "1D, stride 3": ((8,), (3,), (3,), "SAME", {}),
    "1D, one number wide": ((1,), (3,), (1,), "SAME", {}),
    "2D": ((5, 6), (3, 3), (1, 1), "SAME", {}),
    "2D, no padding": ((5, 6), (3, 2), (1, 1), "VALID", {}),
    "2D, low": ((5, 6), (4, 2), (2, 1), "SAME_LOWER", {}),
    "2D, strides with a rest": ((8, 6), (3, 2), (3, 2), "VALID", {}),
    "2D, 1 x 1": ((5, 6), (1, 1), (1, 1), "SAME", {}),
    "2D, padding by numbers": ((5, 6), (3, 3), (1, 2), ((0, 2), (3, 1)), {}),
    "2D, padding beyond the window": ((3, 3), (2, 2), (1, 1), ((3, 3), (0, 4)), {}),
    "2D, cropping": ((7, 7), (2, 2), (2, 1), ((-1, 0), (0, -2)), {}),
    "2D, dilated window": ((7, 8), (3, 3), (1, 2), "SAME", {"rhs_dilation": (2, 3)}),
    "2D, dilated input": ((4, 3), (3, 3), (1, 2), ((1, 1), (2, 0)), {"lhs_dilation": (2, 3)}),
    "2D, groups": ((5, 6), (3, 3), (1, 1), "SAME", {"feature_group_count": 3}),
    "3D": ((4, 3, 5), (3, 3, 3), (1, 1, 1), "SAME", {}),
    "3D, stride 2": ((4, 5, 6), (2, 3, 3), (2, 2, 1), "VALID", {}),
    "3D, dilated": ((5, 5, 6), (2, 3, 2), (1, 1, 2), "SAME", {"rhs_dilation": (2, 1, 2)}),
    "3D, no output": ((2, 3, 3), (3, 3, 3), (1, 1, 1), "VALID", {}),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_values_and_gradients(setting):
    """Those of lax's convolution: another order of summing, so a few roundings."""
    space, window, strides, padding, options = setting
    x, kernel = arrays(space, window, (3, 6))
    if "feature_group_count" in options:
        kernel = kernel[..., :1, :]
    options = options | {"dimension_numbers": DIMS[len(space)]}
    got, expected = (
        value_and_gradients(conv, x, kernel, strides, padding, **options)
        for conv in (nn.conv_general_dilated, lax.conv_general_dilated)
    )
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


LARGE = {
    "same": ((40, 20), (16, 20), (3, 3), (1, 1), "SAME"),
    "few channels out": ((40, 20), (20, 3), (3, 3), (1, 1), "SAME"),
    "even window": ((40, 20), (16, 17), (4, 2), (1, 1), "VALID"),
    "padding by numbers": ((40, 20), (16, 16), (3, 2), (1, 1), ((0, 3), (4, 1))),
    "cropping": ((40, 20), (16, 16), (2, 2), (1, 1), ((-1, 0), (0, -2))),
    "strides": ((40, 20), (16, 16), (3, 3), (2, 3), "SAME"),
    "1D": ((400,), (16, 18), (3,), (1,), "SAME"),
}


@pytest.mark.parametrize("setting", LARGE.values(), ids=LARGE)
def test_large_images(setting):
    """These are left to XLA, gradients in a layout that it is fast in, if channels are many."""
    space, channels, window, strides, padding = setting
    x, kernel = arrays(space, window, channels, dtype=jnp.float32)
    options = {"dimension_numbers": DIMS[len(space)]}
    got = value_and_gradients(nn.conv_general_dilated, x, kernel, strides, padding, **options)
    x, kernel = x.astype(float), kernel.astype(float)
    expected = value_and_gradients(lax.conv_general_dilated, x, kernel, strides, padding, **options)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == jnp.float32
        assert a.shape == b.shape
        assert relative_error(a, b) < 1e-5


def test_large_images_batched_over_kernels_and_second_derivatives():
    """In turn, for XLA is slow at one convolution with a group for each kernel."""
    x, kernel = arrays((26, 10), (3, 3), (16, 16))
    xs, kernels = (jnp.stack([a, 2 * a, a + 1]) for a in (x, kernel))
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": DIMS[2]}

    def second(conv):
        def first(x, k):
            gradients = jax.grad(lambda x, k: jnp.sum(jnp.sin(conv(x, k, **options))), (0, 1))(x, k)
            return sum(jnp.sum(g * jnp.cos(g)) for g in gradients)

        return jax.jit(jax.vmap(jax.grad(first, (0, 1))))

    single = [a.astype(jnp.float32) for a in (xs / 9, kernels / 9)]
    program = second(nn.conv_general_dilated)
    expected = second(lax.conv_general_dilated)(*(a.astype(float) for a in single))
    for a, b in zip(program(*single), expected, strict=True):
        assert relative_error(a, b) < 1e-4
    text = program.lower(*single).as_text()
    assert "stablehlo.convolution" in text
    assert not re.search(r"(feature|batch)_group_count = [^1]", text)


@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_half_precision(preferred):
    """Rounded once, from sums in single precision: at most half a unit, 2^-8."""
    x, kernel = arrays((9, 8), (3, 3), (8, 8), batch=4, dtype=jnp.bfloat16)
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": DIMS[2]}
    y, *got = value_and_gradients(
        nn.conv_general_dilated, x, kernel, preferred_element_type=preferred, **options
    )
    assert y.dtype == preferred or jnp.bfloat16
    assert [a.dtype for a in got] == [jnp.bfloat16] * 2
    x, kernel = x.astype(float), kernel.astype(float)
    expected = lax.conv_general_dilated(x, kernel, **options)
    assert relative_error(y.astype(float), expected) < (2**-8 if preferred is None else 1e-6)


@pytest.mark.parametrize("space", [(6,), (4, 3), (3, 2, 3)])
def test_derivatives_by_finite_differences(space):
    """Of first and second order."""
    x, kernel = arrays(space, (3,) * len(space), (2, 2))

    def f(x, kernel):
        ones, dims = (1,) * len(space), DIMS[len(space)]
        return nn.conv_general_dilated(jnp.sin(x), kernel, ones, "SAME", dimension_numbers=dims)

    check_grads(f, (x, kernel), order=2, modes=["rev"], rtol=1e-5, atol=1e-5)


def test_batched_over_kernels():
    """As MGRIT does with the layers of small states; only matrix products, forward and backward."""
    x, kernel = arrays((5, 4), (3, 3), (3, 3))
    xs, kernels = (jnp.stack([a, 2 * a, a + 1]) for a in (x, kernel))
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": DIMS[2]}

    def all_of(conv):
        return jax.vmap(lambda x, k: value_and_gradients(conv, x, k, **options))

    got = all_of(nn.conv_general_dilated)(xs, kernels)
    for a, b in zip(got, all_of(lax.conv_general_dilated)(xs, kernels), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    text = str(jax.make_jaxpr(all_of(nn.conv_general_dilated))(xs, kernels))
    assert "conv_general_dilated[" not in text


@pytest.mark.parametrize(("space", "channels"), [((6,), 3), ((400,), 16)])
def test_inside_a_checked_shard_map(space, channels):
    """The kernel is the same on all devices, the images are not."""
    x, kernel = arrays(space, (3,), (channels, channels), batch=4, dtype=jnp.float32)

    def total(conv, x, k):
        return jnp.sum(jnp.sin(conv(x, k, (1,), "SAME", dimension_numbers=DIMS[1])))

    def f(x, k):
        return lax.psum(total(nn.conv_general_dilated, x, k), "data")

    mapped = jax.shard_map(f, mesh=mesh_of(1, 2), in_specs=(P("data"), P()), out_specs=P())
    got = jax.jit(jax.grad(mapped, (0, 1)))(x, kernel)
    truth = jax.grad(lambda x, k: total(lax.conv_general_dilated, x, k), (0, 1))
    assert relative_error(got, truth(x.astype(float), kernel.astype(float))) < 1e-5


def test_other_layouts_backends_and_dtypes_are_left_to_lax(monkeypatch):
    """Channels first, integers, and everything where the backend isn't a CPU, forward-mode too."""
    x, kernel = arrays((5, 6), (3, 3))
    first = x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)
    for a, b in (first, tuple(v.astype(int) for v in first)):
        text = str(jax.make_jaxpr(lambda x, k: nn.conv_general_dilated(x, k, (1, 1), "SAME"))(a, b))
        assert "conv_general_dilated[" in text
        assert "custom_vjp" not in text
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def f(conv):
        return lambda x: conv(x, kernel, (1, 1), "SAME", dimension_numbers=DIMS[2])

    texts = [
        str(jax.make_jaxpr(f(c))(x)) for c in (nn.conv_general_dilated, lax.conv_general_dilated)
    ]
    assert texts[0] == texts[1]
    assert jax.jvp(f(nn.conv_general_dilated), (x,), (x,))[1].shape == (2, 5, 6, 4)


def test_errors_are_those_of_lax():
    x, kernel = arrays((5, 6), (3, 3))
    for args in (((1, 1), "SOME"), ((1,), "SAME")):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as expected:
            lax.conv_general_dilated(x, kernel, *args, dimension_numbers=DIMS[2])
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            nn.conv_general_dilated(x, kernel, *args, dimension_numbers=DIMS[2])


LAYERS = {
    "1D causal": ((3, 4, (3,)), {"padding": "CAUSAL"}, (2, 6, 3)),
    "circular": ((3, 4, (3, 3)), {"padding": "CIRCULAR", "kernel_dilation": 2}, (2, 6, 5, 3)),
    "reflected": ((3, 4, (3, 3), 2), {"padding": "REFLECT", "use_bias": False}, (2, 6, 5, 3)),
    "groups": ((4, 4, (3, 3)), {"feature_group_count": 2}, (2, 6, 5, 4)),
    "no batch": ((3, 4, (3, 3)), {"padding": 1}, (6, 5, 3)),
    "3D, two batch axes": ((1, 2, (3, 3, 3)), {}, (2, 2, 4, 3, 5, 1)),
}


@pytest.mark.parametrize(("args", "options", "shape"), LAYERS.values(), ids=LAYERS)
def test_drop_in_for_flax(args, options, shape):
    """The same variables from the same seed, the same output and gradients."""
    x = jax.random.normal(jax.random.key(0), shape)
    got, expected = (
        layer(*args, **options, param_dtype=float, rngs=nnx.Rngs(0))
        for layer in (nn.Conv, nnx.Conv)
    )

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    results = [nnx.value_and_grad(loss, argnums=(0, 1))(layer, x) for layer in (got, expected)]
    for a, b in zip(*(jax.tree.leaves(r) for r in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    given = inspect.signature(lax.conv_general_dilated).parameters
    assert list(inspect.signature(nn.conv_general_dilated).parameters) == list(given)


def test_hook_of_linen():
    x = arrays((5, 6), (3, 3))[0]
    layer = linen.Conv(4, (3, 3), conv_general_dilated=nn.conv_general_dilated)
    params = layer.init(jax.random.key(1), x)
    np.testing.assert_allclose(layer.apply(params, x), linen.Conv(4, (3, 3)).apply(params, x), 1e-5)


def kernels_of_a_training_step(conv, space, channels):
    """Convolutions in the compiled gradient of a stack, by the layout of their operands."""
    window = (3,) * len(space)
    x, kernel = arrays(space, window, (channels, channels), dtype=jnp.float32)
    ones, dims = (1,) * len(space), DIMS[len(space)]

    def f(k, u):
        return jnp.tanh(conv(u, k, ones, "SAME", dimension_numbers=dims))

    def loss(kernels, x):
        config = MGRIT(max_iters=1, coarsening=2)
        return jnp.sum(jaxbraid.parallel_ode_net(f, kernels, forward=config)(x) ** 2)

    grad = jax.jit(jax.grad(loss, (0, 1)))
    text = grad.lower(jnp.stack([kernel] * 4), x).compile().as_text()
    return set(re.findall(r"convolution\(.*dim_labels=(\w+->\w+)", text))


FORWARD = "b01f_01io->b01f"  # the fast kind, of gradients too


@pytest.mark.parametrize(
    ("space", "channels", "left"),
    [
        ((6,), 2, set()),
        ((6, 5), 2, set()),
        ((4, 3, 4), 2, set()),
        ((40, 16), 16, {FORWARD}),
    ],
    ids=str,
)
def test_no_gradient_of_a_convolution_is_left_in_loops(space, channels, left):
    """In what XLA compiles: none but convolutions of large images in their fast layout."""
    naive = kernels_of_a_training_step(lax.conv_general_dilated, space, channels)
    assert naive - {FORWARD}
    assert kernels_of_a_training_step(nn.conv_general_dilated, space, channels) == left
