"""The same solves on MPI ranks: each holds the parameters of its own layers only.

    ranks = jaxbraid.mpi.Ranks.of(MPI.COMM_WORLD, batch=2)     # (layers x batch), like a mesh
    own = ranks.own_layers(64)                                 # this rank's slice of the 64 layers
    net = jaxbraid.mpi.parallel_ode_net(f, params_of(own), layers=64, ranks=ranks)
    y = net(x)                                                 # x, y: this rank's part of the batch

Every rank runs the same program; messages pass in its order, inside `jit`, through mpi4jax
(D. Häfner, F. Vicentini: mpi4jax: zero-copy MPI communication of JAX arrays. JOSS 6(65), 2021).
Start the program with `mpirun -n ...`. Once there are `Ranks`, an exception that nobody catches on
one of them ends the program on all.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mpi4jax  # pyright: ignore[reportMissingImports]
import numpy as np
from jaxtyping import Array, Float, PyTree
from mpi4py import MPI  # pyright: ignore[reportMissingImports]

from jaxbraid import _ode_net, _solve, _tree
from jaxbraid._hierarchy import Hierarchy, build_hierarchies
from jaxbraid._layout import pad_to, starts_of
from jaxbraid._ode_net import FORWARD, ParallelODENet, default_adjoint
from jaxbraid._options import MGRIT
from jaxbraid._stats import Solution
from jaxbraid._tree import Tree


@dataclasses.dataclass(frozen=True)
class _Abort:
    """What happens to an exception that nobody catches: other ranks would wait for this one."""

    report: Callable[..., Any]

    def __call__(self, *error: Any) -> None:
        try:
            self.report(*error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            MPI.COMM_WORLD.Abort(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """MPI ranks as rows of `layers` and columns of `batch`; made by `Ranks.of`.

    On each rank `solve` and `parallel_ode_net` take the parameters of its own steps and its own
    part of the batch. Gradients of parameters and shared arguments are summed over the batch.
    """

    layers: MPI.Comm
    batch: MPI.Comm
    split: tuple[str, ...] = ()

    @classmethod
    def of(cls, world: MPI.Comm, batch: int = 1) -> Ranks:
        """Split `world` into `world.size / batch` blocks of layers times `batch` parts."""
        size, rank = world.Get_size(), world.Get_rank()
        if not isinstance(batch, (int, np.integer)) or batch < 1 or size % batch:
            raise ValueError(f"batch={batch!r}: must be an integer that divides the {size} ranks.")
        row, part = divmod(rank, int(batch))
        if size > 1 and not isinstance(sys.excepthook, _Abort):
            sys.excepthook = _Abort(sys.excepthook)
        return cls(world.Split(part, rank), world.Split(row, rank))

    @property
    def devices(self) -> int:
        """Number of blocks of layers."""
        return self.layers.Get_size()

    @property
    def parts(self) -> int:
        """Number of parts of the batch."""
        return self.batch.Get_size()

    def own_layers(
        self, layers: int, forward: MGRIT = FORWARD, adjoint: MGRIT | None = None
    ) -> slice:
        """The layers (time steps) that belong to this rank, given how they will be solved."""
        h = build_hierarchies((forward, default_adjoint(forward, adjoint)), layers, self.devices)[0]
        first = min(layers, self.layers.Get_rank() * h.levels[0].block)
        return slice(first, first + self.count(h))

    def batch_sum(self, x: PyTree) -> PyTree:
        """Sum over the parts of the batch, for gradients of what lies outside the layers."""
        return _RankComm(self).batch_sum(x)

    # -- the layout of data, as the engine asks for it --------------------------------------------

    def agree(self, name: str, x: Tree) -> None:
        """All blocks of layers were given arrays of the same shapes; before their first message."""
        if self.devices > 1:
            _agree((self.layers,), name, _shapes(x))

    def shard(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """`fn(comm, ...)`: every rank has its own part already."""
        return functools.partial(fn, _RankComm(self))

    def count(self, h: Hierarchy) -> int:
        """This rank's steps."""
        block, rank = h.levels[0].block, self.layers.Get_rank()
        return max(0, min(h.steps, (rank + 1) * block) - rank * block)

    def size(self, h: Hierarchy) -> int:
        """This rank's slots."""
        return h.levels[0].block

    def pad(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of this rank's steps to entries of its slots."""
        return pad_to(self.size(h), x)

    def cut(self, x: Tree, h: Hierarchy) -> Tree:
        """The inverse of `pad`."""
        own = self.count(h)
        return x if own == self.size(h) else _tree.take(x, slice(0, own))

    def starts(self, x: Tree, h: Hierarchy) -> tuple[Tree, Tree]:
        """States at this rank's points to those where its slots start, and that of the end."""
        return starts_of(self.size(h), x)

    def first_step(self, h: Hierarchy) -> int:
        """Number of this rank's first step."""
        return min(h.steps, self.layers.Get_rank() * h.levels[0].block)

    def c_points(self, h: Hierarchy) -> np.ndarray:
        """This rank's C-points of the finest level."""
        points = h.c_points() - self.first_step(h)
        return points[(points >= 0) & (points < self.count(h))]

    def cut_c(self, x: Tree, h: Hierarchy) -> Tree:
        """Entries of this rank's intervals, or parts of one, to those of its C-points."""
        return _tree.take(x, slice(0, len(self.c_points(h))))

    def active(self, h: Hierarchy) -> jax.Array:
        """Which of this rank's slots have a step."""
        return jnp.arange(self.size(h)) < self.count(h)


@dataclasses.dataclass(frozen=True)
class _RankComm:
    """The engine's communicator: one rank a block."""

    ranks: Ranks
    lockstep: bool = False

    @property
    def size(self) -> int:
        return self.ranks.devices

    @property
    def index(self) -> int:
        return self.ranks.layers.Get_rank()

    def shift(self, x: Tree, hops: int, fill: Tree) -> Tree:
        if hops == 0 or abs(hops) >= self.size:
            return x if hops == 0 else fill
        source, dest = self.index - hops, self.index + hops
        has_source, has_dest = 0 <= source < self.size, 0 <= dest < self.size

        def exchange(a: jax.Array) -> jax.Array:
            return mpi4jax.sendrecv(
                a,
                a,
                source=source if has_source else MPI.PROC_NULL,
                dest=dest if has_dest else MPI.PROC_NULL,
                comm=self.ranks.layers,
            )

        moved = _move(exchange, x)
        return moved if has_source else fill

    def gather(self, x: Tree) -> Tree:
        return _move(lambda a: mpi4jax.allgather(a, comm=self.ranks.layers), x)

    def _all(self, x: Tree, op: MPI.Op, comm: MPI.Comm) -> Tree:
        if comm.Get_size() == 1:
            return x

        def reduce(a: jax.Array) -> jax.Array:
            wide = a.astype(jnp.float32) if _is_half(a) else a
            return mpi4jax.allreduce(wide, op=op, comm=comm).astype(a.dtype)

        return jax.tree.map(reduce, x)

    def sum(self, x: Tree) -> Tree:
        return self._all(x, MPI.SUM, self.ranks.layers)

    def max(self, x: Tree) -> Tree:
        return self._all(x, MPI.MAX, self.ranks.layers)

    def broadcast(self, x: Tree, source: int) -> Tree:
        if self.size == 1:
            return x
        return _move(lambda a: mpi4jax.bcast(a, source, comm=self.ranks.layers), x)

    def batch_sum(self, x: Tree) -> Tree:
        return self._all(x, MPI.SUM, self.ranks.batch)

    def batch_size(self) -> int:
        return self.ranks.parts

    def batch_gather(self, x: Tree) -> Tree:
        if self.ranks.parts == 1:
            return x

        def one(a: jax.Array) -> jax.Array:
            a = jnp.moveaxis(mpi4jax.allgather(a, comm=self.ranks.batch), 0, 1)
            return a.reshape(a.shape[0], -1, *a.shape[3:])

        return _move(one, x)

    @property
    def is_first(self) -> bool:
        return self.index == 0 and self.ranks.batch.Get_rank() == 0


def _is_half(a: jax.Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize == 2


def _move(fn: Callable[[jax.Array], jax.Array], x: Tree) -> Tree:
    """`fn`, which only moves data, of all leaves; MPI has no type for half precision."""

    def one(a: jax.Array) -> jax.Array:
        if not _is_half(a):
            return fn(a)
        bits = fn(jax.lax.bitcast_convert_type(a, jnp.uint16))
        return jax.lax.bitcast_convert_type(bits, a.dtype)

    return _tree.on_data(one, x)


def _agree(comms: Sequence[MPI.Comm], name: str, value: Any) -> None:
    """All ranks were given the same `value`; found out before the first message of a solve."""
    for comm in comms:
        values = comm.allgather(value)
        if any(v != values[0] for v in values):
            raise ValueError(f"{name} differs between ranks: {values}; it must be the same on all.")


def _shapes(x: PyTree, axes: int = 0) -> str:
    """Structure, shapes without the first `axes` axes, and dtypes, for comparison."""
    return str(jax.tree.map(lambda a: (jnp.shape(a)[axes:], str(jnp.result_type(a))), x))


def parallel_ode_net(
    f: Callable[..., Any] | Sequence[Callable[..., Any]],
    params: PyTree,
    *,
    layers: int,
    ranks: Ranks,
    **options: Any,
) -> ParallelODENet:
    """`jaxbraid.parallel_ode_net` on MPI ranks.

    **Arguments**

    - `params`: the parameters of this rank's layers, `ranks.own_layers(layers, forward, adjoint)`.
    - `layers`: the number of layers of the whole network.
    - the others: as in `jaxbraid.parallel_ode_net`, but for its mesh and axes.

    The gradient of a loss of the output, taken alike on all ranks of a row, has this rank's part of
    the parameters' gradient; losses of different parts of the batch are added.

    **Raises**

    `ValueError` on all ranks if they were not given the same network.
    """
    for name in ("mesh", "layer_axis", "batch_axis"):
        if name in options:
            raise TypeError(f"{name}: not for MPI; ranks={ranks} takes its place.")
    both = ranks.layers, ranks.batch
    _agree(both, "layers", layers)
    _agree(both, "params", _shapes(params, axes=1))
    _agree(both, "options", str({k: v for k, v in options.items() if k in ("forward", "adjoint")}))
    return _ode_net.parallel_ode_net(f, params, layers=layers, mesh=ranks, **options)


def solve(
    step: Callable[..., Any] | Sequence[Callable[..., Any]],
    u0: PyTree,
    ts: Float[Array, " steps_plus_1"],
    params: PyTree | None = None,
    args: PyTree | None = None,
    *,
    ranks: Ranks,
    **options: Any,
) -> Solution:
    """`jaxbraid.solve` on MPI ranks.

    `params` are those of this rank's steps, `ranks.own_layers(len(ts) - 1, config, adjoint)`; `us`
    of the solution holds the states where this rank's steps start, then that at the end of time.
    """
    _agree((ranks.layers, ranks.batch), "ts", np.asarray(ts).tobytes())
    return _solve.solve(step, u0, ts, params, args, mesh=ranks, **options)
