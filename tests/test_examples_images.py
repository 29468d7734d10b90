"""A residual network on images of 28 x 28 pixels."""

from __future__ import annotations

import re

import pytest

from test_examples import run


@pytest.mark.slow
def test_layer_parallel_training_is_as_good_as_serial(tmp_path):
    text = run("images", tmp_path)
    found = re.search(r"test accuracy +│ ([\d.]+)% +│ ([\d.]+)%", text)
    parallel, serial = map(float, found.groups())
    assert abs(parallel - serial) <= 1
    assert serial > 90
