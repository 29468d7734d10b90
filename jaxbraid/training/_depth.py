r"""Change of depth: weights, gradients and optimiser states of N layers made those of N' layers.

Layer $n$ of $N$ lives at the time $t_n = n T / N$, as in the engine, and covers the time up to
$t_{n+1}$. The final time stays, so a deeper network has smaller steps. All transfers are linear
maps along the leading axis with few entries a row; $N$ and $N'$ need not divide each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxbraid import _tree
from jaxbraid._options import check_choice, check_integer

Order = Literal["constant", "linear"]
Kind = Literal["injection", "average", "transpose"]
Layered = PyTree | Callable[[str, Any], bool]

# How a field of an optimiser's state grows with the gradient: mu with g, nu with g^2.
POWERS = {"mu": 1, "trace": 1, "nu": 2, "nu_max": 2, "sum_of_squares": 2}


def prolong_layers(
    tree: PyTree, layers: int, order: Order = "constant", *, layered: Layered = True
) -> PyTree:
    r"""Weights for `layers` layers from those of another number of layers (usually fewer).

    **Arguments**

    - `tree`: a pytree; its layered leaves have leading axis N, real or complex. Others (integers,
        booleans, PRNG keys) take the value of the layer that covers the time, in any `order`.
    - `layers`: the new leading axis, at least 1.
    - `order`: `"constant"`: a layer takes the weights of the old layer that covers its time $t_n$;
        `"linear"`: interpolated in time between old layers (after the last of them, constant).
    - `layered`: which leaves have a layer axis; the others stay. `True`, a pytree of booleans that
        is a prefix of `tree`, or a function `(path, leaf) -> bool` with paths such as
        `"stack/blocks/kernel"`.

    **Returns**

    The pytree with leading axes `layers`.

    **Raises**

    `ValueError` or `TypeError` naming the argument, or the leaf that has no layer axis.

    ??? cite "Reference"

        E. C. Cyr, S. Guenther, J. B. Schroder: Multilevel initialization for layer-parallel deep
        neural network training, 2019.
    """
    check_choice("order", order, ("constant", "linear"))
    return _along_layers("tree", tree, layers, layered, lambda n, to: _rows(order, n, to))


def restrict_layers(
    tree: PyTree,
    layers: int,
    kind: Kind = "injection",
    *,
    order: Order = "constant",
    layered: Layered = True,
) -> PyTree:
    r"""Weights or gradients for `layers` layers from those of another number (usually more).

    **Arguments**

    - `tree`, `layers`, `layered`: as in `prolong_layers`.
    - `kind`: for weights `"injection"` (of the layer that covers the new layer's time $t_n$, which
        is a C-point where the numbers divide) or `"average"` (over the time that the new layer
        covers); for gradients `"transpose"`, the transpose of `prolong_layers`: the gradient of
        $f(P\theta)$ with respect to $\theta$. Leaves that are not real or complex are injected.
    - `order`: of the prolongation that `"transpose"` transposes.

    **Returns**

    The pytree with leading axes `layers`.

    **Raises**

    `ValueError` or `TypeError` naming the argument, or the leaf that has no layer axis.
    """
    check_choice("kind", kind, ("injection", "average", "transpose"))
    check_choice("order", order, ("constant", "linear"))
    name = {"injection": "constant", "average": "average", "transpose": f"transpose {order}"}[kind]
    return _along_layers("tree", tree, layers, layered, lambda n, to: _rows(name, n, to))


def prolong_optimizer_state(
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    layers: int,
    order: Order = "constant",
    *,
    layered: Layered = True,
    scale: bool = True,
) -> optax.OptState:
    r"""The state of an Optax optimiser for weights that `prolong_layers` makes.

    What the state holds for every weight (Adam's moments, momentum) is prolonged as the weights
    are; counters, learning rates and everything for weights without a layer axis stay.

    **Arguments**

    - `optimizer`, `state`: the optimiser, and its state for the old number of layers.
    - `layers`, `order`: as in `prolong_layers`.
    - `layered`: as in `prolong_layers`, of the weights.
    - `scale`: a layer's gradient is proportional to its step $T/N$, so first moments are also
        multiplied by $N/N'$ and second moments by $(N/N')^2$. Otherwise the old, large second
        moments hold back Adam in the deeper network until it has forgotten them.

    **Returns**

    The state for the new number of layers.

    **Raises**

    As `prolong_layers`.
    """
    change = functools.partial(prolong_layers, layers=layers, order=order)
    return _state(optimizer, state, layers, change, layered, scale)


def restrict_optimizer_state(
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    layers: int,
    *,
    layered: Layered = True,
    scale: bool = True,
) -> optax.OptState:
    """The state of an Optax optimiser for weights that `restrict_layers` makes.

    Averaged over the time that a new layer covers; otherwise as `prolong_optimizer_state`, with
    its arguments, result and errors.
    """
    change = functools.partial(restrict_layers, layers=layers, kind="average")
    return _state(optimizer, state, layers, change, layered, scale)


def which_layered(tree: PyTree, layered: Layered) -> PyTree:
    """For every leaf of `tree` whether it has a layer axis."""
    if callable(layered):

        def ask(path: Any, leaf: Any) -> bool:
            return bool(layered(jax.tree_util.keystr(path, simple=True, separator="/"), leaf))

        return jax.tree_util.tree_map_with_path(ask, tree)
    for leaf in jax.tree.leaves(layered):
        if not isinstance(leaf, (bool, np.bool_)):
            raise TypeError(
                f"layered={layered!r}: must be True, a pytree of booleans that is a prefix of the "
                "weights, or a function (path, leaf) -> bool."
            )
    try:
        return jax.tree.broadcast(layered, tree)
    except ValueError as e:
        raise ValueError(f"layered={layered!r}: is no prefix of the weights: {e}") from e


def depth(name: str, tree: PyTree, layered: Layered) -> int:
    """The number of layers: the leading axis that all layered leaves have."""
    mask = jax.tree.leaves(which_layered(tree, layered))
    named = jax.tree_util.tree_leaves_with_path(tree)
    sizes = {_layers(name, p, x): p for (p, x), m in zip(named, mask, strict=True) if m}
    if len(sizes) != 1:
        shown = {jax.tree_util.keystr(p): n for n, p in sizes.items()}
        raise ValueError(
            f"{name}: layered leaves have the leading axes {shown}: there must be one number of "
            "layers (see `layered`)."
        )
    return next(iter(sizes))


def _layers(name: str, path: Any, leaf: Any) -> int:
    if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] < 1:
        raise ValueError(
            f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: its leading axis "
            "must be the number of layers, >= 1 (see `layered`)."
        )
    return jnp.shape(leaf)[0]


def _along_layers(
    name: str,
    tree: PyTree,
    layers: int,
    layered: Layered,
    rows: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
) -> PyTree:
    layers = check_integer("layers", layers, 1)

    def change(path: Any, leaf: Any, has_layers: bool) -> Any:
        if not has_layers:
            return leaf
        n = _layers(name, path, leaf)
        if n == layers:
            return leaf
        if not _tree.is_inexact(leaf):
            return leaf[_rows("constant", n, layers)[0][:, 0]]
        return _apply(rows(n, layers), leaf)

    return jax.tree_util.tree_map_with_path(change, tree, which_layered(tree, layered))


def _apply(rows: tuple[np.ndarray, np.ndarray], leaf: Any) -> jax.Array:
    """Each row of the result is a weighted sum of few rows of `leaf`."""
    index, weight = rows
    leaf = jnp.asarray(leaf)
    if index.shape[1] == 1 and np.all(weight == 1):
        return leaf[index[:, 0]]
    precise = jnp.promote_types(leaf.dtype, jnp.float32)  # sums of bfloat16 lose small terms
    weight = jnp.asarray(weight, jnp.finfo(precise).dtype)
    return jnp.einsum("nk,nk...->n...", weight, leaf[index].astype(precise)).astype(leaf.dtype)


@functools.lru_cache(maxsize=256)
def _rows(name: str, n: int, to: int) -> tuple[np.ndarray, np.ndarray]:
    """The transfer from `n` to `to` layers: for each row the columns that count, and weights."""
    matrix = _matrix(name.removeprefix("transpose "), *((to, n) if " " in name else (n, to)))
    if name.startswith("transpose"):
        matrix = matrix.T
    most = max(1, int((matrix != 0).sum(1).max()))
    index = np.argsort(matrix == 0, axis=1, kind="stable")[:, :most]
    return index, np.take_along_axis(matrix, index, axis=1)


def _matrix(name: str, n: int, to: int) -> np.ndarray:
    new = np.arange(to)
    if name == "average":  # overlaps of the layers' times, in units of T / (n to)
        old = np.arange(n)
        ends = np.minimum((new[:, None] + 1) * n, (old + 1) * to)
        return np.maximum(0, ends - np.maximum(new[:, None] * n, old * to)) / n
    covering, rest = np.divmod(new * n, to)
    part = rest / to if name == "linear" else np.zeros(to)
    matrix = np.zeros((to, n))
    matrix[new, covering] += 1 - part
    matrix[new, np.minimum(covering + 1, n - 1)] += part
    return matrix


def _state(
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    layers: int,
    change: Callable[..., PyTree],
    layered: Layered,
    scale: bool,
) -> optax.OptState:
    marked = optax.tree_map_params(
        optimizer,
        lambda params: which_layered(params, layered),
        state,
        transform_non_params=lambda _: False,
        is_leaf=lambda _: True,  # the weights as one, for their paths
    )

    if not any(jax.tree.leaves(marked)):
        return state
    n = depth("state", state, marked)  # an error for states that hold weights otherwise: L-BFGS

    def one(path: Any, leaf: Any, has_layers: bool) -> Any:
        if not has_layers:
            return leaf
        names = [getattr(key, "name", None) for key in path]
        power = next((POWERS[name] for name in names if name in POWERS), 0) if scale else 0
        new = change(leaf)
        return (new * (n / layers) ** power).astype(leaf.dtype) if power else new

    return jax.tree_util.tree_map_with_path(one, state, marked)
