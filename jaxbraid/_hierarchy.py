"""The time grids of a solve and how their points lie on a row of devices.

Step `n` of a level goes from its point `n` to its point `n + 1`. A level has *slots*, one a step.
Interval `k` of a level consists of the `m` slots `mk .. mk + m - 1`; slot `k` of the next coarser
level is the same stretch of time taken in one step. Level 0 gives each of `D` devices a block of
`b` consecutive slots, so a coarser level has `b / m` slots a device. When a level has fewer slots
a device than an interval needs, an interval spans a *group* of `q` devices, and the next level
has one slot for each group, on the group's first device: its devices lie at a *stride* of `q` times
this level's. The last slots, beyond the end of time, are inactive: their step is the identity.
From some level on (`Hierarchy.gathered`) all slots may lie on every device, as they do on one.

Values live in slots too. Marching forward, slot `n` holds the value at point `n + 1` and a
C-point is the right end of its interval; marching in reverse (the adjoint) slot `n` holds the
value at point `n`, and the C-point is the left end. Either way slot `k` of a coarse level and the
C-point of interval `k` are the same unknown.

On one device nothing is padded in storage; the last interval may be short, and intervals may have
any lengths (irregular coarsening): only the arrangement for a sweep is padded.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxbraid import _tree
from jaxbraid._options import MGRIT
from jaxbraid._tree import Tree


@dataclasses.dataclass(frozen=True)
class Level:
    """One time grid, as each device sees its part of it.

    - `block`: slots on a device that has any; `stride`: distance between such devices.
    - `length`: slots of one interval on one device; `group`: devices that an interval spans.
    - `span`: finest steps that one slot stands for (regular coarsening).
    - `points`: finest-level indices of the points, for irregular coarsening (else `None`).
    - `bounds`: this level's C-points, for irregular coarsening (else `None`).
    """

    block: int
    stride: int
    length: int
    group: int
    span: int
    points: tuple[int, ...] | None = None
    bounds: tuple[int, ...] | None = None

    @property
    def intervals(self) -> int:
        """Intervals, or parts of one, on a device."""
        if self.bounds is not None:
            return len(self.bounds) - 1
        return -(-self.block // self.length)

    def slots_at_once(self, batch: int) -> int:
        """How many slots to step at once where all can be, when `batch` intervals are."""
        return _tree.largest_divisor(self.block, self.block if batch == self.intervals else batch)

    def padded(self) -> bool:
        """Whether an arrangement has places without a slot."""
        return self.bounds is not None or self.block % self.length != 0

    def _places(self, reverse: bool) -> jax.Array | np.ndarray:
        """Slot of each place of the `(intervals, length)` arrangement; -1 where there is none.

        The step into a C-point comes last in marching order, so short irregular intervals are
        filled up at the other end.
        """
        if self.bounds is None:
            slot = jnp.arange(self.intervals * self.length).reshape(self.intervals, self.length)
            return jnp.where(slot < self.block, slot, -1)
        c = np.asarray(self.bounds)
        j = np.arange(self.length)[None, :]
        if reverse:
            slot, valid = c[:-1, None] + j, j < np.diff(c)[:, None]
        else:
            slot = c[1:, None] - self.length + j
            valid = slot >= c[:-1, None]
        return np.where(valid, slot, -1)

    def arrange(self, x: Tree, batch: int, reverse: bool) -> Tree:
        """Slots `(block, ...)` to places `(groups, length, batch, ...)`."""
        n = self.intervals
        if self.padded():
            index = jnp.maximum(self._places(reverse).reshape(-1), 0)
            x = jax.tree.map(lambda a: a[index], x)

        def one(a: jax.Array) -> jax.Array:
            a = a.reshape(n // batch, batch, self.length, *a.shape[1:])
            return jnp.swapaxes(a, 1, 2)

        return jax.tree.map(one, x)

    def occupied(self, batch: int, reverse: bool) -> jax.Array:
        """Mask of the places of `arrange` that have a slot."""
        valid = jnp.asarray(self._places(reverse)) >= 0
        return jnp.swapaxes(valid.reshape(-1, batch, self.length), 1, 2)

    def flatten(self, x: Tree, reverse: bool) -> Tree:
        """The inverse of `arrange`."""
        index = None
        if self.bounds is not None:
            places = np.asarray(self._places(reverse)).reshape(-1)
            index = np.zeros(self.block, int)
            index[places[places >= 0]] = np.flatnonzero(places >= 0)

        def one(a: jax.Array) -> jax.Array:
            a = jnp.swapaxes(a, 1, 2).reshape(-1, *a.shape[3:])
            return a[: self.block] if index is None else a[index]

        return jax.tree.map(one, x)

    def first_slots(self, x: Tree) -> Tree:
        """The first slot of each interval, where the coarse step starts."""
        return (
            self._pick(x, 0) if self.bounds is None else _tree.take(x, np.array(self.bounds[:-1]))
        )

    def c_slots(self, x: Tree, reverse: bool) -> Tree:
        """The slot that holds each interval's C-point (the device's end of the interval)."""
        if reverse:
            return self.first_slots(x)
        if self.bounds is not None:
            return _tree.take(x, np.array(self.bounds[1:]) - 1)
        return self._pick(x, self.length - 1)

    def replace_first(self, x: Tree, values: Tree) -> Tree:
        """`x` in slots, with the first slot of each interval replaced."""
        index = (
            slice(None, None, self.length) if self.bounds is None else np.array(self.bounds[:-1])
        )
        return jax.tree.map(lambda a, b: a.at[index].set(b), x, values)

    def _pick(self, x: Tree, offset: int) -> Tree:
        short = self.block % self.length
        picked = jax.tree.map(lambda a: a[offset :: self.length], x)
        if 0 < short <= offset:  # the last interval ends before its C-point
            picked = _tree.concatenate([picked, _tree.take(x, slice(-1, None))])
        return picked

    def slots(self, device: jax.Array | int) -> jax.Array:
        """Numbers of the slots of `device`."""
        return (device // self.stride) * self.block + jnp.arange(self.block)

    def all_slots(self, rows: Tree, count: int) -> Tree:
        """The first `count` slots, from those that each device has, `(devices, block, ...)`."""

        def one(a: jax.Array) -> jax.Array:
            a = a[:: self.stride]
            return a.reshape(-1, *a.shape[2:])[:count]

        return jax.tree.map(one, rows)

    def start(self, device: jax.Array | int, steps: int) -> jax.Array:
        """Finest-level index of the point where each slot of `device` starts, at most `steps`."""
        if self.points is not None:
            return jnp.asarray(self.points[:-1])
        return jnp.minimum(self.slots(device) * self.span, steps)

    def end(self, device: jax.Array | int, steps: int, clip: bool = True) -> jax.Array:
        """Finest-level index of the point where each slot ends; with `clip` at most `steps`."""
        if self.points is not None:
            return jnp.asarray(self.points[1:])
        end = (self.slots(device) + 1) * self.span
        return jnp.minimum(end, steps) if clip else end


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """All levels, finest first, over `steps` steps on `devices` devices.

    From level `gathered` on, every device holds all slots; `owner` is the level as the devices
    share it before it's gathered.
    """

    steps: int
    devices: int
    levels: tuple[Level, ...]
    last_is_c_point: tuple[bool, ...]  # whether the end of time is a C-point of each level
    gathered: int | None = None
    owner: Level | None = None

    def is_gathered(self, level: int) -> bool:
        """Whether every device holds all slots of `level`."""
        return self.gathered is not None and level >= self.gathered

    def owned(self, level: int) -> Level:
        """`level` as the devices share it, if it is not beyond the first gathered one."""
        if self.owner is not None and level == self.gathered:
            return self.owner
        return self.levels[level]

    @property
    def slots(self) -> int:
        """Slots of the finest level on all devices together, inactive ones included."""
        return self.devices * self.levels[0].block

    def c_points(self) -> np.ndarray:
        """Finest-level indices of the C-points where the intervals of level 0 start."""
        if len(self.levels) == 1:
            return np.zeros(1, int)
        if self.levels[0].bounds is not None:
            return np.array(self.levels[0].bounds[:-1])
        return np.arange(0, self.steps, self.owned(1).span)

    @property
    def c_stride(self) -> int:
        """Distance between devices that have C-points of level 0."""
        return self.devices if len(self.levels) == 1 else self.owned(1).stride

    def last_slot(self, level: int) -> tuple[int, int]:
        """The device that holds the last step of `level`, and its place there."""
        return self._last(self.levels[level], self.is_gathered(level))

    def last_c_point(self, level: int) -> tuple[int, int]:
        """The device that holds the C-point that ends the last interval, and its place there."""
        if level == len(self.levels) - 1:
            return 0, 0
        return self._last(self.owned(level + 1), self.is_gathered(level))

    def _last(self, level: Level, gathered: bool) -> tuple[int, int]:
        if gathered or self.devices == 1:
            return 0, level.block - 1
        device, place = divmod(-(-self.steps // level.span) - 1, level.block)
        return device * level.stride, place

    def has_inactive(self, level: int) -> bool:
        """Whether some slot of `level` lies beyond the end of time."""
        if self.gathered is not None and level > self.gathered:
            return False
        lv = self.owned(level)
        return lv.points is None and -(-self.devices // lv.stride) * lv.block * lv.span >= (
            self.steps + lv.span
        )


def _factors(config: MGRIT, steps: int) -> tuple[int | tuple[int, ...], ...]:
    """The coarsening of each transfer that `steps` steps allow."""
    explicit = isinstance(config.coarsening, tuple)
    factors: list[int | tuple[int, ...]] = []
    n = steps
    for level in range(config.levels - 1):
        factor = config.at("coarsening", level)
        if isinstance(factor, tuple):
            if factor[-1] > n:
                raise ValueError(
                    f"coarsening[{level}] has the C-point {factor[-1]}, but level {level} has the "
                    f"points 0..{n}."
                )
            coarse = len(factor) - 1
            if coarse >= n:
                raise ValueError(f"coarsening[{level}] keeps every point: it must leave some out.")
        else:
            coarse = n // factor
        if coarse < config.min_coarse:
            if explicit:
                raise ValueError(
                    f"coarsening={config.coarsening} leaves nothing to coarsen: with {steps} steps "
                    f"level {level + 1} would have {coarse} steps; the least is "
                    f"min_coarse={config.min_coarse}. Give fewer levels or smaller factors."
                )
            break
        factors.append(factor)
        n = coarse
    return tuple(factors)


def _block_size(plans: list[tuple[int, ...]], least: int) -> int:
    """The smallest block >= `least` that each factor of all plans divides, or vice versa."""

    def fits(block: int, factors: tuple[int, ...]) -> bool:
        for m in factors:
            if block % m == 0:
                block //= m
            elif m % block == 0:
                block = 1
            else:
                return False
        return True

    block = least
    while not all(fits(block, factors) for factors in plans):
        block += 1
    return block


@functools.lru_cache(maxsize=256)
def build_hierarchies(
    configs: tuple[MGRIT, ...], steps: int, devices: int
) -> tuple[Hierarchy, ...]:
    """The levels that each of `configs` asks for: `steps` steps in equal blocks on `devices`.

    The finest level lies alike in all of them.
    """
    plans = [_factors(config, steps) for config in configs]
    if devices == 1:
        return tuple(_one_device(plan, steps) for plan in plans)
    shared: list[tuple[int, ...]] = []  # factors of the levels that the devices share
    for config, plan in zip(configs, plans, strict=True):
        split = plan[: config.coarse_placement]
        regular = tuple(m for m in split if isinstance(m, int))
        if len(regular) < len(split):
            raise ValueError(
                f"coarsening={config.coarsening}: levels that the {devices} devices of the layer "
                "axis share must be coarsened by factors; give factors instead of C-point indices, "
                "or gather the levels that have them (coarse_placement)."
            )
        shared.append(regular)
    block = _block_size(shared, -(-steps // devices))
    return tuple(
        _gather(_many_devices(split, steps, devices, block), plan[len(split) :])
        if config.coarse_placement is not None and config.coarse_placement <= len(plan)
        else _many_devices(split, steps, devices, block)
        for config, plan, split in zip(configs, plans, shared, strict=True)
    )


def _gather(shared: Hierarchy, factors: tuple[int | tuple[int, ...], ...]) -> Hierarchy:
    """`shared` with its coarsest level on every device, coarsened further by `factors`."""
    owner = shared.levels[-1]
    rest = _one_device(factors, shared.steps, owner.span)
    return Hierarchy(
        shared.steps,
        shared.devices,
        shared.levels[:-1] + rest.levels,
        shared.last_is_c_point + rest.last_is_c_point,
        len(shared.levels) - 1,
        owner,
    )


def _many_devices(factors: tuple[int, ...], steps: int, devices: int, block: int) -> Hierarchy:
    levels, last = [], []
    stride = span = 1
    for m in factors:
        group = 1 if block % m == 0 else m // block
        levels.append(Level(block, stride, min(m, block), group, span))
        block, stride, span = block * group // m, stride * group, span * m
        last.append(steps % span == 0)
    levels.append(Level(block, stride, block, -(-devices // stride), span))
    return Hierarchy(steps, devices, tuple(levels), tuple(last))


def _one_device(factors: tuple[int | tuple[int, ...], ...], steps: int, span: int = 1) -> Hierarchy:
    """Levels on one device, the first of them with slots of `span` finest steps."""
    levels, last = [], []
    irregular = any(isinstance(m, tuple) for m in factors)
    real, block = steps // span, -(-steps // span)  # real: steps between finer levels' C-points
    points = tuple(min(i * span, steps) for i in range(block + 1)) if irregular else None
    for m in factors:
        if isinstance(m, tuple):
            assert points is not None
            bounds = m if m[-1] == block else (*m, block)
            length = int(np.max(np.diff(bounds)))
            coarse = tuple(points[c] for c in bounds)
            last.append(m[-1] == real and real == block)
            real = len(m) - 1
            levels.append(Level(block, 1, length, 1, span, points, bounds))
            points, block = coarse, len(bounds) - 1
        else:
            last.append(real % m == 0 and real == block)
            real //= m
            levels.append(Level(block, 1, m, 1, span, points))
            if points is not None:
                points = (*points[:-1:m], points[-1])
            block, span = -(-block // m), span * m
    levels.append(Level(block, 1, block, 1, span, points))
    return Hierarchy(steps, 1, tuple(levels), tuple(last))
