"""Pictures show the numbers that they were given, with labels, and land where they should.

What a picture shows is read off Matplotlib's artists; which points a level has, and on which device
they lie, is written out by hand.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, plot, problems
from jaxbraid.convergence import ConvergenceBound, stability, two_level_bound
from jaxbraid.performance import Cost, Machine, predict
from jaxbraid.training import Diagnosis

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.figure")

CONFIG = MGRIT(levels=2, coarsening=4, cf_relax=0, max_iters=9, tol=1e-8, nested_iteration=False)


@pytest.fixture(scope="module")
def sol():
    return problems.dahlquist(nt=32).solve(CONFIG, point_residuals=True)


def saved(figure, path):
    """The axes, once the picture is seen to be on disk and to have texts on all axes."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    for ax in figure.axes:
        assert ax.get_ylabel() or ax.get_yticklabels()
    assert all(ax.get_xlabel() or "colorbar" in ax.get_label() for ax in figure.axes)
    return figure.axes[0]


def lines(ax):
    """Points of the labelled curves, by label."""
    return {
        line.get_label(): np.column_stack(line.get_data())
        for line in ax.lines
        if not line.get_label().startswith("_")
    }


def looks(ax, label):
    (line,) = (line for line in ax.lines if line.get_label() == label)
    return line.get_color(), line.get_linestyle(), line.get_marker()


# -- residuals and iterations ---------------------------------------------------------------------


def test_residuals_from_the_initial_guess_to_the_last_iteration(sol, tmp_path):
    done = int(sol.stats.iterations)
    assert done < CONFIG.max_iters and np.isfinite(sol.stats.initial_residual)
    path = tmp_path / "r.png"
    figure = plot.residuals({"a": sol, "b": sol.stats, "c": [3.0, 1.0, np.nan]}, tol=0.5, path=path)
    ax = saved(figure, path)
    shown = lines(ax)
    expected = [sol.stats.initial_residual, *sol.stats.residuals[:done]]
    np.testing.assert_array_equal(shown["a"], np.column_stack([range(done + 1), expected]))
    np.testing.assert_array_equal(shown["a"], shown["b"])
    np.testing.assert_array_equal(shown["c"], [(1, 3), (2, 1)])
    assert "tolerance 0.5" in shown and ax.get_yscale() == "log"
    assert all(x != y for x, y in zip(looks(ax, "a"), looks(ax, "b"), strict=True))


def test_image_of_the_iteration_has_every_residual(sol, tmp_path):
    path = tmp_path / "i.png"
    ts = np.linspace(0, 5, 33)[4::4]
    ax = saved(plot.iteration(sol, ts, xlabel="t", path=path), path)
    (image,) = ax.collections
    got = image.get_array()
    rows = int(sol.stats.iterations) + 1
    expected = np.asarray(sol.stats.point_residuals)[:rows]
    assert got.shape == (rows, 8) and ax.yaxis_inverted()
    large = expected > 1e-12
    assert large[1, -1] and expected[0, -1] == 0  # of the zero guess only the first isn't zero
    np.testing.assert_array_equal(got[large], expected[large])
    low, _ = image.get_clim()
    assert np.all(got[expected == 0] < low)  # grey
    edges = image.get_coordinates()[0, :, 0]
    np.testing.assert_allclose((edges[1:] + edges[:-1]) / 2, ts)


def test_image_of_errors_and_of_nothing_but_zeros(tmp_path):
    errors = np.array([[1.0, 1e-3, np.nan], [0.1, 0.0, 1e-30]])
    (image,) = plot.iteration(errors, label="error").axes[0].collections
    assert image.get_array().mask.tolist() == [[False, False, True], [False, False, False]]
    assert image.get_clim() == (4 * np.finfo(float).eps, 1.0)  # less is rounding
    path = tmp_path / "zero.png"
    saved(plot.iteration(np.zeros((2, 3)), path=path), path)


def test_notebooks_show_a_figure():
    picture = plot.residuals([1.0, 0.1])._repr_png_()
    assert picture.startswith(b"\x89PNG") and len(picture) < 100_000


def test_iterates_are_drawn_at_their_times(tmp_path):
    ts, path = np.linspace(0, 1, 5), tmp_path / "u.png"
    ax = saved(plot.iterates([ts, 2 * ts], ts, 3 * ts, path=path), path)
    shown = lines(ax)
    assert list(shown) == ["iteration 0", "iteration 1", "exact"]
    for factor, points in enumerate(shown.values(), start=1):
        np.testing.assert_array_equal(points, np.column_stack([ts, factor * ts]))


# -- levels ---------------------------------------------------------------------------------------


def drawn(ax):
    """Of each level: points, device's look, whether full; and all of it as a sorted list."""
    found = {}
    for line in ax.lines:
        if line.get_linestyle() == "None" and line.get_marker() != "|":
            full = line.get_markerfacecolor() != "white"
            for x, y in zip(*line.get_data(), strict=True):
                found.setdefault(int(-y), []).append((int(x), line.get_color(), full))
    return {level: sorted(points) for level, points in found.items()}


def by_device(points):
    """Points of a level as lists, one a device, in the order of points."""
    groups: dict[str, list[int]] = {}
    for x, colour, _ in points:
        groups.setdefault(colour, []).append(x)
    return list(groups.values())


def test_levels_on_devices(tmp_path):
    path = tmp_path / "h.png"
    ax = saved(plot.hierarchy(MGRIT(levels=3, coarsening=4), 32, 4, path=path), path)
    levels = drawn(ax)
    assert by_device(levels[0]) == [list(range(8 * d + 1, 8 * d + 9)) for d in range(4)]
    assert by_device(levels[1]) == [[4, 8], [12, 16], [20, 24], [28, 32]]
    assert by_device(levels[2]) == [[16], [32]]  # intervals of two devices: on the first of them
    assert [levels[2][i][1] for i in (0, 1)] == [levels[1][i][1] for i in (0, 4)]
    assert [x for x, _, full in levels[0] if full] == list(range(4, 33, 4))
    assert [x for x, _, full in levels[1] if full] == [16, 32]


def test_levels_that_nothing_divides_irregular_ones_and_gathered_ones():
    levels = drawn(plot.hierarchy(MGRIT(levels=2, coarsening=3), 7).axes[0])
    assert [x for x, _, _ in levels[0]] == list(range(1, 8))
    assert [x for x, _, _ in levels[1]] == [3, 6, 7]  # the last slot ends with time
    levels = drawn(plot.hierarchy(MGRIT(levels=2, coarsening=[[0, 2, 7]]), 9).axes[0])
    assert [x for x, _, _ in levels[1]] == [2, 7, 9]
    gathered = MGRIT(levels=3, coarsening=2, coarse_placement=1)
    figure = plot.hierarchy(gathered, 8, 2)
    levels = drawn(figure.axes[0])
    assert {c for _, c, _ in levels[1] + levels[2]} == {"black"}
    assert by_device(levels[0]) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    labels = [t.get_text() for t in figure.axes[0].get_legend().get_texts()]
    assert labels[2:] == ["device 0", "device 1", "every device"]
    assert list(drawn(plot.hierarchy(MGRIT(), 1).axes[0])) == [0]


# -- networks, predictions, bounds ----------------------------------------------------------------


def test_depth_has_a_panel_for_each_kind_of_norm(sol, tmp_path):
    found = Diagnosis(np.geomspace(1, 100, 4), np.ones(3), np.array([0.0, 1, 2]), sol.stats)
    path = tmp_path / "d.png"
    ax = saved(plot.depth(found, path=path), path)
    np.testing.assert_array_equal(lines(ax)["state"][:, 1], found.states)
    figure = dataclasses.replace(found, adjoints=np.arange(4.0)).plot()
    assert [ax.get_title() for ax in figure.axes] == ["States", "Adjoint states", "Weights"]
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "linear", "linear"]


def test_scaling_of_predictions_and_of_pairs(tmp_path):
    cost = Cost.line(0, 1.0)
    machine = Machine(cost, cost, cost, 8, 8, latency=0, bandwidth=1e9)
    rows = [predict(MGRIT(), 256, d, machine) for d in (1, 8)]
    path = tmp_path / "s.png"
    ax = saved(plot.scaling({"a": rows, "b": [(2, 0.5), (4, 1.0)]}, ideal=True, path=path), path)
    shown = lines(ax)
    np.testing.assert_array_equal(shown["a"], [(p.devices, p.speedup) for p in rows])
    np.testing.assert_array_equal(shown["b"], [(2, 0.5), (4, 1.0)])
    np.testing.assert_array_equal(shown["as many as devices"], [(1, 1), (8, 8)])


def test_bounds(tmp_path):
    z = -np.geomspace(1e-2, 1e2, 20)
    fine, coarse = stability("BE", z), stability("BE", 4 * z)
    bounds = {
        kind: two_level_bound(fine, coarse, coarsening=4, steps=64, kind=kind)
        for kind in ("sharp", "dobrev")
    }
    path = tmp_path / "b.png"
    ax = saved(plot.bounds(bounds, -z, xlabel="-z", path=path), path)
    assert ax.get_xlabel() == "-z" and ax.get_xscale() == ax.get_yscale() == "log"
    first = lines(ax)[f"sharp (largest {bounds['sharp'].factor:.3g})"]
    np.testing.assert_array_equal(first, np.column_stack([-z, bounds["sharp"].modes]))


def test_pictures_are_panels_of_a_larger_figure(sol):
    cost = Cost.line(0, 1.0)
    calls = [
        (plot.residuals, (sol,)),
        (plot.iteration, (np.eye(2),)),
        (plot.iterates, ([np.ones(2)], [0, 1])),
        (plot.hierarchy, (MGRIT(), 8)),
        (plot.scaling, ({"a": [predict(MGRIT(), 8, 1, Machine(cost, cost, cost, 8, 8))]},)),
        (plot.bounds, ({"a": ConvergenceBound(np.ones(2), "sharp")},)),
    ]
    figure = matplotlib.figure.Figure()
    for (draw, given), ax in zip(calls, figure.subplots(2, 3).flat, strict=True):
        assert draw(*given, title=draw.__name__, ax=ax) is figure
        assert ax.get_title() == draw.__name__ and (ax.lines or ax.collections)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (ValueError, "histories is empty", lambda: plot.residuals({})),
        (TypeError, r"histories\['a'\] is a str", lambda: plot.residuals({"a": "x"})),
        (TypeError, "is a list", lambda: plot.residuals([[1.0], [2.0]])),
        (ValueError, "has no residual", lambda: plot.residuals([])),
        (ValueError, "has no residual", lambda: plot.residuals([np.nan, np.nan])),
        (
            ValueError,
            "no point_residuals",
            lambda: plot.iteration(jaxbraid.solve(lambda *a: a[2], 1.0, jnp.arange(9.0))),
        ),
        (ValueError, r"values has shape \(3,\)", lambda: plot.iteration(np.ones(3))),
        (ValueError, "negative", lambda: plot.iteration([[1.0, -1.0]])),
        (ValueError, r"x has shape \(3,\)", lambda: plot.iteration(np.ones((2, 2)), np.ones(3))),
        (ValueError, "states is empty", lambda: plot.iterates([], [])),
        (ValueError, r"states\[1\]", lambda: plot.iterates([[1, 2], [1]], [0, 1])),
        (ValueError, "labels has 2", lambda: plot.iterates([[1]], [0], labels=["a", "b"])),
        (TypeError, "config", lambda: plot.hierarchy(None, 4)),
        (ValueError, "steps=0", lambda: plot.hierarchy(MGRIT(), 0)),
        (ValueError, "curves is empty", lambda: plot.scaling({"a": []})),
        (ValueError, "curves is empty", lambda: plot.bounds({})),
        (
            ValueError,
            r"x shape \(3,\)",
            lambda: plot.bounds({"a": ConvergenceBound(np.ones(2), "sharp")}, np.ones(3)),
        ),
    ],
)
def test_errors_name_what_is_wrong(error, says, call):
    with pytest.raises(error, match=says):
        call()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"jaxbraid\[plot\]"):
        plot.residuals([1.0])
