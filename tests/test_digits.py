"""The demo runs, and an interruption changes nothing in the weights that it reaches."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

import compiler

ROOT = pathlib.Path(__file__).parents[1]
TINY = ["--layers=8", "--width=4", "--epochs=2", "--mesh=2x1", "--batch=256"]


def digits(out, *extra):
    """Run the demo, which makes its own devices; returns what it prints."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"}
    env["XLA_FLAGS"] = compiler.FLAGS
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "examples/digits.py"), *TINY, "--out", str(out), *extra]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_checkpoint(out):
    """Epoch, and all arrays of both networks and optimizers by their path."""
    with ocp.CheckpointManager(out / "checkpoints") as checkpoints:
        epoch = checkpoints.latest_step()
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        state = checkpoints.restore(epoch, args=args).state
    return epoch, dict(ocp.tree.to_flat_dict(state))


@pytest.mark.slow
def test_interrupted_training_ends_with_the_same_weights(tmp_path):
    printed = digits(tmp_path / "whole")
    assert "test accuracy" in printed and "gradient error" in printed
    assert (tmp_path / "whole/digits.png").stat().st_size > 10_000

    assert "stopped after epoch 1" in digits(tmp_path / "parts", "--stop-after", "1")
    epoch, halfway = last_checkpoint(tmp_path / "parts")
    assert epoch == 1
    assert "test accuracy" in digits(tmp_path / "parts", "--resume")

    end, whole = last_checkpoint(tmp_path / "whole")
    resumed_end, parts = last_checkpoint(tmp_path / "parts")
    assert end == resumed_end == 2 and whole.keys() == parts.keys()
    for path, value in whole.items():
        np.testing.assert_array_equal(parts[path], value, err_msg=str(path))
    kernels = [path for path in whole if "kernel" in path]
    assert kernels and all(np.any(whole[path] != halfway[path]) for path in kernels)
