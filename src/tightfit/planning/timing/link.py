"""Speed of copies between the host's memory and a GPU's: measured on the machine at hand, else a share of PCIe's.

| constant | figure | where it comes from |
|---|---|---|
| `LINK_SHARE`, `PAGEABLE_SHARE` | 0.8, 0.4 | of PCIe's bandwidth, from page-locked and from ordinary memory: assumed, where no calibration measured it |
| `UNKNOWN_LINK` | 16 GB/s | a link that is not known: PCIe 3.0 with 16 lanes |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Sequence

from tightfit.calibration import Calibration, CopyRates, LinkRates
from tightfit.devices import Device
from tightfit.planning.timing.streams import Segment
from tightfit.trace import COPIES, Stream

LINK_SHARE, PAGEABLE_SHARE = 0.8, 0.4
UNKNOWN_LINK = 16e9


def copy_rate(device: Device, calibration: Calibration | None, stream: Stream, *, pinned: bool) -> float:
    """Bytes a second of copies on that stream while nothing else runs."""
    if calibration is not None and calibration.link is not None:
        rates = _rates(calibration.link, stream)
        return rates.alone if pinned else rates.pageable
    return (device.pcie_bandwidth or UNKNOWN_LINK) * (LINK_SHARE if pinned else PAGEABLE_SHARE)


def contended(segments: Sequence[Segment], link: LinkRates, seconds: float) -> list[Segment]:
    """A step's ops with what copies both ways cost one another, each stretched by the share of the step's `seconds`
    that the other way is busy."""
    busy = dict.fromkeys(Stream, 0.0)
    for pieces, times in segments:
        for piece in pieces:
            busy[piece.stream] += times * piece.work
    if not any(busy[stream] for stream in COPIES):
        return list(segments)
    longer = dict.fromkeys(Stream, 1.0)
    for stream, other in ((Stream.COPY_IN, Stream.COPY_OUT), (Stream.COPY_OUT, Stream.COPY_IN)):
        rates, share = _rates(link, stream), min(busy[other] / seconds, 1.0)
        longer[stream] = 1 + share * (max(rates.alone / rates.both_ways, 1.0) - 1)
    return [([piece._replace(work=piece.work * longer[piece.stream]) for piece in pieces], times)
            for pieces, times in segments]


def _rates(link: LinkRates, stream: Stream) -> CopyRates:
    return link.to_host if stream is Stream.COPY_OUT else link.to_device
