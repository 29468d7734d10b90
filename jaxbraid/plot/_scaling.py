"""Speed-up over devices, predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxbraid.plot import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxbraid.performance import Prediction


def scaling(
    curves: Mapping[str, Sequence[Prediction | tuple[int, float]]],
    *,
    ideal: bool = False,
    title: str = "",
    ax: Axes | None = None,
    path: Any = None,
) -> Figure:
    """Draw speed-up over devices, a curve for each name, on logarithmic axes.

    **Arguments**

    - `curves`: for each label of the legend, predictions of `jaxbraid.performance`, or pairs of a
        number of devices and the speed-up over sequential stepping on one device.
    - `ideal`: draw the line, too, on which the speed-up is the number of devices.
    - `title`: a text above.
    - `ax`: Matplotlib axes to draw into, instead of a new figure.
    - `path`: a file to save the picture to.

    **Returns**

    The Matplotlib figure. The line across is the speed of sequential stepping.

    **Raises**

    `ValueError` if there is nothing to draw.
    """
    rows = {name: [_pair(p) for p in row] for name, row in curves.items()}
    if not any(rows.values()):
        raise ValueError("curves is empty: must have at least one prediction or pair.")
    ax = _style.axes_of(ax, 6, 4)
    for (name, row), style in zip(rows.items(), _style.line_styles(), strict=False):
        ax.plot([devices for devices, _ in row], [speed for _, speed in row], label=name, **style)
    if ideal:
        ends = [f(devices for row in rows.values() for devices, _ in row) for f in (min, max)]
        ax.plot(ends, ends, color="0.6", lw=0.8, ls=":", label="as many as devices")
    ax.axhline(1, color="0.6", lw=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="devices", ylabel="speed-up over sequential stepping", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return _style.finished(ax.figure, path)


def _pair(p: Any) -> tuple[int, float]:
    return p if isinstance(p, tuple) else (p.devices * p.parts, p.speedup)
