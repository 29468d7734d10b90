"""The problem library: serial and parallel solutions agree, orders, exact solutions, derivatives.

The truth is a closed form where there is one, scipy's integrator on a vector field written here
otherwise, and diffrax for its own solvers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.integrate

from jaxbraid import MGRIT, Solution, problems
from jaxbraid.problems import _newton

PARALLEL = MGRIT(levels=2, coarsening=4, tol=1e-10, max_iters=30)


@dataclasses.dataclass(frozen=True)
class Case:
    """A small problem for a number of steps; one of its coefficients; the steps to measure with."""

    build: Callable[..., problems.Problem]
    coefficient: str
    steps: int = 64
    dtype: Any = np.float32


def heat_with_all(nt, **options):
    """Values on all sides that change in time and place, and a source."""
    sides = (rising, 0.0, 1.0, waving)
    return problems.heat_2d(
        9, 7, theta=0.5, sides=sides, source=driven, t_end=0.1, nt=nt, **options
    )


def rising(s, t):
    return s * jnp.cos(9 * t)


def waving(s, t):
    return jnp.sin(s + t)


def driven(x, y, t):
    return x * y * jnp.sin(20 * t)


def pendulum(t, u, args):
    return jnp.stack([u[1], -args["g"] * jnp.sin(u[0])])


def of(builder, **fixed):
    return lambda nt, **options: builder(nt=nt, **fixed, **options)


def ode(solver, f=pendulum):
    def build(nt, dtype=np.float64):
        ts = np.linspace(0, 1, nt + 1)
        return problems.ode(f, np.array([1.0, 0.0], dtype), ts, {"g": 9.81}, solver)

    return build


P = problems
AC = {"nx": 12, "eps": 0.12}
CASES = {
    "dahlquist_BE": Case(of(P.dahlquist, method="BE"), "lam"),
    "dahlquist_FE": Case(of(P.dahlquist, method="FE"), "lam"),
    "dahlquist_TR": Case(of(P.dahlquist, method="TR"), "lam"),
    "dahlquist_complex": Case(of(P.dahlquist, method="MR", lam=-1 + 2j), "lam", dtype=np.complex64),
    "heat_1d": Case(of(P.heat_1d, nx=17), "a", 256),
    "heat_1d_crank_nicolson": Case(of(P.heat_1d, nx=17, theta=0.5), "a"),
    "heat_1d_forward": Case(of(P.heat_1d, nx=9, theta=(0.0, 1.0), t_end=0.5), "a"),
    "heat_1d_bdf": Case(of(P.heat_1d_bdf, nx=17), "a"),
    "heat_2d": Case(of(P.heat_2d, nx=9, ny=7, t_end=0.02), "a"),
    "heat_2d_with_all": Case(heat_with_all, "a"),
    "advection_1d": Case(of(P.advection_1d, nx=17, t_end=1.0), "c", 256),
    "burgers_1d": Case(of(P.burgers_1d, nx=33, nu=0.1, t_end=1.0), "nu"),
    "burgers_1d_backward": Case(of(P.burgers_1d, nx=33, nu=0.1, theta=1.0, t_end=1.0), "nu", 128),
    "brusselator": Case(of(P.brusselator, t_end=1.0), "b"),
    "lorenz_63": Case(of(P.lorenz_63, t_end=0.2), "rho"),
    "van_der_pol": Case(of(P.van_der_pol, t_end=0.5), "mu"),
    "van_der_pol_BE": Case(of(P.van_der_pol, t_end=0.5, method="BE"), "mu"),
    "allen_cahn_imex": Case(of(P.allen_cahn_2d, **AC), "eps", 128),
    "allen_cahn_implicit": Case(of(P.allen_cahn_2d, scheme="implicit", **AC), "eps", 128),
    "allen_cahn_crank_nicolson": Case(
        of(P.allen_cahn_2d, scheme=("crank_nicolson", "imex"), **AC), "eps"
    ),
    "gray_scott_2d": Case(of(P.gray_scott_2d, nx=12, side=0.3, t_end=16.0), "k"),
    "schroedinger_1d": Case(
        of(P.schroedinger_1d, nx=48, x=(-8.0, 8.0), t_end=1.0), "omega", dtype=np.complex64
    ),
    "kuramoto_sivashinsky": Case(
        of(P.kuramoto_sivashinsky, nx=16, length=22.0, t_end=8.0), "nu", 256
    ),
    "arenstorf": Case(of(P.arenstorf, t_end=0.05, solver=diffrax.Bosh3()), "mu", 64),
    "ode": Case(ode(diffrax.Bosh3()), "g", 32),
    "ode_implicit": Case(ode(diffrax.ImplicitEuler()), "g"),
}
# their gradients take long to compile and show no more than others' do
NO_GRADIENT = ("dahlquist_BE", "dahlquist_FE", "van_der_pol", "allen_cahn_implicit", "heat_2d")

each = pytest.mark.parametrize("name", CASES)


def vector(state: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state)])


def point(us: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], us)


# -- parallel solutions and their derivatives -----------------------------------------------------


@each
def test_mgrit_equals_serial(name):
    """The error at a point is at most the sum of the residuals before it, for steps that contract;
    those that amplify here do so by less than 100."""
    problem = CASES[name].build(32)
    sol = problem.solve(PARALLEL)
    assert bool(sol.stats.converged)
    truth = vector(problem.serial())
    np.testing.assert_allclose(vector(sol.us), truth, rtol=0, atol=1e-8 * np.max(np.abs(truth)))


def gradient_cases():
    slow = ("van_der_pol_BE", "allen_cahn_crank_nicolson")
    for name in CASES:
        if name not in NO_GRADIENT:
            yield pytest.param(name, marks=[pytest.mark.slow] if name in slow else [])


@pytest.mark.parametrize("name", list(gradient_cases()))
def test_gradients_equal_those_of_the_serial_run(name):
    """With respect to the initial state and to a coefficient."""
    case = CASES[name]
    problem = case.build(16)
    config = dataclasses.replace(PARALLEL, tol=1e-12, max_iters=8)

    def loss(states, u0, value):
        args = {**problem.args, case.coefficient: value}
        us = states(dataclasses.replace(problem, u0=u0, args=args))
        # + 1, as the sum of the squares itself is the same for all omega in Schrödinger's equation
        return sum(jnp.sum(jnp.abs(x + 1) ** 2) for x in jax.tree.leaves(us))

    def parallel(u0, value):
        return loss(lambda p: p.solve(config).us, u0, value)

    def serial(u0, value):
        return loss(lambda p: p.serial(), u0, value)

    data = jax.tree.map(jnp.asarray, (problem.u0, problem.args[case.coefficient]))
    expected = jax.jit(jax.grad(serial, (0, 1)))(*data)
    gradients = jax.jit(jax.grad(parallel, (0, 1)))(*data)
    for a, b in zip(gradients, expected, strict=True):
        a, b = vector(a), vector(b)
        assert np.max(np.abs(b)) > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7 * np.max(np.abs(b)))


# -- orders and solutions -------------------------------------------------------------------------


@each
def test_order(name):
    """Halving the steps divides the change of the final state by 2^order."""
    case = CASES[name]
    builds = [case.build(n * case.steps) for n in (1, 2, 4)]
    finals = [point(p.serial(), -1) for p in builds]
    if name == "heat_1d_bdf":
        finals = [pair[0] for pair in finals]  # the other's time depends on the grid
    a, b, c = (vector(x) for x in finals)
    order = np.log2(np.linalg.norm(b - a) / np.linalg.norm(c - b))
    assert abs(order - builds[0].order) < 0.25


HALF = {"theta": 0.5}
# refined in space and time so that both errors fall by the same factor
EXACT = {
    "dahlquist": (lambda r: P.dahlquist(nt=20 * r, t_end=1.0), 2),
    "dahlquist_complex": (lambda r: P.dahlquist("MR", lam=-1 + 2j, nt=50 * r), 4),
    "heat_1d": (lambda r: P.heat_1d(8 * r + 1, nt=16 * r**2, a=0.7), 4),
    "heat_1d_half_waves": (lambda r: P.heat_1d(16 * r + 1, half_waves=2, nt=16 * r, **HALF), 4),
    "heat_1d_shifted": (lambda r: P.heat_1d(8 * r + 1, ts=np.linspace(0.5, 1.2, 8 * r**2 + 1)), 4),
    "heat_1d_bdf": (lambda r: P.heat_1d_bdf(16 * r + 1, nt=8 * r), 4),
    "heat_2d": (lambda r: P.heat_2d(8 * r + 1, 8 * r + 1, t_end=0.05, nt=8 * r, **HALF), 4),
    "advection_1d": (lambda r: P.advection_1d(64 * r + 1, t_end=0.5, nt=32 * r, c=1.5), 1.8),
    "advection_1d_left": (lambda r: P.advection_1d(64 * r + 1, t_end=0.5, nt=32 * r, c=-1), 1.8),
    "burgers_1d": (lambda r: P.burgers_1d(64 * r + 1, nu=0.1, t_end=1.0, nt=32 * r), 4),
    "schroedinger_1d": (lambda r: P.schroedinger_1d(96, omega=1.3, nt=64 * r), 4),
}


@pytest.mark.parametrize("name", EXACT)
def test_error_against_the_exact_solution_falls(name):
    build, factor = EXACT[name]
    errors = []
    for r in (1, 2):
        problem = build(r)
        np.testing.assert_allclose(  # of the first pair the second state is a step's result
            vector(problem.exact(problem.ts[0])), vector(problem.u0), rtol=0, atol=1e-2
        )
        last = vector(point(problem.serial(), -1))
        truth = vector(problem.exact(problem.ts[-1], problem.args))
        errors.append(np.linalg.norm(last - truth) / np.linalg.norm(truth))
    assert errors[0] < 0.1
    assert 0.85 * factor < errors[0] / errors[1] < 1.4 * factor


def test_free_packet_is_exact_in_time():
    problem = problems.schroedinger_1d(128, omega=0.0, t_end=1.0, nt=2)  # 1e-9 at the ends
    last = np.asarray(problem.serial()[-1])
    np.testing.assert_allclose(last, problem.exact(1.0), rtol=0, atol=1e-8)


def test_heat_2d_with_time_dependent_sides_is_exact_for_a_quadratic_solution():
    """u = x^2 + 2 y^2 + t: neither the stencil nor the trapezoidal rule makes an error."""
    problem = problems.heat_2d(
        7,
        9,
        theta=0.5,
        sides=(
            lambda y, t: 2 * y**2 + t,
            lambda y, t: 0.75**2 + 2 * y**2 + t,
            lambda x, t: x**2 + t,
            lambda x, t: x**2 + 2 * 1.5**2 + t,
        ),
        source=lambda x, y, t: 1 - 3.5 * 6,
        initial=lambda x, y: x**2 + 2 * y**2,
        nt=4,
    )
    x, y = np.linspace(0, 0.75, 7)[:, None], np.linspace(0, 1.5, 9)
    us = problem.serial()
    np.testing.assert_allclose(us[-1], x**2 + 2 * y**2 + 2.0, rtol=0, atol=1e-12)


def _brusselator(t, u):
    x, y = u
    return [1 + x * x * y - 4 * x, 3 * x - x * x * y]


def _lorenz(t, u):
    x, y, z = u
    return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]


def _van_der_pol(t, u):
    x, y = u
    return [y, 10 * (1 - x * x) * y - x]


def _allen_cahn(t, u):
    u = u.reshape(12, 12)
    shifted = sum(np.roll(u, s, axis) for s in (1, -1) for axis in (0, 1))
    return np.ravel(144 * (shifted - 4 * u) + u * (1 - u**2) / 0.12**2)


def _derivative_matrix(n, length, order):
    """Of trigonometric interpolation on the periodic grid, column by column."""
    k = 2j * np.pi / length * np.fft.fftfreq(n, 1 / n)
    if order % 2:
        k[n // 2] = 0
    return np.real(np.fft.ifft(k[:, None] ** order * np.fft.fft(np.eye(n), axis=0), axis=0))


def _gray_scott(t, state):
    u, v = state.reshape(2, 12, 12)
    d2 = _derivative_matrix(12, 0.3, 2)
    rate = u * v * v
    du = 2e-5 * (d2 @ u + u @ d2.T) - rate + 0.04 * (1 - u)
    dv = 1e-5 * (d2 @ v + v @ d2.T) + rate - 0.1 * v
    return np.ravel([du, dv])


def _kuramoto_sivashinsky(t, u):
    d1, d2, d4 = (_derivative_matrix(16, 22.0, k) for k in (1, 2, 4))
    return -d1 @ (u * u) / 2 - d2 @ u - d4 @ u


FIELDS = {
    "brusselator": (_brusselator, 1e-8),
    "lorenz_63": (_lorenz, 1e-5),
    "van_der_pol": (_van_der_pol, 1e-3),
    "allen_cahn_imex": (_allen_cahn, 1e-2),
    "allen_cahn_implicit": (_allen_cahn, 1e-2),
    "allen_cahn_crank_nicolson": (_allen_cahn, 1e-4),
    "gray_scott_2d": (_gray_scott, 3e-3),
    "kuramoto_sivashinsky": (_kuramoto_sivashinsky, 1e-5),
}


@pytest.mark.parametrize("name", FIELDS)
def test_solution_is_that_of_the_equation(name):
    """Against an integrator with error control, on a vector field written anew; errors fall."""
    field, bound = FIELDS[name]
    errors = []
    steps = max(64, CASES[name].steps)
    for nt in (steps, 2 * steps):
        problem = CASES[name].build(nt)
        u0 = vector(problem.u0)
        span = problem.ts[0], problem.ts[-1]
        truth = scipy.integrate.solve_ivp(field, span, u0, "LSODA", rtol=1e-11, atol=1e-12).y[:, -1]
        last = vector(point(problem.serial(), -1))
        errors.append(np.linalg.norm(last - truth) / np.linalg.norm(truth))
    assert errors[0] < bound
    order = np.log2(errors[0] / errors[1])
    assert errors[1] < 1e-9 or abs(order - problem.order) < 0.3


@pytest.mark.parametrize("method", ["SDIRK2", "BE"])
def test_van_der_pol_gets_over_its_jumps_in_single_precision(method):
    """There y is large, and so are the rounding errors that Newton's method has to bear with."""
    single, double = (
        problems.van_der_pol(method=method, dtype=dtype).serial()
        for dtype in (np.float32, np.float64)
    )
    assert np.max(np.abs(double[:, 1])) > 10
    np.testing.assert_allclose(single[-1], double[-1], rtol=0, atol=1e-3)


def test_arenstorf_comes_back():
    """After a period; near the moon errors in velocity weigh 160 times as much as in place."""
    errors = []
    for nt in (10000, 20000):
        problem = problems.arenstorf(nt=nt)
        us = problem.serial()
        errors.append(float(jnp.max(jnp.abs(us[-1] - us[0]))))
    assert errors[0] < 1e-3
    assert errors[0] / errors[1] > 30
    assert float(jnp.max(jnp.abs(us[10000, :2] - us[0, :2]))) > 1  # but it was elsewhere


# -- XBraid ---------------------------------------------------------------------------------------

XBRAID = MGRIT(
    levels=5, coarsening=4, cf_relax=1, nested_iteration=False, final_relax="FCF", min_coarse=2
)


def xbraid_guess(points, size):
    """XBraid's initial guess: random numbers of its own generator at the C-points."""
    state, out = 1, np.empty(points * size)
    for i in range(len(out)):
        state = (state * 1103515245 + 12345) % 2**64
        out[i] = (state // 65536) % 2**32 % 32768 / 32768
    return out.reshape(points, size)


@pytest.mark.parametrize(
    ("skip", "printed"),
    [
        (False, [12.60487, 0.7230601, 0.05542935, 4.615482e-3, 4.339299e-4]),
        (True, [2.240964, 6.398033e-2, 2.162003e-3, 9.545495e-5, 4.570286e-6]),
    ],
)
def test_xbraid_heat_history(skip, printed):
    """What XBraid prints for its heat equation: 5 levels, m = 4, FCF, with and without skip.

    u_t = u_xx + F on [0, pi] x [0, 2 pi] with 65 points and 1024 steps of backward Euler (its
    ex-02 with -ntime 1024 -nspace 65 -ml 5 -cf 4 -nu 1 and -skip 0 or 1). XBraid takes its norm in
    each iteration after the relaxation, before the coarse correction: that is the last norm of a
    solve with that many iterations before it, and one relaxation after it.
    """
    heat = problems.heat_1d(65, (0.0, np.pi), t_end=2 * np.pi, nt=1024)
    guess = None
    if not skip:
        at_points = xbraid_guess(256, 65)[:, 1:-1]
        guess = np.zeros((1025, 63))
        guess[4::4] = at_points
        guess[0] = heat.u0
    for k, norm in enumerate(printed):
        config = dataclasses.replace(XBRAID, max_iters=k + skip, skip_first_down=skip)
        stats = heat.solve(config, guess=guess).stats
        got = stats.residuals[-1] if k + skip else stats.initial_residual
        np.testing.assert_allclose(got, norm, rtol=2e-6)


# -- diffrax --------------------------------------------------------------------------------------


def field(t, u, args):
    """A pytree state, and slopes that depend on time."""
    return {"x": u["y"], "y": -args["k"] * u["x"] + jnp.cos(3 * t)}


NEWTON = optx.Newton(rtol=1e-12, atol=1e-12)
SOLVERS = {
    "Euler": (diffrax.Euler(), diffrax.Euler()),
    "Tsit5": (diffrax.Tsit5(), diffrax.Tsit5()),
    "Dopri8": (diffrax.Dopri8(), diffrax.Dopri8()),
    "ImplicitEuler": (diffrax.ImplicitEuler(), diffrax.ImplicitEuler(root_finder=NEWTON)),
    "Kvaerno5": (diffrax.Kvaerno5(), diffrax.Kvaerno5(root_finder=NEWTON)),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_diffrax_step_equals_diffeqsolve(name):
    solver, reference = SOLVERS[name]
    u0 = {"x": jnp.array([1.0, -0.5]), "y": jnp.array([0.0, 2.0])}
    ts = np.array([0.0, 0.1, 0.3, 0.4, 0.7])
    problem = problems.ode(field, u0, ts, {"k": 2.0}, solver)
    terms, points = diffrax.ODETerm(field), jnp.asarray(ts)
    out = diffrax.diffeqsolve(
        terms,
        reference,
        ts[0],
        ts[-1],
        None,
        u0,
        {"k": 2.0},
        saveat=diffrax.SaveAt(ts=points),
        stepsize_controller=diffrax.StepTo(ts=points),
    )
    np.testing.assert_allclose(vector(problem.serial()), vector(out.ys), rtol=0, atol=1e-11)


def test_substeps_are_a_finer_grid():
    fine = np.linspace(0, 1, 13)
    one = problems.ode(pendulum, np.array([1.0, 0.0]), fine, {"g": 9.81}, diffrax.Heun())
    three = problems.ode(pendulum, np.array([1.0, 0.0]), fine[::3], {"g": 9.81}, diffrax.Heun(), 3)
    np.testing.assert_allclose(three.serial(), one.serial()[::3], rtol=1e-13)


def test_kvaerno_runs_parallel_in_time():
    problem = ode(diffrax.Kvaerno3())(16)
    sol = problem.solve(PARALLEL)
    np.testing.assert_allclose(sol.us, problem.serial(), rtol=0, atol=1e-9)


def test_failing_root_finder_is_seen():
    """A state that no iteration has found is NaN, and the solve says that it isn't finite."""
    ts = np.linspace(0, 8, 9)  # u = u_old + 1 + u^2 has no solution
    problem = problems.ode(lambda t, u, args: 1 + u**2, 1.0, ts, None, diffrax.ImplicitEuler())
    assert np.isnan(problem.serial()[1])
    sol = problem.solve(MGRIT(max_iters=2, coarsening=2))
    assert not bool(sol.stats.finite)


@pytest.mark.parametrize("solve", [_newton.solve_nonlinear, _newton.solve_nonlinear_gmres])
def test_failing_newton_is_seen(solve):
    """The same equation, for the steps that solve theirs themselves; with a root it is found."""

    def equation(u, data):
        return u - data * (1 + u**2)

    np.testing.assert_allclose(solve(equation, jnp.zeros(1), jnp.array([0.4])), 0.5, rtol=1e-13)
    assert np.isnan(solve(equation, jnp.zeros(1), jnp.array([0.6]))[0])


REFUSED = {
    "LeapfrogMidpoint": (diffrax.LeapfrogMidpoint(), ValueError, "carries more than the state"),
    "ReversibleHeun": (diffrax.ReversibleHeun(), ValueError, "carries more than the state"),
    "KenCarp3": (diffrax.KenCarp3(), ValueError, "several terms"),
    "SRA1": (diffrax.SRA1(), ValueError, "stochastic"),
    "EulerHeun": (diffrax.EulerHeun(), ValueError, "stochastic"),
    "SemiImplicitEuler": (diffrax.SemiImplicitEuler(), ValueError, "several terms"),
    "class": (diffrax.Tsit5, TypeError, r"Did you mean Tsit5\(\)"),
    "name": ("Tsit5", TypeError, "must be a solver of diffrax"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_solvers(name):
    solver, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        problems.diffrax_step(solver, pendulum)


# -- builds ---------------------------------------------------------------------------------------


@each
def test_equal_builds_share_steps(name):
    """So they share compiled programs."""
    build = CASES[name].build
    assert build(16).step == build(16).step
    if name != "heat_1d_bdf":  # whose steps know the distance of a pair's points
        assert build(16).step == build(32).step


@each
def test_single_precision(name):
    """The state's precision is kept, though x64 is on and coefficients come in double precision."""
    case = CASES[name]
    problem = case.build(16, dtype=case.dtype)
    us = problem.serial()
    assert all(x.dtype == case.dtype for x in jax.tree.leaves(us))
    out = jax.eval_shape(lambda: problem.solve(PARALLEL).us)
    assert all(x.dtype == case.dtype for x in jax.tree.leaves(out))
    truth = vector(case.build(16).serial())
    np.testing.assert_allclose(vector(us), truth, rtol=0, atol=1e-3 * np.max(np.abs(truth)))


def test_a_step_serves_coarser_grids_in_space():
    """On a state of half the size it is the step of the problem with half the points."""
    for make in (
        lambda nx: problems.heat_1d(nx, theta=0.5),
        lambda nx: problems.burgers_1d(nx),
        lambda nx: problems.heat_2d(nx, nx),
        lambda nx: problems.advection_1d(nx),
    ):
        fine, coarse = make(33), make(17)
        out = (p.step(0.0, 0.1, jnp.asarray(coarse.u0), None, p.args) for p in (fine, coarse))
        np.testing.assert_array_equal(*out)


BAD = [
    (lambda: P.dahlquist("RK4"), ValueError, r"method='RK4'.*'BE', 'FE', 'TR', 'MR'"),
    (lambda: P.dahlquist(("BE", "XX")), ValueError, r"method\[1\]='XX'"),
    (lambda: P.dahlquist(lam="1"), TypeError, "lam='1'.*real or complex"),
    (lambda: P.dahlquist(nt=0), ValueError, "nt=0: must be >= 1"),
    (lambda: P.dahlquist(t_end=-1.0), ValueError, "t_end=-1.0.*> 0"),
    (lambda: P.dahlquist(ts=[0.0, 1.0, 0.5]), ValueError, "ts must increase"),
    (lambda: P.dahlquist(dtype=int), TypeError, "dtype=int64: must be real"),
    (lambda: P.heat_1d(nx=2), ValueError, "nx=2: must be >= 3"),
    (lambda: P.heat_1d(x=(1.0, 0.0)), ValueError, "x=.*must increase"),
    (lambda: P.heat_1d(a=-1.0), ValueError, "a=-1.0.*> 0"),
    (lambda: P.heat_1d(theta=1.5), ValueError, r"theta=1.5: must lie in \[0, 1\]"),
    (lambda: P.heat_1d_bdf(9, dtau=1.0), ValueError, "dtau=1.0.*less than all steps"),
    (lambda: P.heat_1d_bdf(9, start="x"), ValueError, "start='x'"),
    (lambda: P.heat_2d(sides=(0.0, 1.0)), ValueError, "sides=.*four"),
    (lambda: P.heat_2d(source=1.0), TypeError, "source=1.0: must be a function"),
    (lambda: P.advection_1d(c=float("nan")), ValueError, "c=nan"),
    (lambda: P.brusselator(u0=(1.0,)), ValueError, r"u0 has shape \(1,\): must be \(2,\)"),
    (lambda: P.van_der_pol(method="TR"), ValueError, "method='TR'.*'SDIRK2', 'BE'"),
    (lambda: P.burgers_1d(theta=0.0), ValueError, "theta=0.0.*unstable"),
    (lambda: P.burgers_1d(values=1.0), TypeError, "values=1.0: must be a pair"),
    (lambda: P.allen_cahn_2d(scheme="x"), ValueError, "scheme='x'.*'imex'"),
    (lambda: P.allen_cahn_2d(nu=3), ValueError, "nu=3: must be even"),
    (lambda: P.gray_scott_2d(nx=13), ValueError, "nx=13: must be even"),
    (lambda: P.schroedinger_1d(omega=-1.0), ValueError, "omega=-1.0.*>= 0"),
    (lambda: P.schroedinger_1d(dtype=np.float64), TypeError, "dtype=float64: must be complex"),
    (lambda: P.kuramoto_sivashinsky(nx=31), ValueError, "nx=31: must be even"),
    (lambda: P.ode(pendulum, [1.0, 0.0], [0.0]), ValueError, "ts has shape"),
    (lambda: P.diffrax_step(diffrax.Tsit5(), 1.0), TypeError, "vector_field=1.0"),
    (lambda: P.diffrax_step(diffrax.Tsit5(), pendulum, 0), ValueError, "substeps=0"),
    (lambda: jax.grad(lambda a: P.heat_1d(9, a=a).args["a"])(1.0), TypeError, "a is traced"),
]


@pytest.mark.parametrize(("build", "error", "message"), BAD)
def test_bad_arguments(build, error, message):
    with pytest.raises(error, match=message):
        build()


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dahlquist_complex", None),
        ("lorenz_63", None),
        ("lorenz_63", "series"),
        ("heat_1d_bdf", None),
        ("schroedinger_1d", None),
        ("gray_scott_2d", None),
        ("heat_2d", None),
    ],
)
def test_plot_writes_a_picture(name, kind, tmp_path):
    problem = CASES[name].build(16)
    path = tmp_path / "picture.png"
    figure = problem.plot(problem.serial(), path, kind=kind)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert all(ax.get_xlabel() for ax in figure.axes if ax.has_data() and not ax.get_label())


def test_plot_names_what_is_wrong(monkeypatch):
    problem = CASES["heat_1d"].build(16)
    us = problem.serial()
    with pytest.raises(ValueError, match="kind='pie': must be one of 'series'"):
        problem.plot(us, kind="pie")
    with pytest.raises(ValueError, match="kind='snapshots': needs a state with two axes, not 1"):
        problem.plot(us, kind="snapshots")
    with pytest.raises(ValueError, match="leading axis must be the number of times, 17"):
        problem.plot(us[1:])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"jaxbraid\[plot\]"):
        problem.plot(us)


# -- what a problem shares with `solve` -----------------------------------------------------------


@pytest.mark.parametrize("name", ["heat_2d", "gray_scott_2d"])
def test_space_split_over_devices(name):
    """Time over two devices and space over two or three of them: the same states and gradients."""
    mesh = jax.make_mesh((2, 3), ("layer", "space"))
    build = {
        "heat_2d": of(
            P.heat_2d, nx=9, ny=8, theta=(0.5, 1.0), t_end=0.1, source=driven,
            sides=(1.0, 0.5, rising, waving),
        ),
        "gray_scott_2d": of(P.gray_scott_2d, nx=12, t_end=32.0),
    }[name]  # fmt: skip
    one, split = build(16), build(16, space_axis="space")
    config = dataclasses.replace(PARALLEL, tol=0.0, max_iters=3)

    def run(problem, **more):
        def loss(u0, args):
            us = dataclasses.replace(problem, u0=u0, args=args).solve(config, **more).us
            return sum(jnp.sum(jnp.cos(x) * x) for x in jax.tree.leaves(us)), us

        given = jax.tree.map(jnp.asarray, (problem.u0, problem.args))
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*given)

    (_, us), gradients = run(split, mesh=mesh, space_axis="space")
    (_, expected), expected_gradients = run(one)
    np.testing.assert_allclose(vector(us), vector(expected), rtol=0, atol=1e-12)
    scale = np.max(np.abs(vector(expected_gradients)))
    np.testing.assert_allclose(
        vector(gradients), vector(expected_gradients), rtol=1e-9, atol=1e-12 * scale
    )


def test_arenstorf_takes_several_substeps_on_coarse_levels():
    problem = problems.arenstorf(diffrax.Tsit5(), (1, 5), t_end=0.5, nt=100)
    fine, coarse = problem.step
    u = jnp.asarray(problem.u0)
    for t0, t1 in itertools.pairwise(problem.ts[:6]):
        u = fine(t0, t1, u, None, problem.args)
    at_once = coarse(problem.ts[0], problem.ts[5], jnp.asarray(problem.u0), None, problem.args)
    np.testing.assert_allclose(at_once, u, rtol=1e-12)
    sol = problem.solve(MGRIT(levels=2, coarsening=5, tol=1e-9))
    assert bool(sol.stats.converged)
    np.testing.assert_allclose(sol.us, problem.serial(), rtol=0, atol=1e-9)


def test_problem_takes_all_options_of_solve():
    heat = CASES["heat_1d"].build(32)
    mesh = jax.make_mesh((2,), ("layer",))
    sol = heat.solve(PARALLEL, mesh=mesh, save="coarse")
    assert isinstance(sol, Solution)
    np.testing.assert_allclose(sol.us, heat.serial()[::4], atol=1e-9)
