r"""Stochastic depth: layers that are left out at random in training.

With $b \sim \mathrm{Bernoulli}(p)$, $\dot x = (b / p) f(x)$ in training, else $\dot x = f(x)$.
"""

from __future__ import annotations

import inspect
import numbers
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, PyTree

from jaxbraid import _tree
from jaxbraid._ode_net import Form
from jaxbraid._options import check_choice


class CommonKey(nnx.Variable):
    """A PRNG key that the parts of a split batch have in common, unlike an `nnx.RngKey`."""


class StochasticDepth(nnx.Module):
    r"""A block that is left out at random in training (drop path).

    In a stack every layer draws once a call, however many iterations there are and on all levels,
    and the next call draws anew. `model.eval()` switches it off, `model.train()` on.

    **Arguments**

    - `block`: any block of a stack.
    - `keep`: probability to keep a layer; a pair falls (or rises) linearly in depth, from the first
        value at time 0 to the second at `t_final`: layer n of N has that of $t_n = n T / N$.
    - `per_sample`: every sample draws for itself; otherwise the whole batch is kept or not.
    - `t_final`, `form`: those of the stack. With `form="step"` a layer left out is the identity.
    - `rngs`: draws from its stream `dropout`.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        G. Huang, Y. Sun, Z. Liu, D. Sedra, K. Q. Weinberger: Deep networks with stochastic depth.
        ECCV 2016.
    """

    def __init__(
        self,
        block: nnx.Module,
        keep: float | tuple[float, float],
        *,
        per_sample: bool = True,
        t_final: float = 1.0,
        form: Form = "field",
        rngs: nnx.Rngs,
    ):
        both = keep if isinstance(keep, tuple) else (keep, keep)
        if len(both) != 2 or not all(isinstance(p, numbers.Real) for p in both):
            raise TypeError(f"keep={keep!r}: must be a probability or a pair of them.")
        if not all(0 < p <= 1 for p in both):
            raise ValueError(f"keep={keep!r}: must lie in (0, 1].")
        check_choice("form", form, ("field", "step"))
        self.block = block
        self.keep = (float(both[0]), float(both[1]))
        self.per_sample = per_sample
        self.t_final = t_final
        self.form = form
        self.deterministic = False
        self.rngs = rngs.dropout.fork()
        if not per_sample:
            common: Any = CommonKey(self.rngs.key.get_value(), tag="dropout")
            self.rngs.key = common

    def __call__(self, x: PyTree, t: Array, dt: Array, side: PyTree, inputs: PyTree) -> PyTree:
        """What the block returns, or that of no block, at random."""
        given = {"t": t, "dt": dt, "side": side, "inputs": inputs}
        takes = inspect.signature(type(self.block).__call__).parameters
        y = self.block(x, **{name: value for name, value in given.items() if name in takes})
        if self.deterministic:
            return y
        first, last = self.keep
        p = first + (last - first) * t / self.t_final
        batch = jax.tree.leaves(x)[0].shape[0]
        kept = jax.random.bernoulli(self.rngs(), p, (batch,) if self.per_sample else ())
        scale = kept / p

        def drop(x: Array, y: Array) -> Array:
            if not _tree.is_inexact(x):
                return y
            s = scale.astype(y.real.dtype).reshape(scale.shape + (1,) * (y.ndim - scale.ndim))
            return s * y if self.form == "field" else x + s * (y - x)

        return jax.tree.map(drop, x, y)
