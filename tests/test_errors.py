"""What is refused, with errors that name the argument, its value and what is allowed; and NaN."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT, parallel_ode_net
from nets import dense, dense_weights, mesh_of

TS = np.linspace(0, 1, 9)
EXACT = MGRIT(coarsening=2, max_iters=4)


def decay(t0, t1, u, params, args):
    return jax.tree.map(lambda a: a * (1 - (t1 - t0).astype(a.dtype)), u)


def refuse_solve(error, message, step=decay, u0=1.0, ts=TS, **options):
    with pytest.raises(error, match=message):
        jaxbraid.solve(step, u0, ts, **options)


W = dense_weights(8, 2)
X = np.ones((4, 2))


def refuse_net(error, message, f=dense, params=W, x=X, call=None, **options):
    with pytest.raises(error, match=message):
        parallel_ode_net(f, params, **options)(x, **call or {})


# -- time grids, per-step parameters, states ------------------------------------------------------


@pytest.mark.parametrize(
    ("ts", "message"),
    [
        ([0.0, 2.0, 1.0], "ts must increase .or decrease. strictly"),
        ([0.0, 1.0, 1.0], "ts must increase .or decrease. strictly"),
        ([0.0, np.nan, 1.0], "ts must increase .* without NaN"),
        ([0.0], r"ts has shape \(1,\): must be a list of at least two times"),
        ([], r"ts has shape \(0,\): must be"),
        (1.0, r"ts has shape \(\): must be"),
        (np.ones((2, 3)), r"ts has shape \(2, 3\): must be"),
    ],
)
def test_time_grids(ts, message):
    refuse_solve(ValueError, message, ts=ts)


@pytest.mark.parametrize("ts", [[0.0, 1.0, np.inf], [0.0, 1.0j], ["a", "b"], [[0.0], [1.0, 2.0]]])
def test_times_that_are_not_finite_real_numbers(ts):
    refuse_solve((TypeError, ValueError), "^ts( |=)", ts=ts)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (np.ones(7), ValueError, r"params has shape \(7,\): its leading axis must be .*, 8"),
        ({"a": np.ones(8), "b": [np.ones(9)]}, ValueError, r"params\['b'\]\[0\] has shape \(9,\)"),
        (3.0, ValueError, r"params has shape \(\): its leading axis must be .*, 8"),
        (object(), TypeError, "params has a leaf of type object: its leaves must be arrays"),
    ],
)
def test_per_step_parameters(params, error, message):
    refuse_solve(error, message, params=params)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ((W, W[:3]), ValueError, r"params\[1\] has shape \(3, 2, 2\): .* number of layers, 8"),
        ([1.0, 2.0], ValueError, r"params\[0\] is a scalar: its leading axis must be"),
        ({"w": W, "s": 1.0}, ValueError, r"params\['(s|w)'\]"),
        (W[:0], ValueError, "params has a leading axis of 0"),
        (None, ValueError, "params has no leaves: it must have arrays with leading axis"),
        ({}, ValueError, "params has no leaves"),
    ],
)
def test_parameters_of_layers(params, error, message):
    refuse_net(error, message, params=params)


def test_replaced_parameters():
    net = dataclasses.replace(parallel_ode_net(dense, W), params=(W, W[:3]))
    with pytest.raises(ValueError, match=r"params\[1\] has shape \(3, 2, 2\)"):
        net(X)


@pytest.mark.parametrize("u0", [(), None, 3, np.ones(2, bool), {"key": jax.random.key(0)}])
def test_states_without_real_or_complex_leaves(u0):
    refuse_solve(TypeError, "u0 has no real or complex leaf", u0=u0)
    refuse_net(TypeError, "x has no real or complex leaf", x=u0)


@pytest.mark.parametrize("u0", ["abc", (1.0, object()), np.array([None])])
def test_states_that_are_not_arrays(u0):
    refuse_solve(TypeError, "u0.* has a leaf of type .*: its leaves must be arrays", u0=u0)
    refuse_net(TypeError, "x.* has a leaf of type .*: its leaves must be arrays", x=u0)


def test_shared_arguments_that_are_not_arrays():
    refuse_solve(TypeError, "args has a leaf of type str", args={"scheme": "euler"})
    refuse_net(TypeError, "side has a leaf of type str", call={"side": "mask"})


# -- steps and vector fields ----------------------------------------------------------------------

PAIR = (np.ones(2), np.array(3))


@pytest.mark.parametrize(
    ("step", "u0", "error", "message"),
    [
        (lambda t0, t1, u, p, a: u[None], np.ones(2), ValueError,
         r"step on level 0 returns state with shape \(1, 2\): .* state, \(2,\)"),
        (lambda t0, t1, u, p, a: u * 1j, np.ones(2), TypeError,
         "returns state with dtype complex128: it must be that of the state, float64"),
        (lambda t0, t1, u, p, a: (u, u), np.ones(2), TypeError,
         r"returns the structure PyTreeDef\(\(\*, \*\)\): .* of the state, PyTreeDef\(\*\)"),
        (lambda t0, t1, u, p, a: None, np.ones(2), TypeError, "returns the structure .*None"),
        (lambda t0, t1, u, p, a: (u[0], u[1] + 1), PAIR, TypeError,
         r"changes state\[1\], of dtype int64: only real and complex leaves can change"),
        ([decay, lambda t0, t1, u, p, a: u[None]], np.ones(2), ValueError,
         r"step on level 1 returns state with shape \(1, 2\)"),
        (None, 1.0, TypeError, "step=None: must be a function"),
        ([decay, 3], 1.0, TypeError, "step=3: must be a function"),
        ([], 1.0, ValueError, "step has 0 entries: .* one for each of the levels=2"),
        ([decay] * 3, 1.0, ValueError, "step has 3 entries: .* one for each of the levels=2"),
    ],
)  # fmt: skip
def test_steps(step, u0, error, message):
    refuse_solve(error, message, step=step, u0=u0)


def test_constant_leaves_pass_through():
    u = jaxbraid.solve(lambda t0, t1, u, p, a: (u[0] / 2, u[1]), PAIR, TS, config=EXACT).u
    np.testing.assert_array_equal(u[0], 2.0**-8)
    assert u[1] == 3 and u[1].dtype == PAIR[1].dtype


def test_steps_that_return_no_pair():
    refuse_solve(TypeError, "step must return a pair", lambda *_: 1.0, has_aux=True)


def test_a_step_may_return_a_plain_number():
    assert jaxbraid.solve(lambda *_: 0.25, 1.0, TS, config=EXACT).u == 0.25


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda w, x, key: x, TypeError, "parameter 'key'; .* names can be t, dt, args, side"),
        (lambda w, x, *, key: x, TypeError, "parameter 'key'; .* names can be t, dt, args, side"),
        (lambda w: w, TypeError, r"f\(w\): must take at least \(params_n, x\)"),
        (3, TypeError, "f=3: must be a function"),
        ((dense,) * 3, ValueError, "f has 3 entries: .* one for each of the levels=2"),
        (lambda w, x: (x,), TypeError, "f returns the structure .*: the derivative must have"),
        (lambda w, x: None, TypeError, "f returns the structure .*None"),
        (lambda w, x: jnp.stack([x, x]), ValueError, r"f returns a leaf of shape \(2, 4, 2\)"),
        (lambda w, x: 1j * x, TypeError, "returns state with dtype complex128"),
    ],
)
def test_vector_fields(f, error, message):
    refuse_net(error, message, f=f)


def test_a_derivative_of_another_shape():
    refuse_net(ValueError, r"f returns .* shape \(2,\)", f=lambda w, x: x[0])


@pytest.mark.parametrize("f", [lambda w, *, x: x, eval("lambda w, x, t, /: x")])
def test_fields_that_cannot_be_called(f):
    with pytest.raises(TypeError, match=r"must take at least|positional"):
        parallel_ode_net(f, W)


def test_precision_is_not_raised_in_silence():
    refuse_net(TypeError, "dtype float64: .* float32. Cast", lambda w, x: x @ w, x=np.float32(X))


# -- options of a solve ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"guess": "zero"}, ValueError, "guess='zero': must be states at all points, 'constant'"),
        ({"guess": np.ones(8)}, ValueError, r"guess has a leaf of shape \(8,\): must be \(9,\)"),
        ({"guess": (np.ones(9),)}, TypeError, "guess has the structure .*: must be that of"),
        ({"save": "last"}, ValueError, "save='last': must be 'all', 'coarse' or 'final'"),
        ({"transfers": (None, None)}, ValueError, "transfers has 2 entries: .* levels - 1 = 1"),
        ({"transfers": ("half",)}, TypeError, r"transfers\[0\]='half': must be a jaxbraid.Tran"),
        (
            {"transfers": (jaxbraid.transfers.injection,)}, TypeError,
            r"transfers\[0\]=<function injection .*: must be a jaxbraid.Transfer or None",
        ),
    ],
)  # fmt: skip
def test_options_of_solve(options, error, message):
    refuse_solve(error, message, **options)


@pytest.mark.parametrize(
    "options",
    [{"config": "V"}, {"adjoint": {"levels": 2}}, {"transfers": 3}, {"guess": np.array(["a"] * 9)}],
)
def test_options_of_solve_of_a_wrong_type(options):
    refuse_solve(TypeError, f"^{next(iter(options))}.*must be", **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"form": "euler"}, ValueError, "form='euler': must be 'field' or 'step'"),
        ({"adjoint": "V"}, TypeError, "adjoint='V': must be a jaxbraid.MGRIT"),
        ({"transfers": [None] * 2}, ValueError, "transfers has 2 entries"),
        ({"call": {"guess": X}}, ValueError, r"guess has a leaf of shape \(4, 2\): must be \(9, 4"),
    ],
)
def test_options_of_nets(options, error, message):
    refuse_net(error, message, **options)


@pytest.mark.parametrize(
    "options", [{"forward": 3}, {"t_final": "1"}, {"t_final": None}, {"t_final": np.nan}]
)
def test_options_of_nets_that_are_not_named(options):
    (name,) = options
    refuse_net((TypeError, ValueError), f"^{name}=.*must be", **options)


def test_a_traced_end_of_time():
    net = jax.jit(lambda t: parallel_ode_net(dense, W, t_final=t)(X))
    with pytest.raises(TypeError, match="t_final is traced: must be a number; scale f"):
        net(2.0)


# -- coarsening that the time axis does not allow -------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        (16, {"levels": 4, "coarsening": (4, 4, 4)},
         r"coarsening=\(4, 4, 4\) leaves nothing to coarsen: .* level 2 would have 1 steps"),
        (8, {"coarsening": (9,), "min_coarse": 1}, r"coarsening=\(9,\) leaves nothing .* 0 steps"),
        (8, {"coarsening": ([0, 4, 9],)}, r"coarsening\[0\] has the C-point 9, .* points 0\.\.8"),
        (8, {"coarsening": (range(9),)}, r"coarsening\[0\] keeps every point"),
        (8, {"levels": 3, "coarsening": (2, [0, 5])}, r"coarsening\[1\] has the C-point 5"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config", "adjoint"])
def test_coarsening(steps, options, message, name):
    def loss(u0):
        ts = np.linspace(0, 1, steps + 1)
        return jaxbraid.solve(decay, u0, ts, **{name: MGRIT(**options)}).u

    with pytest.raises(ValueError, match=message):
        jax.grad(loss)(1.0)


@pytest.mark.parametrize("factor", [9, 10**30])
def test_one_factor_for_all_levels_makes_as_many_as_fit(factor):
    sol = jaxbraid.solve(decay, 1.0, TS, config=MGRIT(levels=5, coarsening=factor))
    np.testing.assert_allclose(sol.us, 0.875 ** np.arange(9), rtol=1e-14)  # one rounding a step


def test_irregular_coarsening_on_several_devices():
    config = MGRIT(coarsening=([0, 3, 8],))
    message = r"coarsening=\(\(0, 3, 8\),\): levels that the 2 devices .* share must be"
    refuse_solve(ValueError, message, mesh=mesh_of(2), layer_axis="depth", config=config)


def test_adjoint_with_more_levels_than_transfers():
    half = jaxbraid.transfers.average_pooling(0)
    loss = lambda u: jnp.sum(  # noqa: E731
        jaxbraid.solve(
            decay, u, TS, transfers=(half,), config=EXACT, adjoint=MGRIT(levels=3, coarsening=2)
        ).u
    )
    with pytest.raises(ValueError, match="adjoint"):
        jax.grad(loss)(np.ones(8))


# -- meshes ---------------------------------------------------------------------------------------

MESHES = [
    ({"layer_axis": "x"}, ValueError, "layer_axis='x': must be one of .*'depth', 'data'"),
    ({"layer_axis": ["depth"]}, ValueError, r"layer_axis=\['depth'\]: must be one of"),
    ({"batch_axis": "x"}, ValueError, "batch_axis='x': must be one of .*'depth', 'data'"),
    ({"batch_axis": "depth"}, ValueError, "layer_axis and batch_axis are both 'depth'"),
    ({"mesh": "cpu"}, TypeError, "mesh='cpu': must be a jax.sharding.Mesh or None"),
    ({"mesh": [0, 1]}, TypeError, r"mesh=\[0, 1\]: must be a jax.sharding.Mesh or None"),
]


@pytest.mark.parametrize(("options", "error", "message"), MESHES)
def test_meshes(options, error, message):
    options = {"mesh": mesh_of(2, 2), "layer_axis": "depth", **options}
    refuse_solve(error, message, u0=np.ones(4), **options)
    refuse_net(error, message, **options)


def test_default_axis_name_that_the_mesh_does_not_have():
    refuse_net(ValueError, "layer_axis='layer': must be one of", mesh=mesh_of(2))


BATCHED = {"layer_axis": "depth", "batch_axis": "data"}


@pytest.mark.parametrize(
    ("u0", "message"),
    [
        (np.ones(3), "u0 has a size of 3 along axis 0, which the mesh axis 'data' of size 2"),
        ((np.ones(4), 1.0), r"u0\[1\] has 0 axes: the mesh axis 'data' splits axis 0"),
    ],
)
def test_batches_that_the_mesh_does_not_divide(u0, message):
    refuse_solve(ValueError, message, u0=u0, mesh=mesh_of(2, 2), **BATCHED)


def test_batches_of_nets():
    options = {"mesh": mesh_of(2, 2), **BATCHED}
    refuse_net(ValueError, "x has a size of 3 along axis 0", x=X[:3], **options)
    message = "side has 0 axes: the mesh axis 'data' splits axis 0"
    refuse_net(ValueError, message, lambda w, x, side: x, call={"side": 1.0}, **options)


# -- NaN ------------------------------------------------------------------------------------------


def scale(t0, t1, u, params, args):
    return u * params


CONFIGS = {
    "direct": MGRIT(levels=1),
    "fixed": MGRIT(coarsening=2, max_iters=2),
    "tolerance": MGRIT(coarsening=2, tol=1e-8),
    "jump": MGRIT(coarsening=2, max_iters=2, criterion="jump"),
    "jump tolerance": MGRIT(coarsening=2, tol=1e-8, criterion="jump"),
    "largest": MGRIT(coarsening=2, tol=1e-8, temporal_norm="max"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_nan_is_told(name):
    @jax.jit
    def run(factors):
        return jaxbraid.solve(scale, 1.0, TS, factors, config=CONFIGS[name])

    good = np.full(8, 0.9)
    bad = np.where(np.arange(8) == 5, np.nan, good)
    sol = run(bad)
    assert not sol.stats.finite and not sol.stats.converged
    # a loop that watches its norm stops before the NaN has come to the end of time
    assert np.isnan(sol.u) or CONFIGS[name].tol > 0
    assert "stopped: not finite" in str(sol.stats)
    with pytest.raises(FloatingPointError, match=r"non-finite value within \d+ iteration"):
        sol.stats.raise_if_not_finite()

    sol = run(good)
    assert sol.stats.finite
    sol.stats.raise_if_not_finite()
    assert "not finite" not in str(sol.stats)


@pytest.mark.parametrize("name", ["fixed", "tolerance"])
def test_nan_behind_the_last_c_point_is_told(name):
    factors, ts = np.full(9, 0.9), np.linspace(0, 1, 10)
    factors[-1] = np.nan
    stats = jaxbraid.solve(scale, 1.0, ts, factors, config=CONFIGS[name]).stats
    assert not stats.finite and not stats.converged


@pytest.mark.parametrize("name", CONFIGS)
def test_nan_of_the_adjoint_is_recorded(name):
    """sqrt(x) has the derivative inf at 0; inf times the seed 0 of the other entry is NaN."""
    net = parallel_ode_net(
        lambda w, x: w * jnp.sqrt(x * 0.0), np.ones(8), forward=EXACT, adjoint=CONFIGS[name]
    )
    probe = net.adjoint_probe()
    record = jax.jit(jax.grad(lambda p: net(jnp.ones(2), adjoint_probe=p)[0]))(probe)
    assert np.all(np.isfinite(net(jnp.ones(2))))
    assert not np.all(np.isfinite(record.norms))
    # a loop that watches its norm does not start where that of the guess is NaN
    ran = int(record.iterations)
    assert ran == 0 or not np.all(np.isfinite(record.residuals[:ran]))


# -- derivatives that are not there ---------------------------------------------------------------


def test_a_differentiated_value_that_the_step_closes_over():
    def loss(c):
        return jnp.sum(parallel_ode_net(lambda w, x: c * dense(w, x), W, forward=EXACT)(X))

    with pytest.raises(Exception, match="closed-over value") as raised:
        jax.grad(loss)(2.0)
    assert any("as `args` if all steps share it" in note for note in raised.value.__notes__)


def test_forward_mode():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda u: jaxbraid.solve(decay, u, TS, config=EXACT).u, (1.0,), (1.0,))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_derivative_while_the_step_closes_over_a_traced_value(transform):
    """Refused with the way out, and right once the value is handed in."""

    def closed(c):
        f = lambda w, x: c * dense(w, x)  # noqa: E731
        return jax.grad(lambda w: jnp.sum(parallel_ode_net(f, w, forward=EXACT)(X)))(W)

    def handed(c):
        f = lambda w, x, args: args * dense(w, x)  # noqa: E731
        return jax.grad(lambda w: jnp.sum(parallel_ode_net(f, w, args=c, forward=EXACT)(X)))(W)

    value = jnp.array([0.5]) if transform is jax.vmap else jnp.array(0.5)
    with pytest.raises(TypeError, match=r"closes over a traced value.*`args`"):
        transform(closed)(value)
    got = transform(handed)(value).reshape(W.shape)
    np.testing.assert_allclose(got, closed(0.5), rtol=1e-12)


def test_times_are_not_differentiated_in_silence():
    def end(ts):
        return jaxbraid.solve(decay, 1.0, ts, config=EXACT).u

    ts = jnp.asarray(TS)
    with pytest.raises(TypeError, match="ts is being differentiated"):
        jax.grad(end)(ts)
    stopped = jax.grad(lambda ts: end(jax.lax.stop_gradient(ts)))(ts)
    assert np.all(stopped == 0)
