"""Norms across depth against a serial march, and a program's time by part."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import jaxbraid
import nets
from jaxbraid import MGRIT
from jaxbraid.training import diagnose, timers
from jaxbraid.training._timers import PARTS

N = 12
EXACT = MGRIT(levels=2, coarsening=3, max_iters=4)


def make(mesh=None, forward=EXACT):
    params, args, x = nets.tree_net(N)
    where = {}
    if mesh is not None:
        where = {"mesh": nets.mesh_of(*mesh), "layer_axis": "depth", "batch_axis": "data"}
    net = jaxbraid.parallel_ode_net(nets.field, params, args=args, forward=forward, **where)
    return net, params, args, x


def loss(y):
    return jnp.sum(y["a"] ** 2) + jnp.sum(jnp.cos(y["s"]))


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


@pytest.mark.parametrize("mesh", [None, (4, 2)])
def test_norms_are_those_of_a_serial_march(mesh):
    net, params, args, x = make(mesh)
    found = diagnose(net, x, loss=loss)
    _, us = nets.serial_field(params, args, x)
    states = [x] + [jax.tree.map(lambda a, n=n: a[n], us) for n in range(N)]
    np.testing.assert_allclose(found.states, [norm(u) for u in states], rtol=1e-10)
    steps = [jax.tree.map(jnp.subtract, b, a) for a, b in itertools.pairwise(states)]
    np.testing.assert_allclose(found.increments, [norm(s) for s in steps], rtol=1e-9)
    layers = [jax.tree.map(lambda a, n=n: a[n], params) for n in range(N)]
    np.testing.assert_allclose(found.weights, [norm(p) for p in layers], rtol=1e-12)

    def rest(u, n):  # the loss from the state before layer n on
        for m in range(n, N):
            d = nets.field(layers[m], u, m / N, args)
            u = jax.tree.map(lambda a, b: a + b / N, u, d)
        return loss(u)

    adjoints = [norm(jax.jit(jax.grad(rest), static_argnums=1)(states[n], n)) for n in (0, 7, N)]
    np.testing.assert_allclose(found.adjoints[[0, 7, N]], adjoints, rtol=1e-9)
    assert list(found.step_in) == list(found.states[:-1])
    assert list(found.step_out) == list(found.states[1:])


def test_without_a_loss_there_are_no_adjoints_and_the_table_has_every_layer(tmp_path):
    net, _, _, x = make()
    found = diagnose(net, x)
    assert found.adjoints is None and found.stats.finite
    console = rich.console.Console(width=120, record=True)
    console.print(found.table())
    text = console.export_text()
    assert "adjoint" not in text and f"{found.increments[-1]:.3e}" in text
    found.plot(tmp_path / "norms.png")
    assert (tmp_path / "norms.png").stat().st_size > 10000


def test_a_program_holds_nothing_of_it_unless_asked():
    """Without a probe no norm is computed: the gradient's program has no square root."""
    net, _, _, x = make(forward=MGRIT(levels=2, coarsening=3, max_iters=2))
    plain = jax.jit(jax.grad(lambda x: loss(net(x)))).lower(x).as_text()
    assert "sqrt" not in plain

    def watched(x, probe):
        return loss(net(x, adjoint_probe=probe))

    probed = jax.jit(jax.grad(watched, (0, 1))).lower(x, net.adjoint_probe()).as_text()
    assert "sqrt" in probed


def test_a_trace_tells_forward_adjoint_and_gradient_apart():
    net, _, _, x = make((4, 2), forward=MGRIT(levels=2, coarsening=3, max_iters=2))

    def value(params, x):
        return loss(dataclasses.replace(net, params=params)(x))

    both = timers(jax.grad(value), net.params, x, repeats=2)
    for part in PARTS[:3]:
        assert both.compute[part] > 0
    assert both.communication["forward"] > 0 and both.communication["adjoint"] > 0
    assert 0 < both.share < 1
    total = sum(both.compute.values()) + sum(both.communication.values())
    assert total < 1.5 * both.wall
    only = timers(lambda x: net(x), x, repeats=1)
    assert only.compute["adjoint"] == only.compute["gradient"] == 0 < only.compute["forward"]
    console = rich.console.Console(width=120, record=True)
    console.print(both.table())
    assert "communication, ms" in console.export_text()


def test_one_device_sends_no_messages():
    net, _, _, x = make()
    assert timers(lambda x: net(x), x, repeats=1).share == 0


def test_bad_input_is_named():
    net, _, _, x = make()
    with pytest.raises(TypeError, match=r"net=.*stack\.net\(\)"):
        diagnose(lambda x: x, x)
    with pytest.raises(TypeError, match="loss=3"):
        diagnose(net, x, loss=3)
    with pytest.raises(TypeError, match="fn=3"):
        timers(3)
    with pytest.raises(ValueError, match="repeats=0"):
        timers(net, x, repeats=0)
