"""Change of depth of Flax NNX models: every `ParallelStack` in them, and their optimisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jaxbraid._options import check_integer
from jaxbraid.training import _depth
from jaxbraid.training._depth import Order
from jaxbraid.training._stacks import stacks_of

M = TypeVar("M", bound=nnx.Module)


def deepen(model: M, layers: int | Callable[[int], int], order: Order = "constant") -> M:
    """A copy of the model in which every `ParallelStack` has the new depth.

    Parameters and statistics (BatchNorm's) are interpolated in layer time as `prolong_layers`
    does; counters are copied; PRNG streams are split, so that no two layers draw the same
    numbers. Everything outside the stacks stays, and so does the stacks' final time. The arrays
    are new ones: on a mesh, put the model there again. Fewer layers are made just so.

    **Arguments**

    - `model`: an NNX module with at least one `ParallelStack` anywhere in it.
    - `layers`: the new number of layers, or a function from the old one (`lambda n: 2 * n`).
    - `order`: `"constant"` or `"linear"`.

    **Returns**

    The new model.

    **Raises**

    `ValueError` or `TypeError` naming the argument.
    """
    new = nnx.clone(model)
    for stack in stacks_of(new).values():
        to = check_integer("layers", layers(stack.layers) if callable(layers) else layers, 1)
        state = nnx.state(stack.blocks)
        changed = nnx.map_state(lambda _, v, to=to: v.replace(_new_value(v, to, order)), state)
        nnx.update(stack.blocks, changed)
        stack.layers = to
    return new


def deepen_optimizer(
    optimizer: nnx.Optimizer, model: nnx.Module, order: Order = "constant"
) -> nnx.Optimizer:
    """An optimiser for the `model` that `deepen` made, which goes on where `optimizer` was.

    The moments follow the weights, scaled as in `prolong_optimizer_state`; counters stay.

    **Arguments**

    - `optimizer`: that of the old model.
    - `model`: the new model; all its stacks have one depth.
    - `order`: as for the weights.

    **Returns**

    A new `nnx.Optimizer`.
    """
    new = nnx.Optimizer(model, optimizer.tx, wrt=optimizer.wrt)
    pure = nnx.as_pure(optimizer.opt_state)
    state = _depth.prolong_optimizer_state(
        optimizer.tx, pure, depth_of(model), order, layered=_in_stacks(model)
    )
    nnx.update(new.opt_state, nnx.state(state))
    new.step[...] = optimizer.step[...]
    return new


def split_model(
    model: M, wrt: Any = nnx.Param
) -> tuple[PyTree, Callable[[PyTree], M], Callable[[str, Any], bool]]:
    """An NNX model as weights and a function of them, at any depth: for `MGOPT` and the like.

        params, merge, layered = split_model(model)
        method = MGOPT(lambda p, batch: loss(merge(p), batch), optimizer, layered=layered)

    **Arguments**

    - `model`: an NNX module; all its stacks have one depth.
    - `wrt`: a filter: which variables are the weights.

    **Returns**

    - `params`: the weights, a pytree of arrays.
    - `merge`: `merge(params)` is a model of the depth that `params` has. It is a new one at each
        call, so what it changes when called (statistics, counters) is lost with it.
    - `layered`: which of the weights have a layer axis: those inside the stacks.
    """
    layered = _in_stacks(model)
    graphdef, params, rest = nnx.split(model, wrt, ...)
    params = nnx.as_pure(params)
    _depth.depth("params", params, layered)

    def merge(params: PyTree) -> M:
        layers = _depth.depth("params", params, layered)
        return deepen(nnx.merge(graphdef, params, rest, copy=True), layers)

    return params, merge, layered


def depth_of(model: nnx.Module) -> int:
    """The number of layers that all stacks of the model have."""
    depths = {stack.layers for stack in stacks_of(model).values()}
    if len(depths) > 1:
        raise ValueError(f"model has stacks of {sorted(depths)} layers: must be of one depth.")
    return depths.pop()


def _in_stacks(model: nnx.Module) -> Callable[[str, Any], bool]:
    """The predicate `layered` for the model's variables."""
    starts = tuple(f"{path}/blocks/".lstrip("/") for path in stacks_of(model))
    return lambda path, leaf: path.startswith(starts)


def _new_value(variable: nnx.Variable, layers: int, order: Order) -> jax.Array:
    old = variable.get_value()
    if isinstance(variable, nnx.RngKey) and layers != old.shape[0]:
        keys = _depth.prolong_layers(old, layers)
        return jax.vmap(jax.random.fold_in)(keys, jnp.arange(layers))
    return _depth.prolong_layers(old, layers, order)
