"""Voxel grids of solids, made by formulas: solids of revolution, polyhedra and a torus.

Each solid is a function of points [..., 3] that is positive inside, and about 0.8 in radius.
"""

import numpy as np


def revolved(radius):
    """The solid whose distance from the z-axis is less than radius(z)."""

    def inside(p):
        return radius(p[..., 2]) - np.hypot(p[..., 0], p[..., 1])

    return inside


def polyhedron(normals, distance):
    """The convex solid between planes of these normals, at a distance from the centre."""
    normals = np.array(normals, float)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)

    def inside(p):
        return distance - (p @ normals.T).max(-1)

    return inside


def torus(p):
    return 0.24 - np.hypot(np.hypot(p[..., 0], p[..., 1]) - 0.54, p[..., 2])


SIGNS = [(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
SOLIDS = {
    "ball": revolved(lambda z: np.sqrt(np.maximum(0.6**2 - z**2, 0))),
    "cylinder": revolved(lambda z: np.where(np.abs(z) < 0.7, 0.34, -1)),
    "cone": revolved(lambda z: np.where(np.abs(z) < 0.7, 0.35 * (0.7 - z) + 0.05, -1)),
    "hourglass": revolved(lambda z: np.where(np.abs(z) < 0.65, 0.08 + 0.7 * np.abs(z), -1)),
    "torus": torus,
    "cube": polyhedron(np.vstack([np.eye(3), -np.eye(3)]), 0.48),
    "tetrahedron": polyhedron([s for s in SIGNS if np.prod(s) > 0], 0.32),
    "cross": lambda p: np.sort(0.22 - np.abs(p), -1)[..., 1] - 1e3 * (np.abs(p).max(-1) > 0.75),
}


def random_rotation(rng):
    """Uniform among all rotations."""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q *= np.sign(np.diag(r))
    return q * np.linalg.det(q)


def make(count, size, noise, seed):
    """`count` solids on size^3 voxels, all classes alike: ([count, size, size, size], labels).

    Each is rotated at random, scaled by 0.85 to 1.15 and moved by up to a tenth of the half width;
    voxels are 1 inside and 0 outside, with Gaussian noise of a standard deviation `noise`.
    """
    rng = np.random.default_rng(seed)
    line = (np.arange(size) + 0.5) / size * 2 - 1
    points = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1)
    labels = rng.permutation(np.arange(count) % len(SOLIDS)).astype(np.int32)
    functions = list(SOLIDS.values())
    voxels = np.empty((count, size, size, size), np.float32)
    for i, label in enumerate(labels):
        scale, shift = rng.uniform(0.85, 1.15), rng.uniform(-0.1, 0.1, 3)
        voxels[i] = functions[label]((points - shift) / scale @ random_rotation(rng)) > 0
    return voxels + noise * rng.normal(size=voxels.shape).astype(np.float32), labels
