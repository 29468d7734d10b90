"""One solve over all devices, and its derivative.

`run` splits the data over the devices of a mesh (or none), solves forward in one `shard_map`, and
in the backward pass of `custom_vjp` solves the adjoint in another, so that no collective is ever
differentiated.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxbraid import _tree
from jaxbraid._adjoint import Adjoint, solve_adjoint
from jaxbraid._comm import Comm
from jaxbraid._forward import Forward, Want, solve_forward
from jaxbraid._hierarchy import Hierarchy
from jaxbraid._layout import BATCH, DEVICE, EVERYWHERE, LAYER, LAYER_BATCH, Layout
from jaxbraid._problem import Data, PerStep, Setup, Shared
from jaxbraid._pullback import Kept
from jaxbraid._stats import AdjointStats, Stats
from jaxbraid._tree import Split, Tree

OWN = PerStep(LAYER, LAYER_BATCH)


class Arrays(NamedTuple):
    """The traced data of a solve; `own` with leading axis n."""

    times: Any
    u0: Tree
    own: PerStep
    args: Tree
    side: Tree
    guess: tuple[Tree, Tree] | None  # states where slots start, and at the end of time


class Output(NamedTuple):
    """Results on all devices; `states` and `points` those of `Want`, where steps (C-points) start.

    `saved` and `kept` are the states and linearisations for the adjoint solve, where they lie.
    """

    u: Tree
    states: Tree
    aux: Tree
    stats: Stats | None
    points: Any = ()
    saved: Tree = ()
    kept: Kept | None = None
    growth: Any = ()


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")  # an argument of the forward rule, with symbolic_zeros


def _shard_like(reference: Tree, x: Tree, leading: int = 0) -> Tree:
    """`x` with the shardings that JAX tracks in types, where mesh axes are explicit.

    They are those of `reference`; where that has none and a mesh is set, replicated on it. `x` has
    `leading` axes more, which are not split.
    """
    explicit = jax.sharding.AxisType.Explicit

    def one(reference: Any, x: Any) -> Any:
        mesh, spec = jax.typeof(reference).sharding.mesh, jax.typeof(reference).sharding.spec
        if mesh.empty:
            mesh, spec = jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec()
        if mesh.empty or explicit not in mesh.axis_types:
            return x
        spec = jax.sharding.PartitionSpec(*(None,) * leading, *spec)
        return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(one, reference, x)


def _is_zero(ct: Any) -> bool:
    return isinstance(ct, SymbolicZero)


def _inexact(x: Tree) -> list[Any]:
    """The real and complex leaves; of cotangents, those that are not of integers or keys."""
    return Split.of(x)(x)[0]


def _zeros_for(ct: Any) -> Any:
    """Cotangents with symbolic zeros made into arrays."""

    def array(c: Any) -> Any:
        return jnp.zeros(c.shape, c.dtype) if _is_zero(c) else c

    return jax.tree.map(array, ct, is_leaf=_is_zero)


def _all_zero(ct: Any) -> bool:
    return all(_is_zero(c) for c in jax.tree.leaves(ct, is_leaf=_is_zero))


def run(
    setup: Setup, layout: Layout, want: Want, arrays: Arrays, probe: AdjointStats | None
) -> Output:
    """Solve, differentiably in `u0`, `own`, `args`, `side`; see `AdjointStats` for `probe`."""
    try:
        return _run(setup, layout, want, arrays, probe)
    except Exception as e:
        if "closed-over value" in str(e) and hasattr(e, "add_note"):
            e.add_note(
                "The step closes over a value that is being differentiated. Hand it in instead: as "
                "`args` if all steps share it, in `params` if each has its own."
            )
        if "forward-mode" in str(e) and setup.forward.delta is not None and hasattr(e, "add_note"):
            e.add_note("The Delta correction (delta) needs forward derivatives (jvp) of the step.")
        raise


@functools.partial(jax.jit, static_argnames=("setup", "layout", "want"))
def _run(
    setup: Setup, layout: Layout, want: Want, arrays: Arrays, probe: AdjointStats | None
) -> Output:
    split = [Split.of(x) for x in arrays[1:5]]
    leaves = [s(x) for s, x in zip(split, arrays[1:5], strict=True)]
    diff, rest = [d for d, _ in leaves], [r for _, r in leaves]
    fixed = (arrays.times, rest, arrays.guess)

    def joined(diff: Any, fixed: Any) -> Arrays:
        times, rest, guess = fixed
        parts = [s.join(d, r) for s, d, r in zip(split, diff, rest, strict=True)]
        u0, own, args, side = parts
        return Arrays(times, u0, own, args, side, guess)

    h, _ = setup.hierarchies(layout.devices)

    def solve(want: Want, diff: Any, fixed: Any) -> Output:
        out = _forward(setup, layout, want, joined(diff, fixed))
        return out._replace(u=_shard_like(arrays.u0, out.u))

    def shown(out: Output) -> Output:
        states = out.states
        if want.states is not None:
            cut = layout.cut if want.states == "all" else layout.cut_c
            states = _shard_like(arrays.u0, cut(states, h), leading=1)
        points, aux = layout.cut_c(out.points, h), layout.cut(out.aux, h)
        return out._replace(states=states, points=points, aux=aux, saved=(), kept=None)

    @jax.custom_vjp
    def evolve(diff: Any, probe: AdjointStats | None, fixed: Any) -> Output:
        return shown(solve(want, diff, fixed))

    def forward(diff: Any, probe: Any, fixed: Any) -> tuple[Output, Any]:
        if any(x.perturbed for x in jax.tree.leaves(fixed[0], is_leaf=_is_primal)):
            raise TypeError(
                "ts is being differentiated, which is not supported: give "
                "jax.lax.stop_gradient(ts)."
            )
        diff, probe, fixed = jax.tree.map(
            lambda x: x.value, (diff, probe, fixed), is_leaf=_is_primal
        )
        keep = setup.linearises_forward
        out = solve(want._replace(save=setup.adjoint.saved_states, keep=keep), diff, fixed)
        return shown(out), (diff, fixed, out.saved, out.kept, probe)

    def backward(saved: Any, ct: Output) -> tuple[Any, Any, None]:
        diff, fixed, states, kept, probe = saved
        ct = ct._replace(states=_in_steps(layout, h, want, ct.states))
        grads, record = _backward(setup, layout, joined(diff, fixed), states, kept, probe, ct)
        return _shard_like(diff, grads), record, None

    evolve.defvjp(forward, backward, symbolic_zeros=True)
    return evolve(diff, probe, fixed)


def _forward(setup: Setup, layout: Layout, want: Want, arrays: Arrays) -> Output:
    h, _ = setup.hierarchies(layout.devices)

    def block(comm: Comm, a: Arrays) -> Forward:
        data = Data(a.times, a.u0, a.own, Shared(a.args, a.side))
        out = solve_forward(setup, want, comm, data, a.guess)
        return out._replace(aux=_mean_over_batch(comm, out.aux))

    guess: Any = None if arrays.guess is None else (LAYER_BATCH, BATCH)
    shard = layout.shard(
        block,
        (Arrays(EVERYWHERE, BATCH, OWN, EVERYWHERE, BATCH, guess),),
        Forward(BATCH, LAYER_BATCH, LAYER, EVERYWHERE, LAYER, LAYER_BATCH, DEVICE, EVERYWHERE),
    )
    return Output(*shard(arrays._replace(own=layout.pad(arrays.own, h))))


def _in_steps(layout: Layout, h: Hierarchy, want: Want, ct: Tree) -> Tree:
    """Cotangents of the states that the caller saw as those of the states where steps start."""
    if want.states != "coarse" or _all_zero(ct):
        return ct
    points = layout.c_points(h)

    def one(c: Any) -> Any:
        if c.dtype == jax.dtypes.float0 or _is_zero(c):
            return c
        return jnp.zeros((layout.count(h), *c.shape[1:]), c.dtype).at[points].set(c)

    return jax.tree.map(one, ct, is_leaf=_is_zero)


def _mean_over_batch(comm: Comm, aux: Tree) -> Tree:
    parts = comm.batch_size()
    if parts == 1:
        return aux
    split = Split.of(aux)
    diff, rest = split(aux)
    return split.join([x / parts for x in comm.batch_sum(diff)], rest)


def _backward(
    setup: Setup,
    layout: Layout,
    arrays: Arrays,
    saved: Tree,
    kept: Kept | None,
    probe: AdjointStats | None,
    ct: Output,
) -> tuple[Any, Any]:
    """Cotangents of the inexact leaves of `(u0, own, args, side)`, and of the probe.

    `saved` and `kept` are what the forward pass kept, `ct` is that of what the caller saw.
    """
    _, h = setup.hierarchies(layout.devices)
    last, states_ct, aux_ct = (_inexact(x) for x in (ct.u, ct.states, ct.aux))
    last = _zeros_for(last)
    source = None
    if not _all_zero(states_ct):
        source = layout.pad(_zeros_for(states_ct), h)
        source = _tree.where(layout.active(h), source, _tree.zeros(_tree.shapes(source)))
    if _all_zero(aux_ct) and (kept is None or not kept.form.aux):
        aux_ct = []
    aux_ct = [c / layout.parts for c in _zeros_for(aux_ct)]

    def block(
        comm: Comm,
        a: Arrays,
        saved: Tree,
        kept: Kept | None,
        last: Tree,
        source: Tree,
        aux_ct: Tree,
    ) -> Adjoint:
        data = Data(a.times, a.u0, a.own, Shared(a.args, a.side))
        saved = tuple(_inexact(s) for s in saved)
        track = probe is not None
        return solve_adjoint(setup, track, comm, data, saved, kept, last, source, aux_ct)

    own, aux_ct = layout.pad((arrays.own, aux_ct), h)
    shard = layout.shard(
        block,
        (
            Arrays(EVERYWHERE, BATCH, OWN, EVERYWHERE, BATCH, None),
            LAYER_BATCH,
            DEVICE,
            BATCH,
            LAYER_BATCH,
            LAYER,
        ),
        Adjoint(BATCH, OWN, EVERYWHERE, BATCH, LAYER, EVERYWHERE),
    )
    g = shard(arrays._replace(own=own, guess=None), saved, kept, last, source, aux_ct)
    record = None
    if probe is not None:
        end = sum(jnp.sum(jnp.abs(x) ** 2) for x in last)
        norms = jnp.sqrt(jnp.append(layout.cut(g.norms, h), end))
        record = jax.tree.map(
            lambda p, x: x.astype(p.dtype), probe, dataclasses.replace(g.stats, norms=norms)
        )
    whole = [x.shape[0] == layout.size(h) for x in _inexact(arrays.own)]  # given in slots
    down = g.own.params + g.own.inputs
    down = [x if w else layout.cut(x, h) for w, x in zip(whole, down, strict=True)]
    return [g.u0, down, g.args, g.side], record
