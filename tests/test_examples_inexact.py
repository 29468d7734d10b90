"""The example of adaptive inexactness shows what it says."""

from __future__ import annotations

import re

import pytest

from test_examples import run


@pytest.mark.slow
def test_fixed_iterations_stall_and_controlled_ones_do_not(tmp_path):
    text = run("inexact", tmp_path)
    rows = ("2 forward, 1 adjoint iterations", "controlled", "exact")
    found = {r: re.search(rf"│ {r} +│ (\S+) +│ (\S+)", text) for r in rows}
    fixed, controlled, exact = ([float(x) for x in found[r].groups()] for r in rows)
    assert fixed[1] > 10 * controlled[1], "the true gradient stalls with few iterations"
    assert controlled[0] < 3 * exact[0]
    assert re.search(r"raise|serial", text)
