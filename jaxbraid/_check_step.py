"""Checks of one level's step: what it returns, repeatability, order, derivatives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbraid import _check, _tree
from jaxbraid._measure import (
    difference,
    eps_of,
    pair,
    perturbed,
    random_like,
    size_of,
)
from jaxbraid._report import Finding
from jaxbraid._tree import Split, Tree

_HALVINGS = 4


class Slot(NamedTuple):
    """One step of a level: the finest times within it, and the parameters of its finest steps."""

    points: jax.Array
    params: Tree


def check_step(
    fn: Callable[..., Any],
    u: Tree,
    slots: list[Slot],
    args: Tree,
    level: int,
    has_aux: bool,
    order: float | None,
    key: jax.Array,
    fine: Callable[..., Any] | None,
    derivatives: bool,
) -> list[Finding]:
    """Findings about the step `fn` of `level`, from a state `u` in some of the level's slots.

    `fine` is the finest level's step, where a step of this level can be compared with it.
    """
    found: list[Finding] = []
    where = f"step on level {level}"

    def note(name: str, status: Any, text: str, value: float | None = None) -> None:
        found.append(Finding(f"{where}: {name}", status, text, value))

    def step(t0: Any, t1: Any, u: Tree, params: Tree, args: Tree) -> Tree:
        out = fn(t0, t1, u, params, args)
        return _check.with_aux("the step", out)[0] if has_aux else out

    def one(slot: Slot, u: Tree) -> Tree:
        return step(slot.points[0], slot.points[-1], u, _tree.take(slot.params, 0), args)

    try:
        outs = [one(slot, u) for slot in slots]
    except Exception as e:
        note("shapes", "error", f"it fails for a state of this level: {type(e).__name__}: {e}")
        return found
    wrong = _check.differs(outs[0], _tree.shapes(u), "state", "it")
    if wrong is not None:
        note("shapes", "error", str(wrong))
        return found
    note("shapes", "ok", "it returns a state like the one that it is given.")
    for slot, out in zip(slots, outs, strict=True):
        if not np.isfinite(size_of(out)):
            t0, t1 = float(slot.points[0]), float(slot.points[-1])
            text = f"it returns NaN or infinity from t = {t0:.4g} to {t1:.4g} for the initial state"
            note(
                "finite", "error", text + ": check its stability for this step size, and its data."
            )
            return found
    note("finite", "ok", "its values are finite.")

    # Results that are equal but for rounding: another compilation, another shape of a batch.
    close = 1e3 * eps_of(u)
    keys = jax.random.split(key, len(slots) + 1)
    scale = max(size_of(u), *(size_of(x) for x in outs)) + 1e-300
    gap = max(difference(one(s, u), x) for s, x in zip(slots, outs, strict=True)) / scale
    if gap > 0:
        text = f"called twice with the same input it returns different values (by {gap:.1e}). It "
        text += "draws random numbers or keeps a state on the host; MGRIT steps every slot several "
        text += "times. Hand random numbers or keys in as params."
        note("repeatable", "error", text, gap)
    else:
        note("repeatable", "ok", "the same input gives the same values.", 0.0)
        _compilation(note, step, one, u, slots, outs, args, close, scale, keys)
    if len(found) and found[-1].status == "error":
        return found

    _order(note, step, one, u, slots[0], args, order)
    if fine is not None:
        _against_fine(note, fine, one, u, slots[0], args, has_aux)
    if derivatives:
        _derivatives(note, step, u, slots[0], args, keys[-1])
    return found


def _compilation(
    note: Any,
    step: Any,
    one: Any,
    u: Tree,
    slots: list[Slot],
    outs: list[Tree],
    args: Tree,
    close: float,
    scale: float,
    keys: jax.Array,
) -> None:
    try:
        compiled = jax.jit(lambda slot, u: one(slot, u))(slots[0], u)
    except Exception as e:
        text = f"it can't be compiled: {type(e).__name__}: {e} Times, states and parameters are "
        note("jit", "error", text + "traced: use jax.lax.cond and jnp.where, and no float(t0).")
        return
    gap = difference(compiled, outs[0]) / scale
    if gap > close:
        text = (
            f"under jit its value differs by {gap:.1e}: it depends on something that is read when "
        )
        note("jit", "error", text + "it is traced, such as a random number or a global.", gap)
        return
    note("jit", "ok", "jit changes nothing.", gap)

    # Different states, or else a step that mixes the states of a batch would not be found out.
    states = [perturbed(u, 0.1, random_like(k, u), u) for k in keys[: len(slots)]]
    apart = [one(s, x) for s, x in zip(slots, states, strict=True)]
    times = jnp.stack([jnp.stack([s.points[0], s.points[-1]]) for s in slots])
    params, batch = (
        jax.tree.map(lambda *x: jnp.stack(x), *trees)
        for trees in ([_tree.take(s.params, 0) for s in slots], states)
    )
    try:
        together = jax.vmap(lambda t, u, p: step(t[0], t[1], u, p, args))(times, batch, params)
    except Exception as e:
        text = f"it can't be batched by jax.vmap: {type(e).__name__}: {e} "
        note("vmap", "error", text + "MGRIT(batch_intervals='one') does without on one device.")
        return
    gap = max(difference(_tree.take(together, i), x) for i, x in enumerate(apart)) / scale
    if gap > close:
        text = f"in a batch (jax.vmap) its values differ by {gap:.1e} from those one by one: "
        note(
            "vmap", "error", text + "it mixes the states of a batch, or a host function does.", gap
        )
    else:
        note("vmap", "ok", "a batch gives what single steps give.", gap)


def _order(
    note: Any,
    step: Any,
    one: Any,
    u: Tree,
    slot: Slot,
    args: Tree,
    wanted: float | None,
) -> None:
    r"""$p = \log_2 (d_k / d_(k+1))$ by halving, from the last two differences above rounding."""
    params = _tree.take(slot.params, 0)
    results = [one(slot, u)]
    for k in range(1, _HALVINGS + 1):
        times = _linspace(slot.points[0], slot.points[-1], 2**k)
        x = u
        for t0, t1 in itertools.pairwise(times):
            x = step(t0, t1, x, params, args)
        results.append(x)
    gaps = [difference(a, b) for a, b in itertools.pairwise(results)]
    floor = 30 * eps_of(u) * max(size_of(x) for x in results)
    good = [g for g in gaps if g > floor]
    if not all(np.isfinite(gaps)):
        note("order", "warning", "smaller steps give NaN or infinity: no order can be measured.")
        return
    if len(good) < 2 or (len(good) < len(gaps) and gaps[0] <= floor):
        text = "smaller steps change nothing that rounding lets see: exact, or no order to measure."
        note("order", "ok", text, math.inf)
        return
    last = max(i for i in range(len(gaps)) if gaps[i] > floor)
    p = math.log2(gaps[last - 1] / gaps[last]) if gaps[last - 1] > floor else math.inf
    if wanted is not None and abs(p - wanted) > 0.35:
        text = f"halving the step size measures order {p:.2f}, not order={wanted:g}: a coefficient "
        text += "or a time is wrong, or this step size is still too large to show the order."
        note("order", "error", text, p)
    elif p < 0.5:
        text = f"halving the step size measures order {p:.2f}: the result does not settle as steps "
        text += (
            "get smaller. Does it use t1 - t0? (A network whose layers are no time steps needn't.)"
        )
        note("order", "warning", text, p)
    else:
        note("order", "ok", f"halving the step size measures order {p:.2f}.", p)


def _against_fine(
    note: Any, fine: Any, one: Any, u: Tree, slot: Slot, args: Tree, has_aux: bool
) -> None:
    x = u
    for i in range(len(slot.points) - 1):
        x = fine(slot.points[i], slot.points[i + 1], x, _tree.take(slot.params, i), args)
        x = x[0] if has_aux else x
    change = difference(x, u)
    gap = difference(one(slot, u), x) / (change + 1e-300)
    text = f"one coarse step and the fine steps that it stands for differ by {100 * gap:.2g} % of "
    text += "what they change."
    if change > 1e3 * eps_of(u) * size_of(u) and gap > 1:
        text += (
            " No step at all would be nearer: does it solve another equation, or is it unstable?"
        )
        note("against fine steps", "warning", text, gap)
    else:
        note("against fine steps", "ok", text, gap)


def _derivatives(note: Any, step: Any, u: Tree, slot: Slot, args: Tree, key: jax.Array) -> None:
    """Directional derivatives in `u`, `params` and `args`, in double precision if that works."""
    values = (slot.points[0], slot.points[-1], u, _tree.take(slot.params, 0), args)
    try:
        with jax.enable_x64(True):
            double = jax.tree.map(_to_double, values)
            like = _tree.shapes(double[2])
            if _check.differs(step(*double), like, "state", "it"):
                raise TypeError("its dtypes are fixed")
            _compare(note, step, double, key)
    except _Failed as e:
        note("gradient", "warning", str(e))
    except Exception:  # a step that can't be evaluated in double precision
        try:
            _compare(note, step, values, key)
        except _Failed as e:
            note("gradient", "warning", str(e))


class _Failed(Exception):
    """A derivative could not be taken."""


def _compare(note: Any, step: Any, values: tuple[Any, ...], key: jax.Array) -> None:
    t0, t1, u, params, args = values
    eps = eps_of(u)
    tol = 2e3 * eps ** (2 / 3)  # of central differences, which lose as much in any case
    operands = dict(u=u, params=params, args=args)
    for name, x in operands.items():
        split = Split.of(x)
        leaves, rest = split(x)
        if not leaves:
            continue
        key, a, b = jax.random.split(key, 3)
        out_split = Split.of(u)

        def run(leaves: Any, name: str = name, split: Split = split, rest: Any = rest) -> Any:
            new = operands | {name: split.join(leaves, rest)}
            return out_split(step(t0, t1, new["u"], new["params"], new["args"]))[0]  # noqa: B023

        direction = random_like(a, leaves)
        ct = random_like(b, out_split(u)[0])
        h = eps ** (1 / 3) * max(1.0, size_of(leaves) / max(size_of(direction), 1e-300))
        ahead, behind = (run(perturbed(leaves, s, direction, leaves)) for s in (h, -h))
        quotient = pair(ct, _tree.sub(ahead, behind)) / (2 * h)
        scale = size_of(ct) * difference(ahead, behind) / (2 * h)
        try:
            value, pull = jax.vjp(run, leaves)
            slope = pair(
                pull(jax.tree.map(lambda c, v: c.astype(v.dtype), ct, value))[0], direction
            )
        except Exception as e:
            raise _Failed(
                f"no derivative in {name} can be taken: {type(e).__name__}: {e} Solving works, "
                "gradients don't."
            ) from e
        noise = eps ** (2 / 3) * size_of(ct) * size_of(ahead)
        gap = abs(slope - quotient)
        label = f"gradient in {name}"
        if not gap <= tol * scale + noise:
            text = f"its vjp in {name} gives {slope:.6g} along a random direction, a difference "
            text += f"quotient {quotient:.6g}: a custom derivative is wrong, stop_gradient hides "
            note(label, "error", text + "something, or the step isn't smooth here.", gap)
            continue
        try:
            forward = pair(ct, jax.jvp(run, (leaves,), (direction,))[1])
        except Exception:  # a custom_vjp has no jvp, and none is needed
            forward = None
        if forward is not None and not abs(forward - slope) <= tol * scale + noise:
            text = f"its jvp in {name} gives {forward:.6g}, its vjp {slope:.6g}: they contradict."
            note(label, "error", text, abs(forward - slope))
        else:
            also = "vjp" if forward is None else "vjp and jvp"
            note(label, "ok", f"{also} agree with difference quotients.", float(gap))


def _to_double(x: Any) -> Any:
    if not _tree.is_inexact(x):
        return x
    return jnp.asarray(x, jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


def _linspace(t0: jax.Array, t1: jax.Array, n: int) -> list[jax.Array]:
    return [t0 + (t1 - t0) * (i / n) for i in range(n)] + [t1]
