"""The time grids of a solve: which points each level has, and on which device they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxbraid import _check
from jaxbraid._hierarchy import Hierarchy, build_hierarchies
from jaxbraid._options import MGRIT, check_integer
from jaxbraid.plot import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EVERYWHERE = -1  # in place of a device: held by all of them
_NAMED = 9  # devices that the legend lists


class _Row(NamedTuple):
    """The points 1.. of a level: their numbers on the finest grid, and the device of each."""

    points: np.ndarray
    devices: np.ndarray


def hierarchy(
    config: MGRIT,
    steps: int,
    devices: int = 1,
    *,
    title: str = "",
    ax: Axes | None = None,
    path: Any = None,
) -> Figure:
    """Draw the levels that a solve makes: their C- and F-points, by device.

    **Arguments**

    - `config`: the options of the solve.
    - `steps`: number of time steps, or layers, N.
    - `devices`: number of devices along the layer axis.
    - `title`: a text above.
    - `ax`: Matplotlib axes to draw into, instead of a new figure.
    - `path`: a file to save the picture to.

    **Returns**

    The Matplotlib figure: a row a level, the finest on top. Full marks are C-points, open ones
    F-points (the coarsest level has no further ones: its marks are full); colour and mark are those
    of the device that holds them, black stars are held by all devices. Lines lead from C-points to
    where they are on the next level.

    **Raises**

    `ValueError` or `TypeError` naming the argument at fault.
    """
    _check.config("config", config)
    steps = check_integer("steps", steps, 1)
    devices = check_integer("devices", devices, 1)
    (h,) = build_hierarchies((config,), steps, devices)
    rows = [_row(h, level) for level in range(len(h.levels))]
    ax = _style.axes_of(ax, 8, 1.2 + 0.7 * len(rows))
    for level, row in enumerate(rows):
        coarse = rows[level + 1].points if level + 1 < len(rows) else row.points
        _draw_level(ax, -level, row, np.isin(row.points, coarse))
        if level + 1 < len(rows):
            down = np.append(0, coarse)
            ax.plot([down, down], [-level, -level - 1], color="0.8", lw=0.8, zorder=0)
    ax.plot(np.zeros(len(rows)), -np.arange(len(rows)), "|", color="black", ms=9)
    ax.set_yticks(-np.arange(len(rows)), [f"level {l}" for l in range(len(rows))])
    ax.set(xlabel="point", title=title, ylim=(0.5 - len(rows), 0.5))
    _style.whole_numbers(ax.xaxis)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    _explain(ax, rows)
    return _style.finished(ax.figure, path)


def _row(h: Hierarchy, level: int) -> _Row:
    lv = h.levels[level]
    gathered = h.is_gathered(level)
    points, held = [], []
    for device in range(0, 1 if gathered else h.devices, 1 if gathered else lv.stride):
        ends = np.asarray(lv.end(device, h.steps))
        real = np.asarray(lv.start(device, h.steps)) < h.steps
        points.append(ends[real])
        held.append(np.full(int(real.sum()), _EVERYWHERE if gathered else device))
    return _Row(np.concatenate(points), np.concatenate(held))


def _style_of(device: int) -> dict[str, Any]:
    if device == _EVERYWHERE:
        return {"color": "black", "marker": "*"}
    marks = _style.MARKS
    return {"color": _style.COLOURS[device % 6], "marker": marks[device % len(marks)]}


def _draw_level(ax: Any, y: int, row: _Row, is_c: np.ndarray) -> None:
    size = float(np.clip(400 / max(1, len(row.points)), 2, 7))
    for device in np.unique(row.devices):
        for kind, face in ((is_c, None), (~is_c, "white")):
            x = row.points[(row.devices == device) & kind]
            style = _style_of(int(device))
            face = style["color"] if face is None else face
            ax.plot(x, np.full(len(x), y), ls="", ms=size, mfc=face, **style)


def _explain(ax: Any, rows: list[_Row]) -> None:
    """A legend of devices, where there are several; of many, only the first ones."""
    from matplotlib.lines import Line2D

    def mark(label: str, **style: Any) -> Any:
        return Line2D([], [], ls="", label=label, **style)

    devices = sorted({int(d) for row in rows for d in row.devices} - {_EVERYWHERE})
    grey: dict[str, Any] = {"color": "0.3", "marker": "o"}
    entries = [mark("C-point", **grey), mark("F-point", mfc="white", **grey)]
    if len(devices) > 1:
        entries += [mark(f"device {d}", **_style_of(d)) for d in devices[:_NAMED]]
    if len(devices) > _NAMED:
        entries.append(mark(f"... of {len(devices)} devices"))
    if any(_EVERYWHERE in row.devices for row in rows):
        entries.append(mark("every device", **_style_of(_EVERYWHERE)))
    ax.legend(
        handles=entries,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
        ncols=6,
        fontsize="small",
        frameon=False,
    )
