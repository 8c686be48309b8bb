"""Workloads: the axes of prompts, tokens after a cache, and sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.analysis.axes import bind_axes
from graph_passes.analysis.workload import Phase, Workload
from tests.graph_passes.layouts import decoder

SIZES = st.integers(1, 99)


@given(batch=SIZES, length=SIZES, phase=st.sampled_from(["sequence", "prompt", "token"]))
def test_workload_length_names_it(batch: int, length: int, phase: Phase):
    found = Workload.of(batch, length, phase)
    assert (found.batch, found.length, found.phase) == (batch, length, phase)
    assert found.new == (1 if phase == "token" else length)
    assert found.past == (0 if phase == "prompt" else length)


@pytest.mark.parametrize(
    ("phase", "new", "past"), [("sequence", 7, 7), ("prompt", 7, 0), ("token", 1, 7)]
)
def test_bind_axes_of_a_cache_follow_the_phase(phase: Phase, new: int, past: int):
    axes = bind_axes(decoder().graph, Workload.of(2, 7, phase))
    assert axes == {"batch": 2, "sequence": new, "past": past}
