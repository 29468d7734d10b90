"""Pictures of solutions. matplotlib is imported only where a picture is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxbraid.plot import _style

KINDS = ("series", "phase", "image", "snapshots")
LINES = 6  # components that a time series shows at most
TIMES = 4  # snapshots


def first_leaf(us: Any) -> np.ndarray:
    """The states as one real array: the first leaf, in absolute value where it is complex."""
    leaf = np.asarray(jax.tree.leaves(us)[0])
    return np.abs(leaf) if np.iscomplexobj(leaf) else leaf


@dataclasses.dataclass(frozen=True, eq=False)  # holds arrays: compared by identity
class Picture:
    """How a problem's solution is drawn.

    **Arguments**

    - `kind`: `"series"`, `"phase"`, `"image"` or `"snapshots"`.
    - `labels`: names of the components (series, phase) or of the quantity shown (the others).
    - `space`: coordinates of the state's axes: `{"x": points}` or `{"x": points, "y": points}`.
    - `shown`: maps the states at all points to the real array that is drawn.
    """

    kind: str = "series"
    labels: tuple[str, ...] = ("u",)
    space: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    shown: Callable[[Any], np.ndarray] = first_leaf


def draw(name: str, picture: Picture, ts: np.ndarray, us: Any, path: Any, kind: str | None) -> Any:
    """The figure of the states `us` at the times `ts`, saved to `path` if that is given."""
    kind = picture.kind if kind is None else kind
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(map(repr, KINDS))} or None.")
    values = np.asarray(picture.shown(us))
    if values.shape[:1] != ts.shape:
        raise ValueError(
            f"us has shape {values.shape}: its leading axis must be the number of times, {len(ts)}."
        )
    figure = _style.new_figure(*((10, 3.6) if kind == "snapshots" else (7, 4.5)))
    {"series": _series, "phase": _phase, "image": _image, "snapshots": _snapshots}[kind](
        figure, picture, ts, values
    )
    figure.suptitle(name)
    return _style.finished(figure, path)


def _components(picture: Picture, values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    columns = values.reshape(len(values), -1)
    labels = picture.labels
    if len(labels) != columns.shape[1]:
        labels = tuple(f"{labels[0]}[{i}]" for i in range(columns.shape[1]))
    return columns, labels


def _series(figure: Any, picture: Picture, ts: np.ndarray, values: np.ndarray) -> None:
    columns, labels = _components(picture, values)
    ax = figure.subplots()
    shown = zip(columns.T[:LINES], labels, _style.line_styles(marks=False), strict=False)
    for values, label, style in shown:
        ax.plot(ts, values, label=label, **style)
    ax.set(xlabel="t")
    ax.legend()


def _phase(figure: Any, picture: Picture, ts: np.ndarray, values: np.ndarray) -> None:
    columns, labels = _components(picture, values)
    if columns.shape[1] < 2:
        raise ValueError("kind='phase': needs a state of two components or more.")
    # of three components (Lorenz) the first and last show most of the shape
    second = 2 if columns.shape[1] == 3 else 1
    ax = figure.subplots()
    ax.plot(columns[:, 0], columns[:, second], color=_style.BLUE, lw=1)
    ax.plot(columns[0, 0], columns[0, second], "o", color=_style.ORANGE, label=f"t = {ts[0]:g}")
    ax.set(xlabel=labels[0], ylabel=labels[second])
    ax.legend()


def _image(figure: Any, picture: Picture, ts: np.ndarray, values: np.ndarray) -> None:
    if values.ndim != 2:
        raise ValueError(f"kind='image': needs a state with one axis, not {values.ndim - 1}.")
    (name, x), *_ = picture.space.items() or [("index", np.arange(values.shape[1]))]
    ax = figure.subplots()
    image = ax.pcolormesh(x, ts, values, cmap=_style.IMAGE, shading="nearest", rasterized=True)
    ax.set(xlabel=name, ylabel="t")
    figure.colorbar(image, label=picture.labels[0])


def _snapshots(figure: Any, picture: Picture, ts: np.ndarray, values: np.ndarray) -> None:
    if values.ndim != 3:
        raise ValueError(f"kind='snapshots': needs a state with two axes, not {values.ndim - 1}.")
    names = tuple(picture.space) or ("i", "j")
    x, y = picture.space.values() or (np.arange(n) for n in values.shape[1:])
    axes = figure.subplots(1, TIMES, sharey=True)
    low, high = float(np.min(values)), float(np.max(values))
    image = None
    for ax, i in zip(axes, np.linspace(0, len(ts) - 1, TIMES).astype(int), strict=True):
        # states are indexed [x, y], images by rows
        image = ax.pcolormesh(x, y, values[i].T, vmin=low, vmax=high, cmap=_style.IMAGE)
        ax.set(title=f"t = {ts[i]:.4g}", xlabel=names[0], aspect="equal")
    axes[0].set(ylabel=names[1])
    figure.colorbar(image, ax=list(axes), label=picture.labels[0])
