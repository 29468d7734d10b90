"""The examples that train networks: layer-parallel training ends as serial training does."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import compiler
from test_examples import ROOT, run

SLOW_PRODUCTS = {"shapes": ""}  # that take more time than compiling, which is done as usual


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "apart", "least"),
    [
        ("images", "test accuracy", 1, 90),
        ("spectra", "test accuracy", 1, 95),
        # one of 40 series
        ("sequences", "test accuracy", 2.5, 80),
        # those of 800 solids that two trainings tell apart differ by about one in a hundred
        ("shapes", "test accuracy", 2, 90),
        # 1 % of the likelihood; the normal distribution that the flow starts from has -2.83
        ("spirals", "log-likelihood of the test", 0.01, -2.8),
    ],
)
def test_layer_parallel_training_is_as_good_as_serial(name, what, apart, least, tmp_path):
    """The columns are layer-parallel, serial and, of solids, with coarser voxels on a level."""
    text = run(name, tmp_path, SLOW_PRODUCTS.get(name, compiler.FLAGS))
    row = re.search(rf"{what}((?: +│ +-?[\d.]+%?)+)", text)[1]
    parallel, serial, *others = (float(x) for x in re.findall(r"-?[\d.]+", row))
    assert len(others) == (name == "shapes")
    assert all(abs(x - serial) <= apart for x in (parallel, *others))
    assert serial > least


@pytest.mark.slow
def test_language_model_trains_as_well_in_parallel(tmp_path):
    """Accuracy within a point, loss within 0.05 bits, and both learned (uniform: 6.7)."""
    text = run("language_model", tmp_path)
    row = r"{} +│ ([\d.]+)%? +│ ([\d.]+)"
    parallel, serial = map(float, re.search(row.format("accuracy"), text).groups())
    assert abs(parallel - serial) < 1.0
    parallel, serial = map(float, re.search(row.format("bits per character"), text).groups())
    assert abs(parallel - serial) < 0.05
    assert max(parallel, serial) < 5.0


@pytest.mark.slow
def test_sine_on_several_depths_needs_less_work_than_on_one(tmp_path):
    """And layer-parallel training ends within a point of the error of serial training."""
    text = run("sine", tmp_path)
    for way in ("nested iteration", "MG/OPT"):
        part = re.search(rf"{way}.*│ +(\S+) +│$", text, re.MULTILINE)[1]
        assert float(part) < 0.8, way
    serial, parallel = (float(e) for e in re.findall(r"training: (\S+) %", text))
    assert abs(serial - parallel) < 1


@pytest.mark.slow
def test_fixed_iterations_stall_and_controlled_ones_do_not(tmp_path):
    text = run("inexact", tmp_path)
    rows = ("2 forward, 1 adjoint iterations", "controlled", "exact")
    found = {r: re.search(rf"│ {r} +│ (\S+) +│ (\S+)", text) for r in rows}
    fixed, controlled, exact = ([float(x) for x in found[r].groups()] for r in rows)
    assert fixed[1] > 10 * controlled[1], "the true gradient stalls with few iterations"
    assert controlled[0] < 3 * exact[0]
    assert re.search(r"raise|serial", text)


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
