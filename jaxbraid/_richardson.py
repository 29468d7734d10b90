r"""Richardson extrapolation of a step, and the error estimate that comes with it.

A step of order $p$ makes an error $c\, \Delta t^{p+1}$ over $\Delta t$. One step over $\Delta t$
and $k$ over $\Delta t / k$ tell it, and what is left after it is taken off is of one order more:

$$ e = \frac{\Phi_{\Delta t/k}^k(u) - \Phi_{\Delta t}(u)}{k^p - 1}, \qquad
   u_{n+1} = \Phi_{\Delta t/k}^k(u) + e. $$
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxbraid import _tree
from jaxbraid._iterate import squares
from jaxbraid._options import check_integer
from jaxbraid._tree import Tree

Step = Callable[..., Any]
Norm = Callable[[Any], Any]


def richardson(
    step: Step, order: int, factor: int = 2, *, error: bool = False, norm: Norm | None = None
) -> Step:
    r"""The step of one order more that is extrapolated from `step`, a step like any other.

    Its coarse levels may take the plain step:
    `solve([richardson(step, order=1), step], u0, ts, config=...)`.

    **Arguments**

    - `step`: `step(t0, t1, u, params_n, args) -> u_next`, a one-step method.
    - `order`: its global order $p \ge 1$.
    - `factor`: $k \ge 2$, into how many a step is divided. An extrapolated step costs $k + 1$.
    - `error`: also return, as the step's auxiliary output (`has_aux=True`), the norm of the error
        estimate $e$, that of the divided steps *without* extrapolation. All steps of a solve have
        such an output or none: coarse ones may be `richardson` steps too.
    - `norm`: of a state; `None` is the 2-norm over all leaves.

    **Returns**

    The extrapolated step; the same one whenever it is asked for with the same arguments.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        E. Hairer, S. P. Nørsett, G. Wanner: Solving Ordinary Differential Equations I, II.4.
        In MGRIT: R. D. Falgout, T. A. Manteuffel, B. O'Neill, J. B. Schroder: Multigrid reduction
        in time with Richardson extrapolation. Electron. Trans. Numer. Anal. 54, 2021.
    """
    if not callable(step):
        raise TypeError(f"step={step!r}: must be a function.")
    if norm is not None and not callable(norm):
        raise TypeError(f"norm={norm!r}: must be None or a function state -> scalar.")
    order, factor = check_integer("order", order, 1), check_integer("factor", factor, 2)
    return _richardson(step, order, factor, bool(error), norm)


@functools.lru_cache(maxsize=256)
def _richardson(step: Step, order: int, factor: int, error: bool, norm: Norm | None) -> Step:
    def extrapolated(t0: Any, t1: Any, u: Tree, params: Tree, args: Tree) -> Any:
        coarse, fine = step(t0, t1, u, params, args), u
        times = [t0 + (t1 - t0) * i / factor for i in range(factor)] + [t1]
        for start, end in itertools.pairwise(times):
            fine = step(start, end, fine, params, args)

        def estimate(a: jax.Array, b: jax.Array) -> jax.Array:
            if not _tree.is_inexact(a):
                return a
            return ((a - b) / (factor**order - 1)).astype(a.dtype)

        e = jax.tree.map(estimate, fine, coarse)
        u = jax.tree.map(lambda a, e: a + e if _tree.is_inexact(a) else a, fine, e)
        if not error:
            return u
        size = norm(e) if norm is not None else _two_norm(e)
        return u, jax.lax.stop_gradient(size)

    return extrapolated


def _two_norm(e: Tree) -> jax.Array:
    return jnp.sqrt(squares([x for x in jax.tree.leaves(e) if _tree.is_inexact(x)]))
