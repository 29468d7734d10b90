"""Predictions as text and as curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxbraid._options import MGRIT
from jaxbraid.performance._predict import Prediction


def describe(config: MGRIT | None) -> str:
    """The options that `choose` chooses, in a few characters: `3 levels 8,4 FCF V x2 gather 1`."""
    if config is None:
        return "-"
    if config.levels == 1:
        return "sequential"
    factor = config.coarsening
    if isinstance(factor, tuple):
        text = ",".join(str(f) if isinstance(f, int) else "irregular" for f in factor)
    else:
        text = str(factor)
    nu = config.cf_relax if isinstance(config.cf_relax, int) else max(config.cf_relax)
    relax = "F" + "CF" * nu
    placement = getattr(config, "coarse_placement", None)
    gathered = "" if placement is None else f" gather {placement}"
    return f"{config.levels} levels {text} {relax} {config.cycle} x{config.max_iters}{gathered}"


def table(predictions: Iterable[Prediction]) -> str:
    """Predictions as text, one a row: devices, time, speed-up, messages, options."""
    head = f"{'layers x batch':>14} {'serial':>10} {'predicted':>10} {'speed-up':>9} {'eff.':>6}"
    rows = [f"{head} {'messages':>9}  options"]
    for p in predictions:
        config = p.forward if p.forward is not None else p.adjoint
        rows.append(
            f"{p.devices:>6} x {p.parts:<5} {_unit(p.serial):>10} {_unit(p.seconds):>10} "
            f"{p.speedup:9.2f} {p.efficiency:6.1%} {p.messages:9}  {describe(config)}"
        )
    return "\n".join(rows)


def _unit(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def plot(curves: Mapping[str, Sequence[Prediction]], ax: Any = None) -> Any:
    """Speed-up over devices, a curve for each name, in the matplotlib axes `ax` or new ones.

    **Returns**

    The axes.

    **Raises**

    `ImportError` where matplotlib is missing: install `jaxbraid[plot]`.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise ImportError("plot needs matplotlib: install jaxbraid[plot].") from e
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    # Okabe and Ito's colours, which the colour-blind tell apart, and marks and dashes besides
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    styles = zip(itertools.cycle(colours), itertools.cycle("os^Dv"), itertools.cycle(("-", "--")))
    for (name, row), (colour, mark, line) in zip(curves.items(), styles, strict=False):
        devices = [p.devices * p.parts for p in row]
        speedup = [p.speedup for p in row]
        ax.plot(devices, speedup, color=colour, marker=mark, ls=line, ms=4, label=name)
    ax.axhline(1, color="0.6", lw=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlabel("devices")
    ax.set_ylabel("speed-up over sequential stepping")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax
