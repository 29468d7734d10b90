"""A SpliNet on spectra: its accuracy in both trainings."""

from __future__ import annotations

import re

import pytest

from test_examples import run


@pytest.mark.slow
def test_layer_parallel_training_is_as_good_as_serial(tmp_path):
    text = run("spectra", tmp_path)
    found = re.search(r"test accuracy +│ ([\d.]+)% +│ ([\d.]+)%", text)
    parallel, serial = map(float, found.groups())
    assert abs(parallel - serial) <= 1
    assert serial > 95
