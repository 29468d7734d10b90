"""Code of the README and the guides runs as it stands."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


ALONE = [
    pytest.param(code, id=f"{page}-{i}")
    for page in ("README.md", "docs/distributed.md", "docs/problems.md", "docs/networks.md")
    for i, code in enumerate(blocks(page))
]


@pytest.mark.parametrize("code", ALONE)
def test_block_runs(code, capsys):
    assert len(code.strip().splitlines()) <= 20
    exec(compile(code, "text", "exec"), {})


def test_guide_runs_from_beginning_to_end(capsys):
    """The blocks of one page after another, as it says; and what it says comes out of them."""
    names = {}
    for code in blocks("docs/parallel_in_time.md"):
        exec(compile(code, "text", "exec"), names)
    jax.effects_barrier()
    assert names["newton"].stats.residuals[-1] < 1e-3 * names["plain"].stats.residuals[-1]
    assert names["fine"].converged
    assert names["bound"].factor < 1
    assert "0 errors, 0 warnings" in capsys.readouterr().out


def test_training_guide_runs_from_beginning_to_end(capsys):
    names = {}
    for code in blocks("docs/training.md"):
        exec(compile(code, "text", "exec"), names)
    assert names["nested"].losses[-1] < names["nested"].losses[0]
    assert names["loss"](names["params"], names["x"]) < names["nested"].losses[-1]
