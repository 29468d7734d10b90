"""Training in parallel over a sequence ends as stepping through it does."""

from __future__ import annotations

import re

import pytest

from test_examples import run


@pytest.mark.slow
def test_both_trainings_classify_alike(tmp_path):
    text = run("sequences", tmp_path)
    row = re.search(r"test accuracy +│ ([\d.]+)% +│ ([\d.]+)%", text)
    parallel, serial = map(float, row.groups())
    assert parallel > 80 and abs(parallel - serial) <= 2.5  # one of 40 series
