r"""`parallel_ode_net`: a residual or ODE network whose layers are computed all at once.

Layer $n$ of $N$ is the step $u_{n+1} = u_n + \Delta t\, f(\theta_n, u_n)$ with $\Delta t = T / N$,
or any step that is given.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from jaxbraid import _check, _tree
from jaxbraid._forward import Track, Want
from jaxbraid._hierarchy import Hierarchy, build_hierarchies
from jaxbraid._layout import Layout, make_layout
from jaxbraid._options import MGRIT, check_integer
from jaxbraid._problem import PerStep, Setup
from jaxbraid._run import Arrays, Output, run
from jaxbraid._stats import AdjointStats, Solution
from jaxbraid.transfers import Transfer

Form = Literal["field", "step"]
EXTRAS = ("t", "dt", "args", "side", "inputs")

FORWARD = MGRIT(levels=2, coarsening=4, max_iters=2, final_relax="FC")
ADJOINT = MGRIT(levels=2, coarsening=4, max_iters=1, final_relax="FC")


def default_adjoint(forward: MGRIT, adjoint: MGRIT | None) -> MGRIT:
    """How the adjoint is solved unless told: as `forward`, but for the norm, which is of states."""
    if adjoint is not None:
        return adjoint
    return ADJOINT if forward is FORWARD else dataclasses.replace(forward, norm=None)


def layers_hierarchy(
    layers: int, mesh: Mesh, forward: MGRIT, adjoint: MGRIT | None, layer_axis: str
) -> Hierarchy:
    """How the layers of a network lie on `mesh`; checks all that it is given."""
    layers = check_integer("layers", layers, 1)
    _check.mesh_axes(mesh, layer_axis, None)
    _check.config("forward", forward)
    adjoint = default_adjoint(forward, adjoint)
    _check.config("adjoint", adjoint)
    return build_hierarchies((forward, adjoint), layers, mesh.shape[layer_axis])[0]


def _extras(f: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of `f` after `(params_n, x)`, each one of `EXTRAS`."""
    if not callable(f):
        raise TypeError(f"f={f!r}: must be a function f(params_n, x).")
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return ()
    kinds = inspect.Parameter
    named = [p for p in parameters if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    variadic = any(p.kind == kinds.VAR_POSITIONAL for p in parameters)
    positional = [p for p in named if p.kind != kinds.KEYWORD_ONLY]
    if len(positional) < 2 and not variadic:
        raise TypeError(f"f{inspect.signature(f)}: must take at least (params_n, x).")
    names = []
    for p in named[2:]:
        if p.name in EXTRAS and p.kind != kinds.POSITIONAL_ONLY:
            names.append(p.name)
        elif p.default is kinds.empty:
            raise TypeError(
                f"f{inspect.signature(f)}: does not know the parameter {p.name!r}; after "
                f"(params_n, x) the names can be {', '.join(EXTRAS)}, none positional-only."
            )
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A user's field or step in the engine's form."""

    f: Callable[..., Any]
    extras: tuple[str, ...]
    form: Form
    has_aux: bool

    def __call__(self, time: Any, u: Any, own: PerStep, args: Any, side: Any) -> tuple[Any, Any]:
        t, dt = time
        values = t, dt.astype(_tree.precision(u)), args, side, own.inputs
        given: dict[str, Any] = dict(zip(EXTRAS, values, strict=True))
        out = self.f(own.params, u, **{name: given[name] for name in self.extras})
        out, aux = _check.with_aux("f", out) if self.has_aux else (out, ())
        if self.form == "step":
            return out, aux
        if jax.tree.structure(out) != jax.tree.structure(u):
            raise TypeError(
                f"f returns the structure {jax.tree.structure(out)}: the derivative must have that "
                f"of x, {jax.tree.structure(u)}."
            )
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(u), strict=True):
            if jnp.shape(a) != jnp.shape(b):
                raise ValueError(
                    f"f returns a leaf of shape {jnp.shape(a)}: the derivative must have the shape "
                    f"of x, {jnp.shape(b)}."
                )
        return _tree.euler_step(u, dt, out), aux


@dataclasses.dataclass(frozen=True)
class _WholeBatch:
    """A field or step on one device, where the batch axis that it may sum over has one part."""

    f: Callable[..., Any]
    axis: str

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.f)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def call(args: Any, kwargs: Any, _: Any) -> Any:
            return self.f(*args, **kwargs)

        alone = jax.vmap(call, in_axes=(None, None, 0), out_axes=None, axis_name=self.axis)
        return alone(args, kwargs, jnp.zeros(1))


@dataclasses.dataclass(frozen=True)
class _LayerClock:
    """Times and step sizes of layers: `n` equal steps from `t_start` to `t_final`."""

    t_start: float
    t_final: float
    n: int

    def __call__(self, times: None, start: Array, end: Array) -> tuple[Array, Array]:
        h = jnp.asarray((self.t_final - self.t_start) / self.n)
        return self.t_start + start * h, (end - start) * h


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity
class ParallelODENet:
    """A stack of layers as a function of its input; made by `parallel_ode_net`.

    It is a pytree: `params` and `args` are its leaves. `dataclasses.replace(net, params=...)` makes
    the same net with other weights.
    """

    params: PyTree
    args: PyTree
    layers: int = dataclasses.field(metadata={"static": True})
    f: tuple[Callable[..., Any], ...] = dataclasses.field(metadata={"static": True})
    form: Form = dataclasses.field(metadata={"static": True})
    t_final: float = dataclasses.field(metadata={"static": True})
    forward: MGRIT = dataclasses.field(metadata={"static": True})
    adjoint: MGRIT = dataclasses.field(metadata={"static": True})
    transfers: tuple[Transfer | None, ...] | None = dataclasses.field(metadata={"static": True})
    has_aux: bool = dataclasses.field(metadata={"static": True})
    mesh: Mesh | Layout | None = dataclasses.field(metadata={"static": True})
    layer_axis: str = dataclasses.field(metadata={"static": True})
    batch_axis: str | None = dataclasses.field(metadata={"static": True})
    t_start: float = dataclasses.field(default=0.0, metadata={"static": True})

    def __call__(
        self,
        x: PyTree,
        *,
        inputs: PyTree | None = None,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
    ) -> PyTree:
        """The output of the last layer for the input `x`; with `has_aux`, `(output, aux)`.

        - `x`: the input state, any pytree; with a batch axis, all leaves have the batch leading.
        - `inputs`: what each layer gets that belongs to the samples, as the elements of sequences
            of which every layer takes one: leading axis N, then the batch. A coarse layer gets
            that of the layer where it starts.
        - `side`: what all layers get alike that belongs to the samples (masks, conditioning),
            batch leading.
        - `guess`: states at the points 0..N to start from (`solve(...).us` of an earlier call), or
            `"constant"` for `x` everywhere, instead of a coarse solve.
        - `adjoint_probe`: see `AdjointStats`.
        """
        out = self._run(Want(None, None, self.has_aux), x, inputs, side, guess, adjoint_probe)
        return (out.u, out.aux) if self.has_aux else out.u

    def states(
        self,
        x: PyTree,
        *,
        inputs: PyTree | None = None,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
    ) -> PyTree:
        """The states before and after all layers, leading axis N + 1; differentiable.

        Arguments are those of a call. `solve` has them with statistics and auxiliary output.
        """
        return _all_states(
            self._run(Want("all", None, False), x, inputs, side, guess, adjoint_probe)
        )

    def solve(
        self,
        x: PyTree,
        *,
        inputs: PyTree | None = None,
        side: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
    ) -> Solution:
        """As calling the net, with the states of all layers (`us`, leading axis N + 1) and `stats`.

        All of it but the statistics is differentiable.
        """
        want = Want("all", Track(), self.has_aux)
        out = self._run(want, x, inputs, side, guess, adjoint_probe)
        assert out.stats is not None
        return Solution(out.u, _all_states(out), out.stats, out.aux if self.has_aux else None)

    def serial(self) -> ParallelODENet:
        """The same network on one device, its layers in sequence: to evaluate, export or check."""
        one = MGRIT(levels=1)
        f = self.f[:1]
        if self.batch_axis is not None:
            f = (_WholeBatch(f[0], self.batch_axis),)
        return dataclasses.replace(
            self, forward=one, adjoint=one, mesh=None, batch_axis=None, f=f, transfers=None
        )

    def adjoint_probe(self) -> AdjointStats:
        """A probe whose gradient is the record of the adjoint solve; see `AdjointStats`."""
        dtype = jnp.result_type(float)
        iters = max(1, self.adjoint.max_iters)
        setup, layout = self._setup()
        own = layout.count(setup.hierarchies(layout.devices)[0])
        return AdjointStats(
            jnp.zeros(iters, dtype), jnp.zeros((), dtype), jnp.zeros(own + 1, dtype)
        )

    def _run(
        self,
        want: Want,
        x: PyTree,
        inputs: PyTree,
        side: PyTree,
        guess: Any,
        probe: AdjointStats | None,
    ) -> Output:
        x, side = _check.arrays("x", x), _check.arrays("side", side)
        inputs = _check.arrays("inputs", inputs)
        params, args = _check.arrays("params", self.params), _check.arrays("args", self.args)
        if not any(_tree.is_inexact(leaf) for leaf in jax.tree.leaves(x)):
            raise TypeError("x has no real or complex leaf: there is nothing to propagate.")
        setup, layout = self._setup()
        _check.parts_divide("x", x, layout)
        _check.parts_divide("side", side, layout)
        _check.parts_divide("inputs", inputs, layout, first=1)
        for name, given in (("x", x), ("side", side), ("args", args)):
            layout.agree(name, given)
        h, _ = setup.hierarchies(layout.devices)
        own = layout.count(h)
        for name, given in (("params", params), ("inputs", inputs)):
            _check.leading_axis(name, given, own, "the number of layers", layout.size(h))
        guess = _check.guess(guess, x, own)
        guess = None if guess is None else layout.starts(guess, h)
        return run(
            setup, layout, want, Arrays(None, x, PerStep(params, inputs), args, side, guess), probe
        )

    def _setup(self) -> tuple[Setup, Layout]:
        setup = Setup(
            tuple(_Layer(f, _extras(f), self.form, self.has_aux) for f in self.f),
            _LayerClock(self.t_start, self.t_final, self.layers),
            self.layers,
            self.forward,
            self.adjoint,
            self.transfers,
            self.has_aux,
        )
        return setup, make_layout(self.mesh, self.layer_axis, self.batch_axis)


def _all_states(out: Output) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), out.states, out.u)


def parallel_ode_net(
    f: Callable[..., Any] | Sequence[Callable[..., Any]],
    params: PyTree,
    *,
    args: PyTree | None = None,
    layers: int | None = None,
    form: Form = "field",
    t_final: float = 1.0,
    t_start: float = 0.0,
    forward: MGRIT = FORWARD,
    adjoint: MGRIT | None = None,
    transfers: Sequence[Transfer | None] | None = None,
    has_aux: bool = False,
    mesh: Mesh | Layout | None = None,
    layer_axis: str = "layer",
    batch_axis: str | None = None,
) -> ParallelODENet:
    r"""A network of N layers that propagates forward and backward in parallel over its layers.

    **Arguments**

    - `f`: `f(params_n, x) -> dx/dt`, the vector field of layer $n$, or with `form="step"`,
        `f(params_n, x) -> x_next`. It may also take, by name: `t`, the time of the layer; `dt`,
        the step size (a coarse layer gets a larger one; a step must use it); `args`; `inputs`;
        `side`. A
        sequence gives one function a level.
    - `params`: the layers' parameters, a pytree with leading axis N. Leaves that are not real or
        complex (integers, booleans, PRNG keys) are allowed and get no gradient.
    - `args`: parameters that all layers share; differentiated as `params` are.
    - `layers`: N, where the leading axis of `params` does not say it: where they are padded to
        equal blocks on the devices (`jaxbraid.distributed.global_layers`), or have no leaves.
        The padding must hold values that `f` can take; it has no influence and no gradient.
    - `form`: `"field"` (stepped by forward Euler, as a residual network is) or `"step"`.
    - `t_final`: the end of time $T$; a layer's step is $\Delta t = (T - t_0) / N$.
    - `t_start`: the time $t_0$ of the first layer, for a net that goes on where another ends.
    - `forward`, `adjoint`: how to solve forward and backward. By default 2 and 1 iterations on two
        levels with factor 4 (`adjoint` takes over the levels and factors of `forward`). They are
        inexact; `MGRIT(levels=1)` is exact and sequential.
    - `transfers`: spatial coarsening: one `Transfer` (or `None`) for each level but the coarsest.
    - `has_aux`: `f` returns `(value, aux)`; calling the net returns `(output, aux)` with every
        layer's `aux` from the last sweep, leading axis N. Where a batch axis splits the batch, aux
        is the mean over its parts.
    - `mesh`: devices: layers are split along `layer_axis`, the leading axis of `x` and `side`
        along `batch_axis`, if given. Without a mesh the same code runs on one device.

    **Returns**

    A `ParallelODENet`: `y = net(x)`.

    **Raises**

    `ValueError` or `TypeError` naming the argument at fault.

    ??? cite "Reference"

        S. Guenther, L. Ruthotto, J. B. Schroder, E. C. Cyr, N. R. Gauger: Layer-parallel training
        of deep residual neural networks. SIAM J. Math. Data Sci. 2(1), 2020.
    """
    fs = tuple(f) if isinstance(f, Sequence) else (f,)
    if form not in ("field", "step"):
        raise ValueError(f"form={form!r}: must be 'field' or 'step'.")
    _check.config("forward", forward)
    adjoint = default_adjoint(forward, adjoint)
    for name, config in (("forward", forward), ("adjoint", adjoint)):
        _check.config(name, config)
        _check.one_a_level("f", fs, config)
    for one in fs:
        _extras(one)
    if layers is None:
        layers = _check.common_leading_axis("params", params, "the number of layers")
    else:
        layers = check_integer("layers", layers, 1)
    make_layout(mesh, layer_axis, batch_axis)
    for name, time in (("t_final", t_final), ("t_start", t_start)):
        if isinstance(time, Tracer):
            raise TypeError(f"{name} is traced: must be a number; scale f instead.")
        if not isinstance(time, numbers.Real) or not math.isfinite(time):
            raise TypeError(f"{name}={time!r}: must be a finite number.")
    return ParallelODENet(
        params,
        args,
        layers,
        fs,
        form,
        float(t_final),
        forward,
        adjoint,
        _check.transfers(transfers, forward, adjoint),
        has_aux,
        mesh,
        layer_axis,
        batch_axis if mesh is not None else None,
        float(t_start),
    )
