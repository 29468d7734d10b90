r"""The vjps of steps, $\lambda \mapsto (\partial\Phi_n/\partial u)^T \lambda$, for adjoint solves.

A vjp either evaluates its step anew, or uses a linearisation that was kept: on level 0 from the
last sweep of the forward solve, which evaluates the steps anyway. A linearisation is what `jax.vjp`
returns, a pytree of arrays. Those among them that the step was given are there already; only the
others are held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxbraid import _tree
from jaxbraid._problem import Inputs, PerStep, Setup, Shared, Space, batched, forward_one
from jaxbraid._problem import forward_step as forward_batch
from jaxbraid._sweep import map_slots
from jaxbraid._tree import Split, Tree


class Form(NamedTuple):
    """How a kept linearisation is put together.

    `given` says which of the step's own arrays, followed by those that all steps share, each of its
    arrays is; `None`: one that is held.
    """

    treedef: Any
    given: tuple[int | None, ...]
    own: int  # how many arrays the step has of its own
    aux: bool  # whether it has the derivatives of the auxiliary output


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """The linearisations of all slots (leading axis)."""

    held: list[Any]
    form: Form = dataclasses.field(metadata={"static": True})


class Pullback:
    """The vjps of the steps of one level; of level 0, also with respect to what else they use."""

    def __init__(self, setup: Setup, space: Space, shared: Shared, l: int, own: PerStep):
        self.setup, self.space, self.shared, self.l = setup, space, shared, l
        self.split = [Split.of(x) for x in (own, shared.args, shared.side)]
        self.form: Form | None = None

    @property
    def shapes(self) -> tuple[Tree, Tree]:
        """Of the inexact leaves of what all steps share: arguments and side."""
        _, args, side = self.split
        return _tree.shapes((args(self.shared.args)[0], side(self.shared.side)[0]))

    def _operands(self, x: Inputs, shared: Shared) -> tuple[Tree, ...]:
        parts = (x.own, shared.args, shared.side)
        return x.state, *(s(part)[0] for s, part in zip(self.split, parts, strict=True))

    def _step(
        self, evaluate: Callable[..., tuple[Tree, Tree]], x: Inputs, shared: Shared, aux: bool
    ) -> Callable[..., tuple[Tree, Tree]]:
        """Steps as a function of `_operands`: what is differentiated, and the auxiliary output."""
        parts = (x.own, shared.args, shared.side)
        fixed = [s(part)[1] for s, part in zip(self.split, parts, strict=True)]

        def step(u: Tree, *operands: list[Any]) -> tuple[Tree, Tree]:
            own, args, side = (
                s.join(*both) for s, *both in zip(self.split, operands, fixed, strict=True)
            )
            here = x._replace(own=own)
            value, out = evaluate(self.setup, self.space, self.l, here, u, Shared(args, side))
            return ((value, Split.of(out)(out)[0]) if aux else value), out

        return step

    def _vjp(self, evaluate: Callable[..., Any], x: Inputs, adjoint: Tree, state_only: bool) -> Any:
        """The vjp at `x`, evaluating the steps, by all operands or by the state alone."""
        aux = bool(jax.tree.leaves(x.aux_ct))
        step = self._step(evaluate, x, self.shared, aux)
        u, *others = self._operands(x, self.shared)
        if state_only:
            pull = jax.vjp(lambda u: step(u, *others), u, has_aux=True)[1]
        else:
            pull = jax.vjp(step, u, *others, has_aux=True)[1]
        return pull((adjoint, x.aux_ct) if aux else adjoint)

    def state(self, x: Inputs, adjoint: Tree) -> Tree:
        """A batch of adjoint steps: cotangents of the next states to those of the states."""
        if self.form is not None:
            return self._pull(self.form, x, adjoint)[0]
        return self._vjp(forward_batch, x, adjoint, True)[0]

    def full(self, x: Inputs, adjoint: Tree) -> tuple[Tree, list[Any], list[Any], list[Any]]:
        """Cotangents of the states, of each step's own data, of shared arguments and side."""
        if x.active is not None:
            cts = adjoint, x.aux_ct
            adjoint, aux_ct = _tree.where(x.active, cts, _tree.zeros(_tree.shapes(cts)))
            x = x._replace(aux_ct=aux_ct)
        if self.form is None:
            return self._vjp(forward_batch, x, adjoint, False)
        du, down, dargs, dside = self._pull(self.form, x, adjoint)
        return du, down, *jax.tree.map(lambda a: a.sum(0), (dargs, dside))

    # -- kept linearisations ----------------------------------------------------------------------

    def linearized(self, x: Inputs, aux: bool) -> Linearized:
        """A step that is linearised, given inputs of slots: `x`, which it is made for."""
        policy = self.setup.adjoint.remat

        def linearize(x: Inputs, shared: Shared) -> tuple[Any, Any]:
            u, *others = self._operands(x, shared)
            step = self._step(forward_one, x, shared, aux)
            if policy is not None:
                step = jax.checkpoint(step, policy=policy)
            if self.l == 0:
                out, vjp, rest = jax.vjp(step, u, *others, has_aux=True)
            else:
                out, vjp, rest = jax.vjp(lambda u: step(u, *others), u, has_aux=True)
            return (out[0] if aux else out, rest), vjp

        one = jax.eval_shape(lambda x: _tree.take(x, 0), x)
        program, (out, vjp) = jax.make_jaxpr(linearize, return_shape=True)(one, self.shared)
        given = {id(v): k for k, v in enumerate(program.jaxpr.invars)}
        vjp, out = jax.tree.structure(vjp), jax.tree.structure(out)
        arrays = program.jaxpr.outvars[out.num_leaves :]
        form = Form(vjp, tuple(given.get(id(v)) for v in arrays), len(jax.tree.leaves(one)), aux)
        return Linearized(program, out, form, self.shared)

    def keep(self, inputs: Inputs, size: int) -> Inputs:
        """The inputs of slots with linearisations of their steps, made `size` at once."""
        bare = inputs._replace(active=None, aux_ct=())
        step = self.linearized(bare, bool(jax.tree.leaves(inputs.aux_ct)))
        held = map_slots(jax.vmap(lambda x: step(x)[1]), size, bare)
        return self.kept(inputs, Kept(held, step.form))

    def kept(self, inputs: Inputs, kept: Kept) -> Inputs:
        """The inputs of slots with `kept` linearisations in place of what these are made of."""
        self.form = form = kept.form
        own, held = jax.tree.leaves(inputs._replace(active=None, aux_ct=())), iter(kept.held)
        of_slots = (k for k in form.given if k is None or k < form.own)
        vjp = [next(held) if k is None else own[k] for k in of_slots]
        return inputs._replace(own=PerStep(()), state=(), time=(), vjp=vjp)

    def _pull(self, form: Form, x: Inputs, adjoint: Tree) -> tuple[Any, ...]:
        shared = jax.tree.leaves(self.shared)

        def one(vjp: list[Any], ct: Tree) -> tuple[Any, ...]:
            own = iter(vjp)
            arrays = [
                next(own) if k is None or k < form.own else shared[k - form.own] for k in form.given
            ]
            return form.treedef.unflatten(arrays)(ct)

        return batched(one)(x.vjp, (adjoint, x.aux_ct) if form.aux else adjoint)


class Linearized(NamedTuple):
    """A step with its linearisation, as a program of the step's inputs and what is shared."""

    program: ClosedJaxpr
    out: Any  # structure of the step's result
    form: Form
    shared: Shared

    def __call__(self, x: Inputs) -> tuple[tuple[Tree, Tree], list[Any]]:
        """`((next state, auxiliary output), held arrays)`."""
        leaves = jaxpr_as_fun(self.program)(*jax.tree.leaves((x, self.shared)))
        out, arrays = leaves[: self.out.num_leaves], leaves[self.out.num_leaves :]
        held = [a for a, k in zip(arrays, self.form.given, strict=True) if k is None]
        return self.out.unflatten(out), held
