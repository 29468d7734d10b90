"""The README's code blocks run as they stand."""

import re
from pathlib import Path

import pytest

BLOCKS = re.findall(
    r"```python\n(.*?)```", Path(__file__).parents[1].joinpath("README.md").read_text(), re.S
)


@pytest.mark.parametrize("code", BLOCKS, ids=["flax", "parallel_in_time"])
def test_block_runs(code, capsys):
    assert len(code.strip().splitlines()) <= 20
    exec(compile(code, "README.md", "exec"), {})
