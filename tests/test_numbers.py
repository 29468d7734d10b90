"""Steps of states of few numbers: done number by number, with the same results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, problems
from jaxbraid._numbers import NeedsWhole, NumbersSplit, by_numbers
from nets import mesh_of
from serial import serial


def apart(fn, u):
    """`fn` of the numbers in `u`."""
    split = NumbersSplit.of(u)
    numbers, rest = split(u)
    return by_numbers(lambda x: fn(split.join(x, rest)), numbers)


def moved(u):
    x, y, z = u
    top = jnp.stack([z, -x])
    bent = jnp.where(u > 0, jnp.sin(u), 0.5 * u**3)[::-1] + u.sum()
    _, low, _ = jnp.split(jnp.clip(bent, -1.0, 2.0), 3)
    return jnp.concatenate([top, low]) * jnp.array([1.0, 2.0, y.size])


def test_arithmetic_on_entries_is_done_on_numbers():
    """The result is that of the arrays, and no array of the state is left in the program."""
    u = jnp.array([0.3, -0.7, 1.1])
    np.testing.assert_allclose(apart(moved, u), moved(u), rtol=1e-14)
    split = NumbersSplit.of(u)
    program = jax.make_jaxpr(lambda x: split(by_numbers(lambda x: moved(split.join(x, [])), x))[0])(
        split(u)[0]
    )
    at_work = [e for e in program.eqns if e.primitive.name in ("sin", "mul", "add", "select_n")]
    assert at_work
    assert all(v.aval.shape == () for e in at_work for v in e.outvars)


def test_axes_of_one_entry_are_widened():
    """JAX's operations take them beside longer ones."""
    u = jnp.array([0.3, -0.7, 1.1])
    fn = lambda u: jax.lax.mul(u.reshape(1, 3), u[:1].reshape(1, 1)).reshape(3)  # noqa: E731
    np.testing.assert_allclose(apart(fn, u), u * u[0], rtol=1e-15)


@pytest.mark.parametrize("fn", [lambda u: jnp.ones((3, 3)) @ u, jnp.sort, lambda u: u.at[0].add(1)])
def test_what_needs_an_array_is_found(fn):
    with pytest.raises(NeedsWhole):
        apart(fn, jnp.arange(3.0))


def test_numbers_of_a_tree_and_back():
    """Batched too, with leaves that are no real numbers left out."""
    u = {"a": jnp.arange(4.0).reshape(2, 2), "key": jax.random.key(1), "z": jnp.complex64(1j)}
    split = NumbersSplit.of(u)
    numbers, rest = split(u)
    assert [jnp.shape(x) for x in numbers] == [()] * 5
    many = {**u, "a": jnp.stack([u["a"], -u["a"]]), "z": jnp.array([1j, 2.0])}
    back = split.join(split(many)[0], rest)
    np.testing.assert_array_equal(back["a"], many["a"])
    np.testing.assert_array_equal(back["z"], many["z"])
    assert back["key"] is u["key"]


@pytest.mark.parametrize("devices", [1, 2])
def test_lorenz_against_the_scan(devices):
    """A vector and a pytree, on one device and on a mesh, with gradients on one."""
    problem = problems.lorenz_63(t_end=0.5, nt=96)
    ts, mesh = jnp.asarray(problem.ts), None if devices == 1 else mesh_of(devices)
    where = {"mesh": mesh, "layer_axis": "depth"}
    truth = serial(problem.step, problem.u0, ts, args=problem.args)
    config = MGRIT(levels=2, coarsening=8, max_iters=8)

    def step(t0, t1, u, params, args):
        x, y, z = problem.step(t0, t1, jnp.append(u["xy"], u["z"]), params, args)
        return {"xy": jnp.stack([x, y]), "z": z}

    def last(u0):
        return jaxbraid.solve(step, u0, ts, None, problem.args, config=config, **where)

    u0 = {"xy": jnp.asarray(problem.u0[:2]), "z": jnp.asarray(problem.u0[2])}
    sol = last(u0)
    np.testing.assert_allclose(sol.us["xy"], truth[:, :2], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(sol.us["z"], truth[:, 2], rtol=1e-11, atol=1e-11)
    if devices > 1:
        return
    g = jax.grad(lambda u0: last(u0).u["z"])(u0)
    h = jax.grad(lambda u: serial(problem.step, u, ts, args=problem.args)[-1, 2])(
        jnp.asarray(problem.u0)
    )
    np.testing.assert_allclose(jnp.append(g["xy"], g["z"]), h, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex128"])
def test_pairs_of_numbers_are_parts_of_complex_ones(dtype):
    """Where there are such complex numbers; what is left over stands alone."""
    u = (jnp.arange(5, dtype=dtype) - 2, jnp.arange(2, dtype="float32"))
    split = NumbersSplit.of(u, pairs=True)
    numbers, rest = split(u)
    widths = {"float32": [2, 2, 2, 1], "float64": [2, 2, 1, 2]}.get(dtype, [1] * 5 + [2])
    assert [1 + (jnp.iscomplexobj(x) and dtype != "complex128") for x in numbers[:5]] == widths[:5]
    assert len(numbers) == len(widths)
    for a, b in zip(u, split.join(numbers, rest), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("norm", [None, lambda u: jnp.abs(u).max()])
def test_pairs_change_no_result(devices, norm, monkeypatch):
    """States, residuals and the norm that a caller gives are those of single numbers."""
    problem = problems.brusselator(t_end=3.0, nt=96)
    where = {"mesh": None if devices == 1 else mesh_of(devices), "layer_axis": "depth"}
    config = MGRIT(levels=3, coarsening=4, max_iters=3, c_weight=0.9, norm=norm)

    def solution():
        ts = jnp.asarray(problem.ts)
        return jaxbraid.solve(
            problem.step, problem.u0, ts, None, problem.args, config=config, **where
        )

    paired = solution()
    jax.clear_caches()
    with monkeypatch.context() as m:
        m.setattr("jaxbraid._numbers.PAIRED", ())
        single = solution()
    jax.clear_caches()
    np.testing.assert_allclose(paired.us, single.us, rtol=1e-13)
    np.testing.assert_allclose(
        paired.stats.residuals, single.stats.residuals, rtol=1e-6, atol=1e-15
    )
