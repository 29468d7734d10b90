"""A stack of equal Linen blocks whose layers are computed in parallel."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxbraid import _tree
from jaxbraid._ode_net import FORWARD, Form, ParallelODENet, parallel_ode_net
from jaxbraid._options import MGRIT
from jaxbraid._stats import AdjointStats, Solution
from jaxbraid.flax import _block
from jaxbraid.transfers import Transfer


@dataclasses.dataclass(frozen=True)
class _Field:
    """A Linen block as `f(variables, x) -> (value, changed collections)`."""

    block: nn.Module
    mutable: tuple[str, ...]
    kwargs: tuple[tuple[str, Any], ...]  # static arguments of the block, such as train=True
    names: tuple[str, ...]
    batch_axis: str | None

    @property
    def __signature__(self) -> inspect.Signature:
        return _block.signature(self.names)

    def __call__(self, params: Mapping[str, Any], x: PyTree, **given: Any) -> tuple[PyTree, Any]:
        rngs = {n: _block.own_key(k, self.batch_axis) for n, k in params["rngs"].items()}
        value, changed = self.block.apply(
            params["variables"], x, **given, **dict(self.kwargs), rngs=rngs, mutable=self.mutable
        )
        _block.check_shape(type(self.block).__name__, x, value)
        return value, changed


class ParallelStack(nn.Module):
    r"""`layers` equal blocks, in parallel over layers: $x \leftarrow x + \Delta t\, b_n(x)$.

    **Fields**

    - `block`: a module that maps `x` to `dx/dt`, of the same shape (with `form="step"`, to the next
        `x`). Its `__call__` may also take, by name, the layer's time `t`, the step size `dt` and
        the samples' `side` (alike for all layers) and `inputs` (one a layer).
    - `layers`: number of blocks N, each with its own parameters; collections of the block are
        stacked along a new leading axis N under the name `blocks`.
    - `smooth_init`: every block starts with the same parameters, so that they are smooth in depth,
        which is what coarse levels need.
    - `serial`: step in sequence on one device, exactly, with the same variables.
    - `rng_streams`: PRNG streams that blocks draw from when they are applied.
    - the others: as in `jaxbraid.parallel_ode_net`. With a batch axis, give BatchNorm
        `axis_name=batch_axis` if its statistics are to be those of the whole batch; otherwise each
        part is normalised by its own, and their mean is recorded.

    Keyword arguments of a call are handed to the block (`train=True`); they must be hashable.
    Collections of the block other than `params` that are mutable in `apply` (`batch_stats`) are
    updated once, from the last sweep; what a block sows is not kept.

    A training step on a mesh returns its variables there; put them on the mesh before the first
    one (`jax.device_put`), or the second is traced and compiled anew.

    **Raises**

    `ValueError` or `TypeError`, when called, naming the argument or the block that changes the
    shape of its input.
    """

    block: nn.Module
    layers: int
    smooth_init: bool = False
    serial: bool = False
    rng_streams: Sequence[str] = ("dropout",)
    t_final: float = 1.0
    t_start: float = 0.0
    form: Form = "field"
    forward: MGRIT = FORWARD
    adjoint: MGRIT | None = None
    transfers: Sequence[Transfer | None] | None = None
    mesh: Mesh | None = None
    layer_axis: str = "layer"
    batch_axis: str | None = None

    def __call__(
        self,
        x: PyTree,
        *,
        inputs: PyTree | None = None,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
        **kwargs: Any,
    ) -> PyTree:
        """The output of the last block for the input `x`, with the shapes of `x`.

        `inputs`, `side` and `guess` are those of a `ParallelODENet`; for `adjoint_probe` see
        `AdjointStats`.
        """
        net = self._bind(x, inputs, side, kwargs)
        if net is None:
            return x
        y, changed = net(x, inputs=inputs, side=side, guess=guess, adjoint_probe=adjoint_probe)
        self._update(changed)
        return y

    def solve(
        self,
        x: PyTree,
        *,
        inputs: PyTree | None = None,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
        **kwargs: Any,
    ) -> Solution:
        """As calling the stack, with the states of all layers (`us`, leading axis N + 1).

        For variables that exist: `stack.apply(variables, x, method="solve")`.
        """
        net = self._bind(x, inputs, side, kwargs)
        if net is None:
            raise ValueError("solve cannot make variables: initialise by calling the stack.")
        solution = net.solve(x, inputs=inputs, side=side, guess=guess, adjoint_probe=adjoint_probe)
        self._update(solution.aux)
        return solution

    def adjoint_probe(self) -> AdjointStats:
        """A probe for the record of the adjoint solve; see `AdjointStats`."""
        field = _Field(self.block, (), (), (), None)
        return self._net(field, jnp.zeros(self.layers)).adjoint_probe()

    @nn.compact
    def _bind(
        self, x: PyTree, inputs: PyTree, side: PyTree, kwargs: dict[str, Any]
    ) -> ParallelODENet | None:
        """The stack with its present variables; on initialisation make these and return `None`."""
        if not isinstance(self.layers, int) or self.layers < 1:
            raise ValueError(f"layers={self.layers!r}: must be an integer >= 1.")
        for name, value in kwargs.items():
            if not isinstance(value, Hashable):
                raise TypeError(
                    f"{name} has the type {type(value).__name__}: keyword arguments for the block "
                    "must be hashable; hand arrays in as `side`."
                )
        block = self.block.clone(parent=None)
        names = _block.extras(type(block).__call__)
        if self.is_initializing():
            samples = {"side": side, "inputs": _tree.take(inputs, 0)}
            self._make_variables(block, x, samples, names, kwargs)
            return None
        variables = {
            collection: entries["blocks"]
            for collection, entries in self.variables.items()
            if "blocks" in entries
        }
        mutable = tuple(c for c in variables if c != "params" and self.is_mutable_collection(c))
        batch_axis = self.batch_axis if self.mesh is not None and not self.serial else None
        field = _Field(block, mutable, tuple(sorted(kwargs.items())), names, batch_axis)
        rngs = self._keys_of_layers(self.rng_streams)
        return self._net(field, {"variables": variables, "rngs": rngs})

    def _net(self, field: _Field, params: PyTree) -> ParallelODENet:
        net = parallel_ode_net(
            field,
            params,
            has_aux=True,
            t_final=self.t_final,
            t_start=self.t_start,
            form=self.form,
            forward=self.forward,
            adjoint=self.adjoint,
            transfers=self.transfers,
            mesh=self.mesh,
            layer_axis=self.layer_axis,
            batch_axis=self.batch_axis,
        )
        return net.serial() if self.serial else net

    def _make_variables(
        self,
        block: nn.Module,
        x: PyTree,
        samples: dict[str, PyTree],
        names: tuple[str, ...],
        kwargs: Any,
    ) -> None:
        extras = {"t": jnp.zeros(()), "dt": jnp.ones(()), **samples}
        given = {name: extras[name] for name in names}
        keys = self._keys_of_layers(("params", *self.rng_streams))
        if self.smooth_init:
            keys = jax.tree.map(lambda k: jnp.broadcast_to(k[:1], k.shape), keys)

        def make(keys: dict[str, jax.Array]) -> Mapping[str, Any]:
            value, made = block.init_with_output(keys, x, **given, **kwargs)
            _block.check_shape(type(block).__name__, x, value)
            return made

        for name, value in jax.vmap(make)(keys).items():
            if name == "params":
                self.param("blocks", lambda _, value=value: value)
            else:
                self.put_variable(name, "blocks", value)

    def _keys_of_layers(self, streams: Sequence[str]) -> dict[str, jax.Array]:
        """For each stream that is given, a key for each layer."""
        return {
            name: jax.random.split(self.make_rng(name), self.layers)
            for name in streams
            if self.has_rng(name)
        }

    def _update(self, changed: Mapping[str, Any]) -> None:
        for name, value in changed.items():
            self.put_variable(name, "blocks", value)
