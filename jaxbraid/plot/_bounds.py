"""Convergence factors over modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import ArrayLike

from jaxbraid.plot import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxbraid.convergence import ConvergenceBound


def bounds(
    curves: Mapping[str, ConvergenceBound],
    x: ArrayLike | None = None,
    *,
    xlabel: str = "mode",
    title: str = "",
    ax: Axes | None = None,
    path: Any = None,
) -> Figure:
    r"""Draw convergence factors over modes, or over $z = a \Delta t$.

    **Arguments**

    - `curves`: what to draw, by the labels of the legend, as
        `jaxbraid.convergence.two_level_bound` has it; their modes are one axis each.
    - `x`: real numbers, where each mode stands; by default its number, from 0. Positive ones over
        more than two decades, such as $-z$, are drawn on a logarithmic axis.
    - `xlabel`, `title`: texts.
    - `ax`: Matplotlib axes to draw into, instead of a new figure.
    - `path`: a file to save the picture to.

    **Returns**

    The Matplotlib figure. Beyond the line across, at 1, an iteration may make errors larger.

    **Raises**

    `ValueError` if there is nothing to draw, or `x` and modes don't fit together.
    """
    if not curves:
        raise ValueError("curves is empty: must have at least one ConvergenceBound.")
    ax = _style.axes_of(ax)
    for (label, bound), style in zip(curves.items(), _style.line_styles(marks=False), strict=False):
        at = np.arange(bound.modes.size) if x is None else np.asarray(x)
        if bound.modes.ndim != 1 or at.shape != bound.modes.shape or np.iscomplexobj(at):
            raise ValueError(
                f"curves[{label!r}] has modes of shape {bound.modes.shape} and x shape {at.shape}: "
                "must be one axis of the same length, x real."
            )
        ax.plot(at, bound.modes, label=f"{label} (largest {bound.factor:.3g})", **style)
    ax.axhline(1, color="0.6", linewidth=0.8)
    ax.set(xlabel=xlabel, ylabel="convergence factor an iteration", title=title)
    ax.set_yscale("log")
    largest = max(bound.factor for bound in curves.values())
    ax.set_ylim(bottom=max(ax.get_ylim()[0], min(1e-4, 1e-3 * largest)))  # less is as good as 0
    if x is not None and np.min(x) > 0 and np.max(x) > 100 * np.min(x):
        ax.set_xscale("log")
    ax.grid(alpha=0.3)
    ax.legend()
    return _style.finished(ax.figure, path)
