r"""A deep stack whose first and last layers are exact; only those between them are iterated.

Of layers 0..N-1, the first $b_0$ and the last $b_1$ are computed in sequence and the rest by MGRIT,
all with $\Delta t = T / N$ and at the times $t_n = n \Delta t$ of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxbraid._ode_net import FORWARD, Form
from jaxbraid._options import MGRIT, check_integer
from jaxbraid._stats import AdjointStats, Solution
from jaxbraid.flax.nnx import ParallelStack
from jaxbraid.transfers import Transfer

_ALONE = "buffer"  # a mesh axis of one device: layers along it are on every device of the others


class BufferedStack(nnx.Module):
    r"""A `ParallelStack` with layers at both ends that are computed exactly, one after another.

    The ends of a deep transformer are where its layers differ most from their neighbours, so that
    coarse levels describe them worst. Three stacks lie upon each other: `opening` ($b_0$ layers),
    `middle` (solved by MGRIT) and `closing` ($b_1$); an end of no layers is `None`.

    **Arguments**

    - `make_block`, `rngs`: as in `jaxbraid.flax.nnx.ParallelStack`; any block will do. Blocks that
        take the time `t` see that of the whole depth.
    - `layers`: number of all layers N, those of the ends among them.
    - `buffers`: numbers of layers $(b_0, b_1)$ at the ends; at least one layer lies between them.
    - `smooth_init`: within each of the three stacks, every block starts with the same parameters.
    - `t_final`: the end of time $T$; every layer's step is $\Delta t = T / N$.
    - `form`, `forward`, `adjoint`, `transfers`, `mesh`, `layer_axis`, `batch_axis`: as in
        `jaxbraid.parallel_ode_net`. On a mesh, every device along the layer axis has the
        parameters of the ends, and computes them for its part of the batch.

    `model.set_attributes(serial=True)` makes the middle exact and sequential, too.

    **Raises**

    `ValueError` or `TypeError` naming the argument.

    ??? cite "Reference"

        S. Jiang, M. Salvadó-Benasco, E. C. Cyr, A. Kopaničáková, R. Krause, J. B. Schroder:
        Layer-parallel training for transformers. arXiv:2601.09026, 2026.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        layers: int,
        *,
        rngs: nnx.Rngs,
        buffers: tuple[int, int] = (0, 0),
        smooth_init: bool = False,
        t_final: float = 1.0,
        form: Form = "field",
        forward: MGRIT = FORWARD,
        adjoint: MGRIT | None = None,
        transfers: Sequence[Transfer | None] | None = None,
        mesh: Mesh | None = None,
        layer_axis: str = "layer",
        batch_axis: str | None = None,
    ):
        layers = check_integer("layers", layers, 1)
        if not isinstance(buffers, (tuple, list)) or len(buffers) != 2:
            raise TypeError(f"buffers={buffers!r}: must be two numbers of layers.")
        first, last = (check_integer("buffers", b, 0) for b in buffers)
        if first + last >= layers:
            raise ValueError(
                f"buffers={buffers!r}: must leave at least one of {layers} layers between them."
            )
        h = t_final / layers

        def stack(start: int, end: int, **options: Any) -> ParallelStack | None:
            return None if start == end else ParallelStack(
                make_block, end - start, rngs=rngs, smooth_init=smooth_init, form=form,
                t_start=start * h, t_final=end * h, batch_axis=batch_axis, **options,
            )  # fmt: skip

        exact: dict[str, Any] = {"forward": MGRIT(levels=1), "mesh": mesh, "layer_axis": layer_axis}
        if mesh is not None:
            exact["mesh"] = Mesh(mesh.devices[..., None], (*mesh.axis_names, _ALONE))
            exact["layer_axis"] = _ALONE
        self.opening = stack(0, first, **exact)
        self.middle = stack(
            first, layers - last, forward=forward, adjoint=adjoint, transfers=transfers, mesh=mesh,
            layer_axis=layer_axis,
        )  # fmt: skip
        self.closing = stack(layers - last, layers, **exact)
        self.layers = layers
        self.buffers = (first, last)

    def __call__(
        self,
        x: PyTree,
        *,
        side: PyTree | None = None,
        inputs: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
    ) -> PyTree:
        """The output of the last block. Arguments are those of a `ParallelStack`.

        `inputs` and a `guess` of states belong to all layers; the guess and the probe are for the
        middle, which alone is iterated.
        """
        for stack, own in self._parts(inputs, guess, adjoint_probe):
            x = stack(x, side=side, **own)
        return x

    def solve(
        self,
        x: PyTree,
        *,
        side: PyTree | None = None,
        inputs: PyTree | None = None,
        guess: PyTree | str | None = None,
        adjoint_probe: AdjointStats | None = None,
    ) -> Solution:
        """As calling the stack, with the states of all layers and the `stats` of the middle."""
        solutions = []
        for stack, own in self._parts(inputs, guess, adjoint_probe):
            solutions.append(stack.solve(x, side=side, **own))
            x = solutions[-1].u
        states = [s.us for s in solutions[:1]]
        states += [jax.tree.map(lambda a: a[1:], s.us) for s in solutions[1:]]
        us = jax.tree.map(lambda *parts: jnp.concatenate(parts), *states)
        return Solution(x, us, solutions[self.opening is not None].stats, None)

    def adjoint_probe(self) -> AdjointStats:
        """A probe for the record of the middle's adjoint solve; see `AdjointStats`."""
        return self._middle().adjoint_probe()

    def stacks(self) -> list[ParallelStack]:
        """The stacks that there are, in order of depth."""
        return [s for s in (self.opening, self.middle, self.closing) if s is not None]

    def _middle(self) -> ParallelStack:
        assert self.middle is not None
        return self.middle

    def _parts(
        self, inputs: PyTree, guess: PyTree | str | None, probe: AdjointStats | None
    ) -> list[tuple[ParallelStack, dict[str, Any]]]:
        """Every stack with what belongs to its layers."""
        parts, start = [], 0
        for stack in self.stacks():
            end = start + stack.layers
            own = {"inputs": _between(inputs, start, end)}
            if stack is self.middle:
                states = guess if isinstance(guess, str) else _between(guess, start, end + 1)
                own |= {"guess": states, "adjoint_probe": probe}
            parts.append((stack, own))
            start = end
        return parts


def _between(tree: PyTree, start: int, end: int) -> PyTree:
    return jax.tree.map(lambda a: a[start:end], tree)
