"""The sine example runs with a short setting, and its figures are as promised."""

from __future__ import annotations

import re

import pytest

from test_examples import run


@pytest.mark.slow
def test_several_depths_need_less_work_than_one(tmp_path):
    """And layer-parallel training ends within a point of the error of serial training."""
    text = run("sine", tmp_path)
    part = {
        way: float(re.search(rf"{way}.*│ +(\S+) +│$", text, re.MULTILINE)[1])
        for way in ("nested iteration", "MG/OPT")
    }
    assert part["nested iteration"] < 0.8 and part["MG/OPT"] < 0.8
    serial, parallel = (float(e) for e in re.findall(r"training: (\S+) %", text))
    assert abs(serial - parallel) < 1
