r"""Recurrent cells that can step over any time: what the coarse levels of a sequence need.

A cell of Flax maps a carry and an input to the next carry. To stand for $m$ of its steps, a coarse
level needs the cell as a step of length $\Delta t$. The cells here have it, split so that what
depends on inputs alone is computed once for all steps:

- `project(x)`: what the gates need of the inputs, for all steps of a sequence at once;
- `step(carry, z, dt)`: the next carry, from `z`, a step's part of the projected inputs;
- `output(carry)`: what the cell shows of its carry.

They are Flax's cells with the same parameters, and with $\Delta t = 1$ the explicit ones compute
the same; they can be used wherever Flax takes a cell (`nnx.RNN`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Hidden = Float[Array, "*batch hidden"]


class _Gated(nnx.GRUCell):
    """The gates of a GRU."""

    def project(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch 3*hidden"]:
        """The inputs' part of the gates, for any number of steps."""
        return self.dense_i(x)

    def output(self, carry: Hidden) -> Hidden:
        """The hidden state."""
        return carry

    def _gates(self, h: Hidden, z: Array) -> tuple[Hidden, Hidden]:
        """The update gate $z$ and the candidate $n$."""
        x_reset, x_update, x_new = jnp.split(z, 3, axis=-1)
        h_reset, h_update, h_new = jnp.split(self.dense_h(h), 3, axis=-1)
        reset = self.gate_fn(x_reset + h_reset)
        return self.gate_fn(x_update + h_update), self.activation_fn(x_new + reset * h_new)


class GRUCell(_Gated):
    r"""The gated recurrent unit: $h^+ = z^{\Delta t} h + (1 - z^{\Delta t})\, n$.

    With $\Delta t = 1$ that is the usual $h^+ = z h + (1 - z) n$ of `flax.nnx.GRUCell`, whose
    arguments and parameters it has; with $\Delta t = m$ it is $m$ such steps with gates that do
    not change meanwhile.

    ??? cite "Reference"

        K. Cho et al.: Learning phrase representations using RNN encoder-decoder for statistical
        machine translation. EMNLP 2014.
    """

    def step(self, carry: Hidden, z: Array, dt: Any = 1.0) -> Hidden:
        """The hidden state a time `dt` later."""
        update, new = self._gates(carry, z)
        kept = jnp.power(update, jnp.asarray(dt, update.dtype))
        return kept * carry + (1 - kept) * new


class ImplicitGRUCell(_Gated):
    r"""The GRU as an ODE, $h' = (1 - z)(n - h)$, stepped implicitly in its stiff term.

    $$h^+ = \frac{h + d\, n}{1 + d}, \qquad d = \Delta t\,(1 - z).$$

    It is stable for every $\Delta t$, so that coarse levels may take long steps. Arguments and
    parameters are those of `flax.nnx.GRUCell`; the step length is that of the `RNN` it's used in.

    ??? cite "Reference"

        G. E. Moon, E. C. Cyr: Parallel training of GRU networks with a multi-grid solver for long
        sequences. ICLR 2022.
    """

    def step(self, carry: Hidden, z: Array, dt: Any = 1.0) -> Hidden:
        """The hidden state a time `dt` later."""
        update, new = self._gates(carry, z)
        d = jnp.asarray(dt, update.dtype) * (1 - update)
        return (carry + d * new) / (1 + d)

    def __call__(self, carry: Hidden, inputs: Array) -> tuple[Hidden, Hidden]:
        """The next hidden state, twice: as carry and as output."""
        h = self.step(carry, self.project(inputs))
        return h, h


class LSTMCell(nnx.OptimizedLSTMCell):
    r"""The long short-term memory: $c^+ = f^{\Delta t} c + \frac{1 - f^{\Delta t}}{1 - f}\, i\, g$.

    The hidden state is $h^+ = o \tanh c^+$. With $\Delta t = 1$ that is the usual
    $c^+ = f c + i g$ of `flax.nnx.OptimizedLSTMCell`, whose arguments and parameters it has; with
    $\Delta t = m$ it is $m$ such steps with gates that do not change meanwhile. The carry is
    $(c, h)$.

    ??? cite "Reference"

        S. Hochreiter, J. Schmidhuber: Long short-term memory. Neural Computation 9(8), 1997.
    """

    def project(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch 4*hidden"]:
        """The inputs' part of the gates, for any number of steps."""
        return self.dense_i(x)

    def output(self, carry: tuple[Hidden, Hidden]) -> Hidden:
        """The hidden state."""
        return carry[1]

    def step(self, carry: tuple[Hidden, Hidden], z: Array, dt: Any = 1.0) -> tuple[Hidden, Hidden]:
        """The memory and the hidden state a time `dt` later."""
        c, h = carry
        i, f, g, o = jnp.split(z + self.dense_h(h), 4, axis=-1)
        i, f, o = self.gate_fn(i), self.gate_fn(f), self.gate_fn(o)
        dt = jnp.asarray(dt, f.dtype)
        kept = jnp.power(f, dt)
        forgets = f < 1  # a gate that is saturated in rounding only adds
        steps = jnp.where(forgets, (1 - kept) / jnp.where(forgets, 1 - f, 1), dt)
        c = kept * c + steps * i * self.activation_fn(g)
        return c, o * self.activation_fn(c)
