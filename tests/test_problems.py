"""The problem library: MGRIT against serial steps, orders, gradients, arguments, pictures."""

from __future__ import annotations

import dataclasses
import functools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, problems

CONFIG = MGRIT(levels=2, coarsening=4, max_iters=30, tol=1e-11)
TIMES = {"nt": 32}


def soliton(t, u, args):
    """A pendulum as a pytree."""
    return {"q": u["p"], "p": -args["g"] * jnp.sin(u["q"])}


PENDULUM = {"q": np.array(1.0), "p": np.array(0.5)}

# Small, and in times that leave something to see. Tolerances are absolute, states of order one.
BUILDERS = {
    "dahlquist": lambda: problems.dahlquist(t_end=2.0, **TIMES),
    "dahlquist_complex": lambda: problems.dahlquist(("TR", "BE"), -0.5 + 2j, dtype=complex,
                                                    u0=1 + 1j, t_end=2.0, **TIMES),
    "heat_1d": lambda: problems.heat_1d(17, t_end=1.0, **TIMES),
    "heat_1d_cn": lambda: problems.heat_1d(17, theta=(0.5, 1.0), t_end=1.0, **TIMES),
    "heat_1d_bdf": lambda: problems.heat_1d_bdf(17, t_end=1.0, **TIMES),
    "heat_2d": lambda: problems.heat_2d(9, 7, a=0.1, theta=(0.5, 1.0), t_end=0.5, **TIMES,
                                        sides=(1.0, 0.0, lambda s, t: jnp.sin(s) * t, 0.5),
                                        source=lambda x, y, t: x * y * t),
    "advection_1d": lambda: problems.advection_1d(17, c=-0.5, t_end=1.0, **TIMES),
    "burgers_1d": lambda: problems.burgers_1d(33, nu=0.2, t_end=0.5, **TIMES),
    "brusselator": lambda: problems.brusselator(t_end=2.0, **TIMES),
    "arenstorf": lambda: problems.arenstorf(t_end=0.5, **TIMES),
    "lorenz_63": lambda: problems.lorenz_63(t_end=0.2, **TIMES),
    "van_der_pol": lambda: problems.van_der_pol(t_end=0.5, **TIMES),
    "allen_cahn_imex": lambda: problems.allen_cahn_2d(8, eps=0.2, t_end=0.1, **TIMES),
    "allen_cahn_implicit": lambda: problems.allen_cahn_2d(6, 0.2, scheme="implicit", t_end=0.1,
                                                          nt=16),
    "allen_cahn_cn": lambda: problems.allen_cahn_2d(6, 0.2, scheme=("crank_nicolson", "imex"),
                                                    t_end=0.1, nt=16),
    "gray_scott_2d": lambda: problems.gray_scott_2d(8, t_end=64.0, **TIMES),
    "schroedinger_1d": lambda: problems.schroedinger_1d(32, (-6.0, 6.0), t_end=1.0, **TIMES),
    "kuramoto_sivashinsky": lambda: problems.kuramoto_sivashinsky(16, 12.0, t_end=2.0, **TIMES),
    "ode_explicit": lambda: problems.ode(soliton, PENDULUM, np.linspace(0, 1, 33), {"g": 4.0},
                                         diffrax.Heun()),
    "ode_implicit": lambda: problems.ode(soliton, PENDULUM, np.linspace(0, 1, 17), {"g": 4.0},
                                         diffrax.ImplicitEuler(), substeps=2),
}  # fmt: skip


def weighed(us):
    """A smooth functional of all states."""

    def one(a):
        weights = jnp.cos(jnp.arange(a.size, dtype=a.real.dtype)).reshape(a.shape)
        return jnp.sum(weights * (jnp.abs(a) ** 2 + a.real))  # fmt: skip

    return sum(map(one, jax.tree.leaves(us)))


def close(a, b, rtol, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("name", BUILDERS)
def test_mgrit_gives_the_serial_states_and_gradients(name):
    """To the tolerance; with respect to the initial state and all coefficients."""
    problem = BUILDERS[name]()

    def run(march):
        def loss(u0, args):
            us, stats = march(dataclasses.replace(problem, u0=u0, args=args))
            return weighed(us), (us, stats)

        given = jax.tree.map(jnp.asarray, (problem.u0, problem.args))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*given)

    def parallel(problem):
        sol = problem.solve(CONFIG)
        return sol.us, sol.stats

    (_, (us, stats)), gradients = run(parallel)
    (_, (expected, _)), expected_gradients = run(lambda problem: (problem.serial(), None))
    assert bool(stats.converged)
    assert int(stats.iterations) < 8  # as many as there are intervals would be no iteration
    close(us, expected, 1e-9, 1e-9)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(expected_gradients))
    scale = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected_gradients))
    close(gradients, expected_gradients, 1e-6, 1e-8 * scale)


# name: what is refined, and steps to start with; where there is no closed form, many steps tell
ORDERS = {
    "dahlquist BE": (functools.partial(problems.dahlquist, "BE", t_end=2.0), 64),
    "dahlquist FE": (functools.partial(problems.dahlquist, "FE", t_end=2.0), 64),
    "dahlquist TR": (functools.partial(problems.dahlquist, "TR", t_end=2.0), 16),
    "dahlquist MR": (functools.partial(problems.dahlquist, "MR", t_end=2.0), 16),
    "heat_1d": (functools.partial(problems.heat_1d, 9, t_end=1.0), 64),
    "heat_1d CN": (functools.partial(problems.heat_1d, 9, theta=0.5, t_end=1.0), 16),
    "heat_1d_bdf": (functools.partial(problems.heat_1d_bdf, 9, t_end=1.0), 32),
    "heat_2d": (functools.partial(problems.heat_2d, 7, 7, a=0.1, t_end=1.0), 64),
    "heat_2d CN": (functools.partial(problems.heat_2d, 7, 7, a=0.1, theta=0.5, t_end=1.0), 16),
    "advection_1d": (functools.partial(problems.advection_1d, 17, t_end=0.5), 64),
    "burgers_1d": (functools.partial(problems.burgers_1d, 33, nu=0.2, t_end=1.0), 16),
    "burgers_1d BE": (functools.partial(problems.burgers_1d, 33, nu=0.2, theta=1.0, t_end=1.0),
                      64),
    "brusselator": (functools.partial(problems.brusselator, t_end=4.0), 64),
    "arenstorf": (functools.partial(problems.arenstorf, diffrax.Bosh3(), t_end=0.3), 512),
    "lorenz_63": (functools.partial(problems.lorenz_63, t_end=0.5), 64),
    "van_der_pol": (functools.partial(problems.van_der_pol, 2.0, t_end=1.0), 32),
    "van_der_pol BE": (functools.partial(problems.van_der_pol, 2.0, method="BE", t_end=1.0), 128),
    "allen_cahn_2d imex": (functools.partial(problems.allen_cahn_2d, 8, 0.3, t_end=0.1), 32),
    "allen_cahn_2d implicit": (functools.partial(problems.allen_cahn_2d, 6, 0.3, t_end=0.05,
                                                 scheme="implicit"), 16),
    "allen_cahn_2d CN": (functools.partial(problems.allen_cahn_2d, 6, 0.3, t_end=0.05,
                                           scheme="crank_nicolson"), 8),
    "gray_scott_2d": (functools.partial(problems.gray_scott_2d, 8, t_end=64.0), 64),
    "schroedinger_1d": (functools.partial(problems.schroedinger_1d, 64, t_end=1.0), 16),
    "kuramoto_sivashinsky": (functools.partial(problems.kuramoto_sivashinsky, 16, 12.0, t_end=1.0),
                             128),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_order_of_accuracy_is_as_claimed(name):
    """In time: against a run of 16 times as many steps, so that errors in space do not count."""
    build, n = ORDERS[name]

    def end(n):
        # of a pair of points the first: the second's time is another with other steps
        leaves = jax.tree.leaves(jax.tree.map(lambda a: a[-1], build(nt=n).serial()))
        return leaves[:1] if name == "heat_1d_bdf" else leaves

    truth = end(16 * n)
    errors = [
        np.linalg.norm([jnp.linalg.norm(a - b) for a, b in zip(end(k), truth, strict=True)])
        for k in (n, 2 * n)
    ]
    order = np.log2(errors[0] / errors[1])
    claimed = build(nt=n).order
    # the finer run has an error, too: 16^-p and 8^-p of those that are compared
    np.testing.assert_allclose(order, claimed, atol=0.25)


EXACT = {
    "dahlquist": (functools.partial(problems.dahlquist, "TR", t_end=2.0), 1e-4),
    "heat_1d": (functools.partial(problems.heat_1d, 129, theta=0.5, t_end=1.0), 2e-4),
    "heat_1d_bdf": (functools.partial(problems.heat_1d_bdf, 129, t_end=1.0), 2e-4),
    "heat_2d": (functools.partial(problems.heat_2d, 33, 33, a=0.1, theta=0.5, t_end=0.5), 1e-2),
    "advection_1d": (functools.partial(problems.advection_1d, 513, t_end=0.5), 1e-1),
    "burgers_1d": (functools.partial(problems.burgers_1d, 257, nu=0.2, t_end=1.0), 2e-4),
    "schroedinger_1d": (functools.partial(problems.schroedinger_1d, 64, t_end=1.0), 1e-3),
    "schroedinger_1d free": (functools.partial(problems.schroedinger_1d, 64, omega=0.0,
                                               t_end=1.0), 1e-8),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact_solutions_are_approached(name):
    """At the end of time, with errors of the grid in space; the scheme has no part in `exact`."""
    build, bound = EXACT[name]
    problem = build(nt=100)
    start, end = (problem.exact(t) for t in (problem.ts[0], problem.ts[-1]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.shape, b.shape), start, problem.u0)
    close(jax.tree.leaves(start)[0], jax.tree.leaves(problem.u0)[0], 0, 1e-3)
    close(jax.tree.map(lambda a: a[-1], problem.serial()), end, 0, bound)


def test_arenstorf_comes_back_after_its_period():
    """A period is no test of the method's order, but of the equation and its constants."""
    problem = problems.arenstorf(nt=4000)
    us = problem.serial()
    np.testing.assert_allclose(us[-1, :2], problem.u0[:2], atol=2e-3)
    assert np.abs(us[:, 0]).max() > 1.2


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


def test_equal_builds_share_their_steps():
    for build in BUILDERS.values():
        if build is not BUILDERS["heat_2d"]:  # whose functions are others each time
            assert build().step == build().step
    assert problems.heat_1d(17).step != problems.heat_1d(17, theta=0.5).step


@pytest.mark.parametrize("name", ["heat_1d", "heat_2d", "van_der_pol", "schroedinger_1d",
                                  "gray_scott_2d", "allen_cahn_2d"])  # fmt: skip
def test_single_precision_stays_single(name):
    small = {"van_der_pol": {}, "heat_2d": {"ny": 9}}.get(name, {})
    small |= {} if name == "van_der_pol" else {"nx": 8}
    dtype = jnp.complex64 if name == "schroedinger_1d" else jnp.float32
    problem = getattr(problems, name)(**small, nt=16, t_end=0.1, dtype=dtype)
    sol = problem.solve(dataclasses.replace(CONFIG, tol=0.0, max_iters=2))
    assert {a.dtype for a in jax.tree.leaves(sol.us)} == {jnp.dtype(dtype)}
    close(sol.us, problem.serial(), 0, 1e-4)


REFUSALS = [
    (ValueError, "nt=0: must be >= 1", lambda: problems.heat_1d(nt=0)),
    (ValueError, "a=-1: must be a finite real number > 0", lambda: problems.heat_1d(a=-1)),
    (TypeError, "a='x': must be a finite real number", lambda: problems.heat_1d(a="x")),
    (ValueError, "nx=2: must be >= 3", lambda: problems.heat_1d(2)),
    (ValueError, r"x=\(1, 0\): must increase", lambda: problems.heat_1d(x=(1, 0))),
    (ValueError, r"theta=2.0: must lie in \[0, 1\]", lambda: problems.heat_1d(theta=2)),
    (ValueError, "method='AB': must be one of", lambda: problems.dahlquist("AB")),
    (ValueError, "sides=.*must have four entries", lambda: problems.heat_2d(sides=(0, 0))),
    (ValueError, "dtau=1.0: must be positive", lambda: problems.heat_1d_bdf(dtau=1)),
    (ValueError, "scheme='explicit': must be", lambda: problems.allen_cahn_2d(scheme="explicit")),
    (ValueError, "nx=9: must be even", lambda: problems.gray_scott_2d(9)),
    (ValueError, r"u0 has shape \(2,\): must be \(3,\)", lambda: problems.lorenz_63(u0=(1, 2))),
    (TypeError, "dtype=int32: must be real", lambda: problems.lorenz_63(dtype=jnp.int32)),
    (TypeError, r"Did you mean Tsit5\(\)", lambda: problems.diffrax_step(diffrax.Tsit5, soliton)),
    (ValueError, "LeapfrogMidpoint: carries more than the state",
     lambda: problems.diffrax_step(diffrax.LeapfrogMidpoint(), soliton)),
    (ValueError, "SPaRK|stochastic",
     lambda: problems.diffrax_step(diffrax.SPaRK(), soliton)),
    (TypeError, "vector_field=3: must be a function",
     lambda: problems.diffrax_step(diffrax.Tsit5(), 3)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS)
def test_bad_arguments_are_named(error, message, call):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("solver", [diffrax.Tsit5(), diffrax.Dopri8(), diffrax.Heun()])
def test_explicit_diffrax_steps_are_those_of_diffrax(solver):
    """Against its own loop over the same points; solvers that reuse the last slope, too."""
    ts = np.linspace(0, 1, 9)
    us = problems.ode(soliton, PENDULUM, ts, {"g": 4.0}, solver).serial()
    close(us, reference(solver, ts, diffrax.StepTo(ts)), 1e-12, 1e-13)


def reference(solver, ts, control):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(soliton), solver, 0.0, 1.0, 1e-2 if control is ACCURATE else None,
        jax.tree.map(jnp.asarray, PENDULUM), {"g": 4.0}, saveat=diffrax.SaveAt(ts=ts),
        stepsize_controller=control,
    ).ys  # fmt: skip


ACCURATE = diffrax.PIDController(rtol=1e-11, atol=1e-11)


def test_implicit_diffrax_steps_solve_their_equations():
    """Backward Euler's by its residual; Kvaerno's of order 5 by the error and how it falls."""
    ts = np.linspace(0, 1, 9)
    us = problems.ode(soliton, PENDULUM, ts, {"g": 4.0}, diffrax.ImplicitEuler()).serial()
    old, new = (jax.tree.map(lambda a, s=s: a[s], us) for s in (slice(0, -1), slice(1, None)))
    slope = soliton(None, new, {"g": 4.0})
    close(
        jax.tree.map(lambda a, b, k: b - a - k / 8, old, new, slope), {"q": 0.0, "p": 0.0}, 0, 1e-11
    )
    errors = []
    for n in (8, 16):
        ts = np.linspace(0, 1, n + 1)
        us = problems.ode(soliton, PENDULUM, ts, {"g": 4.0}, diffrax.Kvaerno5()).serial()
        truth = reference(diffrax.Dopri8(), ts, ACCURATE)
        errors.append(max(float(jnp.abs(us[k] - truth[k]).max()) for k in us))
    assert errors[0] < 1e-5
    assert errors[1] < errors[0] / 2**4.3


def test_pictures(tmp_path):
    """One of each kind, as a file; and words where a kind does not fit."""
    for name in ("dahlquist", "brusselator", "heat_1d", "schroedinger_1d", "gray_scott_2d"):
        problem = BUILDERS[name]()
        path = tmp_path / f"{name}.png"
        figure = problem.plot(problem.serial(), path)
        assert path.stat().st_size > 5000
        assert figure.axes[0].get_xlabel()
    with pytest.raises(ValueError, match="kind='snapshots': needs a state with two axes"):
        problems.dahlquist(nt=4).plot(np.zeros(5), kind="snapshots")
    with pytest.raises(ValueError, match="must be the number of times, 5"):
        problems.dahlquist(nt=4).plot(np.zeros(3))


@pytest.mark.parametrize("name", ["heat_2d", "gray_scott_2d"])
def test_space_split_over_devices(name):
    """Time over two devices and space over two or three of them: the same states and gradients."""
    mesh = jax.make_mesh((2, 3), ("layer", "space"))
    build = {
        "heat_2d": functools.partial(
            problems.heat_2d, 9, 8, a=0.1, theta=(0.5, 1.0), t_end=0.5, nt=16, source=heating,
            sides=(1.0, 0.5, rising, 0.0),
        ),
        "gray_scott_2d": functools.partial(problems.gray_scott_2d, 12, t_end=32.0, nt=16),
    }[name]  # fmt: skip
    one, split = build(), build(space_axis="space")
    config = dataclasses.replace(CONFIG, tol=0.0, max_iters=3)

    def run(problem, **more):
        def loss(u0, args):
            us = dataclasses.replace(problem, u0=u0, args=args).solve(config, **more).us
            return weighed(us), us

        given = jax.tree.map(jnp.asarray, (problem.u0, problem.args))
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*given)

    (_, us), gradients = run(split, mesh=mesh, space_axis="space")
    (_, expected), expected_gradients = run(one)
    close(us, expected, 0, 1e-12)
    close(gradients, expected_gradients, 1e-9, 1e-10)


def heating(x, y, t):
    return x * y * t


def rising(s, t):
    return jnp.sin(s) * t


def test_problem_takes_all_options_of_solve():
    heat = BUILDERS["heat_1d"]()
    mesh = jax.make_mesh((2,), ("layer",))
    sol = heat.solve(CONFIG, mesh=mesh, save="coarse")
    assert isinstance(sol, jaxbraid.Solution)
    np.testing.assert_allclose(sol.us, heat.serial()[::4], atol=1e-9)
