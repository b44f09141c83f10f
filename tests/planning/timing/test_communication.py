"""Communication: a ring by hand, and a step that waits for it or does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.ops import GPU, add
from tests.planning.timing.test_step_time import recipe
from tests.planning.timing.test_streams import compute, run, trace
from tightfit.devices import find_device
from tightfit.planning.timing.collectives import (
    FAR_HOP_SECONDS,
    HOP_SECONDS,
    NETWORK_SHARE,
    NVLINK_SHARE,
    PCIE_SHARE,
    STAGED_SHARE,
    START_SECONDS,
    collective_seconds,
    ring_link,
)
from tightfit.planning.timing.op_times import op_seconds
from tightfit.planning.timing.step_time import step_lanes, step_time
from tightfit.planning.timing.uncertainty import Work
from tightfit.trace import Op, OpClass, Phase, Stream

NETWORK, COMPUTE = Stream.NETWORK, Stream.COMPUTE
TWO = replace(GPU, cards=2, link_bandwidth=1e11)
H100 = find_device("h100-sxm")


def communication(tick, sent, *after, name="c10d._allgather_base_.default", phase=Phase.FORWARD):
    return Op(name=name, tick=tick, phase=phase, op_class=OpClass.COMMUNICATION, bytes_read=sent, bytes_written=sent,
              stream=NETWORK, after=after)  # fmt: skip


def test_a_ring_inside_a_machine():
    eight = replace(H100, cards=8)
    sent = 7 * 10**9
    assert collective_seconds(communication(1, sent), eight) == pytest.approx(
        START_SECONDS + 7 * HOP_SECONDS["NVLink"] + sent / (450e9 * NVLINK_SHARE))
    assert collective_seconds(communication(1, sent, name="_c10d_functional.all_reduce"), eight) == pytest.approx(
        START_SECONDS + 2 * 7 * HOP_SECONDS["NVLink"] + sent / (450e9 * NVLINK_SHARE))
    assert collective_seconds(communication(1, sent), H100) == 0.0  # alone


def test_a_ring_over_machines_goes_at_the_slower_of_links_and_network():
    slow = replace(H100, cards=8, machines=4, network_bandwidth=12.5e9)
    assert collective_seconds(communication(1, 10**9), slow) == pytest.approx(
        START_SECONDS + 28 * HOP_SECONDS["NVLink"] + 3 * FAR_HOP_SECONDS + 1e9 / (12.5e9 * NETWORK_SHARE))
    assert ring_link(slow).name == "the network"
    assert ring_link(replace(slow, network_bandwidth=1e12)).name == "NVLink"


def test_many_machines_sum_by_trees_which_have_fewer_hops():
    many = replace(H100, cards=8, machines=128, network_bandwidth=400e9)
    small = collective_seconds(communication(1, 0, name="DistributedDataParallel.all_reduce"), many)
    assert small == pytest.approx(START_SECONDS + 2 * (7 * FAR_HOP_SECONDS + 7 * HOP_SECONDS["NVLink"]))
    assert small < collective_seconds(communication(1, 0), many)  # gathers go in rings


@pytest.mark.parametrize(("name", "cards", "link", "share"), [
    ("rtx-3090", 2, "NVLink", NVLINK_SHARE), ("rtx-3090", 4, "PCIe", STAGED_SHARE), ("h200", 8, "NVLink", NVLINK_SHARE),
    ("rtx-4090", 2, "PCIe", STAGED_SHARE), ("a100-80gb-pcie", 4, "PCIe", PCIE_SHARE), ("l40s", 2, "PCIe", PCIE_SHARE),
])  # fmt: skip
def test_cards_meet_over_what_they_have(name, cards, link, share):
    device = replace(find_device(name), cards=cards)
    rate = device.link_bandwidth if link == "NVLink" else device.pcie_bandwidth
    assert ring_link(device) == (link, rate * share)


def test_communication_begins_with_the_step_whose_weights_it_gathers():
    assert run((NETWORK, 1.0), (COMPUTE, 3.0, 0)).seconds == 4.0
    assert run((COMPUTE, 3.0), (NETWORK, 1.0, 0), (COMPUTE, 3.0)).seconds == 6.0  # summed meanwhile


def test_a_network_that_is_slower_than_compute_binds():
    assert run((COMPUTE, 1.0), (NETWORK, 3.0, 0), times=10).seconds == pytest.approx(30.0)


def both(device, *ops):
    return step_time(trace(*ops), recipe().override(parallel={"name": "ddp", "processes": device.world}), device)


def test_communication_that_compute_waits_for_adds_what_it_takes():
    found = both(TWO, communication(1, 10**9), compute(2, 85 * 10**9, 1))
    taken = collective_seconds(communication(1, 10**9), TWO)
    assert found.communication.bytes == 10**9
    assert (found.communication.seconds, found.communication.added) == pytest.approx((taken, taken), rel=1e-4)
    assert found.work[Work.COMMUNICATION] == pytest.approx(taken, rel=1e-4)
    assert found.communication.hidden == pytest.approx(0.0, abs=1e-4)
    assert found.copies is None


def test_communication_that_compute_hides_adds_nothing():
    work = compute(2, 85 * 10**9)
    found = both(TWO, compute(1, 1000), communication(2, 10**9, 1), work)
    assert op_seconds(work, TWO) > collective_seconds(communication(1, 10**9), TWO)
    assert found.communication.added == pytest.approx(0.0, abs=1e-9)
    assert found.communication.hidden == pytest.approx(1.0)


def test_lanes_show_the_network():
    ops = trace(communication(1, 10**9), compute(2, 85 * 10**9, 1))
    lanes = step_lanes(ops, recipe().override(parallel={"name": "ddp", "processes": 2}), TWO)
    network = next(lane for lane in lanes if lane.stream is NETWORK)
    assert network.end - network.begin == pytest.approx(collective_seconds(communication(1, 10**9), TWO))


def test_a_recipe_alone_communicates_nothing():
    assert step_time(trace(compute(1, 1000)), recipe(), GPU).communication is None
    assert add().stream is COMPUTE
