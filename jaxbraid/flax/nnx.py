"""A stack of equal NNX blocks whose layers are computed in parallel."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxbraid._ode_net import FORWARD, Form, ParallelODENet, parallel_ode_net
from jaxbraid._options import MGRIT
from jaxbraid._stats import AdjointStats, Solution
from jaxbraid.flax import _block
from jaxbraid.transfers import Transfer

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments for `parallel_ode_net`; hashable, so a static attribute of the module."""

    t_final: float
    t_start: float
    form: Form
    forward: MGRIT
    adjoint: MGRIT | None
    transfers: tuple[Transfer | None, ...] | None
    mesh: Mesh | None
    layer_axis: str
    batch_axis: str | None


@dataclasses.dataclass(frozen=True)
class _Field:
    """A block, split from its variables, as `f(state, x) -> (value, changed variables)`."""

    graphdef: Any
    names: tuple[str, ...]
    batch_axis: str | None

    @property
    def __signature__(self) -> inspect.Signature:
        return _block.signature(self.names)

    def __call__(self, state: nnx.State, x: PyTree, **given: Any) -> tuple[PyTree, dict[Path, Any]]:
        before = {p: _value(v) for p, v in nnx.to_flat_state(state)}
        block = nnx.merge(self.graphdef, self._with_own_keys(state))
        value = block(x, **given)
        _block.check_shape(type(block).__name__, x, value)
        changed = {}
        for path, variable in nnx.to_flat_state(nnx.state(block)):
            if path not in before:
                raise ValueError(
                    f"{type(block).__name__} makes the variable {'.'.join(map(str, path))} when it "
                    "is called: variables of a block must exist once it is built."
                )
            if isinstance(variable, nnx.Param | nnx.RngKey):
                continue
            if _value(variable) is not before[path]:
                changed[path] = _value(variable)
        return value, changed

    def _with_own_keys(self, state: nnx.State) -> nnx.State:
        if self.batch_axis is None:
            return state

        def own(path: Path, v: Any) -> Any:
            if not isinstance(v, nnx.RngKey):
                return v
            return v.replace(_block.own_key(_value(v), self.batch_axis))

        return nnx.map_state(own, state)


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


class ParallelStack(nnx.Module):
    r"""`layers` equal blocks, in parallel over layers: $x \leftarrow x + \Delta t\, b_n(x)$.

    **Arguments**

    - `make_block`: `make_block(rngs) -> nnx.Module`; the module maps `x` to `dx/dt`, of the same
        shape (with `form="step"`, to the next `x`). Its `__call__` may also take, by name, the
        layer's time `t`, the step size `dt`, and the samples' `side` (alike for all layers) and
        `inputs` (one a layer).
    - `layers`: number of blocks N; each has its own parameters and PRNG streams from `rngs`. The
        variables of all blocks are those of the one module `blocks`, with leading axis N.
    - `smooth_init`: every block starts with the same parameters, so that they are smooth in depth,
        which is what coarse levels need.
    - `forward`, `adjoint`, `t_final`, `t_start`, `form`, `transfers`, `mesh`, `layer_axis`,
        `batch_axis`: as in `jaxbraid.parallel_ode_net`. With a batch axis, give BatchNorm
        `axis_name=batch_axis` if its statistics are to be those of the whole batch; otherwise each
        part is normalised by its own, and their mean is recorded.

    Calling the stack updates the blocks' statistics and PRNG counters once, from the last sweep.
    `model.set_attributes(serial=True)` makes all stacks in a model exact and sequential, on one
    device, with the same parameters; `serial=False` makes them parallel again.

    A training step on a mesh returns its variables there; put the model on the mesh before the
    first one (`jax.device_put`), or the second is traced and compiled anew.

    **Raises**

    `ValueError` or `TypeError` naming the argument, or the block that changes the shape of its
    input or makes variables when called (`sow`).
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        layers: int,
        *,
        rngs: nnx.Rngs,
        smooth_init: bool = False,
        t_final: float = 1.0,
        t_start: float = 0.0,
        form: Form = "field",
        forward: MGRIT = FORWARD,
        adjoint: MGRIT | None = None,
        transfers: Sequence[Transfer | None] | None = None,
        mesh: Mesh | None = None,
        layer_axis: str = "layer",
        batch_axis: str | None = None,
    ):
        if not isinstance(layers, int) or layers < 1:
            raise ValueError(f"layers={layers!r}: must be an integer >= 1.")

        self.blocks = self._make_blocks(make_block, layers, rngs)
        if smooth_init:
            params = nnx.state(self.blocks, nnx.Param)
            same = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), params)
            nnx.update(self.blocks, same)
        self.layers = layers
        self.serial = False
        self.options = _Options(
            t_final,
            t_start,
            form,
            forward,
            adjoint,
            None if transfers is None else tuple(transfers),
            mesh,
            layer_axis,
            batch_axis if mesh is not None else None,
        )

    def _make_blocks(
        self, make_block: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs
    ) -> nnx.Module:
        """One module with the variables of all blocks."""
        return _block.stacked_blocks(make_block, layers, rngs)

    def _of_layers(self, state: nnx.State) -> nnx.State:
        """The layers' variables from those of `blocks`: here the same."""
        return state

    def net(self) -> ParallelODENet:
        """The stack as a function of its input, with the present variables as `params`."""
        graphdef, state = nnx.split(self.blocks)
        state = self._of_layers(state)
        names = _block.extras(type(self.blocks).__call__)
        options = vars(self.options)
        field = _Field(graphdef, names, None if self.serial else options["batch_axis"])
        net = parallel_ode_net(field, state, layers=self.layers, has_aux=True, **options)
        return net.serial() if self.serial else net

    def __call__(
        self,
        x: PyTree,
        *,
        inputs: PyTree | None = None,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
    ) -> PyTree:
        """The output of the last block for the input `x`, with the shapes of `x`.

        `inputs`, `side` and `guess` are those of a `ParallelODENet`; for `adjoint_probe` see
        `AdjointStats`.
        """
        net = self.net()
        y, changed = net(x, inputs=inputs, side=side, guess=guess, adjoint_probe=adjoint_probe)
        self._update(net.params, changed)
        return y

    def solve(
        self,
        x: PyTree,
        *,
        inputs: PyTree | None = None,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
    ) -> Solution:
        """As calling the stack, with the states of all layers (`us`, leading axis N + 1)."""
        net = self.net()
        solution = net.solve(x, inputs=inputs, side=side, guess=guess, adjoint_probe=adjoint_probe)
        self._update(net.params, solution.aux)
        return solution

    def adjoint_probe(self) -> AdjointStats:
        """A probe for the record of the adjoint solve; see `AdjointStats`."""
        return self.net().adjoint_probe()

    def _update(self, state: nnx.State, changed: dict[Path, Any]) -> None:
        if not changed:
            return
        flat = [(p, v.replace(changed[p])) for p, v in nnx.to_flat_state(state) if p in changed]
        nnx.update(self.blocks, nnx.from_flat_state(flat))
