"""ModelNet: polygon meshes in the OFF format, and the grid of cells that a mesh occupies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxbraid._options import check_choice, check_integer
from jaxbraid.datasets._files import PathLike, existing, of_classes


class Mesh(NamedTuple):
    """Corners, and triangles as indices of three of them."""

    vertices: Float[np.ndarray, "vertices 3"]
    triangles: Int[np.ndarray, "triangles 3"]


def read_off(path: PathLike) -> Mesh:
    """The mesh in an OFF file; polygons are cut into triangles from their first corner.

    Comments, blank lines and colours are skipped. In some files of ModelNet the counts follow
    `OFF` without a break ("OFF123 45 0"): these are read, too.

    **Raises**

    `FileNotFoundError`, or `ValueError` saying what is wrong with the file.
    """
    path = existing(path, "an OFF file")
    text = path.read_text(errors="replace")
    lines = [s for s in (line.split("#")[0].strip() for line in text.splitlines()) if s]
    if not lines or not lines[0].startswith("OFF"):
        raise ValueError(f"{path}: is no OFF file: begins with {text[:12]!r}.")
    lines = ([lines[0][3:]] if lines[0][3:].strip() else []) + lines[1:]
    counts = _numbers(path, lines, 0, int, "the numbers of vertices, faces and edges")
    if len(counts) < 2 or min(counts) < 0:
        raise ValueError(f"{path}: the numbers of vertices, faces and edges are {lines[0]!r}.")
    n, faces = counts[:2]
    if len(lines) < 1 + n + faces:
        raise ValueError(
            f"{path}: has {len(lines) - 1} lines after the counts: {n} vertices and {faces} faces "
            f"need {n + faces}."
        )
    vertices = [_numbers(path, lines, 1 + i, float, f"vertex {i}") for i in range(n)]
    if any(len(v) < 3 for v in vertices):
        raise ValueError(f"{path}: has a vertex of fewer than three numbers.")
    triangles = []
    for i in range(faces):
        face = _numbers(path, lines, 1 + n + i, float, f"face {i}")  # colours may be fractions
        corners = [int(c) for c in face[1 : 1 + int(face[0])]]
        if len(corners) < int(face[0]) or any(not 0 <= c < n for c in corners):
            raise ValueError(f"{path}: face {i} is {lines[1 + n + i]!r}: must be indices < {n}.")
        triangles += [(corners[0], b, c) for b, c in itertools.pairwise(corners[1:])]
    points = np.array([v[:3] for v in vertices], float).reshape(-1, 3)
    if not np.all(np.isfinite(points)):
        raise ValueError(f"{path}: has a vertex that is not finite.")
    return Mesh(points, np.array(triangles, int).reshape(-1, 3))


def _numbers(path: Path, lines: list[str], i: int, kind: type, what: str) -> list:
    try:
        return [kind(word) for word in lines[i].split()]
    except (ValueError, IndexError):
        seen = repr(lines[i]) if i < len(lines) else "missing"
        raise ValueError(f"{path}: {what} should be numbers, but is {seen}.") from None


def voxelize(mesh: Mesh, size: int, *, solid: bool = True) -> Bool[np.ndarray, "size size size"]:
    """Which cells of a cubic grid the mesh occupies: those that its surface passes through.

    The mesh is scaled to fit the grid, its longest side along an axis being `size` cells, and
    centred.

    **Arguments**

    - `mesh`: from `read_off`.
    - `size`: cells along each side of the cube.
    - `solid`: also fill what the surface encloses: the cells that cannot be reached from outside
        through faces of empty cells. A surface with holes as large as a cell encloses nothing.

    **Raises**

    `ValueError` or `TypeError` naming the argument.
    """
    size = check_integer("size", size, 1)
    vertices, triangles = (np.asarray(a) for a in mesh)
    if not len(triangles):
        raise ValueError("mesh has no triangles: it occupies nothing.")
    low, high = (f(vertices[triangles.ravel()], axis=0) for f in (np.min, np.max))
    longest = (high - low).max()
    if longest == 0:
        raise ValueError("mesh has no extent: all its vertices are the same point.")
    points = (vertices - (low + high) / 2) / longest * size + size / 2
    grid = np.zeros((size, size, size), bool)
    for corners in points[triangles]:
        _mark(grid, corners)
    return _filled(grid) if solid else grid


def _mark(grid: np.ndarray, corners: np.ndarray) -> None:
    """Points of a triangle no further apart than half a cell mark the cells that they lie in.

    Where the surface crosses the line between the centres of two cells, such a point lies in one of
    them: no flood through faces of cells leaks through a closed surface.
    """
    a, b, c = corners
    sides = np.linalg.norm([b - a, c - a, c - b], axis=1)
    n = max(1, int(np.ceil(2 * sides.max())))
    i, j = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    inside = i + j <= n
    s, t = i[inside, None] / n, j[inside, None] / n
    cells = np.clip(np.floor(a + s * (b - a) + t * (c - a)).astype(int), 0, len(grid) - 1)
    grid[tuple(cells.T)] = True


def _filled(surface: np.ndarray) -> np.ndarray:
    """The surface and all cells that a flood from outside does not reach."""
    empty = np.pad(~surface, 1, constant_values=True)
    outside = np.zeros_like(empty)
    outside[0] = True
    while True:
        grown = outside.copy()
        for axis in range(3):
            for back in (False, True):
                to, of = [slice(None)] * 3, [slice(None)] * 3
                to[axis], of[axis] = slice(1, None), slice(None, -1)
                if back:
                    to, of = of, to
                grown[tuple(to)] |= grown[tuple(of)] & empty[tuple(to)]
        if np.array_equal(grown, outside):
            return ~outside[1:-1, 1:-1, 1:-1]
        outside = grown


class ModelNet(NamedTuple):
    """Occupied cells, classes as numbers, and the names of the classes."""

    voxels: Bool[np.ndarray, "shapes size size size"]
    labels: Int[np.ndarray, " shapes"]
    classes: tuple[str, ...]


def load_modelnet(
    folder: PathLike,
    split: Literal["train", "test"] = "train",
    *,
    size: int = 32,
    solid: bool = True,
    per_class: int | None = None,
) -> ModelNet:
    """The shapes of ModelNet as voxels; see `voxelize`.

    **Arguments**

    - `folder`: `ModelNet10` or `ModelNet40`, with `<class>/train/*.off` and `<class>/test/*.off`.
    - `split`: `"train"` or `"test"`.
    - `size`, `solid`: as in `voxelize`.
    - `per_class`: only the first so many shapes of each class.

    **Raises**

    `FileNotFoundError`, or `ValueError` saying what is wrong with a file.
    """
    check_choice("split", split, ("train", "test"))
    folder = existing(folder, "the folder of ModelNet", folder=True)
    classes = tuple(sorted(p.parent.name for p in folder.glob(f"*/{split}") if p.is_dir()))
    if not classes:
        raise FileNotFoundError(f"{folder}: has no folder <class>/{split}.")
    found = {name: (folder / name / split).glob("*.off") for name in classes}
    paths, labels = of_classes(found, per_class, folder, split)
    voxels = [voxelize(read_off(path), size, solid=solid) for path in paths]
    return ModelNet(np.stack(voxels), labels, classes)
