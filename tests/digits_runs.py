"""Tiny runs of examples/digits_processes.py for the tests, and their weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxbraid.distributed import make_mesh

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/digits_processes.py"
TINY = ("--width=8", "--epochs=2", "--batch=360")

sys.path.insert(0, str(SCRIPT.parent))
import digits_processes  # noqa: E402


def environment() -> dict[str, str]:
    """That of the tests (conftest.py), but for their eight devices; the CPU also where are GPUs."""
    env = dict(os.environ)
    flags = env.pop("XLA_FLAGS", "").split()
    env["XLA_FLAGS"] = " ".join(f for f in flags if "host_platform_device_count" not in f)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env | {"JAX_PLATFORMS": "cpu"}


def start(out: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*launcher, sys.executable, str(SCRIPT), *TINY, "--out", str(out), *options]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(out: Path, *options: str, launcher: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The final weights of a run that ends well."""
    process = start(out, *options, launcher=launcher)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, printed + errors[-5000:]
    return weights(out)


def run_here(out: Path, *options: str) -> dict[str, np.ndarray]:
    """The final weights of the same run in this process, on one device."""
    parsed = digits_processes.parse_options([*TINY, "--out", str(out), *options])
    place = digits_processes.OnMesh(parsed, make_mesh(1))
    digits_processes.train(place, parsed, Console(quiet=True))
    return weights(out)


def weights(out: Path) -> dict[str, np.ndarray]:
    with np.load(out / "weights.npz") as file:
        return dict(file)
