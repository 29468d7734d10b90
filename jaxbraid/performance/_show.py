"""Predictions as text; `jaxbraid.plot.scaling` draws them."""

from __future__ import annotations

from collections.abc import Iterable

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
