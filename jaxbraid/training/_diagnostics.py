"""What goes on inside a network: norms across depth, of states, adjoints, weights and gradients.

Nothing of it is in a network that is trained: `diagnose` works on a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree
from rich.table import Table

from jaxbraid import _tree
from jaxbraid._iterate import squares
from jaxbraid._ode_net import ParallelODENet
from jaxbraid._stats import AdjointStats, Solution, Stats
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training._convert import replaced

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """Norms across the depth of one stack: 2-norms over the batch and all leaves.

    - `states`: of the states at the points 0..N; `step_in` (what comes into layer n) and `step_out`
        (what goes out of it) are these, shifted.
    - `increments`: of `u_{n+1} - u_n`.
    - `adjoints`: of the loss's derivatives with respect to the states.
    - `weights`, `gradients`: of each layer's parameters and of the loss's gradients, by name.
    - `forward`, `adjoint`: how the solves converged.
    """

    states: Float[Array, " steps_plus_1"]
    increments: Float[Array, " steps"]
    adjoints: Float[Array, " steps_plus_1"]
    weights: dict[str, Float[Array, " steps"]]
    gradients: dict[str, Float[Array, " steps"]]
    forward: Stats
    adjoint: AdjointStats

    @property
    def step_in(self) -> Float[Array, " steps"]:
        """Norms of what comes into each layer."""
        return self.states[:-1]

    @property
    def step_out(self) -> Float[Array, " steps"]:
        """Norms of what goes out of each layer."""
        return self.states[1:]

    def table(self, rows: int = 20) -> Table:
        """A rich table with a row a layer, or at most so many, evenly spaced."""
        n = len(self.increments)
        names = list(self.weights)
        head = ("layer", "in", "out", "increment", "adjoint", *names)
        table = Table(*head, title="2-norms; parameters: norm / norm of the gradient")
        for i in np.unique(np.linspace(0, n - 1, min(n, rows)).round().astype(int)):
            numbers = (self.step_in, self.step_out, self.increments, self.adjoints)
            parameters = (f"{self.weights[k][i]:.2g} / {self.gradients[k][i]:.1g}" for k in names)
            table.add_row(str(i), *(f"{float(a[i]):.3g}" for a in numbers), *parameters)
        return table

    def plot(self) -> Any:
        """A matplotlib figure of all of it over the layers.

        **Raises**

        `ImportError` where matplotlib is missing: install `jaxbraid[plot]`.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError("plot needs matplotlib: install jaxbraid[plot].") from e
        figure = Figure(figsize=(10, 7), layout="constrained")
        (states, adjoints), (weights, gradients) = figure.subplots(2, 2, sharex=True)
        middle = np.arange(len(self.increments)) + 0.5
        states.plot(self.states, color=COLOURS[0], label="states")
        states.plot(middle, self.increments, color=COLOURS[1], ls="--", label="increments")
        states.set(title="States and increments")
        adjoints.plot(self.adjoints, color=COLOURS[0])
        adjoints.set(title="Adjoint states")
        for axes, values in ((weights, self.weights), (gradients, self.gradients)):
            for i, (name, norms) in enumerate(values.items()):
                style = {"color": COLOURS[i % len(COLOURS)], "marker": "os^Dv"[i % 5], "ms": 3}
                axes.plot(middle, norms, label=name, lw=1, **style)
            axes.set(xlabel="layer")
        weights.set(title="Weights")
        gradients.set(title="Gradients of the weights")
        for axes in (states, adjoints, weights, gradients):
            axes.set(ylabel="2-norm")
            axes.grid(alpha=0.3)
        states.legend()
        weights.legend(fontsize="small")
        return figure


def diagnose(model: nnx.Module, loss: Callable[..., Any], *batch: PyTree) -> dict[str, Diagnostics]:
    """Norms across the depth of every `ParallelStack` in an NNX model, for one batch.

    The model stays as it is, and so do its compiled programs: the stacks of a copy are asked for
    their states and adjoints. Like the training step they are solved with the model's own options.

    **Arguments**

    - `model`, `loss`, `batch`: as in `nnx.grad(loss)(model, *batch)`.

    **Returns**

    `Diagnostics` by the path of the stack in the model (`""` if the model is one).

    **Raises**

    `ValueError` if there is no stack in the model, or one is called not exactly once.
    """
    log = _Log()
    copy = replaced(model, ParallelStack, lambda stack: _Recorder(stack, log))
    if not (recorders := _recorders(copy)):
        raise ValueError(f"model: there is no ParallelStack in {type(model).__name__}.")
    for name, recorder in recorders.items():
        recorder.name = name
    probes = {name: recorder.stack.adjoint_probe() for name, recorder in recorders.items()}
    graph, params, rest = nnx.split(copy, nnx.Param, ...)

    def value(params: Any, probes: Any) -> Any:
        log.probes, log.seen = probes, {}
        return loss(nnx.merge(graph, params, rest, copy=True), *batch), log.seen

    (grads, records), seen = jax.grad(value, argnums=(0, 1), has_aux=True)(params, probes)
    if seen.keys() != recorders.keys():
        missing = next(iter(recorders.keys() - seen.keys()))
        raise ValueError(f"model: the stack {missing!r} is not called.")
    gradients = _recorders(nnx.merge(graph, grads, rest, copy=True))

    def of(recorder: _Recorder) -> dict[str, Array]:
        return _layer_norms(nnx.to_pure_dict(nnx.state(recorder.stack.blocks, nnx.Param)))

    return {
        name: _made(seen[name], of(recorder), of(gradients[name]), records[name])
        for name, recorder in recorders.items()
    }


def diagnose_net(
    net: ParallelODENet, loss: Callable[[PyTree], Any], x: PyTree, *, side: PyTree | None = None
) -> Diagnostics:
    """Norms across the depth of a `parallel_ode_net`, for the scalar `loss(net(x))`."""

    def value(params: Any, probe: Any) -> Any:
        one = dataclasses.replace(net, params=params)
        solution = one.solve(x, side=side, adjoint_probe=probe)
        return loss(solution.u), _norms(solution)

    differentiate = jax.grad(value, argnums=(0, 1), has_aux=True, allow_int=True)
    (grads, record), seen = differentiate(net.params, net.adjoint_probe())
    return _made(seen, _layer_norms(net.params), _layer_norms(grads), record)


def _made(seen: Any, weights: Any, gradients: Any, record: AdjointStats) -> Diagnostics:
    states, increments, stats = seen
    return Diagnostics(states, increments, record.norms, weights, gradients, stats, record)


class _Log:
    """Passes probes to the recorders of a model, and back what they see, within one trace."""

    probes: dict[str, AdjointStats]
    seen: dict[str, Any]


class _Recorder(nnx.Module):
    """A stack that writes down what it sees."""

    def __init__(self, stack: ParallelStack, log: _Log):
        self.stack, self.log, self.name = stack, log, ""

    def __call__(self, x: PyTree, **given: Any) -> PyTree:
        return self.solve(x, **given).u

    def solve(self, x: PyTree, **given: Any) -> Solution:
        if self.name in self.log.seen:
            raise ValueError(
                f"model: the stack {self.name!r} is called twice, so its records would mix."
            )
        given["adjoint_probe"] = self.log.probes[self.name]
        solution = self.stack.solve(x, **given)
        self.log.seen[self.name] = _norms(solution)
        return solution


def _recorders(model: nnx.Module) -> dict[str, _Recorder]:
    modules = nnx.iter_modules(model)
    return {".".join(map(str, path)): m for path, m in modules if isinstance(m, _Recorder)}


def _norms(solution: Solution) -> tuple[Array, Array, Stats]:
    us = [u for u in jax.tree.leaves(solution.us) if _tree.is_inexact(u)]
    increments = [u[1:] - u[:-1] for u in us]
    states, steps = (jnp.sqrt(jax.vmap(squares)(a)) for a in (us, increments))
    return states, steps, solution.stats


def _layer_norms(params: PyTree) -> dict[str, Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): jnp.sqrt(jax.vmap(squares)(a))
        for path, a in jax.tree_util.tree_leaves_with_path(params)
        if _tree.is_inexact(a)
    }
