"""A normalizing flow on spirals: its likelihood in both trainings."""

from __future__ import annotations

import re

import pytest

from test_examples import run


@pytest.mark.slow
def test_training_parallel_in_time_is_as_good_as_serial(tmp_path):
    text = run("spirals", tmp_path)
    found = re.search(r"log-likelihood of the test +│ (-[\d.]+) +│ (-[\d.]+)", text)
    parallel, serial = map(float, found.groups())
    assert abs(parallel - serial) < 0.01  # a likelihood 1 % higher or lower
    assert serial > -2.8  # the normal distribution that it starts from has -2.83
