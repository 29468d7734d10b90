"""A 3D convolutional network on voxels: its accuracy in all three trainings."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from test_examples import ROOT, run


@pytest.mark.slow
def test_layer_parallel_training_is_as_good_as_serial(tmp_path):
    """With coarser voxels on the coarsest level as well.

    Within 2 points: those of 800 solids that two trainings tell apart differ by about one. Here
    matrix products take more time than compiling, so that is done as usual.
    """
    text = run("shapes", tmp_path, flags="")
    found = re.search(r"test accuracy +│ ([\d.]+)% +│ ([\d.]+)% +│ ([\d.]+)%", text)
    parallel, serial, coarser = map(float, found.groups())
    assert abs(parallel - serial) <= 2
    assert abs(coarser - serial) <= 2
    assert serial > 90


def test_solids(monkeypatch):
    """Volumes of the formulas, whatever the rotation: a ball, a cube, a tetrahedron, a torus."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import _shapes

    n = 60
    line = (np.arange(n) + 0.5) / n * 2 - 1
    points = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1)
    turned = points @ _shapes.random_rotation(np.random.default_rng(0))
    expected = {
        "ball": 4 / 3 * np.pi * 0.6**3,
        "cube": 0.96**3,
        "tetrahedron": 8 * 3**0.5 * 0.32**3,
        "torus": 2 * np.pi**2 * 0.54 * 0.24**2,
        "cylinder": np.pi * 0.34**2 * 1.4,
    }
    for name, volume in expected.items():
        cells = np.mean(_shapes.SOLIDS[name](turned) > 0) * 8
        assert abs(cells / volume - 1) < 0.02, name
    voxels, labels = _shapes.make(16, 12, 0.0, 1)
    assert voxels.shape == (16, 12, 12, 12)
    assert np.bincount(labels).tolist() == [2] * 8
    assert set(np.unique(voxels)) == {0, 1}
    assert voxels.mean((1, 2, 3)).min() > 0.02
