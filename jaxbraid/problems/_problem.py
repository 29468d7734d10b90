"""`Problem`: what `jaxbraid.solve` takes, with the serial truth and a picture of the solution."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxbraid import _tree
from jaxbraid._options import MGRIT
from jaxbraid._solve import Step, solve
from jaxbraid._stats import Solution
from jaxbraid.problems._plot import Picture, draw

Exact = Callable[..., Any]


@functools.partial(jax.jit, static_argnames="step")
def _march(step: Step, u0: PyTree, ts: Any, params: PyTree, args: PyTree) -> PyTree:
    def advance(u: PyTree, x: Any) -> tuple[PyTree, PyTree]:
        u = step(*x[:2], u, x[2], args)
        return u, u

    _, us = jax.lax.scan(advance, u0, (ts[:-1], ts[1:], params))
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), u0, us)


@dataclasses.dataclass(frozen=True, eq=False)  # holds arrays: compared by identity
class Problem:
    r"""A time-dependent problem $u_{n+1} = \Phi_n(u_n)$, ready to be solved.

    To change a field, such as the coefficients that one differentiates by, use
    `dataclasses.replace(problem, args={"a": a})`.

    **Arguments**

    - `name`: what it is called in pictures.
    - `step`: `step(t0, t1, u, params_n, args) -> u_next`, one function or a tuple with one a level.
    - `u0`: initial state, a pytree of arrays. Its precision is that of the solve.
    - `ts`: the `N + 1` points of the time grid.
    - `params`: per-step parameters with leading axis `N`, or `None`.
    - `args`: the coefficients of the equation, a dict of numbers.
    - `exact`: `exact(t, args=None) -> state`, the solution of the differential equation (by default
        with this problem's `args`), or `None` where there is no closed form.
    - `order`: global order in time of the scheme on the finest level.
    - `picture`: how a solution is drawn.
    """

    name: str
    step: Step | tuple[Step, ...]
    u0: PyTree
    ts: np.ndarray
    params: PyTree | None = None
    args: PyTree | None = None
    exact: Exact | None = None
    order: int | None = None
    picture: Picture = Picture()  # noqa: RUF009

    def solve(self, config: MGRIT = MGRIT(), **options: Any) -> Solution:  # noqa: B008
        """Solve the problem by MGRIT: `jaxbraid.solve` with this problem's step and data.

        **Arguments**

        - `config`: how to solve.
        - `options`: the other keyword arguments of `jaxbraid.solve`.

        **Returns**

        A `Solution`.
        """
        ts: Any = self.ts  # a numpy array, which `solve` takes as well as JAX's
        return solve(self.step, self.u0, ts, self.params, self.args, config=config, **options)

    def serial(self) -> PyTree:
        """March through the steps of the finest level, one after another: the truth.

        **Returns**

        The states at all points, leading axis `N + 1`.
        """
        step = self.step[0] if isinstance(self.step, tuple) else self.step
        u0 = jax.tree.map(jnp.asarray, self.u0)
        inexact = [x for x in jax.tree.leaves(u0) if _tree.is_inexact(x)]
        real = jnp.finfo(jnp.result_type(*inexact)).dtype  # the precision that `solve` gives ts
        ts = jnp.asarray(self.ts).astype(jnp.promote_types(real, jnp.float32))
        return _march(step, u0, ts, self.params, self.args)

    def plot(self, us: PyTree, path: Any = None, *, kind: str | None = None) -> Any:
        """Draw a solution.

        **Arguments**

        - `us`: the states at all points, as `serial()` and `solve().us` give them.
        - `path`: file to save the picture in; its ending says in which format.
        - `kind`: `"series"` (components over time), `"phase"` (one component over another),
            `"image"` (a 1D state over space and time) or `"snapshots"` (a 2D state at a few times);
            by default what suits the problem.

        **Returns**

        The matplotlib figure.

        **Raises**

        `ImportError` without matplotlib, which `pip install "jaxbraid[plot]"` brings.
        """
        return draw(self.name, self.picture, np.asarray(self.ts), us, path, kind)
