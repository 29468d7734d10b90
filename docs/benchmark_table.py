"""Write the benchmark table of README.md anew from benchmarks/results.md.

    python docs/benchmark_table.py

Its rows are those cases of `make bench` that begin with what stands in ROWS, as they were measured.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results.md"
PLACE = re.compile(r"(?<=<!-- docs/benchmark_table.py -->\n\n).*?(?=\n\n<!-- end -->)", re.S)

ROWS = (
    "PyMGRIT / jaxbraid: heat 1D",
    "PyMGRIT / jaxbraid: Brusselator",
    "PyMGRIT / jaxbraid: Arenstorf",
    "XBraid (recorded) / jaxbraid: an iteration, heat 1D",
    "dense 64, batch 64, 128 layers: TorchBraid as recorded / MGRIT",
    "GRU 2 x 100, batch 100, 128 steps: TorchBraid as recorded / MGRIT",
    "convolutions, 32 channels: TorchBraid as recorded / MGRIT",
    "Brusselator, RK4, 262144 steps, last state",
    "Brusselator, RK4, 262144 steps, all states",
    "dense 64, batch 64, 128 layers, 2 levels: MGRIT / own serial step",
    "MLP 256, batch 64, 512 layers, m = 32",
)


def table() -> str:
    results = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|", RESULTS.read_text(), re.M)
    lines = ["| case | times | ratio |", "| --- | --- | --- |"]
    for row in ROWS:
        found = [cells for cells in results if cells[0].startswith(row)]
        lines += [f"| {case} | {times} | {ratio} |" for case, times, ratio in found[:1]]
    return "\n".join(lines)


if __name__ == "__main__":
    README.write_text(PLACE.sub(lambda _: table(), README.read_text()))
