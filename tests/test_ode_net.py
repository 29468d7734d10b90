"""The layer-parallel network against a plain `lax.scan`: values, gradients, devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT
from nets import (
    dense,
    dense_weights,
    field,
    mesh_of,
    relative_error,
    serial_dense,
    serial_field,
    tree_net,
)

LAYERS = (1, 2, 7, 16, 33, 64)
MESHES = ((1, 1), (2, 2), (3, 1), (4, 2), (6, 1), (8, 1))


def loss(y):
    return jnp.sum(y["a"] ** 2) + jnp.sum(jnp.cos(y["s"]))


def exact_config(layers: int, factor: int, **options) -> MGRIT:
    """As many iterations as intervals: MGRIT is then a direct solver."""
    return MGRIT(coarsening=factor, max_iters=-(-layers // factor), **options)


def cases():
    """All pairs (layers, mesh) and all pairs (layers, levels), cycles and relaxations in turn."""
    for i, layers in enumerate(LAYERS):
        for j, mesh in enumerate(MESHES):
            levels = 1 + (i + j) % 4
            yield layers, mesh, levels, 2 if levels == 4 else 4, "VFW"[(i + 2 * j) % 3], j % 2


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "mesh", "levels", "factor", "cycle", "nu"), list(cases()))
def test_equals_scan_when_all_intervals_were_iterated(layers, mesh, levels, factor, cycle, nu):
    params, args, x = tree_net(layers)
    config = exact_config(layers, factor, levels=levels, cycle=cycle, cf_relax=nu)

    def parallel(params, args, x):
        net = jaxbraid.parallel_ode_net(
            field,
            params,
            args=args,
            forward=config,
            mesh=mesh_of(*mesh),
            layer_axis="depth",
            batch_axis="data",
        )
        y = net(x)
        return loss(y), y

    def serial(params, args, x):
        y = serial_field(params, args, x)[0]
        return loss(y), y

    def derive(fn):
        return jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2), has_aux=True))

    (_, y), grads = derive(parallel)(params, args, x)
    (_, y0), grads0 = derive(serial)(params, args, x)
    assert relative_error(y, y0) < 1e-12
    assert relative_error(grads, grads0) < 1e-10


@pytest.fixture(scope="module")
def one_device_histories():
    return {nu: histories((1, 1), nu) for nu in (0, 1)}


def histories(mesh, nu, **options):
    """Output, residuals and gradients after two iterations, which leave visible errors."""
    params, args, x = tree_net(33)
    config = MGRIT(**({"levels": 3, "coarsening": 2, "max_iters": 2, "cf_relax": nu} | options))

    def run(params, args, x, probe):
        net = jaxbraid.parallel_ode_net(
            field,
            params,
            args=args,
            forward=config,
            mesh=mesh_of(*mesh),
            layer_axis="depth",
            batch_axis="data",
        )
        solution = net.solve(x, adjoint_probe=probe)
        return loss(solution.u), solution

    probe = jaxbraid.parallel_ode_net(field, params, args=args, forward=config).adjoint_probe()
    run = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True))
    (_, solution), (*grads, record) = run(params, args, x, probe)
    return solution.us, solution.stats.residuals, grads, record.residuals, record.norms


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (3, 1), (4, 2), (6, 1), (8, 1)])
def test_inexact_results_do_not_depend_on_the_devices(one_device_histories, mesh):
    nu = mesh[0] % 2
    expected = one_device_histories[nu]
    assert relative_error(histories(mesh, nu), expected) < 1e-12
    assert expected[1][-1] > 1e-6  # else nothing inexact was compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((4, 2), {"coarse_placement": 1}),
        ((3, 1), {"coarse_placement": 2, "cycle": "F"}),
        ((8, 1), {"coarse_placement": 1, "cycle": "W", "coarsening": (4, 2)}),
        ((8, 1), {"coarse_placement": 1, "coarsening": (8, 2), "max_iters": 1}),  # 2 devices each
        ((4, 1), {"coarse_placement": 1, "coarsening": (4, (0, 1, 3, 4, 7))}),  # irregular
        ((4, 1), {"coarse_placement": 1, "window": 3}),
        ((4, 1), {"coarse_placement": 3}),  # a level that there is not
    ],
)
def test_levels_on_every_device_change_nothing(mesh, options):
    expected = histories((1, 1), 1, **options)
    assert relative_error(histories(mesh, 1, **options), expected) < 1e-12
    assert expected[1][-1] > 1e-9


def test_errors_fall_with_each_iteration():
    w, x = dense_weights(64), jnp.linspace(-1, 1, 6).reshape(2, 3)
    exact = jax.grad(lambda w: jnp.sum(serial_dense(w, x) ** 2))(w)
    y = serial_dense(w, x)

    def errors(iters):
        config = MGRIT(levels=2, coarsening=4, max_iters=iters)

        def run(w):
            y = jaxbraid.parallel_ode_net(dense, w, forward=config)(x)
            return jnp.sum(y**2), y

        (_, value), grad = jax.value_and_grad(run, has_aux=True)(w)
        return float(jnp.max(jnp.abs(value - y))), float(jnp.max(jnp.abs(grad - exact)))

    history = np.array([errors(i) for i in (1, 2, 3, 4)])
    assert np.all(history[1:] < 0.5 * history[:-1])


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.complex128]
)
def test_dtypes_stay(dtype):
    w, x = dense_weights(16, dtype=dtype), jnp.linspace(-1, 1, 6).reshape(2, 3).astype(dtype)
    net = jaxbraid.parallel_ode_net(dense, w, forward=exact_config(16, 4))

    def value(fn):
        return lambda w: jnp.sum(jnp.abs(fn(w)).astype(jnp.float32))

    y = net(x)
    grad = jax.grad(value(lambda w: dataclasses.replace(net, params=w)(x)))(w)
    exact = jax.grad(value(lambda w: serial_dense(w, x)))(w)
    eps = float(jnp.finfo(dtype).eps)
    assert y.dtype == dtype and grad.dtype == dtype
    # the same operations, but batched: a few roundings of the working precision
    assert relative_error(y.astype(jnp.complex128), serial_dense(w, x)) < 8 * eps
    assert relative_error(grad.astype(jnp.complex128), exact) < 64 * eps


def test_transformations():
    w, xs = dense_weights(16), jax.random.normal(jax.random.key(0), (5, 2, 3))
    net = jaxbraid.parallel_ode_net(dense, w, forward=exact_config(16, 4))
    serial = lambda x: serial_dense(w, x)  # noqa: E731
    assert relative_error(jax.vmap(net)(xs), jax.vmap(serial)(xs)) < 1e-12
    assert relative_error(jax.jacrev(net)(xs[0]), jax.jacrev(serial)(xs[0])) < 1e-10
    remat = jax.grad(lambda x: jnp.sum(jax.checkpoint(net)(x) ** 2))(xs[0])
    assert relative_error(remat, jax.grad(lambda x: jnp.sum(serial(x) ** 2))(xs[0])) < 1e-10
    per_sample = jax.vmap(jax.grad(lambda x: jnp.sum(net(x) ** 2)))(xs)
    expected = jax.vmap(jax.grad(lambda x: jnp.sum(serial(x) ** 2)))(xs)
    assert relative_error(per_sample, expected) < 1e-10


def test_second_use_does_not_retrace():
    traces = []

    def counted(w, x):
        traces.append(1)
        return jnp.tanh(x @ w)

    w, x = dense_weights(8), jnp.ones((2, 3))

    def grad(w):
        return jax.grad(lambda w: jnp.sum(jaxbraid.parallel_ode_net(counted, w)(x)))(w)

    grad(w)
    first = len(traces)
    grad(w + 1)
    assert first > 0 and len(traces) == first


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (None, {}),
        (None, {"linearization": "keep", "saved_states": "coarse"}),
        ((4, 1), {}),
        ((4, 1), {"coarse_placement": 1}),
    ],
)
def test_leaves_without_derivatives(mesh, options):
    """Integers, booleans and PRNG keys in params, args, side and x; the rest is differentiated."""
    n, batch = 9, 4
    config = exact_config(n, 4, **options)
    where = {} if mesh is None else {"mesh": mesh_of(*mesh), "layer_axis": "depth"}
    params = {
        "w": dense_weights(n),
        "scale": jnp.arange(1, n + 1),
        "on": jnp.arange(n) % 3 > 0,
        "key": jax.random.split(jax.random.key(1), n),
    }
    args = {"shift": jnp.array(0.3), "times": jnp.int32(2), "key": jax.random.key(7)}
    side = {"weight": jnp.linspace(0.5, 1, batch), "mask": jnp.arange(batch) > 0}
    x = {"h": jax.random.normal(jax.random.key(2), (batch, 3)), "label": jnp.arange(batch)}

    def f(p, x, args, side):
        noise = jax.random.bernoulli(p["key"], 0.7, (3,)) * jax.random.uniform(args["key"])
        h = jnp.tanh(x["h"] @ p["w"] + args["shift"] * args["times"]) * noise
        h = h * jnp.where(p["on"], 1.0, 0.5) / p["scale"] * side["weight"][:, None]
        h = jnp.where(side["mask"][:, None], h, 0.1 * h) + 0.01 * x["label"][:, None]
        return {"h": h, "label": x["label"]}

    def value(diff, parallel):
        p = params | {"w": diff[0]}
        a, s = args | {"shift": diff[1]}, side | {"weight": diff[2]}
        state = x | {"h": diff[3]}
        if parallel:
            net = jaxbraid.parallel_ode_net(f, p, args=a, forward=config, **where)
            return jnp.sum(net(state, side=s)["h"] ** 2)
        h, _ = jax.lax.scan(
            lambda h, p: (h + f(p, x | {"h": h}, a, s)["h"] / n, None), state["h"], p
        )
        return jnp.sum(h**2)

    diff = (params["w"], args["shift"], side["weight"], x["h"])
    parallel, serial = (jax.value_and_grad(value)(diff, p) for p in (True, False))
    assert relative_error(parallel, serial) < 1e-10

    def loss(p, a):
        return jnp.sum(jaxbraid.parallel_ode_net(f, p, args=a)(x, side=side)["h"])

    grads = jax.grad(loss, argnums=(0, 1), allow_int=True)(params, args)
    floats = {str(g.dtype) for g in (grads[0]["scale"], grads[0]["on"], grads[1]["times"])}
    assert floats == {"[('float0', 'V')]"}


@pytest.mark.parametrize(
    "options", [{}, {"linearization": "keep"}, {"saved_states": "coarse", "coarse_placement": 1}]
)
def test_auxiliary_output_and_its_derivative(options):
    n = 11
    config = exact_config(n, 2, **options)
    w, x = dense_weights(n), jax.random.normal(jax.random.key(3), (4, 3))

    def f(w, x):
        h = jnp.tanh(x @ w)
        return h, {"mean": h.mean(0), "count": jnp.int32(h.shape[0])}

    def parallel(w, x):
        net = jaxbraid.parallel_ode_net(
            f, w, has_aux=True, forward=config, mesh=mesh_of(3, 2), layer_axis="depth"
        )
        y, aux = net(x)
        return jnp.sum(y**2) + jnp.sum(jnp.exp(aux["mean"])), aux

    def serial(w, x):
        def layer(u, w):
            h, aux = f(w, u)
            return u + h / n, aux

        y, aux = jax.lax.scan(layer, x, w)
        return jnp.sum(y**2) + jnp.sum(jnp.exp(aux["mean"])), aux

    (v, aux), g = jax.value_and_grad(parallel, argnums=(0, 1), has_aux=True)(w, x)
    (v0, aux0), g0 = jax.value_and_grad(serial, argnums=(0, 1), has_aux=True)(w, x)
    assert relative_error((v, aux["mean"]), (v0, aux0["mean"])) < 1e-12
    assert relative_error(g, g0) < 1e-10
    assert aux["count"].dtype == jnp.int32 and np.all(aux["count"] == aux0["count"])


def test_loss_on_all_states():
    n = 14
    w, x = dense_weights(n), jnp.linspace(-1, 1, 6).reshape(2, 3)
    config = exact_config(n, 2, levels=3)

    def parallel(w, x):
        net = jaxbraid.parallel_ode_net(
            dense, w, forward=config, mesh=mesh_of(4, 2), layer_axis="depth", batch_axis="data"
        )
        return jnp.sum(jnp.sin(net.solve(x).us))

    def serial(w, x):
        us = jax.lax.scan(lambda u, w: (u + jnp.tanh(u @ w) / n,) * 2, x, w)[1]
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.sin(us))

    got = jax.value_and_grad(parallel, argnums=(0, 1))(w, x)
    assert relative_error(got, jax.value_and_grad(serial, argnums=(0, 1))(w, x)) < 1e-10


def test_step_form_and_a_step_a_level():
    """A step gets the step size of its level; a level may have a step of its own."""
    n = 12
    w, x = dense_weights(n), jnp.linspace(-1, 1, 6).reshape(2, 3)

    def midpoint(w, x, dt):
        return x + dt * jnp.tanh((x + 0.5 * dt * jnp.tanh(x @ w)) @ w)

    def euler(w, x, dt):
        return x + dt * jnp.tanh(x @ w)

    exact = jax.lax.scan(lambda u, w: (midpoint(w, u, 1 / n), None), x, w)[0]
    for f in (midpoint, (midpoint, euler)):
        net = jaxbraid.parallel_ode_net(f, w, form="step", forward=exact_config(n, 3))
        assert relative_error(net(x), exact) < 1e-12
        few = dataclasses.replace(net, forward=MGRIT(coarsening=3, max_iters=1))(x)
        assert 1e-10 < relative_error(few, exact) < 0.5


def test_guesses():
    n = 16
    w, x = dense_weights(n), jnp.linspace(-1, 1, 6).reshape(2, 3)
    config = MGRIT(coarsening=2, max_iters=2)
    net = jaxbraid.parallel_ode_net(dense, w, forward=config)
    serial = jnp.concatenate(
        [x[None], jax.lax.scan(lambda u, w: (u + jnp.tanh(u @ w) / n,) * 2, x, w)[1]]
    )
    coarse = net.solve(x)
    again = net.solve(x, guess=coarse.us)
    # a previous call's states go on where that call stopped
    assert np.isclose(again.stats.initial_residual, coarse.stats.residuals[-1], rtol=1e-10)
    assert net.solve(x, guess=serial).stats.initial_residual == 0.0
    constant = net.solve(x, guess="constant")
    first = jnp.linalg.norm(serial[1] - x)  # the first F-point, had u stayed at x
    assert constant.stats.initial_residual > first
    zeros = dataclasses.replace(net, forward=dataclasses.replace(config, nested_iteration=False))
    assert zeros.solve(x).stats.initial_residual > constant.stats.initial_residual


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 1), {"linearization": "keep"}),
        ((1, 1), {"saved_states": "coarse", "coarsening": ((0, 2, 5, 9, 20, 31, 33), 2)}),
        ((4, 2), {"linearization": "keep", "saved_states": "coarse", "coarse_placement": 2}),
        ((8, 1), {"saved_states": "coarse", "coarsening": (8, 2), "max_iters": 1}),  # groups
        ((3, 1), {"saved_states": "coarse", "levels": 1}),
        (
            (3, 1),
            {"linearization": "keep", "remat": jax.checkpoint_policies.dots_saveable},
        ),
    ],
)
def test_memory_options_change_nothing(mesh, options):
    names = ("linearization", "saved_states", "remat", "coarse_placement")
    plain = {k: v for k, v in options.items() if k not in names}
    assert relative_error(histories(mesh, 1, **options), histories((1, 1), 1, **plain)) < 1e-12


@pytest.mark.parametrize("final", ["F", "FC", "FCF"])
@pytest.mark.parametrize(("mesh", "factor"), [(1, 4), (1, 5), (4, 8), (8, 4)])
def test_saved_c_points_give_the_same_gradient(final, mesh, factor):
    """Of an inexact solve, too; whatever C-points the adjoint has, however intervals lie."""
    w, x = dense_weights(16), jnp.linspace(-1, 1, 6).reshape(2, 3)
    forward = MGRIT(coarsening=4, max_iters=1, final_relax=final)

    @jax.grad
    def gradient(w, mesh, saved):
        adjoint = MGRIT(coarsening=factor, max_iters=1, saved_states=saved)
        net = jaxbraid.parallel_ode_net(
            dense, w, forward=forward, adjoint=adjoint, mesh=mesh_of(mesh), layer_axis="depth"
        )
        return jnp.sum(net(x) ** 2)

    assert relative_error(gradient(w, mesh, "coarse"), gradient(w, 1, "all")) < 1e-12


@pytest.mark.slow
def test_memory_of_a_device_falls_with_their_number():
    """Arguments, results and temporaries of the gradient, by the compiler's account."""
    n, width = 256, 32

    def total(devices):
        mesh = mesh_of(devices)
        config = MGRIT(levels=4, coarsening=4, max_iters=2)

        def loss(w, x):
            net = jaxbraid.parallel_ode_net(dense, w, forward=config, mesh=mesh, layer_axis="depth")
            return jnp.sum(net(x) ** 2)

        def array(shape, *axes):
            sharding = jax.NamedSharding(mesh, jax.P(*axes))
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        arrays = array((n, width, width), "depth"), array((16, width))
        analysis = jax.jit(jax.value_and_grad(loss)).lower(*arrays).compile().memory_analysis()
        parts = ("argument", "output", "temp")
        return sum(getattr(analysis, f"{part}_size_in_bytes") for part in parts)

    assert total(8) < 0.2 * total(1)


def test_kept_linearizations_hold_shared_arguments_once():
    """What all steps share is not repeated for each of them."""
    n, width = 64, 32
    a = jax.random.normal(jax.random.key(0), (width, width)) / width
    x = jnp.ones((2, width))

    def f(p, x, args):
        return p * jnp.tanh(x @ args)

    config = MGRIT(coarsening=8, max_iters=1, linearization="keep")

    def loss(a, p):
        return jnp.sum(jaxbraid.parallel_ode_net(f, p, args=a, forward=config)(x) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(a, jnp.ones(n)).compile()
    matrices = n * a.nbytes  # if each step held its own
    assert compiled.memory_analysis().temp_size_in_bytes < matrices / 2


@pytest.mark.parametrize("devices", [4, 8])
def test_parameters_padded_to_equal_blocks(devices):
    """What stands in the padding has no influence; its gradient is zero."""
    n, slots = 7, 8
    w, x = dense_weights(n), jnp.linspace(-1, 1, 6).reshape(2, 3)
    padded = jnp.concatenate([w, jnp.full((slots - n, 3, 3), 9.0)])

    def net(w, layers=None):
        return jaxbraid.parallel_ode_net(
            dense,
            w,
            layers=layers,
            forward=MGRIT(coarsening=2, max_iters=2),
            mesh=mesh_of(devices),
            layer_axis="depth",
        )

    value = jax.value_and_grad(lambda w, *layers: jnp.sum(net(w, *layers)(x) ** 2))
    (y, g), (y0, g0) = value(padded, n), value(w)
    assert y == y0 and np.all(g[:n] == g0)
    assert g.shape == padded.shape and np.all(g[n:] == 0)
    assert net(padded, n).adjoint_probe().norms.shape == (n + 1,)
    with pytest.raises(ValueError, match=r"params has shape \(9, 3, 3\).* 7 .*padded.* 8"):
        net(jnp.zeros((9, 3, 3)), n)(x)


def test_layers_without_parameters():
    x = jnp.ones((2, 3))
    net = jaxbraid.parallel_ode_net(lambda _, x: -x, None, layers=10, forward=exact_config(10, 4))
    assert relative_error(net(x), 0.9**10 * x) < 1e-14


def test_serial_is_the_same_network():
    w, x = dense_weights(10), jnp.ones((2, 3))
    net = jaxbraid.parallel_ode_net(dense, w, mesh=mesh_of(2, 2), layer_axis="depth")
    assert relative_error(net.serial()(x), serial_dense(w, x)) < 1e-14


@pytest.mark.parametrize("mesh", [(1, 1), (8, 1)])
def test_unusual_shapes(mesh):
    """60 scalar leaves, a batch of one, more devices than intervals."""
    n = 16
    rates = jnp.linspace(0.1, 2.0, n)
    x = {f"u{i}": jnp.full((1,), 1.0 + i) for i in range(60)}

    def f(rate, x):
        return {k: -rate * v for k, v in x.items()}

    net = jaxbraid.parallel_ode_net(
        f,
        rates,
        forward=exact_config(n, 8),
        mesh=mesh_of(*mesh),
        layer_axis="depth",
        batch_axis="data",
    )
    decay = jnp.prod(1 - rates / n)
    assert relative_error(net(x), {k: decay * v for k, v in x.items()}) < 1e-12


def test_final_relaxation():
    """FC steps into the C-points once more; FCF steps from there to the F-points."""
    n, m = 32, 4
    w, x = dense_weights(n), jnp.linspace(-1, 1, 6).reshape(2, 3)

    def states(final):
        config = MGRIT(coarsening=m, max_iters=1, final_relax=final)
        return jaxbraid.parallel_ode_net(dense, w, forward=config).solve(x).us

    us = {final: states(final) for final in ("F", "FC", "FCF")}
    stepped = us["F"][:-1] + jax.vmap(dense)(w, us["F"][:-1]) / n
    assert relative_error(us["FC"][m::m], stepped[m - 1 :: m]) < 1e-14
    assert relative_error(us["FC"][1::m], us["F"][1::m]) < 1e-14
    assert relative_error(us["FCF"][::m], us["FC"][::m]) < 1e-14
    assert relative_error(us["FCF"][1], us["FCF"][0] + dense(w[0], us["FCF"][0]) / n) < 1e-14
    stepped = us["FCF"][:-1] + jax.vmap(dense)(w, us["FCF"][:-1]) / n
    assert relative_error(us["FCF"][m + 1 :: m], stepped[m::m]) < 1e-14
    assert relative_error(us["FC"], us["F"]) > 1e-8


def test_skipped_first_down_cycle_is_a_coarse_solve():
    """One iteration with `skip_first_down`: the coarse network, F-relaxed."""
    n, m = 16, 4
    w, x = dense_weights(n), jnp.linspace(-1, 1, 6).reshape(2, 3)
    config = MGRIT(coarsening=m, max_iters=1, skip_first_down=True)
    y = jaxbraid.parallel_ode_net(dense, w, forward=config)(x)
    coarse = jax.lax.scan(lambda u, w: (u + m / n * jnp.tanh(u @ w), None), x, w[::m])[0]
    assert relative_error(y, coarse) < 1e-14


def test_relaxation_only_on_the_coarsest_level():
    """The coarsest level takes steps from neighbours instead of a march: still converges."""
    w, x = dense_weights(16), jnp.linspace(-1, 1, 6).reshape(2, 3)
    config = MGRIT(coarsening=2, levels=2, max_iters=8, coarse_solver="relax")
    net = jaxbraid.parallel_ode_net(dense, w, forward=config)
    assert relative_error(net(x), serial_dense(w, x)) < 1e-12
    one = dataclasses.replace(net, forward=dataclasses.replace(config, max_iters=1))
    assert relative_error(one(x), serial_dense(w, x)) > 1e-8


def test_collective_batch_statistics():
    """A field may reduce over the batch axis by its name, as synchronised BatchNorm does."""
    n = 8
    w, x = dense_weights(n), jax.random.normal(jax.random.key(5), (6, 3))

    def value(w, x, parallel):
        def f(w, x):
            mean = x.mean(0)
            mean = jax.lax.pmean(mean, "data") if parallel else mean
            return jnp.tanh((x - mean) @ w)

        if not parallel:
            y = jax.lax.scan(lambda u, w: (u + f(w, u) / n, None), x, w)[0]
        else:
            y = jaxbraid.parallel_ode_net(
                f,
                w,
                forward=exact_config(n, 2),
                mesh=mesh_of(2, 2),
                layer_axis="depth",
                batch_axis="data",
            )(x)
        return jnp.sum(jnp.sin(y))

    got = jax.value_and_grad(value, argnums=(0, 1))(w, x, True)
    expected = jax.value_and_grad(value, argnums=(0, 1))(w, x, False)
    assert relative_error(got, expected) < 1e-10


def test_input_sharded_on_a_mesh_with_explicit_axes():
    """Output and states are typed as the input is, so that they go on in the caller's program."""
    mesh = jax.make_mesh((4, 2), ("layer", "batch"))
    spec = jax.sharding.PartitionSpec("batch")
    w, x = dense_weights(8), jax.random.normal(jax.random.key(0), (4, 3))
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    net = jaxbraid.parallel_ode_net(
        dense, w, forward=exact_config(8, 2), mesh=mesh, batch_axis="batch"
    )
    solution = net.solve(sharded)
    assert relative_error(solution.u, serial_dense(w, x)) < 1e-12
    assert jax.typeof(solution.us).sharding.spec[1] == "batch"
