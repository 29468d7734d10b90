"""Nested iteration over depth: train a shallow network, deepen it, train on.

The work is counted in evaluations of a layer, forward or backward: a step of an optimiser on N
layers costs 2 N, whether they are computed serially or in parallel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, PyTree

from jaxbraid._options import check_integer
from jaxbraid.training._deepen import deepen, deepen_optimizer, depth_of
from jaxbraid.training._depth import (
    Layered,
    Order,
    depth,
    prolong_layers,
    prolong_optimizer_state,
)


@dataclasses.dataclass(frozen=True)
class NestedStep:
    """What a callback of `nested_iteration` is told after each step.

    `params` and `optimizer_state` are those after the step (with NNX: the model and its
    `nnx.Optimizer`), `loss` is that before it, `work` counts layer evaluations from the beginning.
    """

    stage: int
    layers: int
    step: int
    work: int
    loss: Array
    params: Any
    optimizer_state: Any


@dataclasses.dataclass(frozen=True)
class Nested:
    """The result of `nested_iteration`.

    `params` and `optimizer_state` of the deepest network (with NNX: the model and its
    `nnx.Optimizer`), and for every step of all stages the number of `layers`, the `losses` before
    it and the `work` after it, in layer evaluations from the beginning.
    """

    params: Any
    optimizer_state: Any
    layers: np.ndarray
    losses: np.ndarray
    work: np.ndarray


def nested_iteration(
    loss: Callable[[Any, Any], Array],
    params: PyTree | nnx.Module,
    optimizer: optax.GradientTransformation,
    batches: Iterable[Any],
    stages: Sequence[tuple[int, int]],
    *,
    order: Order = "constant",
    layered: Layered = True,
    wrt: Any = nnx.Param,
    callback: Callable[[NestedStep], None] | None = None,
) -> Nested:
    """Train through a sequence of depths; at each change weights and optimiser go on, prolonged.

    **Arguments**

    - `loss`: `loss(params, batch)`, a scalar, at every depth (a `parallel_ode_net` takes its number
        of layers from its weights). With an NNX model: `loss(model, batch)`.
    - `params`: the weights of the first, shallow network, a pytree; or an NNX model with
        `ParallelStack`s.
    - `optimizer`: an Optax optimiser.
    - `batches`: one for each step: an iterable (`itertools.repeat(data)` trains on all data).
    - `stages`: `[(layers, steps), ...]`; the first number of layers is that of `params`.
    - `order`: `"constant"` or `"linear"`, as in `prolong_layers`.
    - `layered`: which weights have a layer axis, as in `prolong_layers`; an NNX model knows.
    - `wrt`: which variables of an NNX model are trained.
    - `callback`: is called after every step with a `NestedStep`. Reading its `loss` waits for it.

    **Returns**

    A `Nested`.

    **Raises**

    `ValueError` or `TypeError` naming the argument; also when `batches` ends too early.

    ??? cite "Reference"

        E. C. Cyr, S. Guenther, J. B. Schroder: Multilevel initialization for layer-parallel deep
        neural network training, 2019.
    """
    if isinstance(params, nnx.Module):
        model = deepen(params, lambda n: n)  # a copy: the caller's stays as it is
        state: tuple[Any, Any] = (model, nnx.Optimizer(model, optimizer, wrt=wrt))
        train, refine, present = _of_model(loss, order, wrt)
    else:
        state = params, optimizer.init(params)
        train, refine, present = _of_tree(loss, optimizer, order, layered)
    stages = _checked(stages, present(state))
    batches, losses, layers = iter(batches), [], []
    for stage, (n, steps) in enumerate(stages):
        state = refine(state, n) if stage else state
        for step in range(steps):
            try:
                batch = next(batches)
            except StopIteration:
                raise ValueError(
                    f"batches has only {len(losses)}: stages={stages} needs one for each step."
                ) from None
            state, value = train(state, batch)
            losses.append(value)
            layers.append(n)
            if callback is not None:
                callback(NestedStep(stage, n, step, 2 * sum(layers), value, *state))
    work = 2 * np.cumsum(layers)
    return Nested(*state, np.array(layers), np.array(jax.device_get(losses)), work)


def _of_tree(loss: Any, optimizer: Any, order: Order, layered: Layered) -> tuple[Any, Any, Any]:
    @jax.jit
    def train(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def refine(state: Any, layers: int) -> Any:
        params, opt_state = state
        return (
            prolong_layers(params, layers, order, layered=layered),
            prolong_optimizer_state(optimizer, opt_state, layers, order, layered=layered),
        )

    return train, refine, lambda state: depth("params", state[0], layered)


def _of_model(loss: Any, order: Order, wrt: Any) -> tuple[Any, Any, Any]:
    gradient = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))

    def update(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = gradient(model, batch)
        optimizer.update(model, grads)
        return value

    step: Any = nnx.jit(update)

    def train(state: Any, batch: Any) -> Any:
        return state, step(*state, batch)

    def refine(state: Any, layers: int) -> Any:
        model = deepen(state[0], layers, order)
        return model, deepen_optimizer(state[1], model, order)

    return train, refine, lambda state: depth_of(state[0])


def _checked(stages: Any, layers: int) -> list[tuple[int, int]]:
    try:
        pairs = [(layers_, steps) for layers_, steps in stages]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise ValueError(f"stages={stages!r}: must be a sequence of pairs (layers, steps).")
    pairs = [
        (check_integer("layers in stages", n, 1), check_integer("steps in stages", s, 0))
        for n, s in pairs
    ]
    if pairs[0][0] != layers:
        raise ValueError(
            f"stages={stages!r}: starts with {pairs[0][0]} layers: must be those of params, "
            f"{layers}."
        )
    return pairs
