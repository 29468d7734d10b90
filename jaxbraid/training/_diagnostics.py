"""What goes on in a network, layer by layer: norms of states, adjoints and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from rich.table import Table

from jaxbraid import _tree
from jaxbraid._ode_net import ParallelODENet
from jaxbraid._stats import AdjointStats, Stats
from jaxbraid.plot import depth

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Norms across the depth of a network of N layers; made by `diagnose`.

    All are 2-norms over all leaves and samples, as the solve has them (inexact as it is).

    - `states`: of the states $u_0, ..., u_N$: what comes into layer n is entry n (`step_in`), what
        goes out entry n + 1 (`step_out`).
    - `increments`: of $u_{n+1} - u_n$.
    - `weights`: of the layers' parameters.
    - `stats`: convergence of the forward solve.
    - `adjoints`: of the loss gradients with respect to the states, and `adjoint_stats`: convergence
        of the adjoint solve; `None` without a loss.
    """

    states: Float[np.ndarray, " layers_plus_1"]
    increments: Float[np.ndarray, " layers"]
    weights: Float[np.ndarray, " layers"]
    stats: Stats
    adjoints: Float[np.ndarray, " layers_plus_1"] | None = None
    adjoint_stats: AdjointStats | None = None

    @property
    def step_in(self) -> Float[np.ndarray, " layers"]:
        """Norms of what comes into each layer."""
        return self.states[:-1]

    @property
    def step_out(self) -> Float[np.ndarray, " layers"]:
        """Norms of what goes out of each layer."""
        return self.states[1:]

    def table(self) -> Table:
        """A row for each layer, to print by `rich.print`."""
        table = Table("layer", "in", "out", "increment", "weights", title="Layers")
        columns = [self.step_in, self.step_out, self.increments, self.weights]
        if self.adjoints is not None:
            table.add_column("adjoint in")
            columns.append(self.adjoints[:-1])
        for n, row in enumerate(zip(*columns, strict=True)):
            table.add_row(str(n), *(f"{value:.3e}" for value in row))
        return table

    def plot(self, path: str | Path | None = None) -> Figure:
        """States, adjoints and weights across depth, by `jaxbraid.plot.depth`."""
        return depth(self, path=path)


def diagnose(
    net: ParallelODENet,
    x: PyTree,
    *,
    loss: Callable[[PyTree], Float[Array, ""]] | None = None,
    inputs: PyTree | None = None,
    side: PyTree | None = None,
) -> Diagnosis:
    """Look into a network: norms of states, adjoints and weights of all its layers.

    A program of its own: nothing is recorded, and nothing costs time, where it isn't called.

    **Arguments**

    - `net`: the network; of an NNX `ParallelStack`, `stack.net()`.
    - `x`, `inputs`, `side`: as it is called with.
    - `loss`: `loss(y)` of its output, a scalar: what lies above it in a model. With it, adjoints
        are had too.

    **Returns**

    A `Diagnosis`.

    **Raises**

    `TypeError` if `net` is none, or `loss` isn't a function of one argument that returns a scalar.
    """
    if not isinstance(net, ParallelODENet):
        raise TypeError(f"net={net!r}: must be a ParallelODENet; of a ParallelStack, stack.net().")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss={loss!r}: must be a function of the network's output, or None.")

    def forward(x: PyTree, probe: AdjointStats | None) -> tuple[Array, tuple[Any, ...]]:
        solution = net.solve(x, inputs=inputs, side=side, adjoint_probe=probe)
        before, after = (_tree.take(solution.us, s) for s in (slice(0, -1), slice(1, None)))
        value = jnp.zeros(()) if loss is None else loss(solution.u)
        return value, (_norms(solution.us), _norms(_difference(after, before)), solution.stats)

    adjoint = None
    if loss is None:
        _, out = jax.jit(lambda x: forward(x, None))(x)
    else:
        grad = jax.grad(lambda probe, x: forward(x, probe), has_aux=True)
        adjoint, out = jax.jit(grad)(net.adjoint_probe(), x)
    states, increments, stats = jax.device_get(out)
    params = _tree.take(net.params, slice(0, net.layers))
    return Diagnosis(
        states,
        increments,
        np.asarray(jax.device_get(_norms(params, net.layers))),
        stats,
        None if adjoint is None else np.asarray(jax.device_get(adjoint.norms)),
        jax.device_get(adjoint),
    )


def _difference(x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a - b if _tree.is_inexact(a) else a, x, y)


def _norms(x: PyTree, n: int | None = None) -> Array:
    """2-norms of the entries along the leading axis, over all real and complex leaves."""
    total = jnp.zeros(() if n is None else (n,))
    for leaf in jax.tree.leaves(x):
        if _tree.is_inexact(leaf):
            wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            total = total + jnp.sum(jnp.abs(wide) ** 2, axis=tuple(range(1, leaf.ndim)))
    return jnp.sqrt(total)
