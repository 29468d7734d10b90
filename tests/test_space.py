"""A mesh that splits space beside time: the same results as on one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxbraid
from jaxbraid import MGRIT, space

CONFIG = MGRIT(levels=2, coarsening=4, max_iters=3)


def on_devices(fn, x, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("space",))
    spec = PartitionSpec("space")
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


@pytest.mark.parametrize(
    ("boundary", "width", "devices"),
    [("periodic", 1, 1), ("periodic", 2, 4), ("zero", 2, 2), ("edge", 1, 4)],
)
def test_halo_is_what_padding_gives(boundary, width, devices):
    """Each part with what lies around it in the whole array; and the transpose puts it back."""
    x = {"a": jnp.arange(8.0), "b": jnp.arange(16.0).reshape(8, 2)}
    mode = {"periodic": "wrap", "zero": "constant", "edge": "edge"}[boundary]
    n = 8 // devices

    def expected(a):
        whole = jnp.pad(a, [(width, width)] + [(0, 0)] * (a.ndim - 1), mode=mode)
        return jnp.concatenate([whole[i * n : i * n + n + 2 * width] for i in range(devices)])

    def got(x):
        return on_devices(lambda x: space.halo(x, "space", width, boundary), x, devices)

    jax.tree.map(np.testing.assert_array_equal, got(x), jax.tree.map(expected, x))
    ct = jax.tree.map(lambda a: jnp.sin(jnp.arange(a.size)).reshape(a.shape), got(x))
    back = jax.vjp(got, x)[1](ct)[0]
    expected_back = jax.vjp(lambda x: jax.tree.map(expected, x), x)[1](ct)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-15), back, expected_back)
    if devices == 1:
        alone = space.halo(x, None, width, boundary)
        jax.tree.map(np.testing.assert_array_equal, alone, got(x))


@pytest.mark.parametrize("columns", [1, 4, 5])
def test_along_gives_whole_columns(columns):
    rng = np.random.default_rng(0)
    x, matrix = rng.normal(size=(8, columns, 2)), rng.normal(size=(8, 8))
    scale = np.arange(1.0, columns + 1)

    def fn(u, scale):
        return jnp.einsum("ij,jq...->iq...", matrix, u) * scale[:, None]

    got = on_devices(lambda x: space.along(fn, x, "space", scale), x, 4)
    np.testing.assert_allclose(got, fn(x, scale), rtol=1e-14)
    np.testing.assert_array_equal(space.along(fn, x, None, scale), fn(x, scale))


def test_part_of_what_describes_the_axis():
    x = np.arange(8.0)
    got = on_devices(lambda u: u + space.part(x, "space"), jnp.zeros(8), 4)
    np.testing.assert_array_equal(got, x)
    assert space.part(x, None) is x
    with pytest.raises(ValueError, match="of size 4 must divide"):
        on_devices(lambda u: u + space.part(x[:6], "space"), jnp.zeros(8), 4)


def diffusion(axis_name=None):
    """u_t = a u_xx + b sin(x) + the mean of u, periodic, forward Euler; b of each step."""

    def step(t0, t1, u, params, args):
        near = space.halo(u, axis_name)
        total = jnp.sum(u)
        if axis_name is not None:
            total = jax.lax.psum(total, axis_name)
        n = u.shape[0] if axis_name is None else u.shape[0] * jax.lax.axis_size(axis_name)
        x = space.part(2 * np.pi * np.arange(n) / n, axis_name)
        rate = args * (near[2:] - 2 * u + near[:-2]) + params * jnp.sin(x) + total / n
        return u + (t1 - t0) * rate

    return step


ONE = diffusion()
SPLIT = diffusion("space")


@pytest.mark.parametrize(
    ("devices", "n", "options"),
    [((1, 2), 32, {}), ((2, 4), 30, {"tol": 1e-8}), ((3, 2), 30, {"levels": 3, "coarsening": 2})],
)
def test_space_time_solution_and_gradients(devices, n, options):
    ts = np.linspace(0, 1, n + 1)
    u0 = np.cos(2 * np.pi * np.arange(8) / 8) + 1
    params = np.sin(np.arange(n))
    config = dataclasses.replace(CONFIG, **options)
    mesh = jax.make_mesh(devices, ("layer", "space"))

    def run(step, u0, params, args, **more):
        return jaxbraid.solve(step, u0, ts, params, args, config=config, **more)

    sol = run(SPLIT, u0, params, 3.0, mesh=mesh, space_axis="space")
    expected = run(ONE, u0, params, 3.0)
    np.testing.assert_allclose(sol.us, expected.us, rtol=0, atol=1e-13)
    np.testing.assert_allclose(sol.stats.residuals, expected.stats.residuals, rtol=1e-9, atol=1e-13)

    def gradient(step, **more):
        def loss(*x):
            return jnp.sum(run(step, *x, **more).us ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(u0, params, 3.0)

    got = gradient(SPLIT, mesh=mesh, space_axis="space")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), got, gradient(ONE))


def test_batch_and_space():
    """A state may be split both ways: its first axis by the batch, its second by space."""
    mesh = jax.make_mesh((2, 2, 2), ("layer", "batch", "space"))
    u0 = np.random.default_rng(0).normal(size=(4, 6))
    ts = np.linspace(0, 1, 17)

    def step(axis_name):
        def advance(t0, t1, u, params, args):
            near = space.halo(u.T, axis_name).T
            return u + (t1 - t0) * (near[:, 2:] - 2 * u + near[:, :-2])

        return advance

    more = {"mesh": mesh, "batch_axis": "batch", "space_axis": "space"}
    seen = []
    got = jaxbraid.solve(step("space"), u0, ts, config=CONFIG, **more,
                         callback=lambda i, r, s: seen.append(s))  # fmt: skip
    jax.effects_barrier()
    expected = jaxbraid.solve(step(None), u0, ts, config=CONFIG)
    np.testing.assert_allclose(got.us, expected.us, rtol=0, atol=1e-14)
    np.testing.assert_allclose(seen[-1], expected.us[::4], rtol=0, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="boundary='open': must be"):
        space.halo(jnp.zeros(4), None, boundary="open")
    with pytest.raises(ValueError, match="width=5: must be between 1"):
        space.halo(jnp.zeros(4), None, 5)
    mesh = jax.make_mesh((1, 3), ("layer", "space"))
    more = {"mesh": mesh, "space_axis": "space"}
    with pytest.raises(ValueError, match="size of 8 along axis 0, which the mesh axis 'space'"):
        jaxbraid.solve(ONE, np.ones(8), np.linspace(0, 1, 9), np.ones(8), 1.0, **more)
    with pytest.raises(ValueError, match="space_axis='x': must be one of the mesh's axes"):
        jaxbraid.solve(ONE, np.ones(9), np.linspace(0, 1, 9), np.ones(8), 1.0, mesh=mesh,
                       space_axis="x")  # fmt: skip
    with pytest.raises(ValueError, match="batch_axis and space_axis are both 'space'"):
        jaxbraid.solve(ONE, np.ones(9), np.linspace(0, 1, 9), np.ones(8), 1.0, **more,
                       batch_axis="space")  # fmt: skip
