"""Parameters as global arrays, each layer made by the process that holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxbraid._ode_net import FORWARD, layers_hierarchy
from jaxbraid._options import MGRIT


def own_layers(
    layers: int,
    mesh: Mesh,
    forward: MGRIT = FORWARD,
    adjoint: MGRIT | None = None,
    layer_axis: str = "layer",
) -> tuple[int, ...]:
    """The layers (time steps) that lie on this process's devices, in order.

    **Arguments**

    - `layers`: the number of layers of the whole network.
    - `mesh`, `layer_axis`: as in `parallel_ode_net`.
    - `forward`, `adjoint`: how the network will be solved; the size of a device's block of layers
        depends on it.

    **Raises**

    `ValueError` or `TypeError` naming the argument.
    """
    h = layers_hierarchy(layers, mesh, forward, adjoint, layer_axis)
    block = h.levels[0].block
    blocks = np.moveaxis(mesh.devices, mesh.axis_names.index(layer_axis), 0)
    mine = jax.process_index()
    return tuple(
        n
        for i, row in enumerate(blocks)
        if any(d.process_index == mine for d in row.flat)
        for n in range(i * block, min(h.steps, (i + 1) * block))
    )


def global_layers(
    make: Callable[[int], PyTree],
    layers: int,
    mesh: Mesh,
    *,
    forward: MGRIT = FORWARD,
    adjoint: MGRIT | None = None,
    layer_axis: str = "layer",
) -> PyTree:
    """Parameters of all layers as global arrays, each layer made by the process that holds it.

    No process ever holds the parameters of all layers, unless all lie on its devices.

    **Arguments**

    - `make`: `make(n)`, the parameters of layer n: a pytree of arrays, with the same structure,
        shapes and dtypes for all n. It is called once for each of `own_layers(...)`; to not depend
        on the number of processes, draw them from `jax.random.fold_in(key, n)`. (A process that has
        slots but no layers calls it for the last layer.)
    - `layers`, `mesh`, `forward`, `adjoint`, `layer_axis`: as in `own_layers`.

    **Returns**

    The pytree with a leading axis, split along `layer_axis`. Its length is `layers`, or more where
    devices have equal blocks only with some slots left over at the end: these repeat the last
    layer. Give it to `parallel_ode_net` together with `layers`. Slots left over take no part: they
    get zero gradients.

    **Raises**

    `ValueError` or `TypeError` naming the argument, if layers differ in structure, shape or dtype.
    """
    if not callable(make):
        raise TypeError(f"make={make!r}: must be a function make(n).")
    h = layers_hierarchy(layers, mesh, forward, adjoint, layer_axis)
    own = own_layers(layers, mesh, forward, adjoint, layer_axis) or (h.steps - 1,)
    made = {n: _one_layer(make, n) for n in own}
    kinds = {n: _kind(tree) for n, tree in made.items()}
    for n in own:
        if kinds[n] != kinds[own[0]]:
            raise ValueError(
                f"make({n}) returns {kinds[n]}, but make({own[0]}) returns {kinds[own[0]]}: all "
                "layers must be alike."
            )
    if jax.process_count() > 1:
        multihost_utils.assert_equal(
            np.frombuffer(kinds[own[0]].encode().ljust(4096)[:4096], np.uint8),
            f"make({own[0]}) returns {kinds[own[0]]}, which another process's layers are not like.",
        )
    sharding = NamedSharding(mesh, PartitionSpec(layer_axis))
    flat = {n: jax.tree.leaves(tree) for n, tree in made.items()}

    def leaf(i: int) -> jax.Array:
        first = flat[own[0]][i]

        def block(index: Any) -> np.ndarray:
            slots = range(*index[0].indices(h.slots))
            return np.stack([flat[min(n, h.steps - 1)][i] for n in slots])

        return jax.make_array_from_callback((h.slots, *first.shape), sharding, block)

    treedef = jax.tree.structure(made[own[0]])
    return treedef.unflatten([leaf(i) for i in range(treedef.num_leaves)])


def _one_layer(make: Callable[[int], PyTree], n: int) -> PyTree:
    def array(path: Any, leaf: Any) -> np.ndarray:
        where = f"make({n}){jax.tree_util.keystr(path)}"
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, int, complex, bool)):
            raise TypeError(f"{where} is a {type(leaf).__name__}: must be an array.")
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            raise TypeError(f"{where} is a PRNG key: give its jax.random.key_data.")
        return np.asarray(leaf, jnp.result_type(leaf))

    return jax.tree_util.tree_map_with_path(array, make(n))


def _kind(tree: PyTree) -> str:
    """Structure, shapes and dtypes, for a message."""
    leaves, treedef = jax.tree.flatten(tree)
    return f"{treedef} of {', '.join(f'{a.dtype}{list(a.shape)}' for a in leaves)}"
