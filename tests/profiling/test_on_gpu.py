"""A streamed step profiled on a GPU: its lanes are measured, and its host memory is the predicted one."""

from __future__ import annotations

import pytest

from tests.profiling.profiled import STREAMED, recipe
from tightfit.profiling.measure import profile_recipe
from tightfit.profiling.report.copies import lanes_of, without_lanes
from tightfit.profiling.step import steps_of
from tightfit.trace import Place, Stream

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("checkpointing", ["none", "every-block"])
def test_a_step_is_profiled_with_the_allocators_record(checkpointing):
    _, measured, _ = profile_recipe(recipe(checkpointing=checkpointing, data="dummy"))
    assert measured.memory_record["device_traces"], measured.trace.notes


def test_a_streamed_steps_lanes_and_host_memory_are_measured():
    found, _, _ = profile_recipe(recipe(**STREAMED, data="dummy"))
    lanes = lanes_of(found)
    assert list(lanes) == ["measured", "predicted"]
    assert without_lanes(found) == ""
    for stream in (Stream.COMPUTE, Stream.COPY_IN, Stream.COPY_OUT):
        assert lanes["measured"].busy[stream] > 0
    measured, predicted = (step.by_category(Place.HOST) for step in steps_of(found).values())
    assert predicted == pytest.approx(measured, rel=0.02)  # by category
