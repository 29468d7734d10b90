r"""Scale on paper: the time of a solve on any number of devices, from times measured on one.

All devices go through the same phases of a cycle, so its time is the sum over phases of the longest
that a device takes in them (the *critical path*):

$$T = \sum_{l,k} n_{l,k}\, t(k) + \sum_l n^{msg}_l (\lambda + S / \beta) + \text{reductions}.$$

$n_{l,k}$ counts loop iterations on level $l$ that step $k$ intervals at once, $t(k)$ is the time
of one, $\lambda$ the latency of a message, $\beta$ the bandwidth and $S$ the bytes of a state.
The counts follow `_cycle.py` phase by phase on the levels of `build_hierarchies`; where an interval
spans a group of devices, they step in turn, and their times add up.

    machine = measure(net, x, latency=10e-6, bandwidth=50e9)
    best = choose(steps=4096, devices=256, machine=machine, iterations={0: 3, 1: 2})[0]
    print(best.speedup, best.forward)

All times are in seconds, all sizes in bytes.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxbraid import _tree
from jaxbraid._hierarchy import Hierarchy, Level, build_hierarchies
from jaxbraid._options import MGRIT, check_integer

if TYPE_CHECKING:
    from jaxbraid._ode_net import ParallelODENet

Direction = Literal["forward", "adjoint", "training"]


# -- the machine ----------------------------------------------------------------------------------


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
        if not _is_real(self.bandwidth) or not self.bandwidth > 0:
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
        if not _is_real(share) or not 0 < share <= 1:
            raise ValueError(f"share={share!r}: must be in (0, 1].")
        costs = {n: getattr(self, n).scaled(share) for n in ("step", "vjp", "last", "rhs")}
        return dataclasses.replace(self, state_bytes=self.state_bytes * share, **costs)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _non_negative(name: str, value: Any) -> None:
    if not _is_real(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r}: must be a finite number >= 0.")


# -- what lies on the critical path ---------------------------------------------------------------


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


def _path(*phases: tuple[Phase, int]) -> Path:
    path = Path()
    for phase, count in phases:
        if count:
            path[phase] += count
    return path


@dataclasses.dataclass(frozen=True)
class _Cycle:
    """The phases of `_cycle.py` and `_iterate.py`, function by function."""

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
        return _path((Phase("message", l), 0 if alone else 1))

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
        run = _path((phase, level.intervals // batch * length))
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
        step = _path((Phase("step", l, size), level.block // size))
        return self.shift(l, level.stride) + step

    def cycle(self, l: int, cycle: str, kind: str) -> Path:
        relax = self.sweep(l, kind).times(1 + self.config.at("cf_relax", l))
        return relax + self.correct(l, cycle)

    def correct(self, l: int, cycle: str) -> Path:
        down = Path()
        if self.h.gathered == l + 1:
            down = _path((Phase("gather", l + 1, 2 * self.h.owned(l + 1).block), 1))
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
                path += _path((Phase("norm", 0), 1))
        return path

    def iteration(self) -> Path:
        if self.coarsest == 0:
            return Path()
        # with a tolerance a cycle ends with the sweep that the next would begin with
        path = self.cycle(0, self.config.cycle, "step")
        return path + _path((Phase("norm", 0), int(self.config.tol > 0)))

    def epilogue(self) -> Path:
        """The last sweep, what `final_relax` adds, and the final state to every device."""
        path = self.starts(0) + self.march(0, "last")
        if self.coarsest > 0:
            relax = self.config.final_relax
            if relax == "FCF" and self.config.tol == 0:
                path += self.sweep(0, "step")
            if relax == "FC" and self.keeps:
                path += self.to_owner(0) + self.starts(0)
        return path + _path((Phase("broadcast", 0), int(self.h.devices > 1)))


# -- prediction -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of a solve, or of a training step.

    - `seconds`: the whole; `cycle`: one iteration; `start`, `last`: what comes before the
        first and after the last (nested iteration, the last sweep); in training, both directions
        together. `seconds` has also the messages of gradients and the start of the program.
    - `serial`: sequential stepping on one device with the whole batch.
    - `steps`: on each level, steps on the critical path; `evaluations`: on all devices together.
    - `messages`, `sent`: messages between neighbours on the critical path, and their bytes.
    - `forward`, `adjoint`: the options; `None` for a direction that is not part of it.
    - `devices` along the layer axis, `parts` along the batch axis, of the machine called `machine`.
    """

    seconds: float
    cycle: float
    start: float
    last: float
    serial: float
    steps: tuple[int, ...]
    evaluations: tuple[int, ...]
    messages: int
    sent: float
    forward: MGRIT | None
    adjoint: MGRIT | None
    devices: int
    parts: int
    layers: int
    machine: str

    @property
    def speedup(self) -> float:
        """Over sequential stepping on one device."""
        return self.serial / self.seconds

    @property
    def efficiency(self) -> float:
        """Speed-up for each device."""
        return self.speedup / (self.devices * self.parts)


def predict(
    config: MGRIT,
    steps: int,
    devices: int,
    machine: Machine,
    direction: Direction = "forward",
    *,
    adjoint: MGRIT | None = None,
    iterations: int | None = None,
    adjoint_iterations: int | None = None,
    parts: int = 1,
) -> Prediction:
    """The time of a solve of `steps` steps on `devices` devices along the layer axis.

    **Arguments**

    - `config`: options of the forward solve; of the adjoint one in the direction `"adjoint"`.
    - `steps`, `devices`, `machine`: N, D and what its steps and messages cost.
    - `direction`: `"forward"`; `"adjoint"`, the backward pass alone; `"training"`, both, with the
        sums of gradients over devices.
    - `adjoint`: options of the adjoint solve in training; by default those of the forward one.
    - `iterations`, `adjoint_iterations`: numbers of iterations, where a tolerance stops earlier
        than `max_iters`.
    - `parts`: devices along the batch axis, each of which has a part of the batch. The gradients
        are summed over them.

    **Returns**

    A `Prediction`.

    **Raises**

    `ValueError` or `TypeError` that names the argument.
    """
    if not isinstance(config, MGRIT):
        raise TypeError(f"config={config!r}: must be an MGRIT.")
    steps, devices = check_integer("steps", steps, 1), check_integer("devices", devices, 1)
    parts = check_integer("parts", parts, 1)
    if not isinstance(machine, Machine):
        raise TypeError(f"machine={machine!r}: must be a Machine.")
    if direction not in ("forward", "adjoint", "training"):
        raise ValueError(f"direction={direction!r}: must be 'forward', 'adjoint' or 'training'.")
    adjoint = config if adjoint is None else adjoint
    for name, one in (("config", config), ("adjoint", adjoint)):
        for option, known in (("linearization", "recompute"), ("saved_states", "all")):
            if getattr(one, option, known) != known:
                raise ValueError(f"{name}: the model does not know {option} other than {known!r}.")
    for name, count in (("iterations", iterations), ("adjoint_iterations", adjoint_iterations)):
        if count is not None:
            check_integer(name, count, 0)
    if direction == "adjoint" and adjoint_iterations is None:
        adjoint_iterations = iterations

    one, whole = machine.with_batch(1 / parts), machine
    hierarchies = build_hierarchies((config, adjoint), steps, devices)
    total = dict.fromkeys(("start", "cycle", "cycles", "last"), 0.0)
    path, serial, evaluations = Path(), 0.0, collections.Counter()
    for reverse in {"forward": (False,), "adjoint": (True,)}.get(direction, (False, True)):
        h = hierarchies[reverse]
        options = adjoint if reverse else config
        given = adjoint_iterations if reverse else iterations
        count = options.max_iters if given is None else given
        if options.skip_first_down:
            count = max(0, count - 1)
        keeps = direction == "training" and not reverse
        phases = _Cycle(h, options, reverse, machine.auto_batch, keeps)
        start, cycle, last = phases.prologue(), phases.iteration(), phases.epilogue()
        cost = functools.partial(_seconds, one, h, reverse)
        total["start"] += cost(start) + _preparation(one, h, reverse)
        total["cycle"] += cost(cycle)
        total["cycles"] += count * cost(cycle)
        total["last"] += cost(last)
        path += start + cycle.times(count) + last
        evaluations.update(_evaluations(h, start + cycle.times(count) + last))
        serial += steps * (whole.last if reverse else whole.step)(1)
    seconds = sum(total[k] for k in ("start", "cycles", "last")) + machine.dispatch
    if direction != "forward":
        own = hierarchies[1].levels[0].block * machine.layer_bytes
        seconds += machine.all_reduce(machine.shared_bytes, devices)
        seconds += machine.all_reduce(own + machine.shared_bytes, parts)
    levels = max(len(h.levels) for h in hierarchies)
    return Prediction(
        seconds,
        total["cycle"],
        total["start"],
        total["last"],
        serial + machine.dispatch,
        path.steps(levels),
        tuple(evaluations[l] for l in range(levels)),
        path.messages(),
        path.messages() * one.state_bytes,
        None if direction == "adjoint" else config,
        None if direction == "forward" else adjoint,
        devices,
        parts,
        steps,
        machine.name,
    )


def _seconds(machine: Machine, h: Hierarchy, reverse: bool, path: Path) -> float:
    """Seconds of the phases of a path, one after another."""
    step, last = (machine.vjp, machine.last) if reverse else (machine.step, machine.step)
    state, total = machine.state_bytes, 0.0
    for (kind, _, width, _), count in path.items():
        if kind == "step":
            one = step(width)
        elif kind == "rhs":
            one = step(width) + machine.rhs(width)
        elif kind == "last":
            one = last(width)
        elif kind == "message":
            one = machine.message(state)
        elif kind == "gather":
            one = machine.all_gather(width * state, h.devices)
        else:
            one = machine.all_reduce(state if kind == "broadcast" else 4, h.devices)
        total += count * one
    return total


def _preparation(machine: Machine, h: Hierarchy, reverse: bool) -> float:
    """Putting parameters in the order of sweeps, and gathering those of gathered levels."""
    seconds = machine.arrange * h.levels[0].block if len(h.levels) > 1 else 0.0
    if h.gathered is not None:
        size = machine.layer_bytes + (machine.state_bytes if reverse else 0.0)
        seconds += machine.all_gather(h.owned(h.gathered).block * size, h.devices)
    return seconds


def _evaluations(h: Hierarchy, path: Path) -> collections.Counter[int]:
    """Steps of all devices together, a level."""
    counts: collections.Counter[int] = collections.Counter()
    for phase, count in path.items():
        if phase.kind in STEPS:
            l, level = phase.level, h.levels[phase.level]
            holders = h.devices if h.is_gathered(l) else -(-h.devices // level.stride)
            counts[l] += count * phase.width * holders // phase.turns
    return counts


# -- choice ---------------------------------------------------------------------------------------

# How many iterations (forward, adjoint) a relaxation is taken to need where the caller doesn't say:
# those of `parallel_ode_net` for FCF-relaxation, and one more without it.
ITERATIONS: Mapping[int, tuple[int, int]] = {0: (3, 2), 1: (2, 1)}

Iterations = Mapping[int, int | tuple[int, int]] | Callable[[MGRIT], int | tuple[int, int]]


def _iterations(iterations: Iterations, config: MGRIT) -> tuple[int, int]:
    cf_relax = config.at("cf_relax", 0)
    try:
        given = iterations(config) if callable(iterations) else iterations[cf_relax]
    except KeyError:
        raise ValueError(
            f"iterations={iterations!r}: has no entry for cf_relax={cf_relax}."
        ) from None
    pair = given if isinstance(given, tuple) else (given, given)
    return (check_integer("iterations", pair[0], 0), check_integer("iterations", pair[1], 0))


def candidates(
    steps: int,
    devices: int,
    *,
    levels: Sequence[int] = (2, 3, 4, 5, 6),
    factors: Sequence[int] = (2, 4, 8, 16, 32),
    cf_relax: Sequence[int] = (0, 1),
    cycles: Sequence[Literal["V", "F", "W"]] = ("V",),
    first_factors: Sequence[int] | None = None,
    placements: bool = True,
    base: MGRIT | None = None,
) -> tuple[MGRIT, ...]:
    """The options that `choose` compares: all combinations that `steps` steps allow.

    **Arguments**

    - `steps`, `devices`: N and D.
    - `levels`, `factors`, `cf_relax`, `cycles`: values to combine. The factor of the first transfer
        is one of `first_factors` (by default `factors`), the others are alike.
    - `placements`: whether to try `coarse_placement`, from each level on.
    - `base`: the other options; by default `MGRIT(final_relax="FC")`.

    **Returns**

    `MGRIT` options, each hierarchy once.
    """
    base = MGRIT(final_relax="FC") if base is None else base
    first_factors = factors if first_factors is None else first_factors
    found: dict[MGRIT, None] = {}
    for count, first, rest, nu, cycle in itertools.product(
        levels, first_factors, factors, cf_relax, cycles
    ):
        sizes = [steps]
        for i in range(count - 1):
            sizes.append(sizes[-1] // (first if i == 0 else rest))
        if sizes[-1] < base.min_coarse:
            continue  # fewer levels have been tried
        coarsening = (first, *(rest,) * (count - 2))
        config = dataclasses.replace(
            base, levels=count, coarsening=coarsening, cf_relax=nu, cycle=cycle
        )
        found[config] = None
        if placements and devices > 1 and hasattr(base, "coarse_placement"):
            for l in range(1, count):
                found[dataclasses.replace(config, coarse_placement=l)] = None
    return tuple(found)


def choose(
    steps: int,
    devices: int,
    machine: Machine,
    *,
    iterations: Iterations = ITERATIONS,
    direction: Direction = "training",
    configs: Iterable[MGRIT] | None = None,
    parts: int = 1,
) -> tuple[Prediction, ...]:
    """Options by predicted time, the fastest first.

    **Arguments**

    - `steps`, `devices`, `machine`, `direction`, `parts`: as for `predict`.
    - `iterations`: how many are needed: `{cf_relax: n}` (that of level 0), or a function of the
        options, for factors and levels matter too; `n` is a number, or a pair (forward, adjoint).
        What a problem needs is known from solves of it; the default, `ITERATIONS`, is that of
        `parallel_ode_net`, and one more without FCF.
    - `configs`: options to compare, by default `candidates(steps, devices)`. Their `max_iters` is
        replaced.

    **Returns**

    A tuple of `Prediction`; `choose(...)[0].forward` and `.adjoint` are the options to use. A best
    speed-up below 1 says: `MGRIT(levels=1)`.
    """
    steps, devices = check_integer("steps", steps, 1), check_integer("devices", devices, 1)
    configs = candidates(steps, devices) if configs is None else tuple(configs)
    if not configs:
        raise ValueError(f"configs: there is nothing to choose from for steps={steps}.")
    predictions = []
    for config in configs:
        forward, adjoint = _iterations(iterations, config)
        predictions.append(
            predict(
                dataclasses.replace(
                    config, max_iters=adjoint if direction == "adjoint" else forward
                ),
                steps,
                devices,
                machine,
                direction,
                adjoint=dataclasses.replace(config, max_iters=adjoint),
                parts=parts,
            )
        )
    return tuple(sorted(predictions, key=lambda p: p.seconds))


def tradeoff(
    steps: int,
    devices: int,
    machine: Machine,
    *,
    iterations: Iterations = ITERATIONS,
    most_parts: int | None = None,
    configs: Callable[[int], Iterable[MGRIT]] | None = None,
) -> tuple[Prediction, ...]:
    """A training step on a fixed number of devices, split between layers and batch.

    **Arguments**

    - `steps`, `devices`, `machine`: N, all devices together, and the costs with the whole batch.
    - `iterations`: as for `choose`.
    - `most_parts`: the most parts that the batch has, such as its number of samples.
    - `configs`: from the devices along the layer axis to the options to compare.

    **Returns**

    The best `Prediction` for each number of parts that is a power of two times one, 1 first. With
    one device along the layer axis, layers are stepped in sequence.
    """
    devices = check_integer("devices", devices, 1)
    most = devices if most_parts is None else check_integer("most_parts", most_parts, 1)
    rows = []
    for parts in (d for d in range(1, min(devices, most) + 1) if devices % d == 0):
        if parts & (parts - 1):
            continue
        along = devices // parts
        if along == 1:
            rows.append(predict(MGRIT(levels=1), steps, 1, machine, "training", parts=parts))
            continue
        options = None if configs is None else configs(along)
        best = choose(steps, along, machine, iterations=iterations, configs=options, parts=parts)
        rows.append(best[0])
    return tuple(rows)


def describe(config: MGRIT | None) -> str:
    """The options that `choose` chooses, in a few characters: `3 levels 8,4 FCF V x2 gather 1`."""
    if config is None:
        return "-"
    if config.levels == 1:
        return "sequential"
    factor = config.coarsening
    if isinstance(factor, tuple):
        text = ",".join(str(f) if isinstance(f, int) else "irregular" for f in factor)
    else:
        text = str(factor)
    nu = config.cf_relax if isinstance(config.cf_relax, int) else max(config.cf_relax)
    relax = "F" + "CF" * nu
    placement = getattr(config, "coarse_placement", None)
    gathered = "" if placement is None else f" gather {placement}"
    return f"{config.levels} levels {text} {relax} {config.cycle} x{config.max_iters}{gathered}"


def table(predictions: Iterable[Prediction]) -> str:
    """Predictions as text, one a row: devices, time, speed-up, messages, options."""
    head = f"{'layers x batch':>14} {'serial':>10} {'predicted':>10} {'speed-up':>9} {'eff.':>6}"
    rows = [f"{head} {'messages':>9}  options"]
    for p in predictions:
        config = p.forward if p.forward is not None else p.adjoint
        rows.append(
            f"{p.devices:>6} x {p.parts:<5} {_unit(p.serial):>10} {_unit(p.seconds):>10} "
            f"{p.speedup:9.2f} {p.efficiency:6.1%} {p.messages:9}  {describe(config)}"
        )
    return "\n".join(rows)


def _unit(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def plot(curves: Mapping[str, Sequence[Prediction]], ax: Any = None) -> Any:
    """Speed-up over devices, a curve for each name, in the matplotlib axes `ax` or new ones.

    **Returns**

    The axes.

    **Raises**

    `ImportError` where matplotlib is missing: install `jaxbraid[plot]`.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise ImportError("plot needs matplotlib: install jaxbraid[plot].") from e
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    # Okabe and Ito's colours, which the colour-blind tell apart, and marks and dashes besides
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    styles = zip(itertools.cycle(colours), itertools.cycle("os^Dv"), itertools.cycle(("-", "--")))
    for (name, row), (colour, mark, line) in zip(curves.items(), styles, strict=False):
        devices = [p.devices * p.parts for p in row]
        speedup = [p.speedup for p in row]
        ax.plot(devices, speedup, color=colour, marker=mark, ls=line, ms=4, label=name)
    ax.axhline(1, color="0.6", lw=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlabel("devices")
    ax.set_ylabel("speed-up over sequential stepping")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax


# -- measurement ----------------------------------------------------------------------------------


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
    import jax

    from jaxbraid import _check
    from jaxbraid._measure import Layer, messages, step_costs
    from jaxbraid._problem import AUTO_BATCH_ELEMENTS

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
        if not _is_real(share) or not 0 < share < 1:
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
    import jax

    return float(sum(leaf.nbytes for leaf in jax.tree.leaves(x)))
