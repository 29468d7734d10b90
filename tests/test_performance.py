"""`performance`: its counts are those of runs; limits, choice and errors. Nothing here is timed."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import jaxbraid
from jaxbraid import MGRIT, performance
from jaxbraid.performance import Cost, Machine, choose, predict, tradeoff
from nets import dense, dense_weights, mesh_of
from test_solve import counting_step


def machine(**changes) -> Machine:
    """A device whose loop iteration costs as much as ten intervals, with slow messages."""
    options = {
        "step": Cost.line(10e-6, 1e-6),
        "vjp": Cost.line(10e-6, 2e-6),
        "last": Cost.line(10e-6, 3e-6),
        "state_bytes": 4096,
        "layer_bytes": 16384,
        "latency": 5e-6,
        "bandwidth": 1e10,
    }
    return Machine(**options | changes)


# -- counts ---------------------------------------------------------------------------------------


def counted(config: MGRIT, steps: int, devices: int, direction: str) -> list[int]:
    """Evaluations of the step (or its vjp) on each level, counted in a run."""
    counts = collections.Counter()
    step = counting_step(counts)
    ts = jnp.linspace(0, 1, steps + 1)
    mesh = None if devices == 1 else mesh_of(devices)

    def run(u0):
        return jaxbraid.solve(step, u0, ts, config=config, mesh=mesh, layer_axis="depth").u

    fn = run if direction == "forward" else jax.grad(run)
    jax.block_until_ready(fn(jnp.float64(1.0)))
    jax.effects_barrier()
    kind = "step" if direction == "forward" else "vjp"
    return [n for _, n in sorted((dt, n) for (k, dt), n in counts.items() if k == kind)]


# (direction, steps, devices, options): one interval at once, as a callback is compiled for each
ONE = functools.partial(MGRIT, batch_intervals="one", max_iters=2)
CASES = [
    ("adjoint", 8, 1, MGRIT(levels=1)),
    ("forward", 16, 1, ONE(cf_relax=0, batch_intervals="all")),
    ("forward", 64, 1, ONE(levels=4, coarsening=(4, 2, 2), cf_relax=(0, 1, 2), cycle="F")),
    ("adjoint", 64, 1, ONE(levels=3, coarsening=2, cycle="W", nested_iteration=False)),
    ("forward", 64, 1, ONE(levels=3, coarsening=2, skip_first_down=True, final_relax="FCF")),
    ("forward", 64, 1, ONE(levels=2, window=3)),
    ("forward", 32, 1, ONE(levels=3, coarse_solver="relax", batch_intervals=2)),
    # intervals within devices, over groups of devices, and both
    ("forward", 64, 8, MGRIT(levels=1)),
    ("forward", 64, 8, ONE(levels=3, coarsening=(16, 2), min_coarse=1, cycle="F")),
    ("adjoint", 64, 8, ONE(levels=2, coarsening=16, cf_relax=0)),
    ("forward", 64, 8, ONE(levels=3, coarsening=4, coarse_placement=1)),
    ("adjoint", 64, 8, ONE(levels=2, coarsening=16, coarse_placement=1)),
]


@pytest.mark.parametrize(("direction", "steps", "devices", "config"), CASES)
def test_counts_are_those_of_a_run(direction, steps, devices, config):
    """Steps on all devices, level by level; on one device they are the critical path."""
    predicted = predict(config, steps, devices, machine(), direction)
    assert list(predicted.evaluations) == counted(config, steps, devices, direction)
    if devices == 1:
        assert predicted.steps == predicted.evaluations


def test_messages_are_those_of_the_program():
    """Without loops, each message of the critical path is one `ppermute` of the program."""
    config = MGRIT(levels=2, coarsening=4, cf_relax=0, max_iters=1, nested_iteration=False)
    net = jaxbraid.parallel_ode_net(
        dense, dense_weights(64), forward=config, mesh=mesh_of(8), layer_axis="depth"
    )
    text = str(jax.make_jaxpr(net)(jnp.ones((2, 3))))
    # a sweep, tau, the coarsest level's eight turns (one loop), the last sweep
    assert text.count("ppermute[") == 4
    assert predict(config, 64, 8, machine()).messages == 3 + 8


@pytest.mark.parametrize("direction", ["forward", "adjoint"])
def test_messages_grow_with_the_logarithm(direction):
    """Where every level coarsens the devices by the same factor, to a bounded coarsest level."""

    def messages(devices):
        levels = 1 + round(math.log2(devices)) + 2
        config = MGRIT(levels=levels, coarsening=2, max_iters=1, nested_iteration=False)
        return predict(config, 8 * devices, devices, machine(), direction).messages

    counts = [messages(2**k) for k in range(3, 13)]
    growth = {b - a for a, b in itertools.pairwise(counts)}
    assert len(growth) == 1  # as many more for each doubling
    # two levels pay each device a turn
    two = [predict(MGRIT(coarsening=8), 8 * d, d, machine()).messages for d in (64, 128)]
    assert two[1] > 1.8 * two[0]


# -- limits and order -----------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "adjoint", "training"])
def test_limits(direction):
    config = MGRIT(levels=3, coarsening=4, max_iters=2)
    serial = predict(MGRIT(levels=1), 256, 1, machine(), direction)
    assert serial.speedup == pytest.approx(1)  # sequential stepping is what it's compared with
    # as many devices as steps can't make sequential stepping faster
    assert predict(MGRIT(levels=1), 256, 8, machine(), direction).speedup < 1
    # where steps cost nothing besides their work, one device gains nothing
    work = {n: Cost.line(0.0, 1e-6) for n in ("step", "vjp", "last")}
    one = predict(config, 256, 1, machine(**work), direction)
    assert one.seconds == pytest.approx(sum(one.steps) * 1e-6)
    assert one.speedup < 1
    # free messages: the steps are all there is
    free = predict(config, 256, 8, machine(**work, latency=0, bandwidth=math.inf), direction)
    assert free.seconds == pytest.approx(sum(free.steps) * 1e-6)


@pytest.mark.parametrize("direction", ["forward", "adjoint", "training"])
def test_more_of_anything_takes_longer(direction):
    config = MGRIT(levels=3, coarsening=4, max_iters=2, final_relax="FC")

    def seconds(changes=None, **more):
        options = config if changes is None else dataclasses.replace(config, **changes)
        return predict(options, 512, 16, machine(**more), direction).seconds

    base = seconds()
    assert seconds({"max_iters": 3}) > base
    assert seconds({"cf_relax": 2}) > base
    assert seconds({"cycle": "F"}) > base
    assert seconds({"nested_iteration": False}) < base
    assert seconds({"batch_intervals": "one"}) > base
    assert seconds({"tol": 1e-3}) > base
    assert seconds(latency=1e-5) > base
    assert seconds(bandwidth=1e9) > base
    assert seconds(step=Cost.line(1e-4, 1e-6), vjp=Cost.line(1e-4, 1e-6)) > base


def test_a_slow_network_prefers_gathered_levels():
    """One all-gather in place of a message for each turn."""
    configs = {c: MGRIT(levels=2, coarsening=8, coarse_placement=c) for c in (None, 1)}
    slow = {c: predict(m, 512, 64, machine(latency=1e-3)).seconds for c, m in configs.items()}
    assert slow[1] < slow[None]


def test_cost_interpolates():
    cost = Cost(((1, 2.0), (3, 4.0), (4, 9.0)))
    assert [cost(w) for w in (0.5, 1, 2, 4, 5)] == [1.5, 2.0, 3.0, 9.0, 14.0]
    assert cost.scaled(0.5)(2) == cost(1)
    assert Cost.line(3.0, 1.0)(7) == 10.0


# -- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "adjoint", "training"])
@pytest.mark.parametrize("devices", [1, 4, 64])
def test_choose_finds_the_cheapest(devices, direction):
    needed = {0: 3, 1: 2}
    configs = performance.candidates(256, devices, factors=(2, 4, 16), levels=(2, 3, 4))
    ranked = choose(
        256, devices, machine(), iterations=needed, direction=direction, configs=configs
    )
    best = math.inf
    for config in configs:
        config = dataclasses.replace(config, max_iters=needed[config.cf_relax])
        best = min(best, predict(config, 256, devices, machine(), direction).seconds)
    assert ranked[0].seconds == best
    assert [p.seconds for p in ranked] == sorted(p.seconds for p in ranked)
    asked = ranked[0].adjoint if direction == "adjoint" else ranked[0].forward
    assert predict(asked, 256, devices, machine(), direction).seconds == best


def test_tradeoff_splits_the_devices():
    """One row for each split; the parts of the batch pay for the sum of the gradients."""
    rows = tradeoff(128, 16, machine(), most_parts=8)
    assert [(p.devices, p.parts) for p in rows] == [(16, 1), (8, 2), (4, 4), (2, 8)]
    assert tradeoff(128, 4, machine())[-1].forward == MGRIT(levels=1)
    # gradients that are free to sum and steps of pure work: the batch alone scales perfectly
    work = {n: Cost.line(0.0, 1e-6) for n in ("step", "vjp", "last")}
    rows = tradeoff(128, 16, machine(**work, layer_bytes=0))
    assert rows[-1].speedup == pytest.approx(16)
    heavy = tradeoff(128, 16, machine(**work, layer_bytes=1e9))
    assert heavy[-1].speedup < heavy[0].speedup


def test_measure_gives_a_machine():
    """Every cost is there and positive; what it measures exactly is for the benchmark."""
    net = jaxbraid.parallel_ode_net(dense, dense_weights(8))
    x = jnp.ones((4, 3))
    measured = performance.measure(net, x, mesh=mesh_of(2), widths=(1, 2), shares=(0.5,), repeats=1)
    assert [w for w, _ in measured.step.points] == [0.5, 1, 2]
    assert all(s > 0 for c in (measured.step, measured.vjp, measured.last) for _, s in c.points)
    assert measured.state_bytes == x.nbytes
    assert measured.layer_bytes == 9 * 8
    assert measured.latency > 0
    assert measured.bandwidth > 0
    assert predict(net.forward, 8, 2, measured, "training").seconds > 0


def test_tables():
    rows = choose(256, 8, machine())[:3]
    text = performance.table(rows)
    assert len(text.splitlines()) == 4
    assert "levels" in text


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (ValueError, "steps=0", lambda: predict(MGRIT(), 0, 1, machine())),
        (TypeError, "devices=1.5", lambda: predict(MGRIT(), 8, 1.5, machine())),
        (TypeError, "config=2", lambda: predict(2, 8, 1, machine())),
        (TypeError, "machine=None", lambda: predict(MGRIT(), 8, 1, None)),
        (ValueError, "direction='back'", lambda: predict(MGRIT(), 8, 1, machine(), "back")),
        (ValueError, "parts=0", lambda: predict(MGRIT(), 8, 1, machine(), parts=0)),
        (ValueError, "iterations=-1", lambda: predict(MGRIT(), 8, 1, machine(), iterations=-1)),
        (TypeError, "step=1.0", lambda: machine(step=1.0)),
        (ValueError, "latency=-1", lambda: machine(latency=-1)),
        (ValueError, "bandwidth=0", lambda: machine(bandwidth=0)),
        (ValueError, "points=", lambda: Cost(((1, 1.0), (1, 2.0)))),
        (ValueError, "points=", lambda: Cost(())),
        (ValueError, "share=2", lambda: machine().with_batch(2)),
        (ValueError, "iterations=", lambda: choose(64, 4, machine(), iterations={0: 2})),
        (ValueError, "configs", lambda: choose(64, 4, machine(), configs=())),
        (ValueError, "most_parts=0", lambda: tradeoff(64, 4, machine(), most_parts=0)),
    ],
)
def test_errors_name_the_argument(error, says, call):
    with pytest.raises(error, match=says):
        call()
