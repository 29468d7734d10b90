r"""MG/OPT: multilevel optimisation over depth.

Level $l$ has $N_l$ layers and the objective $f_l(\theta) - \langle v_l, \theta \rangle$, with the
loss $f_l$ of a network of that depth and $v_0 = 0$. A cycle on it:

1. some steps of the optimiser (pre-smoothing), and the objective's gradient $g$ at $\theta$;
2. $\theta_H = R\theta$ and $v_H = \nabla f_H(\theta_H) - P^T g$: at $\theta_H$ the coarse
   objective has the gradient $P^T g$, the fine one's as the coarse level sees it;
3. a cycle on the coarse level gives $\theta_H'$ (on the coarsest: steps of the optimiser);
4. $\theta \leftarrow \theta + \alpha P(\theta_H' - \theta_H)$ with a backtracking line search;
5. some steps of the optimiser (post-smoothing).

$R$ restricts and $P$ prolongs along the layer axis; weights without one are shared by all levels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxbraid import _tree
from jaxbraid._options import check_choice, check_integer
from jaxbraid.training import _depth
from jaxbraid.training._depth import Layered, Order
from jaxbraid.training._line_search import Backtracking, along

State = tuple[optax.OptState, ...]


class MGOPTInfo(NamedTuple):
    """What a step of `MGOPT` did.

    - `loss`: of the finest level, before the step.
    - `step_lengths`: of the line searches, one for each level but the coarsest, finest first; 0 is
        a coarse correction that was rejected.
    - `work`: evaluations of a layer, forward or backward, on all levels.
    """

    loss: Float[Array, ""]
    step_lengths: Float[Array, " corrections"]
    work: Int[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: a static argument of jit
class MGOPT:
    r"""Multilevel optimisation over depth, as an Optax-style training step.

        method = MGOPT(loss, optax.adam(1e-2), levels=3, coarsening=4)
        state = method.init(params)
        params, state, info = method.step(params, state, batch)

    `step` is one V-cycle on one batch, compiled whole.

    **Arguments**

    - `loss`: `loss(params, batch)`, a scalar, at every depth: a `parallel_ode_net` takes its number
        of layers from its weights; for NNX models see `split_model`. All leaves of the weights
        are real.
    - `optimizer`: the Optax optimiser that smooths on every level; or one a level, finest first.
    - `levels`: number of depths; no level is made with fewer than `min_layers` layers. With 1
        level a step is `pre + post` ordinary steps of the optimiser.
    - `coarsening`: the factor between the depths, one for all or one a level but the coarsest.
    - `pre`, `post`: steps of the optimiser before and after a level's correction.
    - `coarse`: steps of the optimiser on the coarsest level.
    - `order`: of the prolongation: `"constant"` or `"linear"`, as in `prolong_layers`.
    - `restriction`: of the weights: `"average"` or `"injection"`, as in `restrict_layers`.
        Gradients are restricted by the transposed prolongation.
    - `coarse_state`: where a coarse level's optimiser starts: `"restrict"`, from the finer level's
        state (the coarse gradient is the restricted one there); `"keep"`, from where it was left
        in the step before, as optimisers must whose state is no average of gradients (L-BFGS) or
        that differ from level to level. With Adam `"restrict"` needs much less work on the
        problem of `examples/sine.py`.
    - `line_search`: how the corrections' lengths are found.
    - `layered`: which weights have a layer axis, as in `prolong_layers`.
    - `min_layers`: fewest layers that a coarse level may have.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        S. G. Nash: A multigrid approach to discretized optimization problems. Optim. Methods
        Softw. 14, 2000. R. M. Lewis, S. G. Nash: Model problems for the multigrid optimization of
        systems governed by differential equations. SIAM J. Sci. Comput. 26, 2005.
        A. Kopanicakova, R. Krause: Globally convergent multilevel training of deep residual
        networks. SIAM J. Sci. Comput. 45, 2023.
    """

    loss: Callable[[PyTree, Any], Array]
    optimizer: optax.GradientTransformation | Sequence[optax.GradientTransformation]
    levels: int = 2
    coarsening: int | Sequence[int] = 2
    pre: int = 0
    post: int = 1
    coarse: int = 10
    order: Order = "constant"
    restriction: Literal["average", "injection"] = "average"
    coarse_state: Literal["restrict", "keep"] = "restrict"
    line_search: Backtracking = dataclasses.field(default_factory=Backtracking)
    layered: Layered = True
    min_layers: int = 2

    def __post_init__(self) -> None:
        for name, least in {"levels": 1, "pre": 0, "post": 0, "coarse": 1, "min_layers": 1}.items():
            check_integer(name, getattr(self, name), least)
        if self.pre + self.post < 1:
            raise ValueError(f"pre={self.pre}, post={self.post}: one of them must be at least 1.")
        check_choice("order", self.order, ("constant", "linear"))
        check_choice("restriction", self.restriction, ("average", "injection"))
        check_choice("coarse_state", self.coarse_state, ("restrict", "keep"))
        for m in self._factors:
            check_integer("coarsening", m, 2)
        for name, given, need in (
            ("coarsening", self._factors, self.levels - 1),
            ("optimizer", self._optimizers, self.levels),
        ):
            if len(given) != need:
                raise ValueError(f"{name} has {len(given)} entries: must have {need}, one a level.")

    def depths(self, params: PyTree) -> tuple[int, ...]:
        """The numbers of layers on all levels that there are, finest first."""
        depths = [_depth.depth("params", params, self.layered)]
        for m in self._factors:
            coarser = -(-depths[-1] // m)
            if coarser < self.min_layers or coarser == depths[-1]:
                break
            depths.append(coarser)
        return tuple(depths)

    def init(self, params: PyTree) -> State:
        """The states of the optimisers on all levels."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise TypeError(
                    f"params{jax.tree_util.keystr(path)} is of type {jnp.result_type(leaf)}: all "
                    "weights must be real; give other data to `loss` in another way."
                )
        levels = [params]
        for layers in self.depths(params)[1:]:
            levels.append(self.restrict(levels[-1], layers))
        states = tuple(o.init(p) for o, p in zip(self._optimizers, levels, strict=False))
        if self.coarse_state == "restrict" and len({*map(jax.tree.structure, states)}) > 1:
            raise ValueError("coarse_state='restrict': the levels' optimisers differ in kind.")
        return states

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, params: PyTree, state: State, batch: Any) -> tuple[PyTree, State, MGOPTInfo]:
        """One V-cycle: `(params, state, info)` after it; `info` is an `MGOPTInfo`."""
        run = _Run(self, self.depths(params), lambda params: self.loss(params, batch))
        out = _cycle(run, 0, None, params, state, None)
        lengths = jnp.array(out.lengths, out.value.dtype)
        return out.params, out.states, MGOPTInfo(out.value, lengths, jnp.asarray(out.work))

    def restrict(self, params: PyTree, layers: int) -> PyTree:
        """Weights for a coarser level."""
        return _depth.restrict_layers(params, layers, self.restriction, layered=self.layered)

    def restrict_gradient(self, gradient: PyTree, layers: int) -> PyTree:
        """A gradient as a coarser level sees it: the transpose of `prolong`."""
        return _depth.restrict_layers(
            gradient, layers, "transpose", order=self.order, layered=self.layered
        )

    def prolong(self, params: PyTree, layers: int) -> PyTree:
        """Weights, or a correction of them, for a finer level."""
        return _depth.prolong_layers(params, layers, self.order, layered=self.layered)

    @property
    def _factors(self) -> tuple[int, ...]:
        m = self.coarsening
        return (m,) * (self.levels - 1) if isinstance(m, int) else tuple(m)

    @property
    def _optimizers(self) -> tuple[optax.GradientTransformation, ...]:
        o = self.optimizer
        return (o,) * self.levels if isinstance(o, optax.GradientTransformation) else tuple(o)


class _Run(NamedTuple):
    """What all levels of one step have in common."""

    method: MGOPT
    depths: tuple[int, ...]
    loss: Callable[[PyTree], Array]


class _Known(NamedTuple):
    """An objective's value and gradient at some weights."""

    value: Array
    gradient: PyTree


class _Cycled(NamedTuple):
    """What a cycle gives: `value` is at its start, `lengths` are those of its level and below."""

    params: PyTree
    states: State
    value: Array
    lengths: tuple[Array, ...]
    work: Any


def _cycle(
    run: _Run, level: int, v: PyTree | None, params: PyTree, states: State, known: _Known | None
) -> _Cycled:
    """One V-cycle from `level` down, for its objective with the linear term `v`."""
    method, layers, start = run.method, run.depths[level], params

    def objective(p: PyTree) -> Array:  # <v, p - start>: small numbers lose less to rounding
        return run.loss(p) if v is None else run.loss(p) - _inner(v, _tree.sub(p, start))

    smooth = functools.partial(_smooth, method._optimizers[level], objective)
    others = states[:level]
    if level == len(run.depths) - 1:
        steps = method.coarse if level else method.pre + method.post
        params, own, value, used = smooth(steps, params, states[level], known)
        return _Cycled(params, (*others, own), value, (), 2 * layers * used)

    params, own, value, used = smooth(method.pre, params, states[level], known)
    if known is None or method.pre:
        known, used = _Known(*jax.value_and_grad(objective)(params)), used + 1
    coarse = run.depths[level + 1]
    low = method.restrict(params, coarse)
    loss, coarse_gradient = jax.value_and_grad(run.loss)(low)
    gradient = method.restrict_gradient(known.gradient, coarse)
    term = _tree.sub(coarse_gradient, gradient)
    coarse_state = states[level + 1]
    if method.coarse_state == "restrict":
        optimizer = method._optimizers[level]
        coarse_state = _depth.restrict_optimizer_state(
            optimizer, own, coarse, layered=method.layered
        )
    states = (*others, own, coarse_state, *states[level + 2 :])
    below = _cycle(run, level + 1, term, low, states, _Known(loss, gradient))

    e = method.prolong(_tree.sub(below.params, low), layers)
    slope = _inner(known.gradient, e)
    length, tries = method.line_search(objective, params, known.value, slope, e)
    params = along(params, length, e)
    params, own, _, later = smooth(method.post, params, own, None)
    work = layers * (2 * (used + later) + tries) + 2 * coarse + below.work
    return _Cycled(
        params,
        (*others, own, *below.states[level + 1 :]),
        known.value if value is None else value,
        (length, *below.lengths),
        work,
    )


def _smooth(
    optimizer: optax.GradientTransformation,
    objective: Callable[[PyTree], Array],
    steps: int,
    params: PyTree,
    state: optax.OptState,
    known: _Known | None,
) -> tuple[PyTree, optax.OptState, Any, int]:
    """So many steps; also the value before them (None without any), and the gradients evaluated.

    The first step takes the `known` gradient, if there is one.
    """
    update = optax.with_extra_args_support(optimizer).update

    def step(at: tuple[PyTree, optax.OptState], known: _Known) -> tuple[PyTree, optax.OptState]:
        params, state = at
        value, g = known
        updates, state = update(g, state, params, value=value, grad=g, value_fn=objective)
        return optax.apply_updates(params, updates), state

    def evaluate_and_step(at: Any, _: None) -> tuple[Any, Array]:
        now = _Known(*jax.value_and_grad(objective)(at[0]))
        return step(at, now), now.value

    at, first, evaluations = (params, state), None, steps
    if known is not None and steps:
        at, first, evaluations = step(at, known), known.value, steps - 1
    if evaluations:
        at, values = jax.lax.scan(evaluate_and_step, at, None, length=evaluations)
        first = values[0] if first is None else first
    return at[0], at[1], first, evaluations


def _inner(x: PyTree, y: PyTree) -> Array:
    return jnp.asarray(optax.tree.vdot(x, y))
