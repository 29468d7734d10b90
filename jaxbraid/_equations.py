r"""The equations of a level on this device, and how values travel between devices.

A level poses $u_i = \Phi_l(u_{i-1}) + g_i$; `_cycle.py` solves it. Messages go along the march: to
the neighbour at the level's stride, between the ends of an interval that spans several devices, and
to or from a level that every device holds whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._comm import Comm
from jaxbraid._delta import Delta
from jaxbraid._hierarchy import Level
from jaxbraid._options import MGRIT
from jaxbraid._tree import Tree

Step = Callable[[Any, Tree], Tree]  # (inputs of some steps, their states) -> the next states
Start = Literal["guess", "nested", "coarse"]  # how the first C-points are had


class Ends(NamedTuple):
    """Times where slots start and end; each slot starts where the one before it ends."""

    start: jax.Array
    end: jax.Array


class Marks(NamedTuple):
    """`Ends` in places: the times between which steps lie, one more than steps (axis 1)."""

    of: jax.Array


class Points(NamedTuple):
    """Values at some points and, where a Delta correction's bases follow the flow, these."""

    u: Tree
    basis: Tree = ()


class Rhs(NamedTuple):
    """Right-hand side of some slots: `(Phi(u) - phi) + b`; without `phi`, `Phi(u) + b`.

    With a `delta`, `delta(u)` is added.
    """

    phi: Tree | None
    b: Tree
    delta: Delta | None = None


@dataclasses.dataclass(frozen=True)
class LevelProblem:
    """One level's equation on this device.

    `phi` steps a batch of slots (leading axis) given their `inputs`, whose `active` masks slots
    that pass their state on; `swept` are the same inputs arranged for sweeps of `batch` intervals
    at once. `u0` is the value that the march starts from; `restrict` and `prolong` act on single
    states, to and from the next level. `comm` is the row of devices that share the level; where the
    next one lies on every device, `owner` is that level as they share it. `last` and `last_c` say
    where the last step's slot and the last C-point lie: the device and the place on it.
    """

    level: Level
    comm: Comm
    phi: Step
    inputs: Any
    swept: Any
    u0: Tree
    batch: int
    restrict: Callable[[Tree], Tree] | None = None
    prolong: Callable[[Tree], Tree] | None = None
    source: Tree | None = None  # g of the original equation, in slots; 0 if None
    inside: jax.Array | None = None  # which C-points lie within time, None if all
    owner: Level | None = None
    expand: Callable[[Any], Any] | None = None  # the inputs of some intervals, as they are stepped
    last: tuple[int, int] = (0, -1)
    last_c: tuple[int, int] = (0, -1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The equations of all levels, how they are solved, and the direction of marching.

    `basis`, with a Delta correction, is the basis `(k, ...)` at the point where the march starts.
    Where time is `periodic`, the march starts from where it ends, plus, in reverse, `u0`.
    `watch(i, norm, u)` is told of every iteration.
    """

    levels: tuple[LevelProblem, ...]
    config: MGRIT
    comm: Comm
    start: Start
    norm: Callable[[Tree], jax.Array] | None = None
    reverse: bool = False
    basis: Tree | None = None
    periodic: bool = False
    watch: Callable[[Any, jax.Array, Tree], None] | None = None

    @property
    def coarsest(self) -> int:
        return len(self.levels) - 1

    @property
    def moves_basis(self) -> bool:
        """Whether bases follow the flow; a basis of all unit vectors stays."""
        return self.basis is not None and self.config.delta != "full"

    def points(self, u: Tree, n: int) -> Points:
        """The `n` values `u`, with the basis of the beginning where bases move."""
        return Points(u, _tree.repeat(self.basis, n) if self.moves_basis else ())

    def with_basis(self, x: Points) -> Points:
        """`x` with the bases that derivatives are taken along, where none are."""
        if self.basis is None or self.moves_basis:
            return x
        return x._replace(basis=_tree.repeat(self.basis, jax.tree.leaves(x.u)[0].shape[0]))


def masked(active: jax.Array | None, value: Tree, u: Tree) -> Tree:
    """Inactive slots pass their state on."""
    return value if active is None else _tree.where(active, value, u)


def apply_rhs(value: Tree, u: Tree, rhs: Rhs | None) -> Tree:
    """The right-hand side of steps from `u` to `value` (a batch of them) applied."""
    if rhs is None:
        return value
    if rhs.phi is None:
        return _tree.add(value, rhs.b)
    change = _tree.sub(value, rhs.phi)
    if rhs.delta is not None:
        change = _tree.add(change, rhs.delta(u))
    return _tree.add(change, rhs.b)


# -- communication along the march ----------------------------------------------------------------


def neighbour(p: Problem, l: int, x: Tree, fill: Tree) -> Tree:
    """`x` of the device that holds the slots just before this one's, in marching order."""
    hop = p.levels[l].level.stride
    return p.levels[l].comm.shift(x, -hop if p.reverse else hop, fill)


def predecessors(p: Problem, x: Tree, first: Tree) -> Tree:
    """Each entry's predecessor in marching order; `first` precedes the first."""
    first = jax.tree.map(lambda a: a[None], first)
    if p.reverse:
        return _tree.concatenate([_tree.take(x, slice(1, None)), first])
    return _tree.concatenate([first, _tree.take(x, slice(None, -1))])


def starting(p: Problem, l: int, x: Points, last: tuple[int, int]) -> Points:
    """What the march on level `l` starts from, given the values `x`, the last of them at `last`."""
    lp = p.levels[l]
    if not p.periodic:
        return Points(lp.u0, p.basis if jax.tree.leaves(x.basis) else ())
    device, place = (0, 0) if p.reverse else last
    end = lp.comm.broadcast(_tree.take(x, place), device)
    return end._replace(u=_tree.add(end.u, lp.u0)) if p.reverse else end


def known_beyond(p: Problem, inside: jax.Array | None, x: Points, first: Points) -> Points:
    """`x` with `first` where a march in periodic time comes through before it enters time."""
    if not (p.periodic and p.reverse) or inside is None:
        return x
    return masked(inside, x, _tree.repeat(first, inside.shape[0]))


def last_entry(p: Problem, x: Tree) -> Tree:
    """The entry of a block that comes last in marching order."""
    return _tree.take(x, 0 if p.reverse else -1)


def turn(p: Problem, level: Level) -> jax.Array | int:
    """This device's place in its group, in marching order."""
    place = (p.comm.index // level.stride) % level.group
    return level.group - 1 - place if p.reverse else place


def takes_part(p: Problem, level: Level) -> jax.Array | bool:
    return True if level.stride == 1 else p.comm.index % level.stride == 0


def to_owner(p: Problem, l: int, x: Tree) -> Tree:
    """Bring C-point values from where intervals end to where the next level keeps them."""
    level = p.levels[l].level
    if p.reverse or level.group == 1:
        return x
    return p.comm.shift(x, -(level.group - 1) * level.stride, x)


def from_owner(p: Problem, l: int, x: Tree) -> Tree:
    level = p.levels[l].level
    if p.reverse or level.group == 1:
        return x
    return p.comm.shift(x, (level.group - 1) * level.stride, x)


def ends_of_intervals(p: Problem, first: Tree, end: Tree) -> Tree:
    """Values where the intervals of level 0 end, from those where they start, marching forward."""
    level = p.levels[0].level
    after = p.comm.shift(_tree.take(first, 0), -level.group * level.stride, end)
    after = jax.tree.map(lambda a: a[None], after)
    return _tree.concatenate([_tree.take(first, slice(1, None)), after])


def gather(owner: Level | None, comm: Comm, count: int, x: Tree) -> Tree:
    """This device's slots to all `count` slots, of a level that `owner` is where it is shared."""
    return x if owner is None else owner.all_slots(comm.gather(x), count)


def hand_down(p: Problem, l: int, x: Tree) -> Tree:
    """C-point values of level `l` as values of the slots that this device has of level `l + 1`."""
    lp = p.levels[l]
    return gather(lp.owner, lp.comm, p.levels[l + 1].level.block, x)


def hand_up(p: Problem, l: int, x: Tree) -> Tree:
    """The inverse of `hand_down`; where it gathers, there are zeros beyond the end of time."""
    lp = p.levels[l]
    if lp.owner is None:
        return x
    last = p.levels[l + 1].level.block - 1
    x = _tree.take(x, jnp.minimum(lp.owner.slots(lp.comm.index), last))
    return masked(lp.inside, x, _tree.zeros(_tree.shapes(x)))
