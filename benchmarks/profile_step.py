"""Where the time of a training step goes: a profile of its compiled program, on one core.

    python benchmarks/profile_step.py                  # dense layers
    python benchmarks/profile_step.py gru              # or: convolutions

The steps are those of `training_step.py`, with two levels, and the serial one. `jax.profiler` tells
how long each instruction of the program ran; what it belongs to is read off the compiled text.
Matrix products and convolutions are work that no arrangement of layers avoids; their floor is what
the serial step needs for them, times as many evaluations as the cycles make of its.
"""

from __future__ import annotations

import collections
import glob
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # where the package `benchmarks` lies

from benchmarks import _bench
from benchmarks._nets import convolutions, dense, gradient, gru
from benchmarks.training_step import config, evaluations
from jaxbraid import MGRIT

NETS = {"dense": (dense, (128,)), "gru": (gru, (128, 100)), "convolutions": (convolutions, (4,))}
CALLS = 20
CONTAINERS = ("while", "call", "conditional", "cond", "ThunkExecutor", "end:", "Pjit", "$")
PRODUCTS = ("dot", "ynn", "convolution", "custom-call", "onednn")
MOVED = "copy slice transpose concatenate broadcast bitcast dynamic update reshape pad iota reverse"
PHASES = ("forward solve", "adjoint solve", "last adjoint sweep", "outside")
KINDS = ("products", "arithmetic", "moving data")


def kind_of(instruction: str) -> str:
    words = re.split(r"[_\-.]", re.sub(r"(_fusion)?(\.[\w.]*)?$", "", instruction))
    if any(instruction.startswith(p) or f"_{p}" in instruction for p in PRODUCTS):
        return "products"
    moves = {*MOVED.split(), "wrapped", "fusion", ""}
    return "moving data" if all(w in moves for w in words) else "arithmetic"


def phase_of(op_name: str) -> str:
    if "mgrit_gradient" in op_name:
        return "last adjoint sweep"
    if "mgrit_adjoint" in op_name:
        return "adjoint solve"
    return "forward solve" if "mgrit_forward" in op_name else "outside"


def profile(step: Callable[[], Any], text: str) -> collections.Counter[tuple[str, str]]:
    """Milliseconds a call by phase and kind."""
    names = dict(re.findall(r'%?([\w.\-]+) = .*?op_name="([^"]*)"', text))
    jax.block_until_ready(step())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(step())
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
    spent: collections.Counter[tuple[str, str]] = collections.Counter()
    for plane in data.planes:
        for line in plane.lines if plane.name == "/host:CPU" else ():
            for event in line.events if line.name.startswith("tf_XLA") else ():
                name = event.name
                if not name.startswith(CONTAINERS) and " " not in name and "::" not in name:
                    where = phase_of(names.get(name, "")), kind_of(name)
                    spent[where] += event.duration_ns / 1e6 / CALLS  # type: ignore[assignment]
    return spent


def show(title: str, spent: collections.Counter[tuple[str, str]]) -> None:
    print(f"{title:22}" + "".join(f"{kind:>13}" for kind in KINDS) + f"{'total':>10}   ms")
    for phase in (*PHASES, "all"):
        row = [sum(v for (p, k), v in spent.items() if k == kind and phase in (p, "all"))
               for kind in KINDS]  # fmt: skip
        if sum(row):
            print(f"  {phase:20}" + "".join(f"{x:13.2f}" for x in row) + f"{sum(row):10.2f}")


def main(name: str) -> None:
    if name not in NETS:
        raise SystemExit(f"{name!r} is none of {', '.join(NETS)}.")
    make, sizes = NETS[name]
    net = make(*sizes)
    forward, adjoint = (config(2, n, skip_first_down=True) for n in (2, 1))
    found = {}
    for title, configs in (("serial", (MGRIT(levels=1),)), ("MGRIT", (forward, adjoint))):
        program = gradient(net, *configs).lower(net.params, net.x).compile()
        found[title] = profile(lambda run=program: run(net.params, net.x), program.as_text())
        show(f"{name}, {title}", found[title])
    work = evaluations(net, forward, adjoint)
    products = {
        title: sum(v for (_, kind), v in spent.items() if kind == "products")
        for title, spent in found.items()
    }
    print(
        f"evaluations: {work:.2f} of the serial step's; the floor of its products: "
        f"{work:.2f} x {products['serial']:.2f} = {work * products['serial']:.2f} ms, "
        f"here {products['MGRIT']:.2f} ms"
    )


if __name__ == "__main__":
    _bench.use(cores=1)
    main(sys.argv[1] if len(sys.argv) > 1 else "dense")
