"""Bounds told from eigenvalues are the norms of the iteration, and no run exceeds them.

The truth is two-level MGRIT on one scalar, written in NumPy as loops over time points: its
C-points after one iteration, for every unit error, are the columns of the matrix E.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid.convergence import stability, two_level_bound

ROUNDING = 1e-10


def one_iteration(c, lam, mu, m, nu, weight=1.0):
    """The C-points 1..N_c after an iteration for u_n = lam u_(n-1), u_0 = 0, point by point."""
    c = np.concatenate([[0], c]).astype(complex)

    def ends(c):
        out = c.copy()
        for k in range(1, len(c)):
            u = c[k - 1]
            for _ in range(m):
                u = lam * u
            out[k] = u
        return out

    for _ in range(nu):
        c = c + weight * (ends(c) - c)
    residual, correction = ends(c) - c, np.zeros_like(c)
    for k in range(1, len(c)):
        correction[k] = mu * correction[k - 1] + residual[k]
    return (c + correction)[1:]


def propagation_matrix(lam, mu, m, points, nu, weight=1.0):
    return np.stack([one_iteration(e, lam, mu, m, nu, weight) for e in np.eye(points)], axis=1)


MODES = {
    "heat": (0.9, 0.7),
    "stiff": (0.05, -0.3),
    "advection": (np.exp(0.05j), 1 / (1 - 0.2j)),
    "imaginary": (np.exp(0.2j), 0.99 * np.exp(0.7j)),
    "unit": (0.99, 1.0),
    "zero": (0.5, 0.0),
    "between": (1.0, 1 + 1 / 14),  # sine and hyperbolic sine meet, for 16 points and nu = 1
    "growing": (1.05, 1.3),
    "exploding": (1.0, -3.0),
}


@pytest.mark.parametrize("nu", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_sharp_is_the_norm_of_the_iteration_and_below_dobrev(mode, nu):
    lam, mu = MODES[mode]
    args = dict(coarsening=4, steps=16 * 4 + 3, cf_relax=nu)  # three steps past the last C-point
    sharp = two_level_bound(lam, mu, **args).factor
    norm = np.linalg.norm(propagation_matrix(lam, mu, 4, 16, nu), 2)
    np.testing.assert_allclose(sharp, norm, rtol=ROUNDING)
    assert sharp <= two_level_bound(lam, mu, kind="dobrev", **args).factor * (1 + ROUNDING)


@pytest.mark.parametrize("nu", [1, 2])
@pytest.mark.parametrize("mode", ["heat", "advection", "growing"])
def test_weighted_relaxation(mode, nu):
    lam, mu = MODES[mode]
    args = dict(coarsening=3, steps=36, cf_relax=nu, c_weight=1.3)
    norm = np.linalg.norm(propagation_matrix(lam, mu, 3, 12, nu, 1.3), 2)
    sharp = two_level_bound(lam, mu, **args).factor
    np.testing.assert_allclose(sharp, norm, rtol=ROUNDING)
    assert sharp <= two_level_bound(lam, mu, kind="dobrev", **args).factor


def test_dobrev_has_the_exponents_of_the_theorem():
    lam, mu, m, points = 0.9, 0.7, 4, 16
    args = dict(coarsening=m, steps=m * points, kind="dobrev")
    f = abs(lam**m - mu) * (1 - mu**points) / (1 - mu)
    fcf = abs(lam**m - mu) * lam**m * (1 - mu ** (points - 1)) / (1 - mu)
    np.testing.assert_allclose(two_level_bound(lam, mu, cf_relax=0, **args).factor, f)
    np.testing.assert_allclose(two_level_bound(lam, mu, cf_relax=1, **args).factor, fcf)
    for close in (1.0, 1 - 1e-15, 1 + 1e-13):
        limit = two_level_bound(0.9, close, cf_relax=0, **args).factor
        np.testing.assert_allclose(limit, abs(0.9**m - 1) * points, rtol=1e-11)


def test_long_time_axis():
    """A million C-points: the limit |lam^m - mu| |lam|^(m nu) / (1 - |mu|)."""
    lam = np.array([0.9, 0.5])
    mu = np.array([0.7, 0.2])
    bound = two_level_bound(lam, mu, coarsening=4, steps=4 * 10**6)
    limit = abs(lam**4 - mu) * lam**4 / (1 - mu)
    np.testing.assert_allclose(bound.modes, limit, rtol=1e-8)
    assert bound.factor == bound.modes.max()


def test_exact_when_relaxation_reaches_all_c_points():
    assert two_level_bound(0.9, 0.5, coarsening=4, steps=8, cf_relax=1).factor == 0
    np.testing.assert_allclose(propagation_matrix(0.9, 0.5, 4, 2, 1), 0, atol=1e-15)


METHODS = {
    "FE": lambda z: 1 + z,
    "BE": lambda z: 1 / (1 - z),
    "TR": lambda z: (1 + z / 2) / (1 - z / 2),
    "MR": lambda z: (1 + z / 2) / (1 - z / 2),
    "Heun": lambda z: 1 + z + z**2 / 2,
    "RK4": lambda z: 1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24,
    "SDIRK2": lambda z: (1 + (np.sqrt(2) - 1) * z) / (1 - (1 - np.sqrt(0.5)) * z) ** 2,
}


@pytest.mark.parametrize("method", METHODS)
def test_stability_functions(method):
    z = np.array([[-2.0, -0.1], [0.3j, -1 + 1j]])
    np.testing.assert_allclose(stability(method, z), METHODS[method](z), rtol=1e-13)
    np.testing.assert_allclose(stability(METHODS[method], z), METHODS[method](z))


def run(fine, coarse, m, nu, guess, iters):
    """`solve` of u_n = fine u_(n-1), u_0 = 0, whose errors are its states."""
    n = len(guess) - 1
    dtype = np.result_type(fine, np.float64)
    sol = jaxbraid.solve(
        [lambda t0, t1, u, p, a: a[0] * u, lambda t0, t1, u, p, a: a[1] * u],
        jnp.zeros(np.shape(fine), dtype),
        jnp.arange(n + 1.0),
        args=(jnp.asarray(fine, dtype), jnp.asarray(coarse, dtype)),
        config=jaxbraid.MGRIT(coarsening=m, cf_relax=nu, max_iters=iters),
        guess=jnp.asarray(guess, dtype),
    )
    return np.asarray(sol.us), sol.stats


@pytest.mark.parametrize("nu", [0, 1])
@pytest.mark.parametrize("problem", ["heat", "advection"])
def test_runs_stay_below_and_reach_the_factor(problem, nu):
    """Heat (real) and upwind advection (complex eigenvalues) by backward Euler, mode by mode."""
    m, points, dt, nx = 4, 16, 0.01, 16
    if problem == "heat":
        lam = -4 * nx**2 * np.sin(np.arange(1, nx) * np.pi / (2 * nx)) ** 2
    else:
        lam = -nx * (1 - np.exp(-2j * np.pi * np.arange(nx) / nx))
    fine, coarse = stability("BE", dt * lam), stability("BE", m * dt * lam)
    args = dict(coarsening=m, steps=m * points, cf_relax=nu)
    sharp, dobrev = (two_level_bound(fine, coarse, kind=k, **args) for k in ("sharp", "dobrev"))
    assert 0.01 < sharp.factor <= dobrev.factor < 1

    guess = np.random.default_rng(0).normal(size=(m * points + 1, len(fine)))
    guess[0] = 0
    _, stats = run(fine, coarse, m, nu, guess, 6)
    measured = stats.factors()
    assert np.all(measured <= sharp.factor * (1 + ROUNDING)) and measured[0] > sharp.factor / 100

    # the worst error of every mode at once, from the matrices made point by point
    matrices = [propagation_matrix(f, c, m, points, nu) for f, c in zip(fine, coarse, strict=True)]
    worst = np.stack([np.linalg.svd(e)[2][0].conj() for e in matrices], axis=1)
    guess = np.zeros((m * points + 1, len(fine)), worst.dtype)
    guess[m::m] = worst
    us, _ = run(fine.astype(worst.dtype), coarse, m, nu, guess, 1)
    np.testing.assert_allclose(np.linalg.norm(us[m::m], axis=0), sharp.modes, atol=1e-12)


GOOD = dict(fine=0.5, coarse=0.1, coarsening=4, steps=64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(coarsening=1), ValueError, "coarsening=1"),
        (dict(steps=3), ValueError, "steps=3"),
        (dict(cf_relax=-1), ValueError, "cf_relax=-1"),
        (dict(c_weight=0), ValueError, "c_weight=0"),
        (dict(kind="best"), ValueError, "kind='best'"),
        (dict(fine=[0.5, 0.2]), ValueError, r"fine has shape \(2,\)"),
        (dict(coarse="x"), TypeError, "coarse has dtype"),
        (dict(fine=np.nan), ValueError, "fine must hold"),
        (dict(c_weight=1.5, steps=10**4), ValueError, "at most 1024 C-points"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        two_level_bound(**(GOOD | change))


def test_errors_of_the_others():
    with pytest.raises(ValueError, match="method='RK5'"):
        stability("RK5", 1.0)
    with pytest.raises(ValueError, match=r"shapes \(1, 1\) and \(2,\)"):
        stability(([[1]], [1, 1]), 1.0)
