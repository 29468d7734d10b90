"""How an iteration converges along time, or along the layers of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import ArrayLike, Float

from jaxbraid._stats import Solution, Stats
from jaxbraid.plot import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROUNDING = 4  # times eps, relative to the largest value: nothing else is below


def iteration(
    values: Solution | Stats | Float[ArrayLike, "iterations_plus_1 points"],
    x: ArrayLike | None = None,
    *,
    xlabel: str | None = None,
    label: str | None = None,
    title: str = "",
    ax: Axes | None = None,
    path: Any = None,
) -> Figure:
    """Draw residuals or errors as an image: points along, iterations downwards.

    MGRIT carries the solution from the beginning on, m or 2m points an iteration, besides
    contracting the error everywhere; the image shows both.

    **Arguments**

    - `values`: a `Solution`, or its `stats`, of a solve with `point_residuals=True`: the residuals
        at C-points. Or any numbers that are not negative, such as norms of errors at points or
        layers: row 0 of the initial guess, row i after iteration i.
    - `x`: where each point lies, in time or depth; by default its number.
    - `xlabel`, `label`: texts for the points and for the values; `title`: for the whole.
    - `ax`: Matplotlib axes to draw into, instead of a new figure.
    - `path`: a file to save the picture to.

    **Returns**

    The Matplotlib figure. Exact zeros, and what is but rounding beside the largest value, are grey;
    what was not computed is white.

    **Raises**

    `ValueError` for stats without point residuals, values of another shape or negative ones, and
    an `x` that doesn't fit.
    """
    stats = values.stats if isinstance(values, Solution) else values
    if isinstance(stats, Stats):
        if stats.point_residuals is None:
            raise ValueError("there are no point_residuals: solve with point_residuals=True.")
        shown = np.asarray(stats.point_residuals)[: int(stats.iterations) + 1]
        label = "residual" if label is None else label
        xlabel = "C-point" if xlabel is None and x is None else xlabel
    else:
        shown = np.asarray(stats)
        if shown.ndim != 2 or not shown.size:
            raise ValueError(f"values has shape {shown.shape}: must be (iterations + 1, points).")
    if np.any(shown < 0):
        raise ValueError("values has negative entries: must be norms of residuals or errors.")
    points = np.arange(1, shown.shape[1] + 1) if x is None else np.asarray(x, float)
    if points.shape != shown.shape[1:]:
        raise ValueError(f"x has shape {points.shape}: must be {shown.shape[1:]}, one a point.")

    ax = _style.axes_of(ax)
    image = _logarithmic_image(ax, points, shown)
    ax.invert_yaxis()
    ax.set(xlabel=xlabel or "point", ylabel="iteration", title=title)
    _style.whole_numbers(ax.yaxis)
    ax.figure.colorbar(image, ax=ax, label=label or "norm", extend="min")
    return _style.finished(ax.figure, path)


def _logarithmic_image(ax: Any, points: np.ndarray, shown: np.ndarray) -> Any:
    import matplotlib
    from matplotlib.colors import LogNorm

    single = shown.dtype.itemsize < 8 and np.issubdtype(shown.dtype, np.floating)
    eps = float(np.finfo(shown.dtype if single else float).eps)
    shown = shown.astype(float)
    finite = shown[np.isfinite(shown) & (shown > 0)]
    high = float(np.max(finite)) if finite.size else 1.0
    low = max(float(np.min(finite)), high * _ROUNDING * eps) if finite.size else high
    low = min(low, high / 10)  # all alike: a scale all the same
    colours = matplotlib.colormaps[_style.IMAGE].with_extremes(bad="white", under="0.8")
    shown = np.where(shown < low, low / 10, shown)  # zero as well, which has no logarithm
    rows = np.arange(len(shown))
    return ax.pcolormesh(
        points,
        rows,
        np.ma.masked_invalid(shown),
        cmap=colours,
        norm=LogNorm(low, high),
        shading="nearest",
        rasterized=True,
    )


def iterates(
    states: Sequence[ArrayLike],
    ts: Float[ArrayLike, " points"],
    truth: Float[ArrayLike, " points"] | None = None,
    *,
    labels: Sequence[str] | None = None,
    xlabel: str = "t",
    ylabel: str = "u",
    title: str = "",
    ax: Axes | None = None,
    path: Any = None,
) -> Figure:
    """Draw one number of the state along time, or depth, after each of some iterations.

    **Arguments**

    - `states`: for each iteration its values at the points `ts`, first to last.
    - `ts`: times of the points, or numbers of layers.
    - `truth`: the values that the iteration converges to, drawn as a dashed black line.
    - `labels`: one for each entry of `states`; by default `iteration 0`, `iteration 1`, ...
    - `xlabel`, `ylabel`, `title`: texts.
    - `ax`: Matplotlib axes to draw into, instead of a new figure.
    - `path`: a file to save the picture to.

    **Returns**

    The Matplotlib figure. Later iterations are darker.

    **Raises**

    `ValueError` if there are no states, or lengths don't agree.
    """
    import matplotlib

    times = np.asarray(ts)
    rows = [np.asarray(u) for u in states]
    if not rows:
        raise ValueError("states is empty: must have the values after at least one iteration.")
    for i, row in enumerate(rows):
        if row.shape != times.shape:
            raise ValueError(
                f"states[{i}] has shape {row.shape}: must be that of ts, {times.shape}."
            )
    names = [f"iteration {i}" for i in range(len(rows))] if labels is None else list(labels)
    if len(names) != len(rows):
        raise ValueError(f"labels has {len(names)} entries: must be {len(rows)}, one a state.")
    ax = _style.axes_of(ax)
    # from yellow to blue, without the ends: neither too light nor as dark as the truth
    colours = matplotlib.colormaps[_style.IMAGE](np.linspace(0.9, 0.15, len(rows)))
    for row, name, colour, style in zip(rows, names, colours, _style.line_styles(), strict=False):
        mark = style["marker"] if len(times) <= 40 else None
        ax.plot(times, row, color=colour, marker=mark, markersize=3, label=name)
    if truth is not None:
        ax.plot(times, np.asarray(truth), "k--", lw=1, label="exact")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    return _style.finished(ax.figure, path)
