"""The predicted time of a solve: what lies on its critical path, times what that costs."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Literal

from jaxbraid._hierarchy import Hierarchy, build_hierarchies
from jaxbraid._options import MGRIT, check_integer
from jaxbraid.performance._machine import Machine
from jaxbraid.performance._path import STEPS, Cycle, Path

Direction = Literal["forward", "adjoint", "training"]


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
    adjoint = config if adjoint is None else adjoint
    steps, devices = check_integer("steps", steps, 1), check_integer("devices", devices, 1)
    parts = check_integer("parts", parts, 1)
    _check_request(config, adjoint, machine, direction, iterations, adjoint_iterations)
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
        phases = Cycle(h, options, reverse, machine.auto_batch, keeps)
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


def _check_request(
    config: MGRIT,
    adjoint: MGRIT,
    machine: Machine,
    direction: Direction,
    iterations: int | None,
    adjoint_iterations: int | None,
) -> None:
    if not isinstance(config, MGRIT):
        raise TypeError(f"config={config!r}: must be an MGRIT.")
    if not isinstance(machine, Machine):
        raise TypeError(f"machine={machine!r}: must be a Machine.")
    if direction not in ("forward", "adjoint", "training"):
        raise ValueError(f"direction={direction!r}: must be 'forward', 'adjoint' or 'training'.")
    known_options = {"linearization": "recompute", "saved_states": "all", "delta": None}
    for name, one in (("config", config), ("adjoint", adjoint)):
        for option, known in known_options.items():
            if getattr(one, option, known) != known:
                raise ValueError(f"{name}: the model does not know {option} other than {known!r}.")
    for name, count in (("iterations", iterations), ("adjoint_iterations", adjoint_iterations)):
        if count is not None:
            check_integer(name, count, 0)


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
