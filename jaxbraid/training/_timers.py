"""Where a layer-parallel program spends its time: read from a trace of JAX's profiler."""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxbraid._options import check_integer

PARTS = ("forward", "adjoint", "gradient", "other")
SCOPES = {f"mgrit_{part}": part for part in PARTS[:3]}  # as the engine names them
_MESSAGES = ("collective-permute", "all-reduce", "all-gather", "all-to-all", "reduce-scatter")
_CONTAINERS = ("while", "call", "conditional")  # the time of what they run is counted there


@dataclasses.dataclass(frozen=True)
class Timers:
    """Seconds a run of each part of a program, mean over devices; made by `timers`.

    - `compute`, `communication`: by part: `"forward"` (the forward solve), `"adjoint"` (the
        iterations of the adjoint solve), `"gradient"` (its last sweep, which has the gradients) and
        `"other"` (all else, such as the layers around the network).
    - `wall`: seconds a run as the caller sees it, traced.

    Communication includes waiting for the other devices.
    """

    compute: dict[str, float]
    communication: dict[str, float]
    wall: float

    @property
    def share(self) -> float:
        """Communication's share in the time of all parts."""
        total = sum(self.compute.values()) + sum(self.communication.values())
        return sum(self.communication.values()) / total if total else 0.0

    def table(self) -> Table:
        """To print by `rich.print`."""
        table = Table("", "compute, ms", "communication, ms", title="Time of a run")
        for part in PARTS:
            table.add_row(
                part, f"{1e3 * self.compute[part]:.2f}", f"{1e3 * self.communication[part]:.2f}"
            )
        table.add_row("share", f"{1 - self.share:.1%}", f"{self.share:.1%}", end_section=True)
        table.add_row("wall time", f"{1e3 * self.wall:.2f}", "")
        return table


def timers(fn: Callable[..., Any], *args: Any, repeats: int = 3) -> Timers:
    """Trace `fn(*args)`, compiled, and add up the time of its operations by part.

    Operations are known by the names that the engine gives them in the compiled program, so what is
    measured is what runs; nothing is added to it. Tracing takes some time itself: small operations
    look longer than they are, and parts are to be compared with each other. The time of all
    operations on a device is less than the wall time, which includes starting them.

    **Arguments**

    - `fn`, `args`: a function of arrays, such as the gradient of a loss, and its arguments.
    - `repeats`: how many runs are traced.

    **Returns**

    A `Timers`.

    **Raises**

    `TypeError` if `fn` isn't a function; `ValueError` for `repeats` less than 1; `RuntimeError`
    where the profiler tells no times of operations.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: must be a function.")
    repeats = check_integer("repeats", repeats, 1)
    compiled = jax.jit(fn).lower(*args).compile()
    hlo = compiled.as_text() or ""
    kinds = _kinds(hlo)
    jax.block_until_ready(compiled(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            for _ in range(repeats):
                jax.block_until_ready(compiled(*args))
            wall = (time.perf_counter() - began) / repeats
        traces = list(Path(folder).rglob("*.xplane.pb"))
        if not traces:
            raise RuntimeError("JAX's profiler wrote no trace.")
        data = jax.profiler.ProfileData.from_file(str(traces[0]))
    module = hlo.split(maxsplit=2)[1].rstrip(",")
    seconds: dict[tuple[str, bool], float] = collections.defaultdict(float)
    devices = set()
    for event in (e for plane in data.planes for line in plane.lines for e in line.events):
        stats = dict(event.stats)
        kind = kinds.get(str(stats.get("hlo_op", "")))
        if kind is not None and stats.get("hlo_module") == module:
            seconds[kind] += event.duration_ns * 1e-9
            devices.add(stats.get("device_ordinal"))
    if not seconds:
        raise RuntimeError("the trace of JAX's profiler holds no operation of the program.")
    runs = repeats * len(devices)
    return Timers(
        {part: seconds[part, False] / runs for part in PARTS},
        {part: seconds[part, True] / runs for part in PARTS},
        wall,
    )


def _kinds(hlo: str) -> dict[str, tuple[str, bool]]:
    """For each operation of a compiled program its part, and whether it passes messages."""
    kinds = {}
    for line in hlo.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*?[\])}] ([a-z-]+)\(", line)
        if not found or found[2] in _CONTAINERS:
            continue
        scope = re.search(r'op_name="([^"]*)"', line)
        names = scope[1] if scope else ""
        # the innermost scope says it: the gradients' sweep lies in the adjoint solve
        part = max(SCOPES, key=lambda name: names.rfind(name)) if names else ""
        part = SCOPES[part] if part and part in names else "other"
        kinds[found[1]] = part, found[2].startswith(_MESSAGES)
    return kinds
