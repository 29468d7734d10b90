"""What all pictures have in common: colours, figures without windows, and how they are saved."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind tell apart; lines and marks differ besides.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v")
IMAGE = "viridis"  # grows lighter all along, for any eye and in print


def line_styles(marks: bool = True) -> Iterator[dict[str, Any]]:
    """Keyword arguments for one line after another, without an end."""
    every = zip(
        itertools.cycle(COLOURS), itertools.cycle(LINES), itertools.cycle(MARKS), strict=False
    )
    for colour, line, mark in every:
        style: dict[str, Any] = {"color": colour, "linestyle": line}
        yield style | {"marker": mark, "markersize": 4} if marks else style


def new_figure(width: float = 6.4, height: float = 4.2) -> Figure:
    """A figure with no window and no global state behind it; sizes in inches.

    **Raises**

    `ImportError` where Matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError(
            'pictures need matplotlib, which `pip install "jaxbraid[plot]"` brings.'
        ) from e
    return _shown_by_notebooks(Figure)(figsize=(width, height), layout="constrained")


@functools.cache
def _shown_by_notebooks(figure: type[Figure]) -> type[Figure]:
    """The class with a picture for IPython, whatever Matplotlib's backend is."""

    class Picture(figure):
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=90)
            return out.getvalue()

    return Picture


def axes_of(ax: Axes | None, width: float = 6.4, height: float = 4.2) -> Axes:
    """`ax`, or the only axes of a new figure."""
    return new_figure(width, height).add_subplot() if ax is None else ax


def finished(figure: Any, path: Any) -> Any:
    """`figure`, written to `path` if that is given."""
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers only, for iterations, layers and devices."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
