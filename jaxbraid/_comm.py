"""How the blocks of a time axis talk: the small interface that the cycle is written against.

`shift` is all that the cycle itself needs, and `gather` where a level is to lie on every device;
`sum`, `max` and `broadcast` serve norms and results.
Implementations: one device (here), the axes of a JAX mesh (here).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._tree import Tree


class Comm(Protocol):
    """A row of `size` devices, of which this is number `index`, and the devices of its batch."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> jax.Array | int: ...

    @property
    def lockstep(self) -> bool:
        """Whether steps exchange messages of their own, which all devices must take part in."""
        ...

    def shift(self, x: Tree, hops: int, fill: Tree) -> Tree:
        """The `x` of the device `hops` places before this one, or `fill` where there is none."""
        ...

    def gather(self, x: Tree) -> Tree:
        """The `x` of all devices, along a new leading axis."""
        ...

    def sum(self, x: Tree) -> Tree:
        """Sum over the row."""
        ...

    def max(self, x: Tree) -> Tree:
        """Maximum over the row."""
        ...

    def broadcast(self, x: Tree, source: int) -> Tree:
        """The `x` of device `source`."""
        ...

    def batch_sum(self, x: Tree) -> Tree:
        """Sum over the parts of the batch."""
        ...

    def batch_size(self) -> int:
        """Number of parts of the batch."""
        ...

    def batch_gather(self, x: Tree) -> Tree:
        """The states in `x`, with one leading axis, put together from all parts of the batch."""
        ...

    @property
    def is_first(self) -> jax.Array | bool:
        """Whether this is the first device of all."""
        ...


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """The whole time axis and the whole batch on one device."""

    size: int = 1
    index: int = 0
    lockstep: bool = False

    def shift(self, x: Tree, hops: int, fill: Tree) -> Tree:
        return x if hops == 0 else fill

    def gather(self, x: Tree) -> Tree:
        return jax.tree.map(lambda a: a[None], x)

    def sum(self, x: Tree) -> Tree:
        return x

    def max(self, x: Tree) -> Tree:
        return x

    def broadcast(self, x: Tree, source: int) -> Tree:
        return x

    def batch_sum(self, x: Tree) -> Tree:
        return x

    def batch_size(self) -> int:
        return 1

    def batch_gather(self, x: Tree) -> Tree:
        return x

    @property
    def is_first(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """One axis of a JAX mesh as the row, and others that split states, in `shard_map`.

    Axis `i` of a state is split along mesh axis `split[i]`; together they have `parts` devices.
    """

    axis: str
    size: int
    split: tuple[str, ...] = ()
    parts: int = 1
    lockstep: bool = False

    @property
    def index(self) -> jax.Array:
        return jax.lax.axis_index(self.axis)

    def shift(self, x: Tree, hops: int, fill: Tree) -> Tree:
        if hops == 0:
            return x
        pairs = [(i, i + hops) for i in range(self.size) if 0 <= i + hops < self.size]
        if not pairs:
            return fill
        source = self.index - hops
        exists = (source >= 0) & (source < self.size)
        moved = jax.lax.ppermute(x, self.axis, pairs)
        return jax.tree.map(lambda a, b: jnp.where(exists, a, b), moved, fill)

    def gather(self, x: Tree) -> Tree:
        return _tree.on_data(lambda a: jax.lax.all_gather(a, self.axis), x)

    def sum(self, x: Tree) -> Tree:
        return jax.lax.psum(x, self.axis) if jax.tree.leaves(x) else x

    def max(self, x: Tree) -> Tree:
        return jax.lax.pmax(x, self.axis)

    def broadcast(self, x: Tree, source: int) -> Tree:
        here = self.index == source
        return self.sum(jax.tree.map(lambda a: jnp.where(here, a, jnp.zeros_like(a)), x))

    def batch_sum(self, x: Tree) -> Tree:
        if self.parts == 1 or not jax.tree.leaves(x):
            return x
        return jax.lax.psum(x, self.split)

    def batch_size(self) -> int:
        return self.parts

    def batch_gather(self, x: Tree) -> Tree:
        for i, axis in enumerate(self.split):
            x = _tree.on_data(
                lambda a, i=i, axis=axis: jax.lax.all_gather(a, axis, axis=i + 1, tiled=True), x
            )
        return x

    @property
    def is_first(self) -> jax.Array:
        index = sum((jax.lax.axis_index(axis) for axis in self.split), self.index)
        return index == 0
