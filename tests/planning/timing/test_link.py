"""Copies in the clock: assumed shares of PCIe's bandwidth, and what was measured on the machine instead."""

from __future__ import annotations

import pytest

from tests.planning.ops import GPU
from tests.planning.timing.test_step_time import recipe
from tests.planning.timing.test_streams import compute, copy, trace
from tightfit.calibration import Calibration, CopyRates, LinkRates
from tightfit.planning.timing.link import LINK_SHARE, PAGEABLE_SHARE, copy_rate
from tightfit.planning.timing.step_time import step_time
from tightfit.trace import Stream

IN, OUT = Stream.COPY_IN, Stream.COPY_OUT
LINK = LinkRates(to_device=CopyRates(alone=10e9, both_ways=8e9, pageable=2e9),
                 to_host=CopyRates(alone=12e9, both_ways=9e9, pageable=3e9))


def calibrated(**fields):
    return Calibration(**{"device": "toy", "kind": "cuda", "processor": "", "torch": "", **fields})


def seconds(*ops, calibration):
    found = step_time(trace(*ops), recipe(), GPU, calibration)
    return found.seconds - found.data


def test_a_copys_rate_is_what_was_measured_in_its_direction():
    rates = [copy_rate(GPU, calibrated(link=LINK), stream, pinned=pinned)
             for stream in (IN, OUT) for pinned in (True, False)]
    assert rates == [10e9, 2e9, 12e9, 3e9]


def test_a_rate_that_was_not_measured_is_a_share_of_the_data_sheets():
    for calibration in (None, calibrated()):
        for stream in (IN, OUT):
            for pinned, share in ((True, LINK_SHARE), (False, PAGEABLE_SHARE)):
                assert copy_rate(GPU, calibration, stream, pinned=pinned) == GPU.pcie_bandwidth * share


def test_a_copy_by_itself_takes_what_it_takes_alone():
    assert seconds(copy(1, 10**10, IN), compute(2, 0, 1), calibration=calibrated(link=LINK)) == pytest.approx(
        1.0, rel=0.001)


def test_copies_both_ways_slow_one_another():
    """Each is under way all the time: 0.8 GB in a tenth of a second, and 0.9 GB out."""
    both = [copy(1, 8 * 10**9, IN), copy(2, 9 * 10**9, OUT)]
    found = seconds(*both, compute(3, 0, 1, 2), calibration=calibrated(link=LINK))
    assert found == pytest.approx(1.0, rel=0.07)  # one of them ends first where each goes by itself
    assert found > max(seconds(one, compute(3, 0, 1), calibration=calibrated(link=LINK)) for one in both) * 1.1


def test_where_copies_bind_the_slower_way_counts_and_computing_goes_on_as_it_would():
    work = compute(9, 10**12)
    alone = seconds(work, calibration=calibrated(link=LINK))
    size = int(2 * alone * 10e9), int(2 * alone * 12e9)
    found = seconds(copy(1, size[0], IN), copy(2, size[1], OUT), work, calibration=calibrated(link=LINK))
    assert found == pytest.approx(2 * alone * max(10 / 8, 12 / 9), rel=0.001)
    beside = seconds(copy(1, size[0] // 20, IN), copy(2, size[1] // 20, OUT), work, calibration=calibrated(link=LINK))
    assert beside == pytest.approx(alone, rel=0.001)
