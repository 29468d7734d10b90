"""What a solve gives out: some of its states, residuals at points, news while it runs."""

from __future__ import annotations

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT
from jaxbraid._live import LiveTable

U0 = np.array([1.0, 0.5])


def step(t0, t1, u, params, args):
    """The explicit midpoint rule for a pendulum."""

    def f(u):
        return jnp.stack([u[1], -args * jnp.sin(u[0])])

    return u + (t1 - t0) * f(u + (t1 - t0) / 2 * f(u))


def grid(n):
    return np.linspace(0, 6, n + 1)


def mesh_of(devices):
    return None if devices == 1 else jax.make_mesh((devices,), ("layer",))


TWO = MGRIT(levels=2, coarsening=4, max_iters=3)
LAYOUTS = [
    # steps, devices, options, C-points where intervals start
    (32, 1, {}, np.arange(0, 32, 4)),
    (30, 1, {"final_relax": "FC"}, np.arange(0, 30, 4)),
    (30, 3, {"final_relax": "FC"}, np.arange(0, 30, 4)),
    (16, 8, {"saved_states": "coarse"}, np.arange(0, 16, 4)),  # intervals span two devices
    (30, 1, {"coarsening": ((0, 3, 9, 20),)}, np.array([0, 3, 9, 20])),
    (30, 3, {"coarse_placement": 1}, np.arange(0, 30, 4)),
    (12, 2, {"levels": 1}, np.array([0])),
]


@pytest.mark.parametrize(("n", "devices", "options", "at"), LAYOUTS)
def test_coarse_states_are_those_of_all_states(n, devices, options, at):
    """And so are their gradients."""
    config = dataclasses.replace(TWO, **options)
    at = np.append(at, n)
    weights = np.random.default_rng(0).normal(size=(len(at), 2))

    def run(save, g):
        mesh = mesh_of(devices)
        return jaxbraid.solve(step, U0, grid(n), args=g, config=config, save=save, mesh=mesh)

    all_, coarse = run("all", 2.0), run("coarse", 2.0)
    np.testing.assert_array_equal(all_.ts, grid(n))
    np.testing.assert_array_equal(coarse.ts, grid(n)[at])
    np.testing.assert_allclose(coarse.us, np.asarray(all_.us)[at], rtol=0, atol=1e-15)
    assert run("final", 2.0).us is run("final", 2.0).ts is None
    of_all = jax.grad(lambda g: jnp.sum(weights * run("all", g).us[at]))(2.0)
    of_coarse = jax.grad(lambda g: jnp.sum(weights * run("coarse", g).us))(2.0)
    np.testing.assert_allclose(of_coarse, of_all, rtol=1e-13)


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("options", [{}, {"tol": 1e-9}, {"criterion": "jump"}])
def test_point_residuals_are_what_the_norm_sums(devices, options):
    """Their 2-norm is the recorded one, and the early blocks converge first."""
    config = dataclasses.replace(TWO, cf_relax=0, max_iters=6, nested_iteration=False, **options)

    def run(devices, points=True):
        mesh = mesh_of(devices)
        more = {"args": 2.0, "config": config, "point_residuals": points, "mesh": mesh}
        return jaxbraid.solve(step, U0, grid(30), **more).stats

    stats = run(devices)
    points = np.asarray(stats.point_residuals)
    assert points.shape == (7, 8)  # the last interval has no C-point at its end
    norms = np.append(stats.initial_residual, stats.residuals)
    np.testing.assert_allclose(np.sqrt(np.sum(points[:, :7] ** 2, axis=1)), norms, rtol=1e-12)
    assert np.isnan(points[:, 7]).all()
    np.testing.assert_allclose(points, run(1).point_residuals, rtol=1e-6, atol=1e-13)
    assert run(devices, points=False).point_residuals is None
    if not options:  # Parareal is exact in as many intervals as it has done iterations
        exact = np.tril(np.ones((7, 7)), -1)[:, :7]
        assert np.all(points[:, :7][exact.astype(bool)] < 1e-14)
        blocks = stats.block_residuals(2)
        np.testing.assert_array_equal(blocks[:, 0], points[:, :4].max(1))
        assert np.all(blocks[2:, 0] < blocks[2:, 1])


def test_residual_at_each_point_is_that_of_its_step():
    """After the last iteration: what four steps from one C-point miss the next by."""
    config = dataclasses.replace(TWO, max_iters=1)
    more = {"args": 2.0, "config": config, "point_residuals": True, "save": "coarse"}
    sol = jaxbraid.solve(step, U0, grid(32), **more)
    ts = jnp.asarray(grid(32))
    for k in range(7):
        u = sol.us[k]
        for i in range(4 * k, 4 * k + 4):
            u = step(ts[i], ts[i + 1], u, None, 2.0)
        expected = np.linalg.norm(u - sol.us[k + 1])
        np.testing.assert_allclose(sol.stats.point_residuals[1, k], expected, rtol=1e-9)


def test_asking_for_blocks_without_points():
    stats = jaxbraid.solve(step, U0, grid(32), args=2.0, config=TWO).stats
    with pytest.raises(ValueError, match="point_residuals=True"):
        stats.block_residuals(2)
    more = {"args": 2.0, "config": TWO, "point_residuals": True}
    stats = jaxbraid.solve(step, U0, grid(32), **more).stats
    with pytest.raises(ValueError, match="blocks=9: must be between 1 and the 8"):
        stats.block_residuals(9)


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, iteration, residual, states):
        assert isinstance(iteration, int)
        assert isinstance(residual, float)
        self.calls.append((iteration, residual, states))


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"tol": 1e-9}, {"criterion": "jump"}, {"skip_first_down": True}]
)
def test_callback_is_told_of_every_iteration(devices, options):
    """Once each, under jit, with the residuals of the record and states that converge."""
    config = dataclasses.replace(TWO, max_iters=4, **options)
    seen = Recorder()
    run = jax.jit(
        lambda g: jaxbraid.solve(
            step, U0, grid(30), args=g, config=config, callback=seen, mesh=mesh_of(devices)
        )
    )
    sol = run(2.0)
    jax.effects_barrier()
    norms = np.append(sol.stats.initial_residual, sol.stats.residuals)
    known = np.flatnonzero(~np.isnan(norms))
    assert [i for i, _, _ in seen.calls] == list(known)
    np.testing.assert_array_equal([r for _, r, _ in seen.calls], norms[known])
    errors = [np.abs(s - np.asarray(sol.us)[np.append(np.arange(0, 30, 4), 30)]).max()
              for _, _, s in seen.calls]  # fmt: skip
    assert errors[-1] < 1e-3 * errors[0]
    assert seen.calls[0][2].shape == (9, 2)


def test_callback_sees_whole_batches_and_pytrees():
    """On a mesh that splits the batch, all parts of it; leaves that are no numbers too."""
    mesh = jax.make_mesh((2, 2), ("layer", "batch"))
    u0 = {"q": np.arange(4.0), "key": np.arange(4)}
    seen = Recorder()

    def decay(t0, t1, u, params, args):
        return {**u, "q": u["q"] * (1 - (t1 - t0))}

    jaxbraid.solve(decay, u0, grid(16), config=TWO, mesh=mesh, batch_axis="batch", callback=seen)
    jax.effects_barrier()
    states = seen.calls[-1][2]
    assert len(seen.calls) == 4
    assert states["q"].shape == states["key"].shape == (5, 4)
    np.testing.assert_array_equal(states["key"], np.tile(np.arange(4), (5, 1)))
    exact = np.arange(4.0) * (1 - 6 / 16) ** np.arange(0, 17, 4)[:, None]
    np.testing.assert_allclose(states["q"], exact, atol=1e-6)


def test_callback_without_states_and_under_vmap_and_grad():
    seen = Recorder()

    def last(g):
        more = {"args": g, "config": TWO, "callback": seen, "callback_states": False}
        return jaxbraid.solve(step, U0, grid(16), **more).u[0]

    value, _ = jax.value_and_grad(last)(2.0)
    jax.effects_barrier()
    assert [(i, s) for i, _, s in seen.calls] == [(i, None) for i in range(4)]
    both = jax.vmap(last)(np.array([2.0, 3.0]))
    jax.effects_barrier()
    np.testing.assert_allclose(both[0], value, rtol=1e-12)
    assert len(seen.calls) == 4 + 2 * 4
    with pytest.raises(TypeError, match="callback=3: must be a function"):
        jaxbraid.solve(step, U0, grid(16), args=2.0, callback=3)


@pytest.mark.parametrize("devices", [1, 3])
def test_one_level_has_one_iteration_and_no_c_points(devices):
    """Serial stepping: told once, with the states at both ends; no residual at any C-point."""
    seen = Recorder()
    config = dataclasses.replace(TWO, levels=1)
    more = {"config": config, "callback": seen, "point_residuals": True, "mesh": mesh_of(devices)}
    sol = jaxbraid.solve(step, U0, grid(10), args=2.0, **more)
    jax.effects_barrier()
    assert sol.stats.point_residuals.shape == (4, 0)
    ((iteration, residual, states),) = seen.calls
    assert (iteration, residual) == (1, 0.0)
    np.testing.assert_array_equal(states, np.stack([sol.us[0], sol.us[-1]]))


def test_progress_prints_the_table_while_it_runs(capsys):
    config = dataclasses.replace(TWO, tol=1e-9)
    sol = jaxbraid.solve(step, U0, grid(64), args=2.0, config=config, progress=True)
    jax.effects_barrier()
    printed = capsys.readouterr().out.splitlines()
    table = str(sol.stats).splitlines()
    assert printed == [line for line in table if line not in ("converged", "stopped: not finite")]


def test_progress_bar_goes_the_logarithmic_way():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    table = LiveTable(10, 1e-8, Terminal())
    shares = []
    for i, r in enumerate([1.0, 1e-2, 1e-4, 1e-8]):
        table(i, r, None)
        shares.append(table._done(i, r))
    np.testing.assert_allclose(shares, [0, 0.25, 0.5, 1])
    assert "MGRIT" in table.file.getvalue()
    assert "50%" in table.file.getvalue()
