"""Options that XLA gets with a step: those it knows, and a word about those it does not."""

from __future__ import annotations

import pytest
from absl import logging

from jaxinfer.execution import compile as compiling


@pytest.fixture
def options(monkeypatch):
    def choose(**options):
        compiling._is_known.cache_clear()
        monkeypatch.setattr(compiling, "COMPILER_OPTIONS", {"cpu": options})

    yield choose
    compiling._is_known.cache_clear()


def test_an_option_that_xla_knows_is_given_with_its_value(options):
    options(xla_gpu_experimental_force_split_k=1)
    assert compiling.compiler_options() == {"xla_gpu_experimental_force_split_k": 1}


def test_an_option_that_xla_does_not_know_is_left_out_and_logged(options, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    options(xla_gpu_of_another_year=1)
    assert compiling.compiler_options() == {}
    warning = "this XLA has no option xla_gpu_of_another_year: a step takes more launches"
    assert warnings == [warning]


def test_other_platforms_get_none(monkeypatch):
    monkeypatch.setattr(compiling, "platform", lambda: "tpu")
    assert compiling.compiler_options() == {}
