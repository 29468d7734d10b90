"""Where data lie: the axes of a mesh that split the steps and the batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxbraid import _check
from jaxbraid._comm import Comm, MeshAxes, OneDevice


@dataclasses.dataclass(frozen=True)
class Layout:
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


def make_layout(mesh: Mesh | None, layer_axis: str, batch_axis: str | None) -> Layout:
    """The layout on `mesh`, checked. Axes of any type are split by `shard_map` alone."""
    if mesh is None:
        return Layout()
    _check.mesh_axes(mesh, layer_axis, batch_axis)
    return Layout(Mesh(mesh.devices, mesh.axis_names), layer_axis, batch_axis)
