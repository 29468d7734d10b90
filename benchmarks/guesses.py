"""What initial guesses of the states save, on the handwritten digits, as training goes on.

    python benchmarks/guesses.py

A network of 32 layers (width 32, two levels, factor 4, F-relaxation) is trained serially by Adam.
At some epochs the table gives, for each way to start MGRIT, the residual relative to the norm of
all states at the start and after 1 and 2 iterations, and the iterations to 1e-4; means over the
batches of the epoch. The coarse solve (nested iteration) costs more than a guess: a sequential
solve of the coarsest level, and with more than two levels V-cycles on the way up.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxbraid
from jaxbraid import MGRIT
from jaxbraid.training import class_means, previous_states, sample_states

LAYERS, WIDTH, BATCH, TOL = 32, 32, 128, 1e-4
CONFIG = MGRIT(coarsening=4, cf_relax=0, max_iters=8)
GUESSES = {
    "coarse solve": None,
    "x at all points": "constant",
    "the batch before": previous_states(LAYERS, coarsening=4),
    "the epoch before": sample_states(LAYERS, 1792, coarsening=4),
    "means of classes": class_means(LAYERS, 10, shift=False, coarsening=4),
    "means of classes, shifted": class_means(LAYERS, 10, coarsening=4),
}


def network(weights, config):
    return jaxbraid.parallel_ode_net(
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        weights["stack"],
        t_final=2.0,
        forward=config,
    )


def make_weights(rough):
    k = jax.random.split(jax.random.key(0), 4)
    w = jax.random.normal(k[0], (LAYERS if rough else 1, WIDTH, WIDTH)) / WIDTH**0.5
    return {
        "open": jax.random.normal(k[1], (64, WIDTH)) / 8,
        "stack": {
            "w": jnp.broadcast_to(w, (LAYERS, WIDTH, WIDTH)),
            "b": jnp.zeros((LAYERS, WIDTH)),
        },
        "close": jax.random.normal(k[2], (WIDTH, 10)) / WIDTH**0.5,
    }


def opened(weights, images):
    return jnp.tanh(images @ weights["open"])


@jax.jit
def train(state, images, labels):
    """One step; also the exact states before it."""

    def loss(weights):
        x = opened(weights, images)
        solution = network(weights, MGRIT(levels=1)).solve(x)
        logits = solution.u @ weights["close"]
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (
            x,
            solution.us,
        )

    weights, opt_state = state
    gradient, seen = jax.grad(loss, has_aux=True)(weights)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state)
    return (optax.apply_updates(weights, updates), opt_state), seen


@jax.jit
def residuals(weights, x, guess):
    """Relative residuals of the guess and after each iteration."""
    solution = network(weights, CONFIG).solve(x, guess=guess)
    r = jnp.append(solution.stats.initial_residual, solution.stats.residuals)
    return r / jnp.linalg.norm(solution.us)


OPTIMIZER = optax.adam(1e-3)


def measure(epochs, shown, rough):
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    weights = make_weights(rough)
    state = weights, OPTIMIZER.init(weights)
    x = opened(weights, images[:BATCH])
    kept = {k: g.init(x) for k, g in GUESSES.items() if isinstance(g, tuple)}
    functions = {k: (jax.jit(GUESSES[k].guess), jax.jit(GUESSES[k].update)) for k in kept}
    for epoch in range(1, epochs + 1):
        order = np.random.default_rng(epoch).permutation(1792).reshape(-1, BATCH)
        rows = {name: [] for name in GUESSES}
        for index in order:
            indices = {name: labels[index] for name in kept} | {"the epoch before": index}
            weights = state[0]
            state, (x, us) = train(state, images[index], labels[index])
            for name, guess in GUESSES.items():
                if name in kept:
                    guess = functions[name][0](kept[name], x, indices[name])
                elif guess == "constant":
                    guess = jnp.repeat(x[None], LAYERS + 1, 0)
                if epoch in shown:
                    rows[name].append(np.asarray(residuals(weights, x, guess)))
                if name in kept:
                    kept[name] = functions[name][1](kept[name], us, indices[name])
        if epoch in shown:
            for name, row in rows.items():
                r = np.array(row)
                iterations = np.argmax(r <= TOL, axis=1).mean()
                numbers = "".join(f"{v:10.1e}" for v in r[:, :3].mean(0))
                print(f"{epoch:5}  {name:26}{numbers}{iterations:12.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[2, 10, 40])
    given = parser.parse_args()
    for rough in (False, True):
        print(f"weights {'independent' if rough else 'equal'} at the start, layer by layer")
        print(f"epoch  {'start':26}{'start':>10}{'1 iter.':>10}{'2 iter.':>10}{'to 1e-4':>12}")
        measure(max(given.epochs), given.epochs, rough)


if __name__ == "__main__":
    main()
