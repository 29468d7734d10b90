"""Initial guesses: what they are against NumPy, and what they save against a serial solve."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbraid import MGRIT, parallel_ode_net
from jaxbraid.training import class_means, previous_states, sample_states
from nets import dense, dense_weights, mesh_of

N, M = 10, 4
ONE = MGRIT(coarsening=M, max_iters=1, cf_relax=0)
W = dense_weights(N)


def exact_states(x, w=W):
    us = [x]
    for n in range(N):
        us.append(us[-1] + dense(w[n], us[-1]) / N)
    return jnp.stack(us)


def batch(seed, size=4):
    return jax.random.normal(jax.random.key(seed), (size, 3))


def net(config=ONE, **options):
    return parallel_ode_net(dense, W, forward=config, **options)


@pytest.mark.parametrize("mesh", [None, (4, 2)])
@pytest.mark.parametrize("coarsening", [1, M])
def test_states_of_the_same_batch_leave_no_residual(coarsening, mesh):
    """Also that only C-points are needed, and the first state of a guess is not used."""
    place = {} if mesh is None else {"mesh": mesh_of(*mesh), "layer_axis": "depth"}
    guesses = previous_states(N, coarsening=coarsening)
    x = batch(0)
    state = guesses.update(guesses.init(x), exact_states(x), None)
    got = guesses.guess(state, x, None)
    spoilt = got.at[0].set(7.0)
    config = MGRIT(coarsening=M, max_iters=1, cf_relax=0, tol=1e-30)
    solution = net(config, **place).solve(x, guess=spoilt)
    assert solution.stats.initial_residual < 1e-14
    np.testing.assert_allclose(solution.us, exact_states(x), atol=1e-13)
    fresh = guesses.guess(guesses.init(x), x, None)
    np.testing.assert_array_equal(fresh, jnp.repeat(x[None], N + 1, 0))


def test_states_by_sample():
    guesses = sample_states(N, 8)
    a, b = batch(0), batch(1)
    state = guesses.init(a)
    state = jax.jit(guesses.update)(state, exact_states(a), jnp.array([6, 1, 3, 0]))
    x = jnp.stack([a[2], b[0], a[0]])
    got = jax.jit(guesses.guess)(state, x, jnp.array([3, 2, 6]))
    np.testing.assert_array_equal(got[:, 0], exact_states(a)[:, 2])
    np.testing.assert_array_equal(got[:, 2], exact_states(a)[:, 0])
    np.testing.assert_array_equal(got[:, 1], jnp.repeat(b[:1], N + 1, 0))


def test_means_of_classes():
    guesses = class_means(N, 3, momentum=0.75, shift=False)
    a, b = batch(0), batch(1)
    ua, ub = np.asarray(exact_states(a)), np.asarray(exact_states(b))
    state = guesses.update(guesses.init(a), ua, jnp.array([0, 2, 0, 0]))
    state = guesses.update(state, ub, jnp.array([2, 2, 2, 2]))
    got = guesses.guess(state, b, jnp.array([0, 2, 1, 2]))
    mean0, mean2 = ua[:, [0, 2, 3]].mean(1), 0.75 * ua[:, 1] + 0.25 * ub.mean(1)
    np.testing.assert_allclose(got[1:, 0], mean0[1:])
    np.testing.assert_allclose(got[1:, 1], mean2[1:])
    np.testing.assert_array_equal(got[:, 2], jnp.repeat(b[2:3], N + 1, 0))
    np.testing.assert_array_equal(got[0], b)


def test_shifted_means_start_from_the_sample_and_are_nearer():
    x = batch(0, 64) * 0.1 + 1.0
    labels = jnp.zeros(64, int)
    errors = []
    for shift in (False, True):
        guesses = class_means(N, 1, shift=shift)
        state = guesses.update(guesses.init(x), exact_states(x), labels)
        errors.append(jnp.linalg.norm(guesses.guess(state, x, labels) - exact_states(x)))
    assert errors[1] < 0.3 * errors[0]


def test_pytrees_with_constants_and_half_precision():
    x = {"a": batch(0).astype(jnp.bfloat16), "n": jnp.arange(4)}
    us = {"a": exact_states(batch(0)).astype(jnp.bfloat16), "n": jnp.zeros((N + 1, 4), int)}
    for guesses in (class_means(N, 2), sample_states(N, 4), previous_states(N)):
        state = guesses.update(guesses.init(x), us, jnp.arange(4) % 2)
        again = guesses.update(state, us, jnp.arange(4) % 2)
        got = guesses.guess(again, x, jnp.arange(4) % 2)
        assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, x)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, again)
        np.testing.assert_array_equal(got["n"], np.tile(np.arange(4), (N + 1, 1)))


def test_guess_takes_no_gradient():
    guesses = class_means(N, 2)
    x = batch(0)
    state = guesses.update(guesses.init(x), exact_states(x), jnp.arange(4) % 2)
    got = jax.grad(lambda x: jnp.sum(guesses.guess(state, x, jnp.arange(4) % 2)))(x)
    np.testing.assert_array_equal(got, 0)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="layers=0"):
        previous_states(0)
    with pytest.raises(ValueError, match="momentum=1"):
        class_means(N, 2, momentum=1)
    guesses = class_means(N, 2)
    with pytest.raises(ValueError, match="index is None"):
        guesses.guess(guesses.init(batch(0)), batch(0), None)
    with pytest.raises(TypeError, match="index has dtype"):
        guesses.guess(guesses.init(batch(0)), batch(0), jnp.ones(4))
