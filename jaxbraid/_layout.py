"""Where data lie: the axes of a mesh that split the steps and the batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxbraid import _check, _tree
from jaxbraid._comm import Comm, MeshAxes, OneDevice
from jaxbraid._hierarchy import Hierarchy
from jaxbraid._tree import Tree


@runtime_checkable
class Layout(Protocol):
    """Where data lie and how to run on all devices at once; hashable."""

    @property
    def devices(self) -> int:
        """Number of blocks of the time axis."""
        ...

    @property
    def parts(self) -> int:
        """Number of parts of the batch."""
        ...

    @property
    def split(self) -> tuple[str, ...]:
        """Names of the mesh axes that split the first axes of states."""
        ...

    def agree(self, name: str, x: Tree) -> None:
        """Raises `ValueError` if blocks of layers were given arrays of different shapes."""
        ...

    def shard(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """`fn(comm, ...)` on all devices. Specs are made of `EVERYWHERE`, `LAYER`, `BATCH`, ..."""
        ...

    def count(self, h: Hierarchy) -> int:
        """How many steps the arrays that a caller holds describe."""
        ...

    def size(self, h: Hierarchy) -> int:
        """How many slots there are for them: the leading axis of arrays that are padded."""
        ...

    def pad(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of steps to entries of slots: inactive ones repeat the last.

        What has an entry for every slot already passes through.
        """
        ...

    def cut(self, x: Tree, h: Hierarchy) -> Tree:
        """The inverse of `pad`."""
        ...

    def starts(self, x: Tree, h: Hierarchy) -> tuple[Tree, Tree]:
        """States at points to those where slots start, and the state at the end of time."""
        ...

    def first_step(self, h: Hierarchy) -> int:
        """Number of the first step of the arrays that a caller holds."""
        ...

    def c_points(self, h: Hierarchy) -> np.ndarray:
        """C-points of the finest level where intervals start, as indices into those arrays."""
        ...

    def cut_c(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of intervals, or parts of one, on devices to those of C-points."""
        ...

    def active(self, h: Hierarchy) -> jax.Array:
        """Which slots have a step."""
        ...


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """The mesh and its axes; without a mesh, one device."""

    mesh: Mesh | None = None
    layer_axis: str = "layer"
    split: tuple[str, ...] = ()
    lockstep: bool = False

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.shape[self.layer_axis]

    @property
    def parts(self) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in self.split)

    def agree(self, name: str, x: Tree) -> None:
        """Arrays on a mesh are the same for all of it."""

    def comm(self) -> Comm:
        if self.mesh is None:
            return OneDevice()
        return MeshAxes(self.layer_axis, self.devices, self.split, self.parts, self.lockstep)

    def shard(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """`fn(comm, ...)` over the mesh. Specs are made of `EVERYWHERE`, `LAYER`, `BATCH`, ..."""
        if self.mesh is None:
            return functools.partial(fn, OneDevice())
        mesh = self.mesh
        mapped = jax.shard_map(
            lambda *xs: fn(self.comm(), *xs),
            mesh=mesh,
            in_specs=self._specs(in_specs),
            out_specs=self._specs(out_specs),
            check_vma=False,
        )

        def run(*xs: Any) -> Any:
            # the caller may have set this mesh with explicit axes, which shard_map would refuse
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return mapped(*xs)

        return run

    def count(self, h: Hierarchy) -> int:
        """All steps."""
        return h.steps

    def size(self, h: Hierarchy) -> int:
        """The slots of all devices."""
        return h.slots

    def pad(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of steps to entries of slots: inactive ones repeat the last."""
        return pad_to(h.slots, x)

    def cut(self, x: Tree, h: Hierarchy) -> Tree:
        """The inverse of `pad`."""
        return x if h.slots == h.steps else _tree.take(x, slice(0, h.steps))

    def starts(self, x: Tree, h: Hierarchy) -> tuple[Tree, Tree]:
        """States at points to those where slots start, and the state at the end of time."""
        return starts_of(h.slots, x)

    def first_step(self, h: Hierarchy) -> int:
        """The first of all."""
        return 0

    def c_points(self, h: Hierarchy) -> np.ndarray:
        """All of them."""
        return h.c_points()

    def cut_c(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of intervals, or parts of one, on all devices to those of C-points."""

        def one(a: jax.Array) -> jax.Array:
            a = a.reshape(self.devices, -1, *a.shape[1:])[:: h.c_stride]
            return a.reshape(-1, *a.shape[2:])[: len(h.c_points())]

        return jax.tree.map(one, x)

    def active(self, h: Hierarchy) -> jax.Array:
        """Which slots have a step."""
        return jnp.arange(h.slots) < h.steps

    def _specs(self, names: Any) -> Any:
        axes = {"layer": (self.layer_axis,), "batch": self.split}

        def one(spec: Spec) -> PartitionSpec:
            every = tuple(axis for a in spec.axes for axis in axes[a])
            return PartitionSpec(every) if spec.together else PartitionSpec(*every)

        return jax.tree.map(one, names, is_leaf=lambda s: isinstance(s, Spec))


@dataclasses.dataclass(frozen=True)
class Spec:
    """Which mesh axes split the leading axes of the leaves below; `together`, the first of them."""

    axes: tuple[str, ...]
    together: bool = False


EVERYWHERE, LAYER, BATCH = Spec(()), Spec(("layer",)), Spec(("batch",))
LAYER_BATCH = Spec(("layer", "batch"))
DEVICE = Spec(("layer", "batch"), together=True)  # what each device has, behind that of another


def pad_to(slots: int, x: Tree) -> Tree:
    """`x` with leading axis `slots`: the last entry is repeated; zeros where there is none."""

    def one(a: jax.Array) -> jax.Array:
        n = a.shape[0]
        if n == slots:
            return a
        if n == 0:
            return jnp.zeros((slots, *a.shape[1:]), a.dtype)
        return a[jnp.minimum(jnp.arange(slots), n - 1)]

    return jax.tree.map(one, x)


def starts_of(slots: int, points: Tree) -> tuple[Tree, Tree]:
    """States at points, the last that at the end of time, to those where `slots` slots start."""
    n = jax.tree.leaves(points)[0].shape[0]
    index = jnp.minimum(jnp.arange(slots), n - 1)
    return _tree.take(points, index), _tree.take(points, -1)


def make_layout(
    mesh: Any, layer_axis: str, batch_axis: str | None, space_axis: str | None = None
) -> Layout:
    """The layout on `mesh`, checked. Axes of any type are split by `shard_map` alone."""
    if mesh is None:
        return MeshLayout()
    if isinstance(mesh, Layout):
        return mesh
    _check.mesh_axes(mesh, layer_axis, batch_axis, space_axis)
    split = tuple(axis for axis in (batch_axis, space_axis) if axis is not None)
    mesh = Mesh(mesh.devices, mesh.axis_names)
    return MeshLayout(mesh, layer_axis, split, lockstep=space_axis is not None)
