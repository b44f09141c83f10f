"""PCIe now against the most, and the interconnect matrix with what it means."""

from __future__ import annotations

import pytest

from tests.doctor.recordings import changed, one, recorded, said
from tightfit.doctor.host_checks import PATHS, matrix
from tightfit.doctor.readings import Link


def test_a_narrow_slot_is_seen_although_the_driver_calls_it_the_most():
    readings = recorded("x4-link")
    assert readings.gpus[0].pcie_width == readings.gpus[0].pcie_width_max == 4
    found = one(readings, "gpus[0].pcie_width")
    assert found.severity == "advice"
    assert "4 of the card's 16 lanes (3.9 of 15.8 GB/s each way)" in found.sentence
    assert "its slot has only that many" in found.action


def test_lanes_that_the_slot_has_and_the_link_has_not():
    found = one(recorded("healthy", pcie_width=8), "gpus[0].pcie_width")
    assert found.severity == "advice"
    assert "its slot" not in found.action


def test_an_idle_card_may_lower_its_generation():
    found = one(recorded("healthy"), "gpus[0].pcie_width")
    assert found.severity == "ok"
    assert found.sentence == "PCIe 4.0 x16, 1.0 while it is idle: 31.5 GB/s each way"
    busy = recorded("healthy", utilization=99, pcie_generation=3)
    assert "15.8 of 31.5" in one(busy, "gpus[0].pcie_generation", "advice").sentence
    assert said(busy, "gpus[0].pcie_width") == []


def test_a_card_without_a_pcie_reading_is_passed_over():
    assert said(recorded("healthy", pcie_width=0), "gpus[0].pcie_width") == []


def test_the_matrix_and_its_legend():
    readings = recorded("two-with-nvlink")
    assert matrix(readings) == [["", "GPU0", "GPU1"], ["GPU0", "X", "NV4"], ["GPU1", "NV4", "X"]]
    assert matrix(recorded("healthy")) == []
    assert matrix(recorded("server-in-trouble"))[-1] == ["GPU3", "?", "?", "?", "X"]


def test_nvlink_suits_every_parallelism():
    found = one(recorded("two-with-nvlink"), "links[0].nvlinks")
    assert (found.severity, found.value) == ("ok", "NV4")
    assert "parallel=ddp" in found.sentence
    assert "parallel=fsdp and zero" in found.sentence


def test_all_alike_is_said_once():
    assert "between every two GPUs" in one(recorded("server-in-trouble"), "links[0].nvlinks").sentence


def test_the_slowest_path_and_missing_peer_access_are_advice():
    readings = recorded("two-without-nvlink")
    assert one(readings, "links[0].path").severity == "advice"
    assert one(readings, "links[0].peer").severity == "advice"
    assert one(readings, "software.environment").sentence.startswith("NCCL_P2P_DISABLE=1")


@pytest.mark.parametrize("path", [name for name in PATHS if name != "NV#"])
def test_every_path_says_what_it_means_for_both_kinds(path):
    readings = changed(recorded("two-without-nvlink"), links=(Link(first=0, second=1, path=path, peer=True),))
    found = one(readings, "links[0].path")
    assert found.value == path
    assert "parallel=ddp" in found.sentence
    assert "parallel=fsdp and zero" in found.sentence
