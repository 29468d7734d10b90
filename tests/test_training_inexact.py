"""Adaptive inexactness: estimates against exact errors, decisions, and what they change in nets."""

from __future__ import annotations

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxbraid import MGRIT, parallel_ode_net, transfers
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training import (
    ControlState,
    GradientError,
    InexactnessControl,
    Solvers,
    adjoint_error,
    gradient_error,
    gradient_noise,
    model_gradient,
    set_solvers,
    solver_ladder,
)
from nets import dense, dense_weights, relative_error, serial_dense

N, M = 16, 2
ONE = MGRIT(coarsening=M, cf_relax=0, max_iters=1, final_relax="FC")
SERIAL = MGRIT(levels=1)
X = jax.random.normal(jax.random.key(0), (3, 3))
W = dense_weights(N)


def gradient(solvers, w=W):
    def loss(w):
        net = parallel_ode_net(dense, w, forward=solvers.forward, adjoint=solvers.adjoint)
        return jnp.sum(net(X) ** 2)

    return jax.grad(loss)(w)


def exact_gradient():
    return jax.grad(lambda w: jnp.sum(serial_dense(w, X) ** 2))(W)


def test_error_of_a_gradient():
    a = {"x": jnp.array([3.0, 0.0]), "n": jnp.arange(2)}
    b = {"x": jnp.array([3.0, 4.0]), "n": jnp.arange(2) + 1}
    error = gradient_error(a, b)
    np.testing.assert_allclose([error.relative, error.cosine, error.norm], [0.8, 0.6, 5.0])


def test_error_of_half_precision_is_measured_in_single():
    a, b = jnp.full(1000, 1.0, jnp.bfloat16), jnp.full(1000, 1.0078125, jnp.bfloat16)
    np.testing.assert_allclose(gradient_error(a, b).relative, 0.0078125 / 1.0078125, rtol=1e-5)


def test_noise_is_the_standard_deviation():
    g = np.random.default_rng(0).normal(size=(5, 7))
    got = gradient_noise([{"a": jnp.array(x[:3]), "b": jnp.array(x[3:])} for x in g])
    np.testing.assert_allclose(got, np.sqrt(np.var(g, axis=0, ddof=1).sum()))
    with pytest.raises(ValueError, match="at least two"):
        gradient_noise([jnp.ones(2)])


def test_doubling_estimates_the_true_error():
    """Within the factor 1 +- rho that a doubling converges by; both measured with the truth."""
    control = InexactnessControl(solver_ladder(ONE, layers=N))
    cheap = control.solvers(control.init())
    got = control.estimate(control.init(), gradient)
    truth = gradient_error(gradient(cheap), exact_gradient())
    rho = gradient_error(gradient(cheap.doubled()), exact_gradient()).relative / truth.relative
    assert 0 < rho < 0.5 and truth.relative > 1e-3
    np.testing.assert_allclose(got.relative, truth.relative, rtol=1.5 * float(rho))


def test_ladder_climbs_to_exact():
    rungs = solver_ladder(ONE, layers=2 * N)
    forward = [r.forward for r in rungs]
    assert [c.cf_relax for c in forward] == [0, 1, 1, 1, 1]
    assert [c.max_iters for c in forward[:-1]] == [1, 1, 2, 4] and rungs[-1].serial
    errors = [relative_error(gradient(s), exact_gradient()) for s in solver_ladder(ONE, layers=N)]
    assert all(a > b for a, b in itertools.pairwise(errors)) and errors[-1] < 1e-12
    assert solver_ladder(SERIAL, layers=1) == (Solvers(SERIAL, SERIAL),)


def test_ladder_takes_levels_tolerances_and_irregular_coarsening():
    three = MGRIT(levels=3, coarsening=2, cf_relax=(0, 1), max_iters=2, tol=1e-2)
    rungs = solver_ladder(three, ONE, layers=64)
    assert rungs[1].forward.cf_relax == (1, 1) and rungs[1].adjoint.cf_relax == 1
    assert rungs[2].forward.tol == 1e-3 and rungs[2].adjoint.max_iters == 2
    irregular = MGRIT(coarsening=np.array([0, 3, 8, 9]), max_iters=1, cf_relax=1)
    assert len(solver_ladder(irregular, layers=12)) == 2


def test_decisions():
    control = InexactnessControl(solver_ladder(ONE, layers=N), tol=0.3, every=10)
    state = control.init()
    assert control.due(state, 0)
    state, decision = control.update(state, 0, GradientError(0.1, 0.99, 1.0))
    assert decision.action == "keep" and not control.due(state, 9) and control.due(state, 10)
    state, decision = control.update(state, 10, GradientError(0.5, 0.9, 1.0))
    assert (decision.action, decision.rung) == ("raise", 1) and control.due(state, 10)
    assert control.solvers(state) == control.ladder[1]
    noisy, decision = control.update(state, 20, GradientError(0.5, 0.9, 1.0, noise=2.0))
    assert decision.action == "keep", "an error of a quarter of the noise does not hurt"
    broken, decision = control.update(noisy, 30, GradientError(np.nan))
    assert decision.action == "serial" and not control.due(broken, 1000)
    table = control.table(broken, keeps=False)
    assert table.row_count == 2 and control.table(broken).row_count == 4
    assert ControlState.from_json(json.loads(json.dumps(noisy.to_json()))) == noisy


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="ladder is empty"):
        InexactnessControl(())
    with pytest.raises(TypeError, match="forward"):
        InexactnessControl(((1, ONE),))
    with pytest.raises(ValueError, match="tol=0"):
        InexactnessControl(((ONE, ONE),), tol=0)
    with pytest.raises(ValueError, match="every=0"):
        InexactnessControl(((ONE, ONE),), every=0)
    with pytest.raises(TypeError, match="layers"):
        solver_ladder(ONE, layers=1.5)
    with pytest.raises(ValueError, match="no ParallelStack"):
        set_solvers(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), ONE)


def test_adjoint_error_is_the_relative_residual():
    def record(config):
        net = parallel_ode_net(dense, W, forward=SERIAL, adjoint=config)
        loss = lambda probe: jnp.sum(net(X, adjoint_probe=probe) ** 2)  # noqa: E731
        return jax.grad(loss)(net.adjoint_probe())

    seen = record(ONE)
    expected = seen.residuals[0] / jnp.linalg.norm(seen.norms)
    np.testing.assert_allclose(adjoint_error(seen).relative, expected)
    assert adjoint_error(record(ONE)).relative > 1e3 * adjoint_error(record(SERIAL)).relative


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs, param_dtype=jnp.float64)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.drop(self.linear(x)))


def squared(model, x):
    return jnp.sum(model(x) ** 2)


def test_solvers_of_a_model_and_its_gradients():
    """Cheap gradients differ from the model's own serial ones, those of `serial` do not."""
    rngs = nnx.Rngs(0)
    stacks = [ParallelStack(Block, N, rngs=rngs, forward=ONE) for _ in range(2)]
    model = nnx.Sequential(*stacks)
    before = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.RngCount)))
    of = model_gradient(model, squared, X)
    cheap, exact = of(Solvers(ONE, ONE)), of(Solvers(SERIAL, SERIAL))
    after = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.RngCount)))
    np.testing.assert_array_equal(before, after)
    assert all(s.options.forward == ONE for s in stacks)

    set_solvers(model, SERIAL)
    assert all(s.options.forward == SERIAL == s.options.adjoint for s in stacks)
    model.set_attributes(serial=True)
    truth = nnx.grad(squared)(model, X)
    error = lambda g: float(gradient_error(g, truth).relative)  # noqa: E731
    assert error(exact) < 1e-12 and error(cheap) > 1e-3
    assert float(optax.tree.norm(truth)) > 0


def test_serial_solvers_of_a_stack_with_transfers():
    identity = transfers.Transfer(lambda u: u, lambda u: u)
    stack = ParallelStack(Block, N, rngs=nnx.Rngs(0), forward=ONE, transfers=[identity])
    set_solvers(stack, SERIAL)
    assert stack.serial and stack(X).shape == X.shape
    set_solvers(stack, ONE)
    assert not stack.serial and stack(X).shape == X.shape
