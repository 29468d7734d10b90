"""Transformer stacks against plain Flax layers, one layer after another.

The truth spells out the formulas of pre-norm transformers in a scan over layers; encoder and
decoder are separate there, each with streams of its own length. Tolerances are a few hundred
roundings: the operations are the same, but batched.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbraid import MGRIT
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.nn import (
    BufferedStack,
    EncoderDecoderBlock,
    EncoderDecoderStack,
    StochasticDepth,
    TransformerBlock,
)
from nets import mesh_of, relative_error

N, M, WIDTH, HEADS, BATCH, TOKENS = 9, 2, 4, 2, 4, 5
EXACT = MGRIT(coarsening=M, max_iters=5)
USUAL = MGRIT(levels=3, coarsening=2, cf_relax=(0, 1), max_iters=2, final_relax="FC")
MESH = {"mesh": mesh_of(4, 2), "layer_axis": "depth", "batch_axis": "data"}
X = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH), float)
Y = jax.random.normal(jax.random.key(1), (BATCH, TOKENS + 2, WIDTH), float)
PADDING = jnp.arange(TOKENS) < jnp.array([5, 4, 3, 5])[:, None]
Y_PADDING = jnp.arange(TOKENS + 2) < jnp.array([7, 4, 6, 5])[:, None]


def block(rngs, **options):
    return TransformerBlock(WIDTH, HEADS, hidden=6, param_dtype=float, rngs=rngs, **options)


def layers_of(stack):
    """A function to take the blocks of a stack one by one: `(scanned variables, merge)`."""
    graphdef, state = nnx.split(stack.blocks)
    return state, lambda state: nnx.merge(graphdef, state, copy=True)


def attention(m, q, k, mask):
    """Written out, with the projections of Flax's layer."""
    query, key, value = m.query(q), m.key(k), m.value(k)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH // HEADS)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    return m.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value))


def mlp(m, x):
    return m.out(nnx.gelu(m.into(x)))


def causal(x):
    n = x.shape[1]
    return jnp.arange(n)[:, None] >= jnp.arange(n)


def encoder_layer(b, x, dt, mask):
    a = attention(b.attention, b.norm(x), b.norm(x), mask)
    return x + dt * (a + mlp(b.mlp, b.mlp_norm(x + a)))


def loop(stacks, x, mask=None, dt=1 / N):
    """The truth: one layer after another."""
    for stack in stacks:
        state, merge = layers_of(stack)
        x = jax.lax.scan(
            lambda x, s, merge=merge: (encoder_layer(merge(s), x, dt, mask), None), x, state
        )[0]
    return x


def loss(tree, weights=1.0):
    return sum(jnp.sum(jnp.sin(a) * weights) for a in jax.tree.leaves(tree))


def value_and_grads(f, module, *inputs):
    """Of `f(module, *inputs)`, with respect to real parameters and inputs."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def value(params, *inputs):
        y = f(nnx.merge(graphdef, params, rest, copy=True), *inputs)
        return loss(y), y

    argnums = tuple(range(len(inputs) + 1))
    (_, y), grads = jax.jit(jax.value_and_grad(value, argnums, has_aux=True))(params, *inputs)
    return y, nnx.to_pure_dict(grads[0]), grads[1:]


def close(got, expected, rtol=1e-10):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize(
    ("causes", "place", "buffers"),
    [(False, {}, (0, 0)), (True, MESH, (2, 1))],
)
def test_values_and_gradients(causes, place, buffers):
    """Encoder with padding and decoder-only, with exact ends and without."""
    stack = BufferedStack(
        lambda r: block(r, causal=causes), N, buffers=buffers, rngs=nnx.Rngs(0), forward=EXACT,
        **place,
    )  # fmt: skip
    side = None if causes else PADDING
    mask = causal(X)[None, None] if causes else PADDING[:, None, None]
    got = value_and_grads(lambda s, x: s(x, side=side), stack, X)
    expected = value_and_grads(lambda s, x: loop(s.stacks(), x, mask), stack, X)
    close(got, expected)


@pytest.mark.slow
def test_error_falls_with_iterations():
    """Monotone, values and gradients, until exact; and exact ends leave less of it."""

    def errors(buffers, *iterations):
        truth, found = None, []
        for k in iterations:
            config = MGRIT(coarsening=M, max_iters=k, cf_relax=0)
            stack = BufferedStack(block, N, buffers=buffers, rngs=nnx.Rngs(0), forward=config)
            if truth is None:
                truth = value_and_grads(lambda s, x: loop(s.stacks(), x), stack, X)[::2]
            got = value_and_grads(lambda s, x: s(x), stack, X)[::2]
            found.append([relative_error(a, b) for a, b in zip(got, truth, strict=True)])
        return np.array(found)

    history = errors((0, 0), 1, 2, 5)
    assert np.all(history[1:] < 0.7 * history[:-1]), history
    assert np.all(history[0] > 1e-5) and np.all(history[-1] < 1e-12), history
    assert np.all(errors((2, 2), 1) < history[0])


def test_padding_and_later_tokens_have_no_influence():
    """Real tokens: as in a batch without padding. With a causal mask: as without what follows."""
    stack = BufferedStack(block, N, rngs=nnx.Rngs(0), forward=USUAL)
    y = nnx.jit(lambda s, x: s(x, side=PADDING))(stack, X)
    close(y[2:3, :3], stack(X[2:3, :3]))
    stack = BufferedStack(lambda r: block(r, causal=True), N, rngs=nnx.Rngs(0), forward=USUAL)
    close(stack(X)[:, :3], stack(X[:, :3]))


class Clock(nnx.Module):
    """dx/dt = w t"""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x, t, dt, inputs):
        return self.w.get_value() * t + inputs[:, None]


@pytest.mark.parametrize("place", [{}, MESH])
def test_buffers_see_the_time_of_the_whole_depth(place):
    """Closed form: the sum of the squares' times, and every layer's own input."""
    stack = BufferedStack(
        Clock, N, buffers=(3, 1), rngs=nnx.Rngs(0), t_final=3.0, forward=EXACT, **place
    )
    inputs = jnp.arange(N * BATCH, dtype=float).reshape(N, BATCH)
    solution = stack.solve(jnp.zeros((BATCH, 1)), inputs=inputs)
    dt = 3 / N
    rates = dt * np.arange(N)[:, None] + np.asarray(inputs)
    expected = dt * np.concatenate([np.zeros((1, BATCH)), np.cumsum(rates, 0)])
    np.testing.assert_allclose(solution.us[..., 0], expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(solution.u, solution.us[-1])
    assert len(stack.middle.blocks.w.get_value()) == N - 4
    # states of a solve are a guess that leaves nothing to do
    again = stack.solve(jnp.zeros((BATCH, 1)), inputs=inputs, guess=solution.us)
    assert np.all(again.stats.residuals < 1e-12)


def test_ends_of_a_stack_are_exact():
    """However inexact the middle is."""
    none = MGRIT(coarsening=M, max_iters=0, nested_iteration=False)
    stack = BufferedStack(block, N, buffers=(3, 2), rngs=nnx.Rngs(0), forward=none)
    us = stack.solve(X, guess="constant").us
    close(us[3], loop([stack.opening], X))
    close(us[-1], loop([stack.closing], us[-3]))
    assert relative_error(us[-3], loop(stack.stacks()[:2], X)) > 1e-3
    stack.set_attributes(serial=True)
    close(stack(X), loop(stack.stacks(), X))


# ---------------------------------------------------------------------- encoder-decoder


def encoder_and_decoder(stacks, encoder_layers, x, y, x_mask, y_mask, dt):
    """The truth: an encoder, then a decoder which attends to its final state."""
    states, merges = zip(*map(layers_of, stacks), strict=True)
    state, merge = jax.tree.map(lambda *a: jnp.concatenate(a), *states), merges[0]
    first, last = (jax.tree.map(lambda a, i=i: a[i], state)
                   for i in (slice(encoder_layers), slice(encoder_layers, None)))  # fmt: skip
    memory = x_mask[:, None, None]
    x = jax.lax.scan(lambda x, s: (encoder_layer(merge(s), x, dt, memory), None), x, first)[0]
    seen = causal(y) & y_mask[:, None, None]

    def decoder_layer(y, s):
        b = merge(s)
        a = attention(b.attention, b.norm(y), b.norm(y), seen)
        d = a + attention(b.cross, b.cross_norm(y + a), b.memory_norm(x), memory)
        return y + dt * (d + mlp(b.mlp, b.mlp_norm(y + d))), None

    return x, jax.lax.scan(decoder_layer, y, last)[0]


def encoder_decoder(**options):
    return EncoderDecoderStack(
        lambda r: EncoderDecoderBlock(WIDTH, HEADS, hidden=6, param_dtype=float, rngs=r),
        5, 4, rngs=nnx.Rngs(0), **{"forward": EXACT} | options,
    )  # fmt: skip


@pytest.mark.parametrize(("place", "buffers", "swap"), [({}, (2, 1), False), (MESH, (0, 0), True)])
def test_encoder_decoder(place, buffers, swap):
    """Also with the longer stream in the encoder; the decoder sees the final encoder state."""
    stack = encoder_decoder(buffers=buffers, t_final=N, **place)
    x, y, x_mask, y_mask = (Y, X, Y_PADDING, PADDING) if swap else (X, Y, PADDING, Y_PADDING)
    got = value_and_grads(lambda s, x, y: s(x, y, x_mask=x_mask, y_mask=y_mask), stack, x, y)
    expected = value_and_grads(
        lambda s, x, y: encoder_and_decoder(s.stack.stacks(), 5, x, y, x_mask, y_mask, 1.0),
        stack, x, y,
    )  # fmt: skip
    close(got, expected)


def test_encoder_decoder_error_falls_and_masks_may_be_left_out():
    everything = [jnp.ones(a.shape[:2], bool) for a in (X, Y)]
    errors = []
    for k in (1, 2, 5):
        stack = encoder_decoder(forward=MGRIT(coarsening=M, max_iters=k, cf_relax=0))
        truth = encoder_and_decoder(stack.stack.stacks(), 5, X, Y, *everything, 1 / N)
        errors.append(relative_error(nnx.jit(lambda s: s(X, Y))(stack), truth))
    assert all(b < 0.7 * a for a, b in itertools.pairwise(errors)), errors
    assert errors[-1] < 1e-12


# --------------------------------------------------------------------- dropout, types


def test_dropout_draws_once_a_call_and_not_in_evaluation():
    """More iterations change nothing once exact; the next call differs; eval is the plain net."""

    def stack(iterations):
        return BufferedStack(
            lambda r: block(r, dropout=0.3), N, rngs=nnx.Rngs(0),
            forward=MGRIT(coarsening=M, max_iters=iterations),
        )  # fmt: skip

    call = nnx.jit(lambda s: s(X))
    exact, longer = stack(5), stack(8)
    first, second = call(exact), call(exact)
    close(call(longer), first)
    assert relative_error(first, second) > 1e-2
    exact.eval()
    plain = call(exact)
    close(plain, loop(exact.stacks(), X))
    close(call(exact), plain, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_precisions(dtype):
    """Parameters in float32, states in `dtype`: within its roundings of the same in float64."""
    stack = BufferedStack(
        lambda r: TransformerBlock(WIDTH, HEADS, dtype=dtype, causal=True, rngs=r),
        N, rngs=nnx.Rngs(0), forward=EXACT,
    )  # fmt: skip
    y, grads, _ = value_and_grads(lambda s, x: s(x), stack, X.astype(dtype))
    assert y.dtype == dtype
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    exact = BufferedStack(
        lambda r: TransformerBlock(WIDTH, HEADS, dtype=float, causal=True, rngs=r),
        N, rngs=nnx.Rngs(0), forward=EXACT,
    )  # fmt: skip
    truth, true_grads, _ = value_and_grads(
        lambda s, x: loop(s.stacks(), x, causal(x)[None, None]), exact, X
    )
    epsilon = float(jnp.finfo(dtype).eps)
    assert relative_error(y.astype(float), truth) < 10 * epsilon
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(true_grads)))
    difference = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), grads, true_grads)
    assert np.sqrt(sum(jax.tree.leaves(difference))) < 10 * epsilon * norm


def test_sizes_at_the_edge():
    """One layer, a batch of one, one token."""
    one = BufferedStack(block, 1, rngs=nnx.Rngs(0))
    close(one(X[:1, :1]), loop(one.stacks(), X[:1, :1], dt=1.0))


def test_bad_input():
    for buffers, error in (((5, 4), ValueError), ((-1, 0), ValueError), (3, TypeError)):
        with pytest.raises(error, match="buffers"):
            BufferedStack(block, N, buffers=buffers, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="decoder_layers=0"):
        EncoderDecoderStack(block, 2, 0, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="make_block"):
        EncoderDecoderStack(block, 2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="t_start"):
        ParallelStack(block, 2, t_start="0", rngs=nnx.Rngs(0))(X)


# ------------------------------------------------------------------- stochastic depth


def dropped(keep, iterations=5, layers=N, **options):
    """A stack of blocks that are left out at random."""
    place = {k: options.pop(k) for k in tuple(options) if k in MESH}

    def make(rngs):
        return StochasticDepth(block(rngs), keep, rngs=rngs, **options)

    forward = MGRIT(coarsening=M, max_iters=iterations)
    form = options.get("form", "field")
    return ParallelStack(make, layers, rngs=nnx.Rngs(0), forward=forward, form=form, **place)


def keep_of(n, first, last):
    return first + (last - first) * n / N


def dropped_loop(stack, x, keep, per_sample, call=0):
    """The truth, with the draws of the layers' keys."""
    state, merge = layers_of(stack)

    def one(x, inputs):
        s, n = inputs
        b, p = merge(s), keep_of(n, *keep)
        key = jax.random.fold_in(b.rngs.key.get_value(), call)
        kept = jax.random.bernoulli(key, p, (BATCH,) if per_sample else ())
        kept = jnp.broadcast_to(kept, (BATCH,))
        scale = kept[:, None, None] / p / N
        return x + scale * (encoder_layer(b.block, x, 1.0, None) - x), kept

    return jax.lax.scan(one, x, (state, jnp.arange(N)))


def test_stochastic_depth():
    """One mask a layer and call, on all iterations and levels, with gradients; eval has none."""
    keep = (1.0, 0.3)
    stack = dropped(keep, iterations=8)  # three more than make it exact
    truth = value_and_grads(lambda s, x: dropped_loop(s, x, keep, True)[0], stack, X)
    close(value_and_grads(lambda s, x: s(x), stack, X), truth)
    masks = np.asarray(dropped_loop(stack, X, keep, True)[1])
    assert masks[0].all() and not masks.all() and np.any(masks != masks[:, :1])

    call = nnx.jit(lambda s: s(X))
    first, second = call(stack), call(stack)
    close(second, dropped_loop(stack, X, keep, True, call=1)[0])
    assert relative_error(first, second) > 1e-3
    stack.eval()
    close(call(stack), dropped_loop(stack, X, (1.0, 1.0), True)[0])
    assert np.all(stack.blocks.rngs.count.get_value() == 2)


def test_stochastic_depth_on_a_split_batch():
    """Samples of both parts draw differently; a layer that draws for all draws alike."""
    x = jnp.tile(X[:2], (2, 1, 1))
    call = nnx.jit(lambda s, x: s(x))
    keep = (1.0, 0.3)
    common = dropped(keep, per_sample=False, **MESH)
    expected, masks = dropped_loop(common, x, keep, False)
    close(call(common, x), expected)
    assert not np.all(masks)
    each = call(dropped(keep, **MESH), x)
    assert relative_error(each[:2], each[2:]) > 1e-3


def test_stochastic_depth_keeps_the_mean_and_the_fraction():
    """Over many samples: kept layers as often as asked, and dx/dt right on average."""

    class One(nnx.Module):
        def __call__(self, x):
            return jnp.ones_like(x)

    def make(rngs):
        return StochasticDepth(One(), (1.0, 0.5), rngs=rngs)

    stack = ParallelStack(make, N, rngs=nnx.Rngs(0), forward=EXACT)
    us = np.asarray(stack.solve(jnp.zeros((4000, 1))).us)[..., 0]
    steps = np.diff(us, axis=0) * N
    for n in range(N):
        p = keep_of(n, 1.0, 0.5)
        near = 5 * np.sqrt(p * (1 - p) / 4000) + 1e-12  # five standard deviations
        assert abs(np.mean(steps[n] > 0.5) - p) <= near
        np.testing.assert_allclose(steps[n][steps[n] > 0.5], 1 / p, rtol=1e-10)
    assert abs(us[-1].mean() - 1) < 0.02


def test_stochastic_depth_of_steps_and_bad_input():
    """A step that is left out is the identity."""

    class Double(nnx.Module):
        def __call__(self, x):
            return 2 * x

    def make(rngs):
        return StochasticDepth(Double(), 0.5, form="step", rngs=rngs)

    stack = ParallelStack(make, 4, rngs=nnx.Rngs(0), form="step", forward=MGRIT(levels=1))
    us = np.asarray(stack.solve(jnp.ones((50, 1))).us)[..., 0]
    ratios = us[1:] / us[:-1]
    assert set(np.unique(ratios)) == {1.0, 3.0}  # 1 + (2 - 1) / 0.5
    for keep in (0.0, 1.2, (1.0, -0.1)):
        with pytest.raises(ValueError, match="keep="):
            StochasticDepth(Double(), keep, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="keep="):
        StochasticDepth(Double(), "half", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="form="):
        StochasticDepth(Double(), 0.5, form="ode", rngs=nnx.Rngs(0))
