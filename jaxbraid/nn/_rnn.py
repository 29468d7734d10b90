"""Recurrent networks, in parallel over the sequence: step n of MGRIT is element n."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from jaxbraid import _check
from jaxbraid._ode_net import FORWARD, ParallelODENet, parallel_ode_net
from jaxbraid._options import MGRIT
from jaxbraid._stats import Solution

Carry = PyTree
Cell = Any  # an nnx.Module with the interface of Flax's cells, and perhaps that of ours

FEW = 16  # features that a CPU projects as fast as it reads what comes of it


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments for `parallel_ode_net`; hashable, so a static attribute of the module."""

    forward: MGRIT
    adjoint: MGRIT | None
    mesh: Mesh | None
    layer_axis: str
    batch_axis: str | None


def _project(cell: Cell, x: Array) -> Array:
    return cell.project(x) if hasattr(cell, "project") else x


def _advance(cell: Cell, carry: Carry, z: Array, dt: Any) -> tuple[Carry, Any]:
    """A cell's next carry and its output; a cell without `step` or `dt` makes one of its steps."""
    if hasattr(cell, "step"):
        new = cell.step(carry, z, dt)
        return new, cell.output(new)
    if "dt" in inspect.signature(type(cell).__call__).parameters:
        return cell(carry, z, dt=dt)
    return cell(carry, z)


def _through(
    cells: Sequence[Cell], carries: Sequence[Carry], x: Array, projected: bool, dt: Any
) -> tuple[tuple[Carry, ...], Array]:
    """One step of all cells, each fed by the one below; the first by `x`, `projected` or not."""
    new, y = [], x
    for i, (cell, carry) in enumerate(zip(cells, carries, strict=True)):
        z = y if i == 0 and projected else _project(cell, y)
        carry, y = _advance(cell, carry, z, dt)
        new.append(carry)
    return tuple(new), y


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step of all cells, split from their variables, as `parallel_ode_net` takes it."""

    graphdef: Any
    projected: bool  # whether the inputs are

    def __call__(
        self, params: tuple[()], carry: Carry, *, dt: Array, args: Any, inputs: Any
    ) -> Carry:
        x, valid = inputs
        new, _ = _through(nnx.merge(self.graphdef, args), carry, x, self.projected, dt)
        if jax.tree.structure(new) != jax.tree.structure(carry):
            raise TypeError(
                f"cells return carries of the structure {jax.tree.structure(new)}: it must be that "
                f"of those before, {jax.tree.structure(carry)}."
            )

        def one(new: Array, old: Array) -> Array:
            new = new.astype(old.dtype)
            if valid is None:
                return new
            return jnp.where(valid.reshape(*valid.shape, *(1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(one, new, carry)


class RNN(nnx.Module):
    r"""Recurrent cells over a sequence whose steps are all computed at once.

    It takes the place of `flax.nnx.RNN` (also within `nnx.Bidirectional`), with several cells
    stacked upon each other if that's wanted: one MGRIT solve of all of them, each step feeding the
    cells from the bottom to the top. To solve one after another, put one `RNN` after another.

    **Arguments**

    - `cells`: a cell, or a sequence of them, the lowest first, with the interface of Flax's,
        `cell(carry, x) -> (carry, y)` and `initialize_carry(input_shape, rngs)`. Coarse levels need
        a step over any time: `jaxbraid.nn.ImplicitGRUCell`, `GRUCell` and `LSTMCell` have one. Of
        other cells that take `dt` by name, $\Delta t$ is handed in; what remains (Flax's own)
        makes one step, its last, for those that a coarse step stands for, which is exact once MGRIT
        has converged but converges fast for cells that forget fast only.
    - `dt`: the length of a step $\Delta t$ on the finest level; 1 makes GRU and LSTM what they
        usually are.
    - `forward`, `adjoint`, `mesh`, `layer_axis`, `batch_axis`: as in `jaxbraid.parallel_ode_net`;
        the layer axis splits the sequence.
    - `time_major`, `return_carry`, `reverse`, `keep_order`: as in `flax.nnx.RNN`; each can be given
        in a call too.

    Weights are shared by all steps; what depends on the inputs alone (`project` of the lowest cell)
    is computed for all steps at once, outside the iteration, unless inputs of few features are read
    faster than what is made of them (on CPUs). `model.set_attributes(serial=True)` makes it exact
    and sequential, with the same parameters. Variables of a cell other than its parameters are
    read, not changed.

    **Raises**

    `ValueError` or `TypeError` naming the argument at fault.
    """

    def __init__(
        self,
        cells: Cell | Sequence[Cell],
        *,
        dt: float = 1.0,
        forward: MGRIT = FORWARD,
        adjoint: MGRIT | None = None,
        mesh: Mesh | None = None,
        layer_axis: str = "layer",
        batch_axis: str | None = None,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
    ):
        cells = [cells] if isinstance(cells, nnx.Module) else list(cells)
        if not cells or not all(isinstance(c, nnx.Module) for c in cells):
            raise TypeError(f"cells={cells!r}: must be a recurrent cell or a sequence of them.")
        if not dt > 0:
            raise ValueError(f"dt={dt!r}: must be positive.")
        self.cells = nnx.List(cells)
        self.dt = float(dt)
        self.options = _Options(
            forward, adjoint, mesh, layer_axis, batch_axis if mesh is not None else None
        )
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.serial = False

    def __call__(
        self,
        inputs: Float[Array, "batch time features"],
        *,
        initial_carry: Carry | None = None,
        seq_lengths: Int[Array, " batch"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Any:
        """The outputs of the top cell at all steps, `(batch, time, hidden)`.

        - `inputs`: `(batch, time, features)`, or time first with `time_major`.
        - `initial_carry`: the carry of the one cell, or a tuple of those of several; by default
            what `initialize_carry` of the cells makes.
        - `seq_lengths`: how many steps of each sequence are valid; after them nothing changes any
            more, carry and outputs stay what they were.
        - `return_carry`: return `(final carry, outputs)`; a tuple of carries for several cells.
        - `reverse`, `keep_order`: go through the (valid part of the) sequence backwards; outputs
            are in that order, or turned round again.
        - `rngs`: for `initialize_carry`.
        """
        time_major, reverse, keep_order, return_carry = (
            default if given is None else given
            for given, default in (
                (time_major, self.time_major),
                (reverse, self.reverse),
                (keep_order, self.keep_order),
                (return_carry, self.return_carry),
            )
        )
        x = self._sequence(inputs, time_major)
        if reverse:
            x = _flipped(x, seq_lengths)
        net, carry, given = self._net(x, initial_carry, seq_lengths, rngs)
        us = net.states(carry, inputs=given)
        y = self._outputs(us, given, x)
        if reverse and keep_order:
            y = _flipped(y, seq_lengths)
        y = y if time_major else jnp.moveaxis(y, 0, 1)
        return (self._shown(jax.tree.map(lambda a: a[-1], us)), y) if return_carry else y

    def solve(
        self,
        inputs: Float[Array, "batch time features"],
        *,
        initial_carry: Carry | None = None,
        seq_lengths: Int[Array, " batch"] | None = None,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ) -> Solution:
        """The carries before and after all steps (`us`, time first) and the solve's `stats`.

        Carries are tuples with an entry for each cell. `options` are those of
        `ParallelODENet.solve`, such as `guess`.
        """
        x = self._sequence(inputs, self.time_major)
        if self.reverse:
            x = _flipped(x, seq_lengths)
        net, carry, given = self._net(x, initial_carry, seq_lengths, rngs)
        return net.solve(carry, inputs=given, **options)

    def _sequence(self, inputs: Array, time_major: bool) -> Array:
        """The inputs, time first."""
        if jnp.ndim(inputs) < 3:
            order = "(time, batch, features)" if time_major else "(batch, time, features)"
            raise ValueError(f"inputs has shape {jnp.shape(inputs)}: it must be {order}.")
        x = inputs if time_major else jnp.moveaxis(inputs, 1, 0)
        if x.shape[0] < 1:
            raise ValueError(f"inputs has shape {inputs.shape}: it must have at least one step.")
        return x

    def _net(
        self, x: Array, initial: Carry | None, lengths: Array | None, rngs: nnx.Rngs | None
    ) -> tuple[ParallelODENet, Carry, tuple[Array, Array | None]]:
        """The steps as a net, the carry it starts from, and its `inputs`."""
        n, batch = x.shape[:2]
        valid = None
        if lengths is not None:
            if jnp.shape(lengths) != (batch,):
                raise ValueError(
                    f"seq_lengths has shape {jnp.shape(lengths)}: it must be ({batch},), one for "
                    "each sequence."
                )
            valid = jnp.arange(n)[:, None] < jnp.asarray(lengths)[None]
        ahead = self._ahead(x)
        given = _project(self.cells[0], x) if ahead else x
        carry = self._initial(x, initial, rngs)
        graphdef, state = nnx.split(self.cells)
        net = parallel_ode_net(
            _Step(graphdef, ahead),
            (),
            args=state,
            layers=n,
            form="step",
            t_final=n * self.dt,
            **vars(self.options),
        )
        return net.serial() if self.serial else net, carry, (given, valid)

    def _ahead(self, x: Array) -> bool:
        """Whether the inputs are projected for all steps at once."""
        return jax.default_backend() != "cpu" or x.shape[-1] > FEW

    def _initial(self, x: Array, initial: Carry | None, rngs: nnx.Rngs | None) -> Carry:
        """The carries before the first step, in the precision that steps give them."""
        cells: list[Cell] = list(self.cells)
        first = x[0]
        if initial is not None:
            carry = initial if len(cells) > 1 else (initial,)
            if not isinstance(carry, Sequence) or len(carry) != len(cells):
                raise TypeError(
                    f"initial_carry must be a tuple with the carries of the {len(cells)} cells."
                )
            carry = tuple(_check.arrays("initial_carry", c) for c in carry)
        else:
            rngs, carry = nnx.Rngs(0) if rngs is None else rngs, []
            for i, cell in enumerate(cells):
                made = cell.initialize_carry(first.shape, rngs)
                carry.append(made)
                if i < len(cells) - 1:
                    first = jax.eval_shape(lambda c, y, cell=cell: cell(c, y)[1], made, first)
            carry = tuple(carry)
        after, _ = jax.eval_shape(lambda c, x: _through(cells, c, x, False, self.dt), carry, x[0])
        return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), carry, after)

    def _outputs(self, us: Carry, given: tuple[Array, Array | None], inputs: Array) -> Array:
        """The top cell's outputs: a part of the carry, or else had from one more step each."""
        top: Cell = self.cells[-1]
        if hasattr(top, "output"):
            return top.output(jax.tree.map(lambda a: a[1:], us[-1]))
        x, valid = given
        graphdef, state = nnx.split(self.cells)
        ahead = self._ahead(inputs)

        def output(carry: Carry, x: Array) -> Array:
            return _through(nnx.merge(graphdef, state), carry, x, ahead, self.dt)[1]

        y = jax.vmap(output)(jax.tree.map(lambda a: a[:-1], us), x)
        if valid is None:
            return y
        last = jnp.maximum(valid.sum(0) - 1, 0)
        at = jnp.minimum(jnp.arange(len(x))[:, None], last)  # outputs stay what they were
        return y[at, jnp.arange(len(last))]

    def _shown(self, carry: tuple[Carry, ...]) -> Carry:
        return carry if len(self.cells) > 1 else carry[0]


def _flipped(x: Array, lengths: Array | None) -> Array:
    """The valid part of each sequence (time first) turned round, what is behind it left there."""
    n = x.shape[0]
    if lengths is None:
        return x[::-1]
    at = jnp.arange(n)[:, None]
    at = jnp.where(at < lengths, lengths - 1 - at, at)
    return x[at, jnp.arange(x.shape[1])]
