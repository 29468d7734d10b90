"""Training steps on one core: against the same network's serial step, TorchBraid and PyTorch.

    python -m benchmarks.training_step
    JAXBRAID_BENCH_TORCH=/path/to/python python -m benchmarks.training_step

A step is the value of a loss and its gradient by parameters and input: two forward iterations and
one adjoint, m = 4, F-relaxation on the finest level (FCF on others). "serial" is the same with
`MGRIT(levels=1)`. TorchBraid's figures are those recorded on a machine of this kind, forward and
backward; times of this machine follow from PyTorch's serial step, recorded with them and run here
as the yardstick. PyTorch steps through the same layers in turn; it runs where it can be imported,
or by the interpreter that JAXBRAID_BENCH_TORCH names.

What limits the first ratio is counted too: `evaluations` are those of a layer relative to a serial
step, taking a layer's vjp for two evaluations, or for one where parameters are left out, and one
more where the layer is evaluated again for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import _bench
from benchmarks._bench import Row, Timed
from benchmarks._nets import Net, convolutions, dense, gru, training_step
from jaxbraid import MGRIT
from jaxbraid.performance import Cost, Machine, predict

# name, maker, its arguments, levels, TorchBraid's seconds, goal against it, PyTorch's recorded ones
CASES = (
    ("dense 64, batch 64, 128 layers", dense, (128,), 2, 0.095 + 0.072, 8.0, 0.0104 + 0.0101),
    ("dense 64, batch 64, 512 layers", dense, (512,), 3, 0.33 + 0.22, 8.0, 0.043 + 0.043),
    ("GRU 2 x 100, batch 100, 128 steps", gru, (128, 100), 2, 0.36 + 0.29, 3.0, 0.11 + 0.20),
    ("GRU 2 x 100, batch 32, 1024 steps", gru, (1024, 32), 3, 2.7 + 2.1, 3.0, 1.0 + 1.5),
    ("convolutions, 4 channels", convolutions, (4,), 2, 0.187 + 0.230, 1.5, 0.055 + 0.165),
    ("convolutions, 32 channels", convolutions, (32,), 2, 3.1 + 2.6, 1.5, 0.71 + 1.54),
)
LIMITS = """
MGRIT evaluates layers more often than a serial step; the notes say how many times, counted by the
engine's own schedule (a vjp taken for two evaluations, three where the layer is evaluated again for
it: an estimate). Where matrix products or convolutions take the time, an evaluation in a batch of
intervals costs about as much as alone, for every layer has weights of its own; the measured ratio
is that number times what the notes say an evaluation costs.
"""
QUICK = {dense: (16, 8, 8), gru: (16, 4, 8)}


def config(levels: int, iterations: int) -> MGRIT:
    return MGRIT(
        levels=levels,
        coarsening=4,
        cf_relax=(0,) * (levels > 1) + (1,) * (levels - 2),
        max_iters=iterations,
        final_relax="FC",
    )


def evaluations(net: Net, forward: MGRIT, adjoint: MGRIT) -> float:
    """Work of a step relative to a serial one: N evaluations, and N vjps of two each."""
    cost = Cost.line(1.0, 1.0)
    none = Machine(
        step=cost, vjp=cost, last=cost, state_bytes=1, layer_bytes=1, latency=0.0, bandwidth=1.0
    )
    n = net.layers
    ahead = sum(predict(forward, n, 1, none, "forward").evaluations)
    back = sum(predict(adjoint, n, 1, none, "adjoint").evaluations)
    return (ahead + 2 * (back - n) + 3 * n) / (3 * n)


def torch_python() -> str | None:
    named = os.environ.get("JAXBRAID_BENCH_TORCH")
    return named or (sys.executable if importlib.util.find_spec("torch") else None)


def torch_seconds(kind: str, sizes: tuple[int, ...], repeats: int) -> float | None:
    """Shortest time of PyTorch's serial training step, in a process of its own on this core."""
    python = torch_python()
    if python is None:
        return None
    script = pathlib.Path(__file__).with_name("_torch_serial.py")
    out = subprocess.run(
        [python, str(script), kind, str(repeats), *map(str, sizes)],
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    if out.returncode:
        raise RuntimeError(f"PyTorch's serial step failed:\n{out.stderr}")
    return json.loads(out.stdout)["seconds"]


def rows(quick: bool) -> Iterator[Row]:
    for name, make, sizes, levels, theirs, goal, recorded in CASES[:4:2] if quick else CASES:
        if quick:
            sizes = QUICK[make]
            name = f"{make.__name__} {sizes}"
        net = make(*sizes)
        forward, adjoint = config(levels, 2), config(levels, 1)
        runs = {
            "MGRIT": training_step(net, forward, adjoint),
            "serial": training_step(net, MGRIT(levels=1)),
        }
        live = torch_seconds(make.__name__, sizes, 3 if quick else 5)
        times: dict[str, Timed | float] = dict(_bench.compare(runs, quick, 8.0))
        ours, serial = (times[k].shortest for k in ("MGRIT", "serial"))  # type: ignore[union-attr]
        work = evaluations(net, forward, adjoint)
        yield _bench.at_most(
            f"{name}, {levels} levels: MGRIT / own serial step",
            times,
            ours / serial,
            1.6,
            f"evaluations: {work:.1f} of a serial step's; an evaluation in MGRIT costs "
            f"{ours / serial / work:.2f} of one in it",
        )
        torch: dict[str, Any] = {"PyTorch": live or recorded, "serial": serial}
        if live or not quick:
            case = f"{name}: PyTorch serial ({'live' if live else 'recorded'}) / own serial step"
            yield Row(case, _bench.told(torch), f"{(live or recorded) / serial:.2f}x")
        if quick:
            continue
        told: dict[str, Any] = {"TorchBraid": theirs, "MGRIT": ours}
        yield _bench.at_least(f"{name}: TorchBraid as recorded / MGRIT", told, theirs / ours, goal)
        if live:
            told["TorchBraid"] = here = theirs / recorded * live
            case = f"{name}: TorchBraid, scaled by PyTorch here / MGRIT"
            yield _bench.at_least(case, told, here / ours, goal)


if __name__ == "__main__":
    _bench.main(rows, __doc__)
