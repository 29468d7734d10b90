"""Steps on the host are the steps that they stand for: values, gradients, calls, errors.

The truths are the same steps written in JAX, and serial marches in NumPy.
"""

import collections
import importlib.util
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.integrate import solve_ivp
from scipy.sparse.linalg import splu

import jaxbraid
from jaxbraid.host import host_step
from jaxbraid.problems import heat_1d

ROOT = pathlib.Path(__file__).parents[1]
ROUNDING = dict(rtol=1e-11, atol=1e-12)
N, M = 32, 4
TS = np.linspace(0, 2, N + 1)
CONFIG = jaxbraid.MGRIT(coarsening=M, max_iters=2, batch_intervals="all")


def implicit(t0, t1, u, params, args):
    """Of a state {a: (3,), b: ()}, in JAX."""
    d = 1 + (t1 - t0) * args["rate"] * (1 + params)
    return {"a": u["a"] / d, "b": u["b"] / d + (t1 - t0) * u["a"].sum()}


def host_implicit(t0, t1, u, params, args):
    """The same in NumPy, for a batch."""
    assert t0.shape == t1.shape == params.shape == u["b"].shape and u["a"].ndim == 2
    assert np.shape(args["rate"]) == () and isinstance(u["a"], np.ndarray)
    dt = t1 - t0
    d = 1 + dt * args["rate"] * (1 + params)
    return {"a": u["a"] / d[:, None], "b": u["b"] / d + dt * u["a"].sum(1)}


def host_implicit_vjp(t0, t1, u, params, args, ct):
    dt = t1 - t0
    d = 1 + dt * args["rate"] * (1 + params)
    dd = -((ct["a"] * u["a"]).sum(1) + ct["b"] * u["b"]) / d**2
    du = {"a": ct["a"] / d[:, None] + (dt * ct["b"])[:, None], "b": ct["b"] / d}
    return du, dd * dt * args["rate"], {"rate": dd * dt * (1 + params)}


def looped(fn):
    """The same for one interval, as `batched=False` has it."""

    def one(t0, t1, u, params, args, *ct):
        assert np.shape(t0) == np.shape(params) == ()
        batch = jax.tree.map(lambda x: np.asarray(x)[None], (t0, t1, u, params))
        ct = jax.tree.map(lambda x: np.asarray(x)[None], ct)
        return jax.tree.map(lambda x: x[0], fn(*batch, args, *ct))

    return one


U0 = {"a": jnp.arange(1.0, 4), "b": jnp.float64(0.5)}
PARAMS, ARGS = jnp.linspace(0, 1, N), {"rate": jnp.float64(0.7)}
STEPS = {
    "batched": host_step(host_implicit, vjp=host_implicit_vjp),
    "looped": host_step(looped(host_implicit), vjp=looped(host_implicit_vjp), batched=False),
}


def gradients(step, mesh=None, **options):
    def loss(u0, params, args):
        config = jaxbraid.MGRIT(coarsening=M, max_iters=2, **options)
        sol = jaxbraid.solve(step, u0, TS, params, args, config=config, mesh=mesh)
        return jnp.sum(sol.us["a"] ** 2) + sol.u["b"]

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(U0, PARAMS, ARGS)


def assert_close(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **ROUNDING), x, y)


@pytest.fixture(scope="module")
def truth():
    """The value and the gradients with the step in JAX."""
    return gradients(implicit)


@pytest.mark.parametrize("kind", STEPS)
def test_values_and_gradients_are_those_of_a_step_in_jax(kind, truth):
    assert_close(gradients(STEPS[kind]), truth)


def test_on_a_mesh_with_kept_linearisations(truth):
    mesh = jax.make_mesh((4,), ("layer",))
    assert_close(gradients(STEPS["batched"], mesh, linearization="keep"), truth)


@pytest.mark.parametrize("batch", ["all", "one", 2])
def test_one_call_for_a_batch(batch):
    """2 iterations of FCF-relaxation and the last sweep are 5 sweeps, each of M calls a group."""
    calls = collections.Counter()

    def counted(t0, t1, u, params, args):
        fine = "fine" if t1[0] - t0[0] < 1.5 * TS[1] else "coarse"
        calls[fine, len(t0)] += 1
        return u / (1 + (t1 - t0))[:, None]

    config = jaxbraid.MGRIT(coarsening=M, max_iters=2, batch_intervals=batch)
    jax.block_until_ready(jaxbraid.solve(host_step(counted), jnp.ones(3), TS, config=config).u)
    intervals = N // M
    size = {"all": intervals, "one": 1, 2: 2}[batch]
    assert calls["fine", size] == 5 * M * intervals // size
    # nested iteration and 2 corrections: a coarse solve each, of one state after another; 2 taus
    assert calls["coarse", 1] == 3 * intervals and calls["coarse", intervals] == 2
    assert {n for kind, n in calls if kind == "fine"} == {size}


def test_the_adjoint_calls_the_vjp_only():
    """A vjp needs no forward step: the backward pass adds no calls of fn."""
    calls = collections.Counter()

    def fn(t0, t1, u, params, args):
        calls["fn"] += 1
        return u / (1 + (t1 - t0))[:, None]

    def vjp(t0, t1, u, params, args, ct):
        calls["vjp", len(t0)] += 1
        return ct / (1 + (t1 - t0))[:, None], None, None

    step = host_step(fn, vjp=vjp)

    def loss(u0):
        return jnp.sum(jaxbraid.solve(step, u0, TS, config=CONFIG).us ** 2)

    jax.block_until_ready(jax.jit(loss)(jnp.ones(3)))
    forward = calls["fn"]
    calls.clear()
    jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.ones(3)))
    assert calls["fn"] == forward
    # four sweeps and two taus; the last sweep would be for parameters, of which there are none
    assert calls["vjp", N // M] == 4 * M + 2


def test_nested_vmaps_are_one_batch():
    """Batches over states, and over args: one call for each value of args."""
    sizes = []

    def fn(t0, t1, u, params, args):
        sizes.append(len(t0))
        return u * args + params[:, None]

    u, params, args = jnp.arange(30.0).reshape(2, 5, 3), jnp.arange(5.0), jnp.array([2.0, 3.0])
    step = host_step(fn)
    inner = jax.vmap(step, (None, None, 0, 0, None))
    both = jax.vmap(inner, (None, None, 0, None, None))(0.0, 1.0, u, params, args[0])
    np.testing.assert_allclose(both, 2 * u + params[:, None])
    assert sizes == [10]
    sizes.clear()
    each = jax.vmap(inner, (None, None, 0, None, 0))(0.0, 1.0, u, params, args)
    np.testing.assert_allclose(each, args[:, None, None] * u + params[:, None])
    assert sizes == [5, 5]


def test_constant_leaves_come_back_as_they_are():
    def fn(t0, t1, u, params, args):
        return {"x": u["x"] * 0.5, "label": None}

    u0 = {"x": jnp.ones(2), "label": jnp.arange(3)}
    step = host_step(fn, vjp=lambda t0, t1, u, p, a, ct: (u | {"x": 0.5 * ct["x"]}, None, None))

    def end(x):
        return jaxbraid.solve(step, u0 | {"x": x}, TS[:9], config=CONFIG).u

    np.testing.assert_array_equal(end(u0["x"])["label"], u0["label"])
    slope = jax.grad(lambda x: end(x)["x"].sum())(u0["x"])
    np.testing.assert_allclose(slope, 0.5**8, rtol=1e-12)


# -- errors ---------------------------------------------------------------------------------------


def raising(t0, t1, u, params, args):
    raise RuntimeError("the reactor is empty")


BAD = [
    (lambda t0, t1, u, p, a: u[:, :2], r"state with shape \(1, 2\): must be \(1, 3\)"),
    (lambda t0, t1, u, p, a: u.astype("float32"), "dtype float32: must be float64"),
    (lambda t0, t1, u, p, a: {"x": u}, r"state with shape \(\)|as dict|structure"),
    (raising, "(?s)the reactor is empty"),
]


@pytest.mark.parametrize(("fn", "message"), BAD)
def test_what_the_host_does_wrong_is_told(fn, message):
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jaxbraid.solve(host_step(fn), jnp.ones(3), TS, config=CONFIG).u)


def half(t0, t1, u, params, args):
    return 0.5 * u


@pytest.mark.parametrize(
    ("vjp", "message"),
    [
        (lambda *x: x[-1], r"must return the tuple \(du, dparams, dargs\)"),
        (lambda *x: (x[-1], None, x[-1].sum()), r"dargs with shape \(\): must be \(1,\)"),
        (lambda *x: (x[-1].astype("float32"), None, None), "du with dtype float32"),
    ],
)
def test_what_a_vjp_does_wrong_is_told(vjp, message):
    step = host_step(half, vjp=vjp)
    with pytest.raises(Exception, match=message):
        jax.grad(lambda u: step(0.0, 1.0, u, None, 1.0).sum())(jnp.ones(3))


def test_derivatives_that_cannot_be_had():
    step = host_step(half)
    with pytest.raises(TypeError, match=r"give host_step\(half, vjp=\.\.\.\)"):
        jax.grad(lambda u: jaxbraid.solve(step, u, TS, config=CONFIG).u.sum())(jnp.ones(3))
    step = host_step(half, vjp=lambda *x: (0.5 * x[-1], None, None))
    with pytest.raises(TypeError, match="with respect to the times"):
        jax.grad(lambda t: step(0.0, t, jnp.ones(3)).sum())(1.0)


def test_arguments():
    with pytest.raises(TypeError, match="fn=3"):
        host_step(3)
    with pytest.raises(TypeError, match="vjp=3"):
        host_step(half, vjp=3)
    with pytest.raises(TypeError, match="batched='yes'"):
        host_step(half, batched="yes")
    with pytest.raises(TypeError, match=r"args\['key'\] is a PRNG key"):
        host_step(half)(0.0, 1.0, jnp.ones(3), None, {"key": jax.random.key(0)})
    assert host_step(half) == host_step(half) and hash(host_step(half)) == hash(host_step(half))


# -- real packages --------------------------------------------------------------------------------


def test_scipy_sparse_lu_is_the_heat_equation_of_jax():
    """The heat equation of the problem library by backward Euler, and a gradient."""
    nx = 17
    problem = heat_1d(nx, (0.0, 1.0), t_end=1.0, nt=16)
    n, h = nx - 2, 1.0 / (nx - 1)
    assert problem.u0.shape == (n,)
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) / h**2
    x = np.linspace(0, 1, nx)[1:-1]

    def lu(t0, t1):
        dt = np.unique(np.round(t1 - t0, 12))
        assert len(dt) == 1
        return dt[0], splu(sp.csc_array(sp.eye_array(n) + dt[0] * line))

    def fn(t0, t1, u, params, args):
        dt, factors = lu(t0, t1)
        return factors.solve((u + dt * source(x, t1)).T).T

    def vjp(t0, t1, u, params, args, ct):
        return (
            lu(t0, t1)[1].solve(np.ascontiguousarray(ct.T), "T").T,
            None,
            {"a": np.zeros(len(t0))},
        )

    def source(x, t):
        t = t[:, None]
        return -np.sin(np.pi * x) * (np.sin(t) - np.pi**2 * np.cos(t))

    def end(step):
        def loss(u0):
            more = {"args": problem.args, "config": CONFIG}
            return jnp.sum(jaxbraid.solve(step, u0, problem.ts, **more).us[1:] ** 3)

        return jax.value_and_grad(loss)(jnp.asarray(problem.u0))

    assert_close(end(host_step(fn, vjp=vjp)), end(problem.step))


def test_solve_ivp_as_a_step():
    """An adaptive integrator, one state at a time: the pendulum, against one call for all times."""

    def f(t, u):
        return [u[1], -np.sin(u[0])]

    options = dict(rtol=1e-10, atol=1e-12)

    def fn(t0, t1, u, params, args):
        return solve_ivp(f, (t0, t1), u, **options).y[:, -1]

    ts = np.linspace(0, 2, 17)
    config = jaxbraid.MGRIT(coarsening=4, tol=1e-11)
    sol = jaxbraid.solve(host_step(fn, batched=False), jnp.array([1.0, 0.0]), ts, config=config)
    truth = solve_ivp(f, (0, 2), [1.0, 0.0], t_eval=ts, **options).y.T
    assert bool(sol.stats.converged)
    np.testing.assert_allclose(sol.us, truth, atol=1e-7)


def run_example(name, out):
    """`main` of an example, in --quick mode."""
    folder = ROOT / "examples"
    sys.path.insert(0, str(folder))  # for what the examples share
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        errors = module.main(["--quick", "--out", str(out)])
    finally:
        sys.path.remove(str(folder))
    assert (out / f"{name}.png").stat().st_size > 10_000
    return errors


def test_example_scipy(tmp_path, capsys):
    error, gradient_error = run_example("scipy_heat", tmp_path)
    assert error < 1e-9 and gradient_error < 1e-6
    printed = capsys.readouterr().out
    assert "converged" in printed and "MGRIT" in printed


def test_example_scikit_fem(tmp_path):
    """Linear diffusion, and Newton's method for Burgers' equation."""
    assert max(run_example("scikit_fem", tmp_path)) < 1e-9


@pytest.mark.petsc
def test_petsc(tmp_path):
    """Krylov solves by PETSc, against a direct solve by SciPy; with the vjp, and as an example."""
    if not os.environ.get("JAXBRAID_REQUIRE_PETSC"):
        pytest.importorskip("petsc4py")
    assert run_example("petsc_heat", tmp_path) < 1e-9
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import petsc_heat
        import scipy_heat
    finally:
        sys.path.remove(str(ROOT / "examples"))
    ours, theirs = petsc_heat.make_heat(7), scipy_heat.make_heat(7)
    ts = np.linspace(0, 0.1, 17)

    def gradient(fn, vjp, u0, args):
        step = host_step(fn, vjp=vjp)
        loss = lambda u0: jnp.sum(jaxbraid.solve(step, u0, ts, args=args, config=CONFIG).u ** 2)  # noqa: E731
        return jax.value_and_grad(loss)(jnp.asarray(u0))

    assert_close(gradient(*ours, None), gradient(*theirs, 20.0))


def test_the_guide_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/host.md").read_text(), re.S)
    exec(compile(code, "text", "exec"), {})
    assert "e-" in capsys.readouterr().out
