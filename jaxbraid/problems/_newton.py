"""Nonlinear systems inside a step: Newton's method with implicit derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx

MAX_STEPS = 50


def tolerance(x: Any) -> float:
    """What an iterative solver is asked for in the precision of `x`: some digits short of it.

    Newton's last step squares the error, so that what it ends with is exact but for rounding.
    """
    return float(jnp.finfo(x.dtype).eps) ** 0.75


def solve_nonlinear(equation: Callable[[Any, Any], Any], guess: Any, data: Any) -> Any:
    """The root u of `equation(u, data) = 0`, an array, by Newton's method from `guess`.

    All that the equation depends on (and that one may differentiate by) must come in `data`. The
    result is NaN where Newton's method fails: a wrong state must not look like a solution.
    """
    return _solve(equation, guess, data, lx.LU())


def solve_nonlinear_gmres(equation: Callable[[Any, Any], Any], guess: Any, data: Any) -> Any:
    """As `solve_nonlinear`, but no Jacobian is built: its systems are solved by GMRES.

    The equation should be preconditioned, so that few iterations are enough.
    """
    tol = tolerance(guess)
    return _solve(equation, guess, data, lx.GMRES(rtol=tol, atol=tol, restart=20, max_steps=200))


def _solve(equation: Any, guess: Any, data: Any, linear: Any) -> Any:
    tol = tolerance(guess)
    newton = optx.Newton(rtol=tol, atol=tol, linear_solver=linear)
    adjoint = optx.ImplicitAdjoint(linear_solver=linear)
    guess = jax.lax.stop_gradient(guess)

    def scaled(u: Any, data: Any) -> Any:
        """The tolerance is absolute, but the equation's rounding errors grow with the state."""
        return equation(u, data) / (1 + jax.lax.stop_gradient(jnp.max(jnp.abs(u))))

    out = optx.root_find(
        scaled, newton, guess, data, max_steps=MAX_STEPS, adjoint=adjoint, throw=False
    )
    return jnp.where(out.result == optx.RESULTS.successful, out.value, jnp.nan)
