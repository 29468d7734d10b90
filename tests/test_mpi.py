"""MPI ranks give the numbers of one device; each test starts `mpi_ranks.py` with mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import compiler
import digits_runs

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


def mpirun(ranks: int) -> tuple[str, ...]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return "mpirun", *root, "--oversubscribe", "-n", str(ranks)


def run(ranks: int, case: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"XLA_FLAGS": compiler.FLAGS}
    return subprocess.run(
        [*mpirun(ranks), sys.executable, SCRIPT, case],
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
        (3, "features"),
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


def same_weights(got, want):
    assert got.keys() == want.keys()
    for name, a in want.items():
        assert a.dtype == np.float64
        assert np.max(np.abs(got[name] - a)) <= 1e-10 * np.max(np.abs(a)), name


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--mpi"]),
        (4, ["--mpi", "--mesh=2x2"]),
        (2, []),  # jax.distributed, started by mpirun
    ],
)
def test_ranks_train_to_the_weights_of_one_process(tmp_path, ranks, options):
    """Seven layers: two ranks have unequal numbers of them."""
    alone = digits_runs.run_here(tmp_path / "one", "--layers=7")
    several = digits_runs.run(tmp_path / "ranks", "--layers=7", *options, launcher=mpirun(ranks))
    same_weights(several, alone)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_killed_ranks_end_the_run_which_others_resume(tmp_path):
    options = "--layers=7", "--epochs=20", "--mpi"
    out = tmp_path / "ranks"
    process = digits_runs.start(out, *options, launcher=mpirun(2))
    deadline = time.monotonic() + 120
    while not (out / "checkpoints/epoch-0002").is_dir():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0 and not (out / "weights.npz").exists()
    # four ranks have blocks of two layers, two have blocks of four
    resumed = digits_runs.run(out, *options, "--resume", launcher=mpirun(4))
    # long enough that the learning rate warms up: one in single precision differs by 1e-9
    alone = digits_runs.run_here(tmp_path / "one", "--layers=7", "--epochs=20")
    same_weights(resumed, alone)
