"""Residuals over iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import ArrayLike

from jaxbraid._stats import AdjointStats, Solution, Stats
from jaxbraid.plot import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Solution | Stats | AdjointStats | ArrayLike


def residuals(
    histories: History | Mapping[str, History],
    *,
    tol: float | None = None,
    ylabel: str = "residual",
    title: str = "",
    ax: Axes | None = None,
    path: Any = None,
) -> Figure:
    """Draw residuals over iterations, on a logarithmic axis.

    **Arguments**

    - `histories`: one history or several by the labels of the legend: a `Solution`, its `stats`,
        the `AdjointStats` of an adjoint solve, or numbers, of which the first is that after
        iteration 1. A known residual of the initial guess is iteration 0. Iterations that were not
        run are left out, as are residuals of exactly zero, which have no place on such an axis.
    - `tol`: a tolerance, drawn as a line across.
    - `ylabel`, `title`: texts.
    - `ax`: Matplotlib axes to draw into, instead of a new figure.
    - `path`: a file to save the picture to.

    **Returns**

    The Matplotlib figure.

    **Raises**

    `ValueError` if there is nothing to draw, `TypeError` for what is no history.
    """
    given = histories if isinstance(histories, Mapping) else {"": histories}
    if not given:
        raise ValueError("histories is empty: must have at least one.")
    curves = {label: _curve(f"histories[{label!r}]", h) for label, h in given.items()}
    ax = _style.axes_of(ax)
    ax.set_yscale("log", nonpositive="mask")
    for (label, (first, values)), style in zip(curves.items(), _style.line_styles(), strict=False):
        ax.plot(np.arange(first, first + len(values)), values, label=label, **style)
    if tol is not None:
        ax.axhline(tol, color="0.4", lw=0.8, ls=":", label=f"tolerance {tol:g}")
    ax.set(xlabel="iteration", ylabel=ylabel, title=title)
    _style.whole_numbers(ax.xaxis)
    ax.grid(alpha=0.3)
    if any(curves) or tol is not None:
        ax.legend()
    return _style.finished(ax.figure, path)


def _curve(name: str, history: Any) -> tuple[int, np.ndarray]:
    """The number of the first iteration, and the residual after it and after each later one."""
    history = history.stats if isinstance(history, Solution) else history
    start = None
    if isinstance(history, Stats | AdjointStats):
        count = int(history.iterations)
        values = np.asarray(history.residuals)[:count]
        if isinstance(history, Stats):
            start = float(history.initial_residual)
    else:
        try:
            values = np.asarray(history, float)
        except (TypeError, ValueError):
            values = np.zeros((0, 0))
        if values.ndim != 1:
            raise TypeError(
                f"{name} is a {type(history).__name__}: must be a Solution, its stats, an "
                "AdjointStats, or a list of numbers."
            )
        known = np.flatnonzero(~np.isnan(values))
        values = values[: known[-1] + 1] if known.size else values[:0]
    if start is not None and np.isfinite(start):
        return 0, np.append(start, values)
    if not len(values):
        raise ValueError(f"{name} has no residual: no iteration was run.")
    return 1, values
