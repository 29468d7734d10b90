"""Layers that each get an element of a sequence: `inputs`, split over layers and over the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxbraid
import nets
from jaxbraid import MGRIT

BATCH, WIDTH = 4, 3


def layer(params, x, inputs, args):
    z, on = inputs
    return jnp.where(on[:, None], jnp.tanh(x @ params + z @ args), 0)


def problem(n):
    k = jax.random.split(jax.random.key(n), 5)
    w = jax.random.normal(k[0], (n, WIDTH, WIDTH))
    x = jax.random.normal(k[1], (BATCH, WIDTH))
    z = jax.random.normal(k[2], (n, BATCH, 2))
    args = jax.random.normal(k[3], (2, WIDTH))
    on = jax.random.bernoulli(k[4], 0.8, (n, BATCH))
    return w, x, z, args, on


def serial(w, x, z, args, on):
    n = w.shape[0]

    def step(u, xs):
        w, z, on = xs
        u = u + layer(w, u, (z, on), args) / n
        return u, u

    return jax.lax.scan(step, x, (w, z, on))


def exact(n):
    return MGRIT(levels=3, coarsening=2, max_iters=n)


@pytest.mark.parametrize("mesh", [None, (4, 2), (3, 1)])
@pytest.mark.parametrize("n", [1, 11, 16])
def test_states_and_gradients_are_those_of_a_scan(mesh, n):
    w, x, z, args, on = problem(n)
    where = {}
    if mesh is not None:
        where = {"mesh": nets.mesh_of(*mesh), "layer_axis": "depth", "batch_axis": "data"}

    def parallel(w, x, z, args):
        net = jaxbraid.parallel_ode_net(layer, w, args=args, forward=exact(n), **where)
        solution = net.solve(x, inputs=(z, on))
        return jnp.sum(jnp.sin(solution.us)) + jnp.sum(solution.u**2), solution.us

    def truth(w, x, z, args):
        u, us = serial(w, x, z, args, on)
        return jnp.sum(jnp.sin(us)) + jnp.sum(jnp.sin(x)) + jnp.sum(u**2), us

    (value, us), grads = jax.jit(jax.value_and_grad(parallel, argnums=(0, 1, 2, 3), has_aux=True))(
        w, x, z, args
    )
    (value_s, us_s), grads_s = jax.value_and_grad(truth, argnums=(0, 1, 2, 3), has_aux=True)(
        w, x, z, args
    )
    assert abs(value - value_s) < 1e-10
    assert nets.relative_error(us[1:], us_s) < 1e-11
    assert nets.relative_error(grads, grads_s) < 1e-10


def test_memory_saving_options_see_the_inputs_too():
    w, x, z, args, on = problem(12)

    def grads(**options):
        config = MGRIT(levels=2, coarsening=3, max_iters=4, **options)
        net = jaxbraid.parallel_ode_net(
            layer, w, args=args, forward=MGRIT(levels=2, coarsening=3, max_iters=4), adjoint=config
        )
        return jax.grad(lambda z: jnp.sum(net(x, inputs=(z, on)) ** 2))(z)

    plain = jax.grad(lambda z: jnp.sum(serial(w, x, z, args, on)[0] ** 2))(z)
    for options in ({"linearization": "keep"}, {"saved_states": "coarse"}):
        assert nets.relative_error(grads(**options), plain) < 1e-10


def test_inputs_that_do_not_fit_are_named():
    w, x, z, args, on = problem(8)
    net = jaxbraid.parallel_ode_net(layer, w, args=args)
    with pytest.raises(ValueError, match=r"inputs\[0\] has shape \(7, 4, 2\).*layers, 8"):
        net(x, inputs=(z[:7], on))
    net = jaxbraid.parallel_ode_net(
        layer, w, args=args, mesh=nets.mesh_of(2, 4), layer_axis="depth", batch_axis="data"
    )
    with pytest.raises(ValueError, match=r"inputs\[0\].*size of 3 along axis 1"):
        net(x, inputs=(z[:, :3], on))
    with pytest.raises(TypeError, match=r"inputs.*str"):
        net(x, inputs="zzz")
