"""Times of a network's steps and of messages on the devices at hand, for `jaxbraid.performance`.

Each loop is that of a sweep: a scan over the steps of `width` intervals, which are stepped at once.
All programs take turns, so that a slow moment of the machine hits all alike.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxbraid import _tree
from jaxbraid._problem import PerStep
from jaxbraid._tree import Split, Tree

if TYPE_CHECKING:
    from jaxbraid._ode_net import ParallelODENet

LEAST = 2e-3  # seconds that one timed call shall take at least, so that its start doesn't count
Points = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer as `step(inputs, u, args, side) -> u`, with the inputs of all `n` layers."""

    step: Callable[[Any, Tree, Tree, Tree], Tree]
    inputs: Any
    args: Tree
    n: int

    @classmethod
    def of(cls, net: ParallelODENet) -> Layer:
        setup, _ = net._setup()
        start = jnp.arange(net.layers)
        clock = setup.clock(None, start, start + 1)

        def step(inputs: Any, u: Tree, args: Tree, side: Tree) -> Tree:
            time, params = inputs
            return setup.steps[0](time, u, PerStep(params), args, side)[0]

        params = _tree.take(net.params, slice(0, net.layers))
        return cls(step, (clock, params), net.args, net.layers)


class Costs(NamedTuple):
    """Points `(width, seconds)` of each kind of loop iteration; see `Machine`."""

    step: Points
    vjp: Points
    last: Points
    rhs: Points
    arrange: float
    dispatch: float


def turns(runs: list[Callable[[], Any]], repeats: int) -> list[float]:
    """The shortest time of each of `runs`, which take turns: what else runs only adds."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        jax.block_until_ready(run())
    for _ in range(repeats):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[i].append(time.perf_counter() - start)
    return [min(t) for t in times]


def _loop(layer: Layer, kind: str, width: int, x: Tree, side: Tree) -> tuple[Any, int]:
    """A compiled `run(repeats)` of sweeps over `width` intervals, and their iterations."""
    length = max(1, layer.n // width)
    split, of_params, of_args = Split.of(x), Split.of(layer.inputs[1]), Split.of(layer.args)
    u, rest = split(x)
    args, fixed_args = of_args(layer.args)

    def arrange(a: jax.Array) -> jax.Array:
        return jnp.swapaxes(a[: width * length].reshape(width, length, *a.shape[1:]), 0, 1)

    clock, params = jax.tree.map(arrange, layer.inputs)
    params, fixed = of_params(params)

    def step(u: list[Any], params: list[Any], args: list[Any], xs: Any) -> list[Any]:
        time, fixed, side = xs

        def one(u: list[Any], params: list[Any], time: Any, fixed: Any) -> list[Any]:
            inputs = (time, of_params.join(params, fixed))
            out = layer.step(inputs, split.join(u, rest), of_args.join(args, fixed_args), side)
            return split(out)[0]

        if width > 1:
            return jax.vmap(one)(u, params, time, fixed)
        out = one(*_tree.take((u, params, time, fixed), 0))
        return jax.tree.map(lambda a: a[None], out)

    start = _tree.repeat(u, width)
    states = jax.tree.map(lambda a: jnp.stack([a] * length), start)

    def body(data: Any, v: list[Any], xs: Any) -> tuple[list[Any], Any]:
        args, side = data
        clock, params, fixed, state, b = xs
        rest = (clock, fixed, side)
        if kind == "step":
            return step(v, params, args, rest), ()
        if kind == "rhs":
            return _tree.add(_tree.sub(step(v, params, args, rest), state), b), ()
        if kind == "vjp":
            return jax.vjp(lambda u: step(u, params, args, rest), state)[1](v)[0], ()
        du, dparams, dargs = jax.vjp(lambda u, p, a: step(u, p, a, rest), state, params, args)[1](v)
        return du, (dparams, dargs)

    used = kind != "step"

    @jax.jit
    def run(count: jax.Array, start: list[Any], xs: Any, data: Any) -> Any:
        def sweep(carry: Any) -> Any:
            total = _tree.zeros(_tree.shapes(data[0])) if kind == "last" else ()

            def one(carry: Any, x: Any) -> Any:
                v, out = body(data, carry[0], x)
                if kind != "last":
                    return (v, ()), ()
                return (v, _tree.add(carry[1], out[1])), out[0]

            return lax.scan(one, (carry, total), xs, reverse=kind in ("vjp", "last"))

        def again(_: int, carry: Any) -> Any:
            # from the start each time: nothing shall decay or grow
            return sweep(jax.tree.map(lambda a, b: a + 0 * b, start, carry[0][0]))

        return lax.fori_loop(0, count, again, sweep(start))

    xs = (clock, params, fixed, states if used else None, states if kind == "rhs" else None)
    data = (args, side)
    return (lambda count: run(count, start, xs, data)), length


def step_costs(
    layer: Layer, x: Tree, side: Tree, widths: list[int], shares: list[float], repeats: int
) -> Costs:
    """Costs at `widths` with the whole batch, and at width 1 with each of its `shares`."""
    kinds = ("step", "vjp", "last", "rhs")
    keys, runs = [], []
    for share in [*sorted(shares), 1.0]:
        part, side_part = _part(x, share), _part(side, share)
        for width in [1] if share < 1 else widths:
            for kind in kinds:
                run, length = _loop(layer, kind, width, part, side_part)
                jax.block_until_ready(run(0))
                begin = time.perf_counter()
                jax.block_until_ready(run(0))
                count = int(LEAST / (time.perf_counter() - begin))
                keys.append((kind, width * share, length * (count + 1)))
                runs.append(lambda run=run, count=count: run(count))
    empty, zero = jax.jit(lambda a: a + 1), jnp.zeros(())
    run_arrange, layers = _arrangement(layer)
    *times, dispatch, arrange = turns([*runs, lambda: empty(zero), run_arrange], repeats)
    points: dict[str, dict[float, float]] = {kind: {} for kind in kinds}
    for (kind, width, iterations), seconds in zip(keys, times, strict=True):
        points[kind][width] = max(0.0, seconds - dispatch) / iterations
    rhs = {w: max(0.0, t - points["step"][w]) for w, t in points["rhs"].items()}
    step, vjp, last = (tuple(points[kind].items()) for kind in kinds[:3])
    each = max(0.0, arrange - dispatch) / layers
    return Costs(step, vjp, last, tuple(rhs.items()), each, dispatch)


def _part(x: Tree, share: float) -> Tree:
    """`share` of the samples; at least one."""
    if share == 1:
        return x
    return jax.tree.map(lambda a: a[: max(1, round(share * a.shape[0]))], x)


def _arrangement(layer: Layer) -> tuple[Callable[[], Any], int]:
    """Putting the parameters in the order of a sweep of intervals of four, and how many."""
    n = layer.n // 4 * 4

    @jax.jit
    def arrange(params: Tree) -> Tree:
        return jax.tree.map(
            lambda a: jnp.swapaxes(a[:n].reshape(n // 4, 4, *a.shape[1:]), 0, 1), params
        )

    if n == 0:
        return lambda: (), 1
    return lambda: arrange(layer.inputs[1]), n


def messages(mesh: Any, x: Tree, repeats: int) -> tuple[float, float]:
    """Latency and bandwidth of messages along all devices of `mesh`, in a row."""
    row = jax.sharding.Mesh(mesh.devices.reshape(-1), ("row",))
    size = row.devices.size
    if size < 2:
        raise ValueError(f"mesh={mesh}: must have at least two devices to exchange messages.")
    pairs = [(i, i + 1) for i in range(size - 1)]
    rounds = 200

    def exchange(elements: int) -> Callable[[], Any]:
        def block(a: jax.Array) -> jax.Array:
            def one(_: int, a: jax.Array) -> jax.Array:
                return a + lax.ppermute(a, "row", pairs)

            return lax.fori_loop(0, rounds, one, a)

        spec = PartitionSpec("row")
        fn = jax.jit(jax.shard_map(block, mesh=row, in_specs=spec, out_specs=spec))
        a = jnp.zeros((size * elements,), jnp.float32)
        return lambda: fn(a)

    # an addition a round is in both: a message is not without work on what arrives
    small, large = 16, 1 << 18
    a, b = turns([exchange(small), exchange(large)], repeats)
    return a / rounds, 4 * (large - small) * rounds / max(b - a, 1e-9)
