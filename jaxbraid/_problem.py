r"""From a user's step and data to the forward equations of all levels, $u_{n+1} = \Phi_n(u_n)$.

States are pytrees; leaves that are not real or complex numbers (integers, booleans, PRNG keys) are
constants of the motion, kept out of the arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._comm import Comm, OneDevice
from jaxbraid._delta import some_basis, unit_vectors
from jaxbraid._equations import Ends, LevelProblem, Marks, Problem, Start, gather
from jaxbraid._hierarchy import Hierarchy, Level, build_hierarchies
from jaxbraid._numbers import NumbersSplit, by_numbers, few
from jaxbraid._options import MGRIT
from jaxbraid._tree import Split, Tree
from jaxbraid.transfers import Transfer

AUTO_BATCH_ELEMENTS = 16384  # on CPU, larger states are stepped one interval after another


class PerStep(NamedTuple):
    """What each step has of its own (leading axis: steps)."""

    params: Tree
    inputs: Tree = ()  # which belong to the samples: batch axis next


class StepFn(Protocol):
    """The engine's form of a user's step: `(time, u, own, args, side) -> (u_next, aux)`."""

    def __call__(
        self, time: Any, u: Tree, own: PerStep, args: Tree, side: Tree
    ) -> tuple[Tree, Tree]: ...


class Clock(Protocol):
    """Times of slots from the finest-level indices of their ends, in the form the steps take."""

    def __call__(self, times: Any, start: jax.Array, end: jax.Array, /) -> Any: ...


class Inputs(NamedTuple):
    """What a step of one slot depends on besides the state (leading axis: slots)."""

    time: Any
    own: PerStep
    active: jax.Array | None  # None where every slot is active
    state: Tree = ()  # adjoint: the forward state where the slot starts
    aux_ct: Tree = ()  # adjoint, level 0: cotangents of the auxiliary output
    vjp: Tree = ()  # adjoint: the step's linearisation, if it is kept


class Shared(NamedTuple):
    """What all steps of a level depend on alike."""

    args: Tree
    side: Tree


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything static about a solve: hashable, so that equal setups share compiled programs."""

    steps: tuple[StepFn, ...]  # one for all levels, or one a level
    clock: Clock
    n: int
    forward: MGRIT
    adjoint: MGRIT
    transfers: tuple[Transfer | None, ...] | None = None
    has_aux: bool = False
    periodic: bool = False

    def hierarchies(self, devices: int) -> tuple[Hierarchy, ...]:
        """The time grids of the forward and of the adjoint solve."""
        return build_hierarchies((self.forward, self.adjoint), self.n, devices)

    @property
    def linearises_forward(self) -> bool:
        """Whether the forward solve's last sweep makes the linearisations that are kept.

        Not if it goes on to change the states, nor if the backward pass recomputes them.
        """
        changed = self.forward.final_relax == "FC" and len(self.hierarchies(1)[0].levels) > 1
        keep = self.adjoint.linearization == "keep" and self.adjoint.saved_states == "all"
        return keep and not changed

    def step(self, level: int) -> StepFn:
        return self.steps[min(level, len(self.steps) - 1)]

    def transfer(self, level: int) -> Transfer | None:
        return None if self.transfers is None else self.transfers[level]


@dataclasses.dataclass(frozen=True)
class Data:
    """One device's part of the data: what its slots have of their own, its part of the batch."""

    times: Any
    u0: Tree
    own: PerStep
    shared: Shared


@dataclasses.dataclass(frozen=True)
class Space:
    """The states of each level: shapes, the split of their leaves, the constant leaves."""

    shapes: tuple[Tree, ...]
    split: tuple[Split, ...]
    constants: tuple[list[Any], ...]
    first: tuple[list[Any], ...]  # u0, restricted, without the constants

    @classmethod
    def of(
        cls, setup: Setup, u0: Tree, levels: int, split_of: Callable[[Tree], Split] = Split.of
    ) -> Space:
        """The spaces of states like `u0`, whose leaves `split_of` says how to take apart."""
        shapes, splits, constants, first = [], [], [], []
        u = u0
        for level in range(levels):
            split = split_of(u)
            diff, rest = split(u)
            shapes.append(_tree.shapes(u))
            splits.append(split)
            constants.append(rest)
            first.append(diff)
            transfer = setup.transfer(level) if level < levels - 1 else None
            if transfer is not None:
                u = transfer.restrict(u)
        return cls(tuple(shapes), tuple(splits), tuple(constants), tuple(first))

    def join(self, level: int, u: list[Any]) -> Tree:
        return self.split[level].join(u, self.constants[level])

    def restrict(self, setup: Setup, level: int) -> Callable[[Tree], Tree] | None:
        transfer = setup.transfer(level)
        if transfer is None:
            return None
        return lambda u: self.split[level + 1](transfer.restrict(self.join(level, u)))[0]

    def prolong(self, setup: Setup, level: int) -> Callable[[Tree], Tree] | None:
        transfer = setup.transfer(level)
        if transfer is None:
            return None
        fine = self.shapes[level]
        return lambda v: self.split[level](transfer.prolong(self.join(level + 1, v), fine))[0]


def batched(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """`fn(x, u)` over a leading axis of both; a batch of one is not batched at all."""

    def run(x: Any, u: Tree) -> Tree:
        if jax.tree.leaves(u)[0].shape[0] == 1:
            return jax.tree.map(lambda a: jnp.asarray(a)[None], fn(*_tree.take((x, u), 0)))
        return jax.vmap(fn)(x, u)

    return run


def forward_one(setup: Setup, space: Space, level: int, x: Inputs, u: Tree, shared: Shared):
    """A step of `level`: state without constants -> (next state, auxiliary output)."""
    step, split = setup.step(level), space.split[level]

    def run(x: Inputs, u: Tree) -> tuple[Tree, Tree]:
        out, aux = step(x.time, space.join(level, u), x.own, shared.args, shared.side)
        return split(out)[0], aux

    return by_numbers(run, x, u) if isinstance(split, NumbersSplit) else run(x, u)


def taking_apart(setup: Setup, data: Data, inputs: tuple[Inputs, ...]) -> Callable[[Tree], Split]:
    """How to split states: into numbers where the steps of all levels allow it and gain by it."""
    # linearisations that are kept are of states as the adjoint solve has them
    if setup.transfers is not None or setup.linearises_forward or not few(data.u0):
        return Split.of
    split = NumbersSplit.of(data.u0)
    numbers, rest = split(data.u0)
    for level, x in enumerate(inputs[: len(setup.steps)]):  # those with a step of their own

        def run(x: Inputs, u: Tree, level: int = level) -> Any:
            u, shared = split.join(u, rest), data.shared
            return setup.step(level)(x.time, u, x.own, shared.args, shared.side)

        try:
            x = jax.eval_shape(lambda x: _tree.take(x, 0), x._replace(active=None))
            jax.eval_shape(lambda x, u: by_numbers(run, x, u), x, numbers)
        except Exception:  # NeedsWhole; or an error of the step's own, which is raised in its place
            return Split.of
    # the Jacobian of real numbers, which Delta corrects with, is none of complex ones
    pairs = jax.default_backend() == "cpu" and setup.forward.delta is None
    return functools.partial(NumbersSplit.of, pairs=pairs)


def forward_step(setup: Setup, space: Space, level: int, x: Inputs, u: Tree, shared: Shared):
    """A batch of steps of `level`."""
    return batched(lambda x, u: forward_one(setup, space, level, x, u, shared))(x, u)


def interval_batch(config: MGRIT, level: Level, state: Tree) -> int:
    """How many of a device's intervals are stepped at once."""
    limit = config.batch_intervals
    if limit == "auto":
        elements = sum(leaf.size for leaf in jax.tree.leaves(state))
        cpu = jax.default_backend() == "cpu"
        limit = "one" if cpu and elements > AUTO_BATCH_ELEMENTS else "all"
    if limit == "one":
        return 1
    return level.intervals if limit == "all" else _tree.largest_divisor(level.intervals, int(limit))


def active_slots(h: Hierarchy, l: int, comm: Comm) -> jax.Array | None:
    if h.is_gathered(l) or not h.has_inactive(l):
        return None
    return h.levels[l].start(comm.index, h.steps) < h.steps


def row_of(h: Hierarchy, l: int, comm: Comm) -> Comm:
    """The devices that share level `l`."""
    return OneDevice() if h.is_gathered(l) else comm


def owner_of_next(h: Hierarchy, l: int) -> Level | None:
    return h.owner if h.gathered == l + 1 else None


def within_time(h: Hierarchy, l: int, comm: Comm) -> jax.Array | None:
    """Which C-points of level `l` lie within time: those that the next level has a step for."""
    if h.is_gathered(l) or l == len(h.levels) - 1 or not h.has_inactive(l + 1):
        return None
    return h.owned(l + 1).start(comm.index, h.steps) < h.steps


def to_next(h: Hierarchy, l: int, comm: Comm, x: Tree) -> Tree:
    """Entries of the C-points of level `l`, as every device holds those of level `l + 1`."""
    return gather(owner_of_next(h, l), comm, h.levels[l + 1].block, x)


def level_inputs(
    setup: Setup, data: Data, h: Hierarchy, l: int, comm: Comm, own: PerStep
) -> Inputs:
    """What the steps of this device's slots of level `l` depend on besides states."""
    level, device = h.levels[l], row_of(h, l, comm).index
    time = setup.clock(data.times, level.start(device, h.steps), level.end(device, h.steps))
    return Inputs(time, own, active_slots(h, l, comm))


def arrange_inputs(level: Level, inputs: Inputs, batch: int, reverse: bool) -> Inputs:
    """The inputs in places; places without a slot are inactive."""
    active, time = inputs.active, inputs.time
    inputs = inputs._replace(active=None)
    if isinstance(time, Ends) and not level.padded():
        arranged = level.arrange(inputs._replace(time=()), batch, reverse)
        end = level.arrange(time.end, batch, reverse)
        first = level.first_slots(time.start).reshape(end.shape[0], 1, batch)
        arranged = arranged._replace(time=Marks(jnp.concatenate([first, end], axis=1)))
    else:
        arranged = level.arrange(inputs, batch, reverse)
    if active is not None:
        active = level.arrange(active, batch, reverse)
    if level.padded():
        occupied = level.occupied(batch, reverse)
        active = occupied if active is None else active & occupied
    return arranged._replace(active=active)


def forward_problem(setup: Setup, data: Data, comm: Comm, start: Start) -> tuple[Problem, Space]:
    """The forward equations of all levels on this device, and the states' spaces."""
    config = setup.forward
    h, _ = setup.hierarchies(comm.size)
    inputs, own = [], data.own
    for l, level in enumerate(h.levels):
        inputs.append(level_inputs(setup, data, h, l, comm, own))
        if l < len(h.levels) - 1:
            own = to_next(h, l, comm, level.first_slots(own))
    split_of = taking_apart(setup, data, tuple(inputs))
    space = Space.of(setup, data.u0, len(h.levels), split_of)
    levels = []
    for l, level in enumerate(h.levels):

        def phi(x: Inputs, u: Tree, l: int = l) -> Tree:
            return forward_step(setup, space, l, x, u, data.shared)[0]

        coarsest = l == len(h.levels) - 1
        batch = interval_batch(config, level, space.first[l])
        levels.append(
            LevelProblem(
                level,
                row_of(h, l, comm),
                phi,
                inputs[l],
                arrange_inputs(level, inputs[l], batch, False),
                space.first[l],
                batch,
                None if coarsest else space.restrict(setup, l),
                None if coarsest else space.prolong(setup, l),
                inside=within_time(h, l, comm),
                owner=owner_of_next(h, l),
                last=h.last_slot(l),
                last_c=h.last_c_point(l),
            )
        )
    p = Problem(
        tuple(levels),
        config,
        comm,
        start,
        norm_of_state(config, space),
        basis=first_basis(config, space),
        periodic=setup.periodic,
    )
    return p, space


def start_of(config: MGRIT, has_guess: bool = False) -> Start:
    """How the first C-points are had."""
    if has_guess:
        return "guess"
    if config.skip_first_down:
        return "coarse"
    return "nested" if config.nested_iteration else "guess"


def norm_of_state(config: MGRIT, space: Space) -> Callable[[Tree], jax.Array] | None:
    """The caller's norm, of states without their constants; `None` where there is none."""
    norm = config.norm
    return None if norm is None else lambda u: norm(space.join(0, u))


def first_basis(config: MGRIT, space: Space) -> Tree | None:
    """The basis of the Delta correction where the march starts."""
    if config.delta is None:
        return None
    shapes = _tree.shapes(space.first[0])
    return unit_vectors(shapes) if config.delta == "full" else some_basis(shapes, config.delta)


def counted(h: Hierarchy, p: Problem) -> jax.Array:
    """Which C-points of level 0 are unknowns that norms count."""
    level, coarse = h.levels[0], h.owned(1)
    if h.devices == 1:
        counts = level.intervals - (not (p.reverse or p.periodic) and not h.last_is_c_point[0])
        return jnp.arange(level.intervals) < counts
    here = p.comm.index % coarse.stride == 0
    if p.reverse or p.periodic:
        return (coarse.start(p.comm.index, h.steps) < h.steps) & here
    return (coarse.end(p.comm.index, h.steps, clip=False) <= h.steps) & here
