"""A table of times: forward solve, adjoint solve, gradients, and how much of it is communication.

Times are those of separately compiled programs, differences of which give the parts; the share of
communication comes from the profiler's events of the devices.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.table import Table

from jaxbraid import _check
from jaxbraid._ode_net import ParallelODENet
from jaxbraid._options import check_integer
from jaxbraid._tree import Split
from jaxbraid.performance._timing import turns

COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\b(?:collective-permute|collective-broadcast|all-reduce|"
    r"all-gather|all-to-all|reduce-scatter)(?:-start|-done)?\(",
    re.M,
)


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of the parts of a network's value and gradient; `table()` prints them.

    - `forward`: the forward solve.
    - `adjoint`: what the gradient with respect to the input takes more: the adjoint solve.
    - `gradient`: what the gradients with respect to all parameters take beyond that.
    - `communication_forward`, `communication_gradient`: of the forward solve and of the whole, the
        share of device time inside collective operations, waiting for other devices included; 0 on
        one device, NaN where the profiler tells nothing.
    """

    forward: float
    adjoint: float
    gradient: float
    communication_forward: float
    communication_gradient: float

    @property
    def total(self) -> float:
        """Seconds of value and gradient."""
        return self.forward + self.adjoint + self.gradient

    def table(self) -> Table:
        """A rich table: a row a part."""
        table = Table("part", "time", "share", "of it communication")
        rows = {
            "forward solve": (self.forward, self.communication_forward),
            "adjoint solve": (self.adjoint, None),
            "gradients of parameters": (self.gradient, None),
            "value and gradient": (self.total, self.communication_gradient),
        }
        for name, (seconds, share) in rows.items():
            known = share is not None and not math.isnan(share)
            text = f"{share:.0%}" if known else ("" if share is None else "not known")
            table.add_row(name, f"{1e3 * seconds:.3g} ms", f"{seconds / self.total:.0%}", text)
        return table


def time_parts(
    net: ParallelODENet, x: PyTree, *, side: PyTree | None = None, repeats: int = 7
) -> Timings:
    """Times of a network's forward solve, adjoint solve and gradients on its devices.

    Three programs are compiled: the forward solve, the gradient with respect to `x`, and that with
    respect to all parameters as well. Each is called `repeats` times, in turns, and the shortest
    time counts; parts are differences, so a part that is shorter than the noise may come out as 0.
    With more than one device two of them are run once more under `jax.profiler`. On virtual CPU
    devices, which share cores, most of the communication is waiting.

    **Arguments**

    - `net`, `x`, `side`: as the net is called; of a `ParallelStack`, give `stack.net()`.
    - `repeats`: calls of each program.
    """
    x, side = _check.arrays("x", x), _check.arrays("side", side)
    repeats = check_integer("repeats", repeats, 1)
    split = Split.of((net.params, net.args))
    params, rest = split((net.params, net.args))
    of_x = Split.of(x)
    diff, fixed = of_x(x)

    def value(diff: Any, params: Any) -> Any:
        net_params, args = split.join(params, rest)
        one = dataclasses.replace(net, params=net_params, args=args)
        out = one(of_x.join(diff, fixed), side=side)
        return of_x(out[0] if net.has_aux else out)[0]

    def pull(argnums: tuple[int, ...]) -> Callable[..., Any]:
        def gradient(diff: Any, params: Any) -> Any:
            total = lambda *given: sum(jnp.sum(jnp.real(y)) for y in value(*given))  # noqa: E731
            return jax.value_and_grad(total, argnums=argnums)(diff, params)

        return gradient

    programs = [
        jax.jit(fn).lower(diff, params).compile() for fn in (value, pull((0,)), pull((0, 1)))
    ]
    given = [jax.device_put((diff, params), p.input_shardings[0]) for p in programs]
    runs = [lambda p=p, g=g: p(*g) for p, g in zip(programs, given, strict=True)]
    forward, first, whole = turns(runs, repeats)
    shares = [_share(runs[i], programs[i].as_text() or "") for i in (0, 2)]
    return Timings(forward, max(0.0, first - forward), max(0.0, whole - first), *shares)


def _share(run: Callable[[], Any], text: str) -> float:
    """The share of communication in a program, whose compiled text names its collectives."""
    collectives = set(COLLECTIVE.findall(text))
    if not collectives:
        return 0.0
    spent = total = 0.0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        for file in Path(folder).rglob("*.xplane.pb"):
            for events in _operations(file).values():
                total += _covered((start, end) for _, start, end in events)
                spent += _covered((a, b) for name, a, b in events if name in collectives)
    return spent / total if total > 0 and spent > 0 else math.nan


def _operations(file: Path) -> dict[Any, list[tuple[str, float, float]]]:
    """Operations of each device in a trace: name in the compiled text, start and end."""
    found = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = {k: v for k, v in event.stats if k in ("hlo_op", "device_ordinal")}
                if "hlo_op" in stats:
                    key = (plane.name, stats.get("device_ordinal"))
                    end = event.start_ns + event.duration_ns
                    found[key].append((stats["hlo_op"], event.start_ns, end))
    return found


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, last = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
