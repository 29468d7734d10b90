"""The language model trains layer-parallel as it does serially."""

from __future__ import annotations

import re

import pytest

from test_examples import run


@pytest.mark.slow
def test_language_model_trains_as_well_in_parallel(tmp_path):
    """Accuracy within a point, loss within 0.05 bits, and both learned (uniform: 6.7)."""
    text = run("language_model", tmp_path)
    row = r"{} +│ ([\d.]+)%? +│ ([\d.]+)"
    parallel, serial = map(float, re.search(row.format("accuracy"), text).groups())
    assert abs(parallel - serial) < 1.0
    parallel, serial = map(float, re.search(row.format("bits per character"), text).groups())
    assert abs(parallel - serial) < 0.05
    assert max(parallel, serial) < 5.0
