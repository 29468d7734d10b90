"""A good problem passes; each kind of broken piece is found, and named in words.

Pieces are broken one at a time, so that the finding can only come from the break.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid._checker import check_problem
from jaxbraid._report import Finding, Report
from jaxbraid.host import host_step
from jaxbraid.problems import brusselator, dahlquist
from jaxbraid.transfers import Transfer, full_weighting, injection

TS = np.linspace(0, 1, 17)
U0 = jnp.array([1.0, 0.5, -0.3])
PARAMS, ARGS = jnp.linspace(1, 2, 16), {"rate": jnp.float64(0.7)}
CONFIG = jaxbraid.MGRIT(coarsening=4)


def heun(t0, t1, u, params, args):
    def f(u):
        return -args["rate"] * params * jnp.sin(u)

    k = f(u)
    return u + (t1 - t0) / 2 * (k + f(u + (t1 - t0) * k))


def euler(t0, t1, u, params, args):
    return u - (t1 - t0) * args["rate"] * params * jnp.sin(u)


def check(step=heun, u0=U0, ts=TS, params=PARAMS, args=ARGS, config=CONFIG, **options):
    return check_problem(step, u0, ts, params, args, config=config, **options)


def test_a_good_problem_passes():
    norm = lambda u: jnp.sqrt(jnp.mean(u**2))  # noqa: E731
    report = check(config=jaxbraid.MGRIT(coarsening=4, norm=norm), order=2)
    assert report.ok and not report.warnings, str(report)
    report.raise_if_failed()
    names = {f.name for f in report.findings}
    assert {f"step on level 0: gradient in {x}" for x in ("u", "params", "args")} <= names
    assert {"levels", "norm", "step on level 1: against fine steps"} <= names
    assert report["levels"].text == "2 levels of 16, 4 steps."
    assert str(report).endswith("0 errors, 0 warnings")


@pytest.mark.parametrize(
    ("problem", "order"),
    [
        (dahlquist("BE", ts=TS), 1),
        (dahlquist(("TR", "BE"), ts=TS), 2),
        (brusselator(ts=TS), 4),
    ],
    ids=["BE", "TR", "RK4"],
)
def test_the_order_is_measured(problem, order):
    report = check(problem.step, problem.u0, problem.ts, None, problem.args)
    assert abs(report["step on level 0: order"].value - order) < 0.1
    if isinstance(problem.step, tuple):
        assert abs(report["step on level 1: order"].value - 1) < 0.1


def test_single_precision_complex_and_constant_leaves_pass():
    def step(t0, t1, u, params, args):
        return {"z": u["z"] / (1 - (t1 - t0) * args), "label": u["label"]}

    u0 = {"z": jnp.array([1, 2j], jnp.complex64), "label": jnp.arange(3)}
    report = check(step, u0, params=None, args=jnp.complex64(1j))
    assert report.ok and not report.warnings, str(report)
    assert report["step on level 0: gradient in args"].status == "ok"


# -- broken steps ---------------------------------------------------------------------------------


def random_on_the_host(t0, t1, u, params, args):
    draw = lambda x: x + np.random.default_rng().normal(size=x.shape) * 1e-6  # noqa: E731
    return jax.pure_callback(draw, u, heun(t0, t1, u, params, args), vmap_method="sequential")


def reads_a_global(t0, t1, u, params, args):
    traced = any(isinstance(x, jax.core.Tracer) for x in (t0, t1, u))
    return heun(t0, t1, u, params, args) * (1.001 if traced else 1.0)


def mixes_the_batch():
    def fn(t0, t1, u, params, args):
        return u.mean(0, keepdims=True) + 0 * u

    return host_step(fn)


@jax.custom_vjp
def wrong_sine(x):
    return jnp.sin(x)


wrong_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (1.01 * jnp.cos(x) * ct,))


def wrong_gradient(t0, t1, u, params, args):
    return u - (t1 - t0) * args["rate"] * params * wrong_sine(u)


def stopped(t0, t1, u, params, args):
    return euler(t0, t1, u, jax.lax.stop_gradient(params), args)


STEPS = {
    "dtype": (lambda *x: heun(*x).astype("float32"), "shapes", "with dtype float32"),
    "shape": (
        lambda *x: heun(*x)[:2],
        "shapes",
        r"with shape \(2,\): it must be that of the state, \(3,\)",
    ),
    "structure": (lambda *x: {"x": heun(*x)}, "shapes", "returns the structure"),
    "raises": (lambda *x: heun(*x) @ jnp.ones(4), "shapes", "it fails"),
    "nan": (lambda *x: jnp.log(heun(*x)), "finite", "NaN or infinity"),
    "random": (random_on_the_host, "repeatable", "draws random numbers"),
    "float(t0)": (lambda t0, *x: heun(float(t0), *x), "jit", "can't be compiled"),
    "global": (reads_a_global, "jit", "when it is traced"),
    "batch": (mixes_the_batch(), "vmap", "mixes the states of a batch"),
    "vjp": (wrong_gradient, "gradient in u", "custom derivative is wrong"),
    "stop_gradient": (stopped, "gradient in params", "stop_gradient"),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_broken_step_is_found(kind):
    step, name, words = STEPS[kind]
    report = check(step)
    assert f"step on level 0: {name}" in [f.name for f in report.errors], str(report)
    with pytest.raises(ValueError, match=words):
        report.raise_if_failed()


def test_a_wrong_order_is_found():
    report = check(euler, order=2)
    assert [f.name for f in report.errors] == ["step on level 0: order"]
    assert "measures order 1.0" in report.errors[0].text
    report = check(lambda t0, t1, u, p, a: u - 0.1 * jnp.sin(u))  # no times in it
    assert report.ok and "does not settle" in report["step on level 0: order"].text


def test_a_coarse_step_of_another_equation_is_found():
    other = lambda t0, t1, u, p, a: u + 3 * (t1 - t0) * jnp.sin(u)  # noqa: E731
    report = check([heun, other])
    finding = report["step on level 1: against fine steps"]
    assert finding.status == "warning" and "another equation" in finding.text
    assert check([heun, lambda *x: heun(*x)[:1]])["step on level 1: shapes"].status == "error"


def test_a_step_without_a_derivative_is_told():
    step = host_step(lambda t0, t1, u, p, a: u - (t1 - t0)[:, None] * u)
    finding = check(step)["step on level 0: gradient"]
    assert finding.status == "warning" and "give host_step" in finding.text


# -- broken transfers and norms -------------------------------------------------------------------

FULL = full_weighting()
PAIRS = {
    "nonlinear prolongation": (
        Transfer(FULL.restrict, lambda v, like: jnp.maximum(FULL.prolong(v, like), 0)),
        "prolong linear",
        "error",
        "prolong is not linear",
    ),
    "offset": (
        Transfer(lambda u: FULL.restrict(u) + 1, FULL.prolong),
        "restrict linear",
        "error",
        "restrict is not linear",
    ),
    "shape": (
        Transfer(FULL.restrict, lambda v: jnp.repeat(v, 2)),
        "shapes",
        "error",
        r"with shape \(14,\): it must be that of the state on level 0, \(15,\)",
    ),
    "not matching": (
        Transfer(lambda u: jnp.roll(FULL.restrict(u), 1), FULL.prolong),
        "R = c P^T",
        "warning",
        "no multiple of the transpose",
    ),
    "scale": (
        Transfer(lambda u: 2 * FULL.restrict(u), FULL.prolong),
        "constants",
        "warning",
        "takes 1 to 2",
    ),
    "prolongation's scale": (
        Transfer(FULL.restrict, lambda v, like: 2 * FULL.prolong(v, like)),
        "R P",
        "warning",
        "changes constants by",
    ),
}


def check_transfer(transfer):
    """Of a state of 15 points; the step does not matter, and compiles fast."""

    def step(t0, t1, u, params, args):
        return u / (1 + (t1 - t0))

    u0 = jnp.sin(jnp.linspace(0.0, jnp.pi, 17)[1:-1])
    return check(step, u0, TS, None, None, transfers=[transfer])


def test_good_transfers_pass():
    report = check_transfer(FULL)
    assert report.ok and not report.warnings, str(report)
    finding = report["transfer from level 0: R = c P^T"]
    np.testing.assert_allclose(finding.value, 0.5, rtol=1e-12)
    report = check_transfer(injection())
    assert "R P = I" in report["transfer from level 0: R P"].text
    assert [f.name for f in report.warnings] == ["transfer from level 0: R = c P^T"]


@pytest.mark.parametrize("kind", PAIRS)
def test_a_broken_transfer_is_found(kind):
    transfer, name, status, words = PAIRS[kind]
    finding = check_transfer(transfer)[f"transfer from level 0: {name}"]
    assert finding.status == status
    with pytest.raises(ValueError, match=words):
        raise ValueError(finding.text)


NORMS = {
    "squares": (lambda u: jnp.sum(u**2), "not homogeneous"),
    "offset": (lambda u: jnp.sqrt(jnp.sum(u**2)) + 1, "norm of the zero state is 1"),
    "vector": (jnp.abs, "must be a real scalar"),
    "complex": (lambda u: jnp.sum(u) * 1j, "must be a real scalar"),
    "negative": (lambda u: -jnp.sqrt(jnp.sum(u**2)), "negative"),
    "quasinorm": (lambda u: jnp.sum(jnp.sqrt(jnp.abs(u))) ** 2, "triangle"),
    "raises": (lambda u: u["x"], "norm fails"),
    "blind": (lambda u: 0.0 * jnp.sum(u), "does not see all"),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_broken_norm_is_found(kind):
    norm, words = NORMS[kind]
    config = jaxbraid.MGRIT(levels=1, norm=norm)
    finding = check(lambda t0, t1, u, p, a: u, config=config)["norm"]
    assert words in finding.text and finding.status != "ok"


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (dict(params=jnp.ones(15)), "params", "its leading axis must be"),
        (dict(ts=[0.0, 2.0, 1.0]), "ts", "must increase"),
        (dict(u0=jnp.array([1.0, jnp.nan])), "u0", "holds NaN"),
        (dict(step=[heun, heun, heun]), "step", "step has 3 entries"),
        (dict(transfers=[None, None]), "transfers", "transfers has 2 entries"),
    ],
)
def test_arguments_are_findings(change, name, words):
    report = check(**change)
    assert not report.ok and words in report[name].text


def test_levels_that_are_not_made_are_told():
    report = check(config=jaxbraid.MGRIT(levels=4, coarsening=4))
    assert "levels=4 were asked for" in report["levels"].text and report.ok


def test_report():
    report = Report((Finding("a", "error", "is wrong. " * 20), Finding("b", "ok", "is right.")))
    assert str(report).splitlines()[-1] == "1 errors, 0 warnings"
    assert max(map(len, str(report).splitlines())) < 90
    with pytest.raises(KeyError, match=r"'c': must be one of \['a', 'b'\]"):
        report["c"]
