"""What the benchmarks share: where they run, how they are timed, how a result is told.

A benchmark is a module with a function `rows(quick)`, which yields a `Row` as soon as it has
measured one, and ends with `main(rows, ...)`. Programs that are compared take turns in one process,
after a call each that compiles; the shortest time of each counts, for what else a machine does only
adds. The median tells how quiet it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

Rows = Callable[[bool], Iterator["Row"]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a goal's table; `met` is `None` for what has no goal or could not be measured."""

    case: str
    times: str
    measured: str
    goal: str = ""
    met: bool | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Timed:
    """Seconds of a program."""

    shortest: float
    median: float

    def __str__(self) -> str:
        return seconds(self.shortest)


def seconds(t: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if t * factor >= 1:
            return f"{t * factor:.3g} {unit}"
    return f"{t * 1e9:.3g} ns"


def told(times: Mapping[str, Timed | float]) -> str:
    """The times of several programs, in words."""
    items = ((k, t if isinstance(t, float) else t.shortest) for k, t in times.items())
    return ", ".join(f"{name} {seconds(t)}" for name, t in items)


def compare(
    runs: Mapping[str, Callable[[], Any]], quick: bool = False, budget: float = 4.0
) -> dict[str, Timed]:
    """Time programs that take turns, for about `budget` seconds after their first calls."""
    if quick:
        budget /= 10
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
        jax.block_until_ready(run())  # the first one may have left buffers to be made
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    least = 3
    while least > 0 or (time.perf_counter() - begin < budget and len(times[name]) < 1000):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
        least -= 1
    gc.enable()
    return {name: Timed(min(t), statistics.median(t)) for name, t in times.items()}


def at_most(case: str, times: Mapping[str, Any], ratio: float, goal: float, note: str = "") -> Row:
    """A row whose ratio must not exceed the goal."""
    return Row(case, told(times), f"{ratio:.2f}x", f"<= {goal:g}x", ratio <= goal, note)


def at_least(case: str, times: Mapping[str, Any], ratio: float, goal: float, note: str = "") -> Row:
    """A row whose ratio must reach the goal."""
    digits = 2 if ratio < 10 else 0
    return Row(case, told(times), f"{ratio:.{digits}f}x", f">= {goal:g}x", ratio >= goal, note)


def use(cores: int, devices: int = 1, x64: bool = False) -> None:
    """This process on so many cores (all for 0), before JAX starts its threads."""
    flags = os.environ.get("XLA_FLAGS", "")
    if cores:
        flags += " --xla_cpu_multi_thread_eigen=false"
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    if devices > 1:
        flags += f" --xla_force_host_platform_device_count={devices}"
        # XLA's threads: where those that wait for another device are all, a run can stand still
        os.environ.setdefault("NPROC", str(2 * devices))
    os.environ["XLA_FLAGS"] = flags.strip()
    jax.config.update("jax_enable_x64", x64)


def table(title: str, rows: list[Row]) -> Table:
    out = Table(title=title, title_justify="left")
    for name in ("case", "times", "measured", "goal", "met"):
        out.add_column(name, overflow="fold")
    for row in rows:
        met = {None: "", True: "[green]yes", False: "[red]no"}[row.met]
        out.add_row(row.case, row.times, row.measured, row.goal, met)
    return out


def measured(rows: Rows, quick: bool) -> Iterator[Row]:
    """Rows without a verdict where sizes are not those that goals are meant for."""
    for row in rows(quick):
        yield dataclasses.replace(row, met=None) if quick else row


def main(rows: Rows, doc: str | None, *, cores: int = 1, devices: int = 1, x64: bool = False):
    """The command line of one benchmark."""
    title = (doc or "").strip().splitlines()[0]
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few repeats")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    given = parser.parse_args()
    use(cores, devices, x64)
    if given.json:
        for row in measured(rows, given.quick):
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        return
    console, done = Console(), []
    with console.status("measuring") as status:
        for row in measured(rows, given.quick):
            done.append(row)
            status.update(f"measured: {row.case}")
    console.print(table(title, done))
    for row in done:
        if row.note:
            console.print(f"{row.case}: {row.note}", soft_wrap=True, highlight=False)
