"""MPI ranks give the numbers of one device; each test starts `mpi_ranks.py` with mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mpi_ranks.py")
MISSING = [
    what
    for what, found in (
        ("mpirun", shutil.which("mpirun")),
        ("mpi4py", importlib.util.find_spec("mpi4py")),
        ("mpi4jax", importlib.util.find_spec("mpi4jax")),
    )
    if found is None
]
# a user's machine may have no MPI; where JAXBRAID_REQUIRE_MPI is set, that is a failure
needed = pytest.mark.skipif(
    bool(MISSING) and not os.environ.get("JAXBRAID_REQUIRE_MPI"),
    reason=f"no {' and no '.join(MISSING)}: make test-mpi installs them",
)
pytestmark = [pytest.mark.mpi, pytest.mark.slow, needed]


def run(ranks: int, case: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        ["mpirun", *root, "--oversubscribe", "-n", str(ranks), sys.executable, SCRIPT, case],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
    )


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (1, "uneven"),
        (2, "network"),
        (2, "mismatch"),
        (3, "network"),
        (3, "integration"),
        (4, "uneven"),
        (6, "uneven"),
    ],
)
def test_ranks_agree_with_one_device(ranks, case):
    done = run(ranks, case)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"ok {case}") == ranks


def test_a_failing_rank_ends_the_run_with_its_message():
    done = run(2, "fail", timeout=120)
    assert done.returncode != 0
    assert "this rank fails on purpose" in done.stderr
