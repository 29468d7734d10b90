"""The examples of time integration run with short settings and leave a picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import compiler

ROOT = Path(__file__).parents[1]


def run(name, out, flags=compiler.FLAGS):
    env = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, ROOT / "examples" / f"{name}.py", "--quick", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert (out / f"{name}.png").stat().st_size > 10000
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bound"), [("arenstorf", 1e-8), ("brusselator", 1e-10), ("gray_scott", 1e-5)]
)
def test_example_gives_the_serial_solution(name, bound, tmp_path):
    text = run(name, tmp_path)
    assert float(re.search(r"from serial stepping.*: (\S+)", text)[1]) < bound
    assert "iteration    residual    factor" in text


@pytest.mark.slow
def test_lorenz_shows_what_the_correction_does(tmp_path):
    """In fewer iterations than without, and the exponents near those of the system."""
    text = run("lorenz", tmp_path)
    rows = [r"one vector +│ (\d+)", r"plain +│ (\d+)"]
    corrected, plain = (int(re.search(row, text)[1]) for row in rows)
    assert corrected < plain
