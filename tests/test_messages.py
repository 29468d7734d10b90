"""How many messages a cycle sends, and how long they are: the compiled program against the formula.

The formula is that of docs/engine.md, "Messages". Counts are those of one more cycle: the
difference between programs with three and with two iterations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from hlo import collectives
from jaxbraid import MGRIT
from jaxbraid._hierarchy import Hierarchy, build_hierarchies
from nets import dense, mesh_of

WIDTH, BATCH = 3, 4
STATE = WIDTH * BATCH * 8  # bytes


def one(hop: int, devices: int) -> int:
    """Messages of a shift: none where no device has a partner."""
    return int(0 < hop < devices)


def sweep(h: Hierarchy, l: int, reverse: bool) -> int:
    """From the neighbour; through the devices that share an interval; to its first device."""
    level = h.levels[l]
    reach = one(level.stride if reverse else level.group * level.stride, h.devices)
    if level.group == 1:
        return reach
    owner = 0 if reverse else one((level.group - 1) * level.stride, h.devices)
    return reach + level.group * one(level.stride, h.devices) + owner


def visit(h: Hierarchy, l: int, nu: int, reverse: bool) -> int:
    """A V-cycle's messages on level `l > 0` and below."""
    level = h.levels[l]
    if h.is_gathered(l):
        return 0
    # without C-relaxation the compiler finds that the finer level's sweep has sent this already
    tau = one(level.stride, h.devices) if nu > 0 else 0
    if l == len(h.levels) - 1:  # marched through its devices
        return tau + (level.group * one(level.stride, h.devices) if level.group > 1 else 0)
    owner = 0
    if level.group > 1 and not reverse:
        owner = one((level.group - 1) * level.stride, h.devices)
    # C-points to their owners, relaxation, F-relaxation, which brings C-points back
    here = owner + (1 + nu) * sweep(h, l, reverse) + sweep(h, l, reverse)
    return tau + here + visit(h, l + 1, nu, reverse)


def cycle(h: Hierarchy, nu: int, reverse: bool) -> int:
    return (1 + nu) * sweep(h, 0, reverse) + visit(h, 1, nu, reverse)


def program(layers, mesh, forward, adjoint, stats=False):
    """Collectives of the forward pass, or with an adjoint of the gradient."""
    w = jnp.zeros((layers, WIDTH, WIDTH))
    x = jnp.zeros((mesh[1] * BATCH, WIDTH))

    def run(w, x):
        net = jaxbraid.parallel_ode_net(
            dense,
            w,
            forward=forward,
            adjoint=adjoint or forward,
            mesh=mesh_of(*mesh),
            layer_axis="depth",
            batch_axis="data",
        )
        if stats:
            return net.solve(x).stats
        return jnp.sum(net(x) ** 2)

    fn = run if adjoint is None else jax.grad(run)
    found = collectives(jax.jit(fn).lower(w, x).compile().as_text())
    return {kind: np.array(numbers) for kind, numbers in found.items()}


def of_a_cycle(layers, mesh, config, reverse, stats=False):
    """Counts and bytes of one more cycle."""

    def iterations(n):
        more = dataclasses.replace(config, max_iters=n)
        if reverse:
            return program(layers, mesh, dataclasses.replace(config, max_iters=1), more)
        return program(layers, mesh, more, None, stats)

    three, two = iterations(3), iterations(2)
    return {kind: tuple(three[kind] - two[kind]) for kind in three}


CASES = [
    (64, (4, 1), MGRIT(levels=2, coarsening=4, cf_relax=1)),
    (64, (8, 1), MGRIT(levels=4, coarsening=4, cf_relax=0)),  # the third level spans devices
    (16, (8, 1), MGRIT(levels=3, coarsening=4, cf_relax=1)),  # intervals of two devices
    (32, (4, 2), MGRIT(levels=5, coarsening=2, cf_relax=2)),
    (64, (8, 1), MGRIT(levels=3, coarsening=4, coarse_placement=2)),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("layers", "mesh", "config"), CASES)
def test_messages_of_a_cycle(layers, mesh, config, reverse):
    h = build_hierarchies((config, config), layers, mesh[0])[0]
    got = of_a_cycle(layers, mesh, config, reverse)
    expected = cycle(h, config.cf_relax, reverse)
    assert got["collective-permute"] == (expected, expected * STATE)
    gathers, moved = 0, 0
    if h.gathered is not None:
        gathers, moved = 2, 2 * h.devices * h.owner.block * STATE
    assert got["all-gather"] == (gathers, moved)
    assert got["all-reduce"] == (0, 0)


def test_a_norm_is_one_number():
    """With statistics a cycle sums one number along layers, and along the batch one a C-point."""
    config = MGRIT(levels=2, coarsening=4)
    assert of_a_cycle(64, (4, 1), config, False, True)["all-reduce"] == (1, 8)
    norms = 64 // 4 // 4
    assert of_a_cycle(64, (4, 2), config, False, True)["all-reduce"] == (2, 8 + 8 * norms)


def test_messages_grow_with_the_logarithm_of_the_devices():
    """At eight layers a device and as many levels as there can be."""
    config = MGRIT(levels=20, coarsening=4)
    counts = []
    for devices in (8, 128, 2048, 32768):
        h = build_hierarchies((config, config), 8 * devices, devices)[0]
        counts.append(cycle(h, 1, False))
    assert len(set(np.diff(counts))) == 1
