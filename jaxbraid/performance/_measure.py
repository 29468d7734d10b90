"""A machine measured where the program runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxbraid import _check
from jaxbraid._ode_net import ParallelODENet
from jaxbraid._options import check_integer
from jaxbraid._problem import AUTO_BATCH_ELEMENTS
from jaxbraid.performance._machine import Cost, Machine, is_real
from jaxbraid.performance._timing import Layer, messages, step_costs


def measure(
    net: ParallelODENet,
    x: Any,
    *,
    side: Any = None,
    mesh: Any = None,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    widths: Sequence[int] | None = None,
    shares: Sequence[float] = (),
    repeats: int = 7,
    name: str = "measured",
) -> Machine:
    """The machine that this process runs on, for the layers of `net` at the input `x`.

    **Arguments**

    - `net`, `x`, `side`: as the net is called. Its layers are stepped on the default device.
    - `mesh`: its devices, in a row, exchange messages to measure latency and bandwidth; without it
        they are `latency` and `bandwidth`.
    - `widths`: how many intervals at once to measure; by default powers of two, of four from 16 on.
    - `shares`: parts of the batch to measure, such as `(1 / 4, 1 / 2)`, for `tradeoff`: the first
        axis of each leaf of `x` and `side` is cut.
    - `repeats`: each time is the shortest of so many calls, which take turns.

    **Returns**

    A `Machine`.
    """
    x, side = _check.arrays("x", x), _check.arrays("side", side)
    repeats = check_integer("repeats", repeats, 1)
    n = net.layers
    if widths is None:
        widths = [w for w in (1, 2, 4, 8, *(4**i for i in range(2, 16))) if w <= max(1, n // 2)]
        widths = sorted({*widths, max(1, n // 2)})
    for w in widths:
        if check_integer("widths", w, 1) > n:
            raise ValueError(f"widths={widths}: must be at most the number of layers, {n}.")
    for share in shares:
        if not is_real(share) or not 0 < share < 1:
            raise ValueError(f"shares={shares}: must be between 0 and 1.")
    costs = step_costs(Layer.of(net), x, side, list(widths), list(shares), repeats)
    if mesh is not None:
        latency, bandwidth = messages(mesh, x, repeats)
    elements = sum(leaf.size for leaf in jax.tree.leaves(x))
    return Machine(
        Cost(costs.step),
        Cost(costs.vjp),
        Cost(costs.last),
        _tree_bytes(x),
        _tree_bytes(net.params) / n,
        _tree_bytes(net.args),
        latency,
        bandwidth,
        Cost(costs.rhs),
        costs.arrange,
        costs.dispatch,
        "one" if jax.default_backend() == "cpu" and elements > AUTO_BATCH_ELEMENTS else "all",
        name,
    )


def _tree_bytes(x: Any) -> float:
    return float(sum(leaf.nbytes for leaf in jax.tree.leaves(x)))
