"""Time of a collective, such as an all-reduce, among processes: over NVLink or PCIe inside a machine, over a network between machines.

NCCL's rings: every process hands on what it sends to the next one, so that each link carries what one process sends,
and a machine's network the same. An all-gather and a reduce-scatter take as many hops as there are other processes, an
all-reduce twice as many, or a tree's where that is quicker.

| constant | figure | where it comes from |
|---|---|---|
| `NVLINK_SHARE` | 0.82 | 370 of an H100's 450 GB/s, as NCCL's maintainers give it (NVIDIA/nccl-tests issue 212) |
| `PCIE_SHARE` | 0.8 | of PCIe, card to card: a little under the 0.89 that copies between RTX PRO 6000 cards were published to reach |
| `STAGED_SHARE` | 0.4 | of PCIe, through the host's memory, as between GeForce cards: assumed |
| `NETWORK_SHARE` | 0.9 | of a network's line rate: assumed |
| `START_SECONDS`, `HOP_SECONDS`, `FAR_HOP_SECONDS` | 8.4; 3.4, 5.7, 14 microseconds | a collective's start; a hop over NVLink, PCIe and a network: the defaults that NCCL 2 itself reckons with (src/graph/tuning.cc) |

None of this was measured here.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import math
from typing import NamedTuple

from tightfit.devices import Device
from tightfit.planning.timing.link import UNKNOWN_LINK
from tightfit.trace import Op

NVLINK_SHARE, PCIE_SHARE, STAGED_SHARE, NETWORK_SHARE = 0.82, 0.8, 0.4, 0.9
START_SECONDS = 8.4e-6
HOP_SECONDS = {"NVLink": 3.4e-6, "PCIe": 5.7e-6}
FAR_HOP_SECONDS = 14e-6


class RingLink(NamedTuple):
    """The slowest part of a ring: what it is, and bytes a second in one direction."""

    name: str
    rate: float


def near_link(device: Device) -> RingLink:
    """Between the cards of one machine."""
    if device.links_all:
        return RingLink("NVLink", device.link_bandwidth * NVLINK_SHARE)
    share = PCIE_SHARE if device.peer_to_peer else STAGED_SHARE
    return RingLink("PCIe", (device.pcie_bandwidth or UNKNOWN_LINK) * share)


def ring_link(device: Device) -> RingLink:
    """The slowest link of a ring over all of the cards."""
    far = RingLink("the network", device.network_bandwidth * NETWORK_SHARE)
    near = near_link(device)
    if device.machines == 1:
        return near
    return far if device.cards == 1 else min(near, far, key=lambda link: link.rate)


def collective_seconds(op: Op, device: Device) -> float:
    """Seconds that a collective among all of the device's cards takes."""
    if device.world == 1:
        return 0.0
    near, far = HOP_SECONDS[near_link(device).name], FAR_HOP_SECONDS
    between = device.machines - 1
    hops = between * far + (device.world - 1 - between) * near
    if "all_reduce" in op.name:
        tree = math.ceil(math.log2(device.machines)) * far + (device.cards - 1) * near
        hops = 2 * min(hops, tree)
    return START_SECONDS + hops + op.bytes_read / ring_link(device).rate
