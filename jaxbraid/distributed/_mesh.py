"""Meshes on which neighbouring layers lie on neighbouring devices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxbraid._options import check_integer


def make_mesh(
    layer: int, batch: int = 1, space: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh on which neighbouring layers lie on neighbouring devices.

    Neighbouring layers exchange states several times in each solve, parts of the batch sum their
    gradients once, parts of a space exchange values in every step. So the axis of space gets the
    nearest devices, that of layers the next nearest, that of the batch the farthest: with 2 x 4
    devices on two hosts, `make_mesh(4, 2)` puts all layers of one half of the batch on each host,
    `make_mesh(8)` the first half of the layers on the first.

    **Arguments**

    - `layer`, `batch`, `space`: sizes of the axes.
    - `devices`: the devices to take, by default all. A single process may ask for fewer than it
        has and gets the first ones.

    **Returns**

    A `jax.sharding.Mesh` with the axes `("layer", "batch")`, and `"space"` if that is larger than
    1, all of type `Auto`.

    **Raises**

    `ValueError` or `TypeError` naming the argument, if the axes do not fit the devices.
    """
    sizes = {"layer": layer, "batch": batch, "space": space}
    sizes = {name: check_integer(name, size, 1) for name, size in sizes.items()}
    shape = "layer x batch x space = {layer} x {batch} x {space}".format(**sizes)
    wanted = math.prod(sizes.values())
    present = list(jax.devices() if devices is None else devices)
    if devices is None and jax.process_count() == 1 and wanted <= len(present):
        present = present[:wanted]
    if wanted != len(present):
        what = "jax.devices()" if devices is None else "devices"
        raise ValueError(
            f"{shape} needs {wanted} devices, but {what} has {len(present)}, on "
            f"{len({d.process_index for d in present})} processes: layer, batch and space must "
            "multiply to that number."
        )
    outer_first = (sizes["batch"], sizes["layer"], sizes["space"])
    grid = _device_grid(outer_first, present)
    grid = grid.transpose(1, 0, 2)
    names = ("layer", "batch", "space")
    if sizes["space"] == 1:
        grid, names = grid[..., 0], names[:2]
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _device_grid(shape: tuple[int, int, int], devices: list[Any]) -> np.ndarray:
    """The devices as `(batch, layer, space)`, the axes in order of growing traffic."""
    if devices[0].platform == "cpu":
        devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    slices = len({getattr(d, "slice_index", None) for d in devices})
    if slices > 1:
        # between slices (or hosts of GPUs) the network is slower: the outermost axes cross it
        outer, left = [], slices
        for size in shape:
            outer.append(math.gcd(size, left))
            left //= outer[-1]
        if left == 1:
            inner = [size // n for size, n in zip(shape, outer, strict=True)]
            with contextlib.suppress(ValueError):  # slices of different sizes: as they come
                return mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
    return mesh_utils.create_device_mesh(shape, devices)
