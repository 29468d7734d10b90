"""States, adjoints and weights across the depth of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbraid.plot import _style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxbraid.training import Diagnosis


def depth(found: Diagnosis, *, title: str = "", path: Any = None) -> Figure:
    """Draw norms of states, increments, adjoints and weights, layer by layer.

    **Arguments**

    - `found`: what `jaxbraid.training.diagnose` returns.
    - `title`: a text above.
    - `path`: a file to save the picture to.

    **Returns**

    The Matplotlib figure: a panel each for states, adjoints (with a loss) and weights; logarithmic
    axes where norms are positive and span more than a decade.
    """
    state = {"color": _style.BLUE, "label": "state"}
    increment = {"color": _style.ORANGE, "label": "increment", "linestyle": "--"}
    adjoint = {"color": _style.ORANGE, "label": "adjoint"}
    weights = {"color": _style.GREEN, "label": "weights"}
    panels = [("States", [(found.states, state), (found.increments, increment)])]
    if found.adjoints is not None:
        panels.append(("Adjoint states", [(found.adjoints, adjoint)]))
    panels.append(("Weights", [(found.weights, weights)]))
    figure = _style.new_figure(4 * len(panels), 3.2)
    for ax, (name, lines) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for values, style in lines:
            ax.plot(values, **style)
        norm = "2-norm" if name == "Weights" else "2-norm over the batch"
        ax.set(title=name, xlabel="layer", ylabel=norm)
        every = np.concatenate([values for values, _ in lines])
        if np.min(every) > 0 and np.max(every) > 10 * np.min(every):
            ax.set_yscale("log")
        _style.whole_numbers(ax.xaxis)
        ax.grid(alpha=0.3)
        ax.legend()
    if title:
        figure.suptitle(title)
    return _style.finished(figure, path)
