"""Layer-parallel networks as plain serial ones of ordinary blocks, and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxbraid import _tree
from jaxbraid._ode_net import FORWARD, Form
from jaxbraid._options import MGRIT
from jaxbraid.flax import _block
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.training._stacks import replaced
from jaxbraid.transfers import Transfer


class SerialStack(nnx.Module):
    r"""Blocks one after another in a Python loop, $x \leftarrow x + \Delta t\, b_n(x)$: plain Flax.

    `to_serial` makes it of a `ParallelStack`. `blocks` is an ordinary list of modules, each with
    variables of its own, and calling it needs no MGRIT.

    **Arguments**

    - `blocks`: the modules.
    - `t_final`, `t_start`, `form`: as in `jaxbraid.parallel_ode_net`.
    - `synced`: whether BatchNorm took statistics of the whole batch, on a mesh that split it.
    """

    def __init__(
        self,
        blocks: Sequence[nnx.Module],
        t_final: float = 1.0,
        form: Form = "field",
        synced: bool = False,
        t_start: float = 0.0,
    ):
        self.blocks = nnx.List(blocks)
        self.t_final, self.t_start, self.synced = t_final, t_start, synced
        self.form: Form = form

    def __call__(
        self, x: PyTree, *, inputs: PyTree | None = None, side: PyTree | None = None
    ) -> PyTree:
        """The output of the last block for the input `x`, with the shapes of `x`.

        `inputs` (leading axis N, one a layer) and `side` are those of a `ParallelODENet`.
        """
        dt = jnp.asarray((self.t_final - self.t_start) / len(self.blocks))
        samples: dict[str, Any] = {"dt": dt.astype(_tree.precision(x)), "side": side}
        for n, block in enumerate(self.blocks):
            given = samples | {"t": self.t_start + n * dt, "inputs": _tree.take(inputs, n)}
            value = block(x, **{k: given[k] for k in _block.extras(type(block).__call__)})  # pyright: ignore[reportCallIssue]
            x = value if self.form == "step" else _tree.euler_step(x, dt, value)
        return x


def to_serial(model: nnx.Module, *, device: Any = None) -> Any:
    """A copy of an NNX model in which a `SerialStack` is in the place of each `ParallelStack`.

    It has the same outputs and gradients as the exact, sequential network
    (`model.set_attributes(serial=True)`), BatchNorm's statistics and PRNG streams are carried over.
    Where a mesh split the batch its parts drew dropout masks of their own, which one device does
    not; and BatchNorm's `axis_name` is taken away. Of a `jaxbraid.nn.SplineStack` the blocks get
    the parameters of the layers, which `to_parallel` does not turn back into splines.

    A Linen model makes its stacks when it is called, so nothing can take their place; but there
    `ParallelStack(..., serial=True)` has the same variables, and a plain `block.apply` takes those
    of layer n: `jax.tree.map(lambda a: a[n], variables["params"]["stack"]["blocks"])`.

    **Arguments**

    - `model`: a module that holds stacks, or is one; it stays as it is.
    - `device`: where to put all variables; by default, if they lie on several devices, on the first
        of this process, otherwise where they are.

    **Raises**

    `TypeError` if the model is no NNX module, or if a stack is in a tuple: it cannot be replaced.
    """
    serial = replaced(model, ParallelStack, _unstacked)
    state = nnx.state(serial)
    if device is None and any(len(a.devices()) > 1 for a in jax.tree.leaves(state)):
        device = jax.local_devices()[0]
    if device is not None:
        _place(serial, device)
    return serial


def _unstacked(stack: ParallelStack) -> SerialStack:
    graph, state = nnx.split(stack.blocks)
    state = stack._of_layers(state)  # of a spline: the layers' own parameters
    options = stack.options

    def block(n: int) -> Any:
        return nnx.merge(graph, jax.tree.map(lambda a: a[n], state), copy=True)

    blocks = [block(n) for n in range(stack.layers)]
    synced = False
    for _, module in (pair for b in blocks for pair in nnx.iter_modules(b)):
        if options.batch_axis is not None and isinstance(module, nnx.BatchNorm):
            synced = synced or module.axis_name == options.batch_axis
            module.axis_name = None
    return SerialStack(blocks, options.t_final, options.form, synced, options.t_start)


def to_parallel(
    model: nnx.Module,
    *,
    forward: MGRIT = FORWARD,
    adjoint: MGRIT | None = None,
    transfers: Sequence[Transfer | None] | None = None,
    mesh: Mesh | None = None,
    layer_axis: str = "layer",
    batch_axis: str | None = None,
) -> Any:
    """The inverse of `to_serial`: a copy with a `ParallelStack` in the place of each `SerialStack`.

    **Arguments**

    - `model`: a module that holds serial stacks, or is one; it stays as it is.
    - the others: as in `jaxbraid.parallel_ode_net`, for all stacks. With a batch axis, BatchNorm in
        stacks that are `synced` gets it as `axis_name`. Variables are put on a mesh, those of a
        stack split over its layer axis if that divides them.

    **Raises**

    `ValueError` if the blocks of a stack have different variables or attributes; `TypeError` if a
    stack is in a tuple.
    """
    options = {
        "forward": forward,
        "adjoint": adjoint,
        "transfers": transfers,
        "mesh": mesh,
        "layer_axis": layer_axis,
        "batch_axis": batch_axis,
    }
    parallel = replaced(model, SerialStack, functools.partial(_stacked, options=options))
    if mesh is not None:
        _place(parallel, NamedSharding(mesh, PartitionSpec()))
        split = NamedSharding(mesh, PartitionSpec(layer_axis))
        for _, stack in nnx.iter_modules(parallel):
            if isinstance(stack, ParallelStack) and stack.layers % mesh.shape[layer_axis] == 0:
                _place(stack.blocks, split)
    return parallel


def _place(module: nnx.Module, where: Any) -> None:
    nnx.update(module, jax.device_put(nnx.state(module), where))


def _stacked(serial: SerialStack, options: dict[str, Any]) -> ParallelStack:
    parts = [nnx.split(block) for block in serial.blocks]
    graph, first = parts[0]
    for n, (other, state) in enumerate(parts):
        kinds = [[(a.shape, a.dtype) for a in jax.tree.leaves(s)] for s in (state, first)]
        if other != graph or kinds[0] != kinds[1]:
            raise ValueError(
                f"blocks[{n}] differs from blocks[0]: all must have the same variables and "
                "attributes to be stacked."
            )

    def block(state: Any) -> Any:
        made = nnx.merge(graph, state, copy=True)
        if serial.synced and options["batch_axis"] is not None and options["mesh"] is not None:
            made.set_attributes(nnx.BatchNorm, axis_name=options["batch_axis"])
        return made

    n = len(parts)
    stack = ParallelStack(
        lambda _: block(first),
        n,
        rngs=nnx.Rngs(0),
        t_final=serial.t_final,
        t_start=serial.t_start,
        form=serial.form,
        **options,
    )
    stack.blocks = block(jax.tree.map(lambda *a: jnp.stack(a), *(state for _, state in parts)))
    return stack
