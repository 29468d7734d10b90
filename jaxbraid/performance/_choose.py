"""Options by their predicted time, and devices split between layers and batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from jaxbraid._options import MGRIT, check_integer
from jaxbraid.performance._machine import Machine
from jaxbraid.performance._predict import Direction, Prediction, predict

ITERATIONS: Mapping[int, tuple[int, int]] = {0: (3, 2), 1: (2, 1)}
"""How many iterations, forward and adjoint, F- (0) and FCF-relaxation (1) are taken to need.

That is where the caller does not say: those of `parallel_ode_net`, and one more without FCF.
"""

Iterations = Mapping[int, int | tuple[int, int]] | Callable[[MGRIT], int | tuple[int, int]]


def _iterations(iterations: Iterations, config: MGRIT) -> tuple[int, int]:
    cf_relax = config.at("cf_relax", 0)
    try:
        given = iterations(config) if callable(iterations) else iterations[cf_relax]
    except KeyError:
        raise ValueError(
            f"iterations={iterations!r}: has no entry for cf_relax={cf_relax}."
        ) from None
    pair = given if isinstance(given, tuple) else (given, given)
    return (check_integer("iterations", pair[0], 0), check_integer("iterations", pair[1], 0))


def candidates(
    steps: int,
    devices: int,
    *,
    levels: Sequence[int] = (2, 3, 4, 5, 6),
    factors: Sequence[int] = (2, 4, 8, 16, 32),
    cf_relax: Sequence[int] = (0, 1),
    cycles: Sequence[Literal["V", "F", "W"]] = ("V",),
    first_factors: Sequence[int] | None = None,
    placements: bool = True,
    base: MGRIT | None = None,
) -> tuple[MGRIT, ...]:
    """The options that `choose` compares: all combinations that `steps` steps allow.

    **Arguments**

    - `steps`, `devices`: N and D.
    - `levels`, `factors`, `cf_relax`, `cycles`: values to combine. The factor of the first transfer
        is one of `first_factors` (by default `factors`), the others are alike.
    - `placements`: whether to try `coarse_placement`, from each level on.
    - `base`: the other options; by default `MGRIT(final_relax="FC")`.

    **Returns**

    `MGRIT` options, each hierarchy once.
    """
    base = MGRIT(final_relax="FC") if base is None else base
    first_factors = factors if first_factors is None else first_factors
    found: dict[MGRIT, None] = {}
    for count, first, rest, nu, cycle in itertools.product(
        levels, first_factors, factors, cf_relax, cycles
    ):
        sizes = [steps]
        for i in range(count - 1):
            sizes.append(sizes[-1] // (first if i == 0 else rest))
        if sizes[-1] < base.min_coarse:
            continue  # fewer levels have been tried
        coarsening = (first, *(rest,) * (count - 2))
        config = dataclasses.replace(
            base, levels=count, coarsening=coarsening, cf_relax=nu, cycle=cycle
        )
        found[config] = None
        if placements and devices > 1 and hasattr(base, "coarse_placement"):
            for l in range(1, count):
                found[dataclasses.replace(config, coarse_placement=l)] = None
    return tuple(found)


def choose(
    steps: int,
    devices: int,
    machine: Machine,
    *,
    iterations: Iterations = ITERATIONS,
    direction: Direction = "training",
    configs: Iterable[MGRIT] | None = None,
    parts: int = 1,
) -> tuple[Prediction, ...]:
    """Options by predicted time, the fastest first.

    **Arguments**

    - `steps`, `devices`, `machine`, `direction`, `parts`: as for `predict`.
    - `iterations`: how many are needed: `{cf_relax: n}` (that of level 0), or a function of the
        options, for factors and levels matter too; `n` is a number, or a pair (forward, adjoint).
        What a problem needs is known from solves of it; the default, `ITERATIONS`, is that of
        `parallel_ode_net`, and one more without FCF.
    - `configs`: options to compare, by default `candidates(steps, devices)`. Their `max_iters` is
        replaced.

    **Returns**

    A tuple of `Prediction`; `choose(...)[0].forward` and `.adjoint` are the options to use. A best
    speed-up below 1 says: `MGRIT(levels=1)`.
    """
    steps, devices = check_integer("steps", steps, 1), check_integer("devices", devices, 1)
    configs = candidates(steps, devices) if configs is None else tuple(configs)
    if not configs:
        raise ValueError(f"configs: there is nothing to choose from for steps={steps}.")
    predictions = []
    for config in configs:
        forward, adjoint = _iterations(iterations, config)
        predictions.append(
            predict(
                dataclasses.replace(
                    config, max_iters=adjoint if direction == "adjoint" else forward
                ),
                steps,
                devices,
                machine,
                direction,
                adjoint=dataclasses.replace(config, max_iters=adjoint),
                parts=parts,
            )
        )
    return tuple(sorted(predictions, key=lambda p: p.seconds))


def tradeoff(
    steps: int,
    devices: int,
    machine: Machine,
    *,
    iterations: Iterations = ITERATIONS,
    most_parts: int | None = None,
    configs: Callable[[int], Iterable[MGRIT]] | None = None,
) -> tuple[Prediction, ...]:
    """A training step on a fixed number of devices, split between layers and batch.

    **Arguments**

    - `steps`, `devices`, `machine`: N, all devices together, and the costs with the whole batch.
    - `iterations`: as for `choose`.
    - `most_parts`: the most parts that the batch has, such as its number of samples.
    - `configs`: from the devices along the layer axis to the options to compare.

    **Returns**

    The best `Prediction` for each number of parts that is a power of two times one, 1 first. With
    one device along the layer axis, layers are stepped in sequence.
    """
    devices = check_integer("devices", devices, 1)
    most = devices if most_parts is None else check_integer("most_parts", most_parts, 1)
    rows = []
    for parts in (d for d in range(1, min(devices, most) + 1) if devices % d == 0):
        if parts & (parts - 1):
            continue
        along = devices // parts
        if along == 1:
            rows.append(predict(MGRIT(levels=1), steps, 1, machine, "training", parts=parts))
            continue
        options = None if configs is None else configs(along)
        best = choose(steps, along, machine, iterations=iterations, configs=options, parts=parts)
        rows.append(best[0])
    return tuple(rows)
