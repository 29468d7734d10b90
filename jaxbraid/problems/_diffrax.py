"""Any one-step solver of diffrax as a propagator, and any vector field as a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import PyTree

from jaxbraid import _check, _tree
from jaxbraid.problems import _arguments as check
from jaxbraid.problems._arguments import real
from jaxbraid.problems._newton import MAX_STEPS, tolerance
from jaxbraid.problems._plot import Picture
from jaxbraid.problems._problem import Exact, Problem, Step

VectorField = Callable[[Any, Any, Any], Any]

# what diffrax's root finders hold where a tolerance is left to the control of step sizes
_OPEN = diffrax.with_stepsize_controller_tols(diffrax.VeryChord)().rtol
# they would lose what they carry from step to step: a step here starts afresh from any point
_CARRY_STATE = (diffrax.LeapfrogMidpoint, diffrax.ReversibleHeun)


def diffrax_step(
    solver: diffrax.AbstractSolver, vector_field: VectorField, substeps: int = 1
) -> Step:
    r"""A step for `jaxbraid.solve` from a solver of diffrax and a vector field.

    It integrates $u' = f(t, u, \text{args})$ from `t0` to `t1` in `substeps` steps of one length.
    There is no control of step sizes: a propagator takes the step that the time grid says. Solvers
    that hand the last slope on ("first same as last") compute it anew at each step's beginning.

    **Arguments**

    - `solver`: any solver of diffrax for ordinary differential equations that goes from step to
        step by the state alone, explicit (`Tsit5()`) or implicit (`Kvaerno5()`). Where an implicit
        one leaves its root finder's tolerance open, Newton's method solves to that of the state.
    - `vector_field`: `f(t, u, args)`, as for diffrax; `u` is any pytree of arrays.
    - `substeps`: steps of the solver in one step of the time grid.

    **Returns**

    `step(t0, t1, u, params, args)`. Equal calls return the same function. The state becomes NaN
    where an implicit solver's root finder fails.

    **Raises**

    `TypeError` or `ValueError` for a solver that cannot work so (for stochastic equations, of
    several terms, with a state that it carries over steps), naming it.

    ??? cite "Reference"

        P. Kidger: On Neural Differential Equations. PhD thesis, University of Oxford, 2021.
    """
    if not isinstance(solver, diffrax.AbstractSolver):
        hint = f" Did you mean {solver.__name__}()?" if isinstance(solver, type) else ""
        raise TypeError(f"solver={solver!r}: must be a solver of diffrax.{hint}")
    inner = solver.solver if isinstance(solver, diffrax.HalfSolver) else solver
    kind = type(inner).__name__
    if isinstance(inner, _CARRY_STATE):
        raise ValueError(
            f"solver={kind}: carries more than the state from step to step; must be a one-step "
            "solver, such as Tsit5 or Kvaerno5."
        )
    if inner.term_structure not in (diffrax.AbstractTerm, diffrax.ODETerm):
        raise ValueError(
            f"solver={kind}: is for stochastic equations or for several terms (IMEX, splitting); "
            "must be for one ordinary differential equation, such as Tsit5 or Kvaerno5."
        )
    if not callable(vector_field):
        raise TypeError(f"vector_field={vector_field!r}: must be a function f(t, u, args).")
    substeps = check.integer("substeps", substeps, 1)
    try:
        return _step(solver, vector_field, substeps)
    except TypeError:  # a solver or a function that holds arrays has no hash
        return _step.__wrapped__(solver, vector_field, substeps)


def _with_newton(solver: Any, u: jax.Array) -> Any:
    """The solver with Newton's method to the precision of the state, where it leaves that open.

    diffrax's own choice then, a chord method, takes a step that is larger than what it suits, or an
    error near rounding, for a sign to halve the step, which is no way out here.
    """
    if isinstance(solver, diffrax.HalfSolver):
        inner = _with_newton(solver.solver, u)
        return eqx.tree_at(lambda s: s.solver, solver, inner)
    if not isinstance(solver, diffrax.AbstractImplicitSolver):
        return solver
    if getattr(solver.root_finder, "rtol", None) is not _OPEN:
        return solver
    newton = optx.Newton(rtol=tolerance(u), atol=tolerance(u), norm=optx.max_norm)

    def where(s: Any) -> tuple[Any, ...]:
        return s.root_finder, s.root_find_max_steps

    return eqx.tree_at(where, solver, (newton, MAX_STEPS))


def _with_all_derivatives(solver: Any) -> Any:
    """The solver with a loop over its stages that has forward derivatives, too."""
    if isinstance(solver, diffrax.HalfSolver):
        return eqx.tree_at(lambda s: s.solver, solver, _with_all_derivatives(solver.solver))
    if getattr(solver, "scan_kind", "none") is not None:
        return solver
    return eqx.tree_at(lambda s: s.scan_kind, solver, "bounded", is_leaf=lambda x: x is None)


@functools.lru_cache(maxsize=256)  # bounded, for a vector field may be made anew for each call
def _step(solver: Any, vector_field: VectorField, substeps: int) -> Step:
    def f(t, u, args):
        slope = vector_field(t, u, args)
        return jax.tree.map(lambda k, x: jnp.asarray(k).astype(x.dtype), slope, u)

    terms = diffrax.ODETerm(f)

    def step(t0, t1, u, params, args):
        inexact = [x for x in jax.tree.leaves(u) if _tree.is_inexact(x)]
        one = jnp.zeros((), jnp.result_type(*inexact))
        t0, t1 = real(one, t0, t1)
        dt = (t1 - t0) / substeps
        method = _with_newton(_with_all_derivatives(solver), one)

        def advance(carry: Any, i: Any) -> tuple[Any, None]:
            u, state, fine = carry
            start, end = t0 + i * dt, jnp.where(i == substeps - 1, t1, t0 + (i + 1) * dt)
            u, _, _, state, result = method.step(terms, start, end, u, args, state, made_jump=False)
            return (u, state, fine & (result == diffrax.RESULTS.successful)), None

        carry = u, method.init(terms, t0, t0 + dt, u, args), jnp.array(True)
        if substeps == 1:
            carry, _ = advance(carry, 0)
        else:
            carry, _ = jax.lax.scan(advance, carry, jnp.arange(substeps))
        u, _, fine = carry
        if not isinstance(method, diffrax.AbstractImplicitSolver):
            return u  # it cannot fail
        return jax.tree.map(lambda x: jnp.where(fine, x, jnp.nan), u)

    return step


def ode(
    f: VectorField,
    u0: PyTree,
    ts: Any,
    args: PyTree | None = None,
    solver: diffrax.AbstractSolver | None = None,
    substeps: int = 1,
    *,
    name: str = "ODE",
    exact: Exact | None = None,
    labels: Sequence[str] = ("u",),
) -> Problem:
    r"""A problem of any vector field: $u' = f(t, u, \text{args})$, by a solver of diffrax.

    **Arguments**

    - `f`: `f(t, u, args)`, the slopes, of the structure of `u`.
    - `u0`: initial state, any pytree of arrays.
    - `ts`: the points of the time grid.
    - `args`: coefficients, which one may differentiate by.
    - `solver`: of diffrax, by default `Tsit5()`, an explicit one of order 5.
    - `substeps`: steps of the solver in one step of the time grid.
    - `name`, `labels`: of the problem and of the state's components, for pictures.
    - `exact`: `exact(t, args=None)`, the solution, if there is a formula.

    **Returns**

    A `Problem`. Its order is that of the solver.

    **Raises**

    `ValueError` or `TypeError` naming the argument.
    """
    solver = diffrax.Tsit5() if solver is None else solver
    step = diffrax_step(solver, f, substeps)
    u0 = _check.arrays("u0", u0)
    ts = np.asarray(_check.time_grid(ts))
    order = solver.order(diffrax.ODETerm(f))
    picture = Picture("series", tuple(labels))
    return Problem(name, step, u0, ts, None, args, exact, order, picture)


# -- Arenstorf's orbit ----------------------------------------------------------------------------

MASS = 0.012277471  # of the moon, in parts of earth and moon
PERIOD = 17.0652165601579625588917206249
ORBIT = (0.994, 0.0, 0.0, -2.00158510637908252240537862224)


def _three_bodies(t, u, args):
    moon = real(u, args["mu"])
    earth = 1 - moon
    x, y, vx, vy = u
    to_earth = ((x + moon) ** 2 + y**2) ** 1.5
    to_moon = ((x - earth) ** 2 + y**2) ** 1.5
    return jnp.stack(
        [
            vx,
            vy,
            x + 2 * vy - earth * (x + moon) / to_earth - moon * (x - earth) / to_moon,
            y - 2 * vx - earth * y / to_earth - moon * y / to_moon,
        ]
    )


def arenstorf(
    solver: diffrax.AbstractSolver | None = None,
    substeps: int | Sequence[int] = 1,
    mu: float = MASS,
    u0: Sequence[float] = ORBIT,
    *,
    t_end: float = PERIOD,
    nt: int = 10000,
    ts: Any = None,
    dtype: Any = None,
) -> Problem:
    r"""Arenstorf's orbit: a satellite's periodic path around earth and moon.

    The restricted problem of three bodies in coordinates that turn with earth and moon; the
    satellite is at $(x, y)$. With the initial values and the mass that are the defaults it comes
    back after the period $T = 17.0652\ldots$, which is `t_end`. It passes near the moon, where
    errors grow much: MGRIT needs coarse steps that still follow the orbit, of several `substeps`.

    **Arguments**

    - `solver`: of diffrax, by default `Dopri8()`, an explicit one of order 8.
    - `substeps`: steps of the solver in one step of the time grid; or a sequence, one a level.
    - `mu`: mass of the moon in parts of that of earth and moon.
    - `u0`: $(x, y, x', y')$ at the start.
    - `t_end`, `nt`: `nt` steps of one length from 0 to `t_end`; or `ts`: the points of the grid.
    - `dtype`: of the state, by default double precision.

    **Returns**

    A `Problem` with `args={"mu": mu}`; the state is $(x, y, x', y')$.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        R. F. Arenstorf: Periodic solutions of the restricted three body problem representing
        analytic continuations of Keplerian elliptic motions. Amer. J. Math. 85, 1963; values from
        E. Hairer, S. P. Nørsett, G. Wanner: Solving Ordinary Differential Equations I, section II.
    """
    solver = diffrax.Dopri8() if solver is None else solver
    counts = check.each_level("substeps", substeps, lambda n, k: check.integer(n, k, 1))
    return Problem(
        "Arenstorf's orbit",
        check.one_or_all(tuple(diffrax_step(solver, _three_bodies, k) for k in counts)),
        check.vector("u0", u0, 4, dtype),
        check.time_grid(t_end, nt, ts),
        args={"mu": check.number("mu", mu, above=0.0)},
        order=solver.order(diffrax.ODETerm(_three_bodies)),
        picture=Picture("phase", ("x", "y", "x'", "y'")),
    )
