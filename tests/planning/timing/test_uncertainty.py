"""Errors of predicted times: by what is known of the card, by what the seconds go to, and of differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.planning.ops import CPU, GPU, add, attention, mm
from tightfit.devices import catalogue
from tightfit.planning.timing.uncertainty import (
    CALIBRATED_ERROR,
    CALIBRATED_STEP,
    CARD_ERROR,
    WORK_ERROR,
    Work,
    intervals,
    seconds_error,
    speed_error,
    work_error,
    work_of,
)
from tightfit.trace import Stream

MEASURED = replace(GPU, evidence="measured")
STEP = {Work.TENSOR_CORES: 0.8, Work.MEMORY: 0.2}


@pytest.mark.parametrize(("op", "tf32", "kind"), [
    (mm(64, 64, 64), False, Work.TENSOR_CORES), (mm(64, 64, 64, "float32"), False, Work.PLAIN),
    (mm(64, 64, 64, "float32"), True, Work.TENSOR_CORES), (attention(128), False, Work.ATTENTION),
    (add(), False, Work.MEMORY), (add(name="fused add"), False, Work.FUSED),
    (add(name="aten._fused_adamw_.default"), False, Work.FUSED), (add(stream=Stream.COPY_IN), False, Work.TRANSFERS),
])  # fmt: skip
def test_what_seconds_go_to(op, tf32, kind):
    assert work_of(op, GPU, tf32) is kind


def test_squares_of_independent_errors_add_up():
    error = math.hypot(CARD_ERROR["measured"], 0.8 * WORK_ERROR[Work.TENSOR_CORES], 0.2 * WORK_ERROR[Work.MEMORY])
    assert speed_error(STEP, MEASURED, False) == pytest.approx(error)
    assert seconds_error({kind: 7 * s for kind, s in STEP.items()}, MEASURED, False) == pytest.approx(7 * error)


def test_work_errors_are_weighed_by_seconds():
    alone = work_error({Work.MEMORY: 2.0}, False, 0.0) / 2
    assert alone == WORK_ERROR[Work.MEMORY]
    assert work_error({Work.MEMORY: 1.0, Work.TENSOR_CORES: 1.0}, False, 0.0) / 2 < alone
    assert work_error({}, False, 0.0) == 0


def test_a_host_that_may_be_slower_adds_its_seconds():
    alone = seconds_error(STEP, MEASURED, False)
    assert seconds_error(STEP, MEASURED, False, 0.5) == pytest.approx(math.hypot(alone, 0.5))
    waits = math.hypot(alone, math.sqrt(1.5**2 - 1) * CARD_ERROR["measured"])  # the card's error of a longer step
    assert seconds_error({**STEP, Work.HOST: 0.5}, MEASURED, False) == pytest.approx(waits)


def test_more_is_known_of_a_measured_card_and_most_of_a_calibrated_one():
    known = speed_error(STEP, MEASURED, False)
    assert speed_error(STEP, MEASURED, True) < known < speed_error(STEP, GPU, False) < 0.5
    least = math.hypot(CALIBRATED_ERROR, CALIBRATED_STEP)
    assert speed_error({Work.TENSOR_CORES: 3.0}, GPU, True) == pytest.approx(least)
    for kind in Work:
        for device in catalogue():
            assert 0 < speed_error({kind: 1.0}, device, False) < 0.5


def test_of_two_steps_only_what_differs_is_uncertain():
    more = {**STEP, Work.MEMORY: 0.25}
    difference = {kind: more[kind] - STEP[kind] for kind in STEP}
    assert seconds_error(difference, MEASURED, False) < 0.05 < seconds_error(STEP, MEASURED, False)


def test_a_step_is_longest_where_its_speed_is_least():
    found = intervals(0.2, seconds={"step": 6.0}, rates={"tokens": 10.0})
    assert found["step"] == pytest.approx((5.0, 7.5))
    assert found["tokens"] == pytest.approx((8.0, 12.0))
    assert intervals(None, seconds={"step": 6.0}, rates={}) is None


def test_nothing_is_known_of_a_processor_that_was_not_measured():
    assert speed_error(STEP, CPU, False) is None
    assert 0 < speed_error(STEP, CPU, True) < 0.5
    assert speed_error({}, MEASURED, False) is None
