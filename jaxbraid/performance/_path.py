"""What lies on the critical path of a solve, counted phase by phase, as the engine runs."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

from jaxbraid import _tree
from jaxbraid._hierarchy import Hierarchy, Level
from jaxbraid._options import MGRIT


class Phase(NamedTuple):
    """A kind of thing that all devices do at the same time; `Path` counts how often.

    - `kind`: `"step"` and `"rhs"`, a loop iteration without and with a right-hand side; `"last"`,
        one of the last sweep; `"message"` of one state; `"broadcast"` of a state, by an all-reduce;
        `"norm"`, an all-reduce of a number; `"gather"`, an all-gather of `width` states a device.
    - `level`, and the `width`: how many intervals are stepped at once.
    - `turns`: how many devices do it in turn, each its share.
    """

    kind: str
    level: int
    width: int = 1
    turns: int = 1


class Path(collections.Counter[Phase]):
    """Numbers of phases on the critical path; `evaluations` counts steps of all devices."""

    def times(self, n: int) -> Path:
        """`n` of them one after another."""
        return Path({phase: n * count for phase, count in self.items()})

    def __add__(self, other: collections.Counter[Phase]) -> Path:  # type: ignore[override]
        total = Path(self)
        total.update(other)
        return total

    def steps(self, levels: int) -> tuple[int, ...]:
        """Steps on each level, one interval's as one."""
        counts = [0] * levels
        for phase, count in self.items():
            if phase.kind in STEPS:
                counts[phase.level] += count * phase.width
        return tuple(counts)

    def messages(self) -> int:
        """Messages from device to device."""
        return sum(count for phase, count in self.items() if phase.kind == "message")


STEPS = ("step", "rhs", "last")


def phases(*counted: tuple[Phase, int]) -> Path:
    path = Path()
    for phase, count in counted:
        if count:
            path[phase] += count
    return path


@dataclasses.dataclass(frozen=True)
class Cycle:
    """The phases of `_sweep.py`, `_cycle.py` and `_iterate.py`, function by function."""

    h: Hierarchy
    config: MGRIT
    reverse: bool
    auto: str = "all"  # what `batch_intervals="auto"` means
    keeps: bool = False  # whether the states at all points are kept

    @property
    def coarsest(self) -> int:
        return len(self.h.levels) - 1

    def level(self, l: int) -> Level:
        return self.h.levels[l]

    def batch(self, l: int) -> int:
        limit, n = self.config.batch_intervals, self.level(l).intervals
        limit = self.auto if limit == "auto" else limit
        if limit == "all":
            return n
        return 1 if limit == "one" else _tree.largest_divisor(n, int(limit))

    def shift(self, l: int, hops: int) -> Path:
        alone = self.h.is_gathered(l) or hops == 0 or hops >= self.h.devices
        return phases((Phase("message", l), 0 if alone else 1))

    def to_owner(self, l: int) -> Path:
        level = self.level(l)
        if self.reverse or level.group == 1:
            return Path()
        return self.shift(l, (level.group - 1) * level.stride)

    def starts(self, l: int) -> Path:
        level = self.level(l)
        if l == self.coarsest:
            return Path()
        return self.shift(l, level.stride if self.reverse else level.group * level.stride)

    def march(self, l: int, kind: str, length: int | None = None) -> Path:
        level, batch = self.level(l), self.batch(l)
        length = level.length if length is None else length
        phase = Phase(kind, l, batch, level.group)
        run = phases((phase, level.intervals // batch * length))
        if level.group == 1:
            return run
        return (run + self.shift(l, level.stride)).times(level.group)

    def sweep(self, l: int, kind: str) -> Path:
        return self.starts(l) + self.march(l, kind) + self.to_owner(l)

    def all_points(self, l: int, kind: str) -> Path:
        level = self.level(l)
        length = level.length - 1 if level.group == 1 else None
        return self.starts(l) + self.march(l, kind, length) + self.to_owner(l)

    def step_all(self, l: int) -> Path:
        level = self.level(l)
        size = level.slots_at_once(self.batch(l))
        step = phases((Phase("step", l, size), level.block // size))
        return self.shift(l, level.stride) + step

    def cycle(self, l: int, cycle: str, kind: str) -> Path:
        relax = self.sweep(l, kind).times(1 + self.config.at("cf_relax", l))
        return relax + self.correct(l, cycle)

    def correct(self, l: int, cycle: str) -> Path:
        down = Path()
        if self.h.gathered == l + 1:
            down = phases((Phase("gather", l + 1, 2 * self.h.owned(l + 1).block), 1))
        return down + self.step_all(l + 1) + self.visit(l + 1, cycle)

    def visit(self, l: int, cycle: str) -> Path:
        if l == self.coarsest:
            return self.solve_coarsest("rhs")
        path = self.to_owner(l)
        if cycle == "W":
            path += self.cycle(l, "W", "rhs").times(2)
        else:
            path += self.cycle(l, cycle, "rhs")
            if cycle == "F":
                path += self.cycle(l, "V", "rhs")
        return path + self.all_points(l, "rhs")

    def solve_coarsest(self, kind: str) -> Path:
        l, config = self.coarsest, self.config
        if config.window is not None:
            return self.step_all(l).times(config.window - 1)
        if config.coarse_solver == "relax":
            return self.step_all(l).times(1 + (config.at("cf_relax", l - 1) if l > 0 else 0))
        return self.march(l, kind)

    def start(self) -> Path:
        nested = self.config.nested_iteration
        if not (nested or self.config.skip_first_down):
            return Path()
        path = self.solve_coarsest("step")
        for l in range(self.coarsest - 1, 0, -1):
            if not self.config.skip_first_down:
                path += self.cycle(l, "V", "step")
            path += self.all_points(l, "step")
        return path

    def prologue(self) -> Path:
        """What comes before the first cycle."""
        if self.coarsest == 0:
            return Path()
        path = self.start()
        if self.config.tol > 0:
            path += self.sweep(0, "step")
            if self.config.criterion == "residual":
                path += phases((Phase("norm", 0), 1))
        return path

    def iteration(self) -> Path:
        if self.coarsest == 0:
            return Path()
        # with a tolerance a cycle ends with the sweep that the next would begin with
        path = self.cycle(0, self.config.cycle, "step")
        return path + phases((Phase("norm", 0), int(self.config.tol > 0)))

    def epilogue(self) -> Path:
        """The last sweep, what `final_relax` adds, and the final state to every device."""
        path = self.starts(0) + self.march(0, "last")
        if self.coarsest > 0:
            relax = self.config.final_relax
            if relax == "FCF" and self.config.tol == 0:
                path += self.sweep(0, "step")
            if relax == "FC" and self.keeps:
                path += self.to_owner(0) + self.starts(0)
        return path + phases((Phase("broadcast", 0), int(self.h.devices > 1)))
