r"""Initial guesses of a network's states, from what earlier batches have left.

`net(x, guess=us)` starts MGRIT from states $u_0, \dots, u_N$ in place of a coarse solve. Of these
only the C-points are used, and never $u_0$, which is `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxbraid import _check
from jaxbraid._options import check_integer


class StateGuess(NamedTuple):
    """Three pure functions, which can be jitted.

    - `init(x)`: the state of the guess; of `x`, a batch, only shapes and dtypes count.
    - `guess(state, x, index)`: states at the points 0..N for the batch `x`.
    - `update(state, us, index)`: the state after a solve for a batch has given `us`.

    `index` are integers that say of every sample of the batch what it is: see the functions that
    make a `StateGuess`.

        guesses = class_means(layers=64, classes=10)
        state = guesses.init(x)
        for x, labels in batches:
            solution = net.solve(x, guess=guesses.guess(state, x, labels))
            state = guesses.update(state, solution.us, labels)
    """

    init: Callable[[PyTree], PyTree]
    guess: Callable[[PyTree, PyTree, Int[Array, " batch"] | None], PyTree]
    update: Callable[[PyTree, PyTree, Int[Array, " batch"] | None], PyTree]


def previous_states(layers: int, *, coarsening: int = 1) -> StateGuess:
    """The states of the solve before, for batches that are always of the same samples.

    **Arguments**

    - `layers`: number of layers N.
    - `coarsening`: the factor m of the finest level: only every m-th state is kept. (1 keeps all.)

    Without an earlier solve all states are `x`. `index` is not used. On other samples than before
    the guess is poor; use `sample_states` or `class_means`.
    """
    points, nearest = _points(layers, coarsening)

    def init(x: PyTree) -> PyTree:
        return jax.tree.map(lambda a: jnp.repeat(a[None], len(points), 0), _check.arrays("x", x))

    def guess(state: PyTree, x: PyTree, index: Any = None) -> PyTree:
        return _expanded(state, x, nearest)

    def update(state: PyTree, us: PyTree, index: Any = None) -> PyTree:
        return _kept(us, points)

    return StateGuess(init, guess, update)


def sample_states(layers: int, samples: int, *, coarsening: int = 1) -> StateGuess:
    """The states of each sample when it was seen last, as in the epoch before.

    It keeps them for all samples, so its memory is that of one batch's states times the number of
    batches. `index` are the numbers of the batch's samples in the data. States of samples that have
    not been seen are `x` at all points: in the first epoch, call the net without a guess.

    **Arguments**

    - `layers`, `coarsening`: see `previous_states`.
    - `samples`: how many there are; an index must be less.
    """
    points, nearest = _points(layers, coarsening)
    samples = check_integer("samples", samples, 1)

    def init(x: PyTree) -> PyTree:
        x = _check.arrays("x", x)
        return _zeros(x, len(points), samples), jnp.zeros(samples, bool)

    def guess(state: PyTree, x: PyTree, index: Any = None) -> PyTree:
        table, seen = state
        index = _index(index, x)
        states = jax.tree.map(
            lambda t, a: jnp.where(_along(seen[index], a), t[:, index], a), table, x
        )
        return _expanded(states, x, nearest)

    def update(state: PyTree, us: PyTree, index: Any = None) -> PyTree:
        table, seen = state
        index = _index(index, jax.tree.map(lambda a: a[0], us))
        table = jax.tree.map(lambda t, u: t.at[:, index].set(u), table, _kept(us, points))
        return table, seen.at[index].set(True)

    return StateGuess(init, guess, update)


def class_means(
    layers: int, classes: int, *, momentum: float = 0.9, shift: bool = True, coarsening: int = 1
) -> StateGuess:
    r"""Running means of the states, one a class and layer.

    $\bar u_n \leftarrow \mu \bar u_n + (1 - \mu)\, \mathrm{mean}(u_n)$, the mean over a batch's
    samples of the class.

    `index` are the labels. States of classes that have not been seen are `x` at all points.

    **Arguments**

    - `layers`, `coarsening`: see `previous_states`.
    - `classes`: how many there are; a label must be less.
    - `momentum`: the weight of the past, $\mu$; the first batch of a class gives its mean.
    - `shift`: guess $\bar u_n + (x - \bar u_0)$, so that a sample starts from itself; otherwise
        $\bar u_n$.

    **Raises**

    `ValueError` or `TypeError` that names the argument.
    """
    points, nearest = _points(layers, coarsening)
    classes = check_integer("classes", classes, 1)
    if not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r}: must be a number in [0, 1).")

    def init(x: PyTree) -> PyTree:
        x = _check.arrays("x", x)
        return _zeros(x, len(points), classes), jnp.zeros(classes, bool)

    def guess(state: PyTree, x: PyTree, index: Any = None) -> PyTree:
        means, seen = state
        index = _index(index, x)

        def one(mean: Any, a: Any) -> Any:
            states = mean[:, index]
            if shift:
                states = states + (a - states[0])
            return jnp.where(_along(seen[index], a), states, a)

        return _expanded(jax.tree.map(one, means, x), x, nearest)

    def update(state: PyTree, us: PyTree, index: Any = None) -> PyTree:
        means, seen = state
        index = _index(index, jax.tree.map(lambda a: a[0], us))
        count = jnp.zeros(classes, int).at[index].add(1)

        def one(mean: Any, u: Any) -> Any:
            n = _along(count, mean[0]).astype(mean.dtype)
            new = jnp.zeros_like(mean).at[:, index].add(u) / jnp.maximum(n, 1)
            mixed = (momentum * mean + (1 - momentum) * new).astype(mean.dtype)
            return jnp.where(n == 0, mean, jnp.where(_along(seen, mean[0]), mixed, new))

        return jax.tree.map(one, means, _kept(us, points)), seen | (count > 0)

    return StateGuess(init, guess, update)


def _points(layers: int, coarsening: int) -> tuple[np.ndarray, np.ndarray]:
    """The points that are kept (C-points and the end), and for all points which of them stands."""
    layers = check_integer("layers", layers, 1)
    m = check_integer("coarsening", coarsening, 1)
    points = np.unique(np.append(np.arange(0, layers + 1, m), layers))
    return points, np.searchsorted(points, np.arange(layers + 1), "right") - 1


def _kept(us: PyTree, points: np.ndarray) -> PyTree:
    return jax.lax.stop_gradient(jax.tree.map(lambda u: u[points], us))


def _expanded(kept: PyTree, x: PyTree, nearest: np.ndarray) -> PyTree:
    """States at all points; leaves that are constant (integers, ...) are those of `x`."""

    def one(k: Any, a: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(a), jnp.inexact):
            return jnp.repeat(jnp.asarray(a)[None], len(nearest), 0)
        return k[nearest].at[0].set(a)

    return jax.lax.stop_gradient(jax.tree.map(one, kept, x))


def _zeros(x: PyTree, points: int, entries: int) -> PyTree:
    return jax.tree.map(lambda a: jnp.zeros((points, entries, *a.shape[1:]), a.dtype), x)


def _index(index: Any, x: PyTree) -> Array:
    n = jnp.shape(jax.tree.leaves(x)[0])[0]
    if index is None or jnp.shape(index) != (n,):
        given = "None" if index is None else f"of shape {jnp.shape(index)}"
        raise ValueError(f"index is {given}: must have an integer for each of the {n} samples.")
    index = jnp.asarray(index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"index has dtype {index.dtype}: must be integers.")
    return index


def _along(values: Array, a: Array) -> Array:
    """`values`, one an entry, so that they broadcast against `a` with its leading axis."""
    return values.reshape(-1, *(1,) * (jnp.ndim(a) - 1))
