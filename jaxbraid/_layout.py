"""Where data lie: the axes of a mesh that split the steps and the batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
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
    def batch_axis(self) -> str | None:
        """Name of the axis that splits arrays along the batch, if any does."""
        ...

    def shard(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """`fn(comm, ...)` on all devices. Specs are made of `EVERYWHERE`, `LAYER`, `BATCH`, ..."""
        ...

    def count(self, h: Hierarchy) -> int:
        """How many steps the arrays that a caller holds describe."""
        ...

    def pad(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of steps to entries of all slots: inactive ones repeat the last."""
        ...

    def cut(self, x: Tree, h: Hierarchy) -> Tree:
        """The inverse of `pad`."""
        ...

    def active(self, h: Hierarchy) -> jax.Array:
        """Which slots have a step."""
        ...


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """The mesh and its axes; without a mesh, one device."""

    mesh: Mesh | None = None
    layer_axis: str = "layer"
    batch_axis: str | None = None

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.shape[self.layer_axis]

    @property
    def parts(self) -> int:
        if self.mesh is None or self.batch_axis is None:
            return 1
        return self.mesh.shape[self.batch_axis]

    def comm(self) -> Comm:
        if self.mesh is None:
            return OneDevice()
        return MeshAxes(self.layer_axis, self.devices, self.batch_axis, self.parts)

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

    def pad(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of steps to entries of all slots: inactive ones repeat the last."""
        if h.slots == h.steps:
            return x
        index = jnp.minimum(jnp.arange(h.slots), h.steps - 1)
        return jax.tree.map(lambda a: a[index], x)

    def cut(self, x: Tree, h: Hierarchy) -> Tree:
        """The inverse of `pad`."""
        return x if h.slots == h.steps else _tree.take(x, slice(0, h.steps))

    def active(self, h: Hierarchy) -> jax.Array:
        """Which slots have a step."""
        return jnp.arange(h.slots) < h.steps

    def _specs(self, names: Any) -> Any:
        axes = {"layer": self.layer_axis, "batch": self.batch_axis}
        return jax.tree.map(
            lambda spec: PartitionSpec(*(axes[a] for a in spec.axes if axes[a] is not None)),
            names,
            is_leaf=lambda s: isinstance(s, Spec),
        )


@dataclasses.dataclass(frozen=True)
class Spec:
    """Which mesh axes split the leading axes of the leaves below."""

    axes: tuple[str, ...]


EVERYWHERE, LAYER, BATCH = Spec(()), Spec(("layer",)), Spec(("batch",))
LAYER_BATCH = Spec(("layer", "batch"))


def make_layout(mesh: Any, layer_axis: str, batch_axis: str | None) -> Layout:
    """The layout on `mesh`, checked. Axes of any type are split by `shard_map` alone."""
    if mesh is None:
        return MeshLayout()
    if isinstance(mesh, Layout):
        return mesh
    _check.mesh_axes(mesh, layer_axis, batch_axis)
    return MeshLayout(Mesh(mesh.devices, mesh.axis_names), layer_axis, batch_axis)
