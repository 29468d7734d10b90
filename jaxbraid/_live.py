"""The table of iterations, printed while a solve runs, with a bar of how far it has come."""

from __future__ import annotations

import functools
import math
import sys
import threading
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


class LiveTable:
    """Prints one line an iteration: its number, residual and factor.

    The bar shows, with a tolerance, the logarithmic way from the first residual to it, otherwise
    the number of iterations. Where the output is no terminal, only lines are printed.
    """

    def __init__(self, max_iters: int, tol: float, file: TextIO | None = None):
        self.max_iters, self.tol, self.file = max_iters, tol, file
        self.first = self.last = math.nan
        self.iteration = -1
        self.bar: Progress | None = None
        self.lock = threading.Lock()

    def __call__(self, iteration: Any, residual: Any, states: Any) -> None:
        with self.lock:
            self._line(int(iteration), float(residual))

    def _line(self, iteration: int, residual: float) -> None:
        if self.bar is None or iteration <= self.iteration:
            self._begin(residual)
        assert self.bar is not None
        factor = residual / self.last if self.last > 0 else math.nan
        shown = f"{factor:.2e}" if math.isfinite(factor) else "-"
        self.bar.console.print(f"{iteration:9d}  {residual:10.4e}  {shown:>8}", highlight=False)
        done = self._done(iteration, residual)
        self.bar.update(self.bar.task_ids[0], completed=done, refresh=True)
        self.iteration, self.last = iteration, residual
        if done >= 1 or not math.isfinite(residual):
            self._end()

    def _begin(self, residual: float) -> None:
        self._end()  # of a solve that was broken off
        columns = TextColumn("MGRIT"), BarColumn(), TaskProgressColumn()
        console = Console(file=sys.stdout if self.file is None else self.file)
        # only a terminal can take a line back
        self.bar = Progress(
            *columns, console=console, auto_refresh=False, disable=not console.is_terminal
        )
        self.bar.add_task("MGRIT", total=1.0)
        self.bar.start()
        self.bar.console.print("iteration    residual    factor", highlight=False)
        self.first, self.last = residual, math.nan

    def _end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.iteration = None, -1

    def _done(self, iteration: int, residual: float) -> float:
        if self.tol > 0 and residual <= self.tol:
            return 1.0
        done = iteration / self.max_iters if self.max_iters else 1.0
        if self.tol > 0 and self.first > self.tol and residual > 0:
            way = math.log(self.first / residual) / math.log(self.first / self.tol)
            done = max(done, min(way, 0.99))
        return max(0.0, min(1.0, done))


@functools.cache
def live_table(max_iters: int, tol: float) -> LiveTable:
    """The table for such solves: one object, so that they share compiled programs."""
    return LiveTable(max_iters, tol)
