"""What steps and messages cost on a machine."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from typing import Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of stepping `width` intervals at once, piecewise linear through measured points.

    **Arguments**

    - `points`: pairs `(width, seconds)`, widths increasing. A width of 1/2 is half a batch. Beyond
        the ends the first and the last pair of points are extrapolated, never below 0.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple((float(w), float(s)) for w, s in self.points)
        widths = [w for w, _ in points]
        if not points or any(b <= a for a, b in itertools.pairwise(widths)):
            raise ValueError(f"points={self.points!r}: must be pairs with increasing widths.")
        if any(not (w >= 0 and 0 <= s < math.inf) for w, s in points):
            raise ValueError(f"points={self.points!r}: widths and seconds must be >= 0.")
        object.__setattr__(self, "points", points)

    @classmethod
    def line(cls, fixed: float, each: float) -> Cost:
        """`fixed` seconds however many intervals, and `each` for every interval."""
        return cls(((0.0, fixed), (1.0, fixed + each)))

    def __call__(self, width: float) -> float:
        """Seconds of one loop iteration that steps `width` intervals."""
        if len(self.points) == 1:
            return self.points[0][1]
        i = bisect.bisect_left(self.points, (width,))
        i = min(max(i, 1), len(self.points) - 1)
        (a, s), (b, t) = self.points[i - 1 : i + 1]
        return max(0.0, s + (t - s) * (width - a) / (b - a))

    def scaled(self, share: float) -> Cost:
        """The same with `share` of the batch."""
        return Cost(tuple((w / share, s) for w, s in self.points))


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a network's steps cost on a device, and messages between devices.

    **Arguments**

    - `step`, `vjp`, `last`: seconds of one loop iteration as a `Cost` of its width: a forward step;
        a vjp with respect to the state (an adjoint step); one with respect to everything (those
        of the last adjoint sweep).
    - `state_bytes`, `layer_bytes`, `shared_bytes`: sizes of one state, of one layer's parameters,
        and of the parameters that all layers share.
    - `latency`, `bandwidth`: of a message, seconds and bytes a second.
    - `rhs`: what the right-hand side of a coarse level adds to a loop iteration.
    - `arrange`: seconds a layer and solve for putting its parameters in the order of a sweep.
    - `dispatch`: seconds for starting a compiled program.
    - `auto_batch`: what `batch_intervals="auto"` means there.
    - `name`: for tables.
    """

    step: Cost
    vjp: Cost
    last: Cost
    state_bytes: float
    layer_bytes: float = 0.0
    shared_bytes: float = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    rhs: Cost = Cost(((0.0, 0.0),))
    arrange: float = 0.0
    dispatch: float = 0.0
    auto_batch: Literal["all", "one"] = "all"
    name: str = "machine"

    def __post_init__(self) -> None:
        for name in ("step", "vjp", "last", "rhs"):
            if not isinstance(getattr(self, name), Cost):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be a Cost.")
        sizes = ("state_bytes", "layer_bytes", "shared_bytes", "latency", "arrange", "dispatch")
        for name in sizes:
            _non_negative(name, getattr(self, name))
        if self.auto_batch not in ("all", "one"):
            raise ValueError(f"auto_batch={self.auto_batch!r}: must be 'all' or 'one'.")
        if not is_real(self.bandwidth) or not self.bandwidth > 0:
            raise ValueError(f"bandwidth={self.bandwidth!r}: must be positive, bytes a second.")

    def message(self, size: float) -> float:
        """Seconds of a message of `size` bytes to another device."""
        return self.latency + size / self.bandwidth

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds of a sum over devices: recursive doubling, or halving and doubling if faster."""
        if devices == 1 or size == 0:
            return 0.0
        rounds = math.ceil(math.log2(devices))
        split = 2 * rounds * self.latency + 2 * size * (1 - 1 / devices) / self.bandwidth
        return min(rounds * self.message(size), split)

    def all_gather(self, size: float, devices: int) -> float:
        """Seconds until every device has the `size` bytes of each of `devices`."""
        if devices == 1:
            return 0.0
        rounds = math.ceil(math.log2(devices))
        return rounds * self.latency + (devices - 1) * size / self.bandwidth

    def with_batch(self, share: float) -> Machine:
        """The same machine with `share` of the batch on each device."""
        if not is_real(share) or not 0 < share <= 1:
            raise ValueError(f"share={share!r}: must be in (0, 1].")
        costs = {n: getattr(self, n).scaled(share) for n in ("step", "vjp", "last", "rhs")}
        return dataclasses.replace(self, state_bytes=self.state_bytes * share, **costs)


def is_real(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _non_negative(name: str, value: Any) -> None:
    if not is_real(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r}: must be a finite number >= 0.")
