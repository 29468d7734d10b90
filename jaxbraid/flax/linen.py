"""A stack of equal Linen blocks whose layers are computed in parallel."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxbraid._ode_net import FORWARD, Form, ParallelODENet, parallel_ode_net
from jaxbraid._options import MGRIT
from jaxbraid._stats import AdjointStats
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
        return self.block.apply(
            params["variables"], x, **given, **dict(self.kwargs), rngs=rngs, mutable=self.mutable
        )


class ParallelStack(nn.Module):
    r"""`layers` equal blocks, $x \leftarrow x + \Delta t\, \mathrm{block}_n(x)$, in parallel over layers.

    **Fields**

    - `block`: a module that maps `x` to `dx/dt`, of the same shape (with `form="step"`, to the next
        `x`). Its `__call__` may also take, by name, the layer's time `t`, the step size `dt` and
        the per-sample `side`.
    - `layers`: number of blocks, each with its own parameters; collections of the block are
        stacked along a new leading axis under the name `blocks`.
    - `smooth_init`: every block starts with the same weights, so that they are smooth in depth.
    - `serial`: step in sequence on one device, exactly, with the same variables.
    - `rng_streams`: PRNG streams that blocks draw from when they are applied.
    - the others: as in `jaxbraid.parallel_ode_net`.

    Keyword arguments of a call are handed to the block (`train=True`); they must be hashable.
    Collections other than `params` that are mutable in `apply` (`batch_stats`) are updated once,
    from the last sweep.
    """

    block: nn.Module
    layers: int
    smooth_init: bool = False
    serial: bool = False
    rng_streams: Sequence[str] = ("dropout",)
    t_final: float = 1.0
    form: Form = "field"
    forward: MGRIT = FORWARD
    adjoint: MGRIT | None = None
    transfers: Sequence[Transfer | None] | None = None
    mesh: Mesh | None = None
    layer_axis: str = "layer"
    batch_axis: str | None = None

    @nn.compact
    def __call__(
        self,
        x: PyTree,
        *,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
        **kwargs: Any,
    ) -> PyTree:
        if self.layers < 1:
            raise ValueError(f"layers={self.layers}: must be >= 1.")
        block = self.block.clone(parent=None)
        names = _block.extras(type(block).__call__)
        variables = self._variables(block, x, side, names, kwargs)
        if self.is_initializing():
            return x
        mutable = tuple(c for c in variables if c != "params" and self.is_mutable_collection(c))
        rngs = {
            name: jax.random.split(self.make_rng(name), self.layers)
            for name in self.rng_streams
            if self.has_rng(name)
        }
        batch_axis = self.batch_axis if self.mesh is not None and not self.serial else None
        field = _Field(block, mutable, tuple(sorted(kwargs.items())), names, batch_axis)
        net = self._net(field, {"variables": variables, "rngs": rngs})
        y, changed = net(x, side=side, guess=guess, adjoint_probe=adjoint_probe)
        for name, value in changed.items():
            self.put_variable(name, "blocks", value)
        return y

    def _net(self, field: _Field, params: PyTree) -> ParallelODENet:
        net = parallel_ode_net(
            field,
            params,
            has_aux=True,
            t_final=self.t_final,
            form=self.form,
            forward=self.forward,
            adjoint=self.adjoint,
            transfers=self.transfers,
            mesh=self.mesh,
            layer_axis=self.layer_axis,
            batch_axis=self.batch_axis,
        )
        return net.serial() if self.serial else net

    def _variables(
        self, block: nn.Module, x: PyTree, side: PyTree, names: tuple[str, ...], kwargs: Any
    ) -> dict[str, Any]:
        """The stacked collections of the block, made on initialisation."""
        if self.is_initializing():
            given = {"t": jnp.zeros(()), "dt": jnp.ones(()), "side": side}
            given = {n: given[n] for n in names}
            keys = {
                name: jax.random.split(self.make_rng(name), self.layers)
                for name in ("params", *self.rng_streams)
                if self.has_rng(name)
            }
            if self.smooth_init:
                keys = jax.tree.map(lambda k: jnp.broadcast_to(k[:1], k.shape), keys)
            made = jax.vmap(lambda keys: block.init(keys, x, **given, **kwargs))(keys)
            for name, value in made.items():
                if name == "params":
                    self.param("blocks", lambda _, value=value: value)
                else:
                    self.put_variable(name, "blocks", value)
        collections = [c for c in self.variables if "blocks" in self.variables[c]]
        return {c: self.variables[c]["blocks"] for c in collections}
