"""Code blocks of the README and of the guide to several processes run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(code, id=f"{page}-{i}")
    for page in ("README.md", "docs/distributed.md")
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code, capsys):
    assert len(code.strip().splitlines()) <= 20
    exec(compile(code, "text", "exec"), {})
