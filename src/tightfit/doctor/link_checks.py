"""What to say of the way to the host and between cards: PCIe now against the most, and the interconnect matrix."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.device_catalogue import PCIE_3, PCIE_4, PCIE_5
from tightfit.devices import find_device
from tightfit.doctor.findings import Finding, Severity
from tightfit.doctor.gpu_checks import busy
from tightfit.doctor.readings import Gpu, Link, Readings
from tightfit.errors import RecipeError

LANE = {1: 0.25, 2: 0.5, 3: PCIE_3, 4: PCIE_4, 5: PCIE_5, 6: 7.56}
"""GB/s of one lane in one direction, by PCIe generation (PCI-SIG; the sixth after its flit encoding)."""

LEGEND = {
    "NV#": "that many NVLinks, bonded",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, without the processor's",
    "PHB": "through the processor's PCIe host bridge",
    "NODE": "between host bridges of one processor's memory (NUMA node)",
    "SYS": "between processors, over their own link",
}
"""What `nvidia-smi topo -m` calls a path between two cards, nearest first."""

MEANING: dict[str, tuple[Severity, str, str]] = {
    "NV#": ("ok", "data parallelism hides its gradient exchange; sharding (FSDP, ZeRO), which fetches weights at every "
            "layer, runs well too", ""),
    "PIX": ("ok", "the cards talk past the processor at PCIe's speed: data parallelism suits; sharding waits at large "
            "layers", ""),
    "PXB": ("ok", "the cards talk past the processor at PCIe's speed: data parallelism suits; sharding waits at large "
            "layers", ""),
    "PHB": ("info", "every exchange passes the processor: data parallelism exchanges once a step and suits, more so "
            "with gradient accumulation; sharding exchanges at every layer and is slowed down", "prefer data "
            "parallelism where the model fits one card"),
    "NODE": ("info", "every exchange passes two host bridges: data parallelism suits with gradient accumulation; "
             "sharding is slowed down", "prefer data parallelism where the model fits one card"),
    "SYS": ("advice", "every exchange crosses between the processors, the slowest way: data parallelism wants much "
            "gradient accumulation; sharding is slow", "use cards of one processor where that is enough "
            "(CUDA_VISIBLE_DEVICES), or raise gradient accumulation"),
}  # fmt: skip
"""For each kind of path: how it is to be taken, what it means for a parallel run, and what to do."""


def label(link: Link) -> str | None:
    """The matrix's entry: NV4, PHB; None where neither was read."""
    return f"NV{link.nvlinks}" if link.nvlinks else link.path


def matrix(readings: Readings) -> list[list[str]]:
    """The interconnect matrix with its headings, empty for fewer than two cards."""
    if len(readings.gpus) < 2 or not readings.links:
        return []
    names = {(link.first, link.second): label(link) or "?" for link in readings.links}
    indices = [gpu.index for gpu in readings.gpus]
    rows = [["", *(f"GPU{i}" for i in indices)]]
    for a in indices:
        rows.append([f"GPU{a}", *("X" if a == b else names.get((min(a, b), max(a, b)), "?") for b in indices)])
    return rows


def legend(readings: Readings) -> list[str]:
    """The words for the matrix's entries, of those that are in it."""
    kinds = {_kind(link) for link in readings.links}
    return [f"{name} {meaning}" for name, meaning in LEGEND.items() if name in kinds]


def link_checks(readings: Readings) -> Iterator[Finding]:
    """PCIe of each card, then what lies between them."""
    for place, gpu in enumerate(readings.gpus):
        yield from _pcie(gpu, f"GPU {gpu.index}", f"gpus[{place}]")
    groups: dict[str, list[tuple[int, Link]]] = {}
    for place, link in enumerate(readings.links):
        if (name := label(link)) is not None:
            groups.setdefault(name, []).append((place, link))
    for name, links in groups.items():
        severity, meaning, action = MEANING[_kind(links[0][1]) or "SYS"]
        yield Finding(topic="links", severity=severity, sentence=f"{name} between {_pairs(links, readings)}: {meaning}",
                      field=f"links[{links[0][0]}].{'nvlinks' if links[0][1].nvlinks else 'path'}", value=name,
                      action=action)
    apart = [(place, link) for place, link in enumerate(readings.links) if link.peer is False]
    if apart:
        yield Finding(
            topic="links", severity="advice", field=f"links[{apart[0][0]}].peer", value=False,
            sentence=f"no peer access between {_pairs(apart, readings)}: what they exchange is copied through the "
                     "host's memory",
            action="GeForce cards have none over PCIe; with others, look at the IOMMU and ACS in the firmware",
        )  # fmt: skip
    yield from _bridges(readings)


def _bridges(readings: Readings) -> Iterator[Finding]:
    for place, link in enumerate(readings.links):
        pair = [gpu.name for gpu in readings.gpus if gpu.index in (link.first, link.second)]
        if not link.nvlinks and len(set(pair)) == 1 and _catalogued_link(pair[0]):
            yield Finding(
                topic="links", severity="advice", field=f"links[{place}].nvlinks", value=0,
                sentence=f"no NVLink is active between GPU {link.first} and {link.second}, which are made for one",
                action="an NVLink bridge speeds up every exchange; where there is one, reseat it",
            )  # fmt: skip


def _catalogued_link(name: str) -> float:
    try:
        return find_device(name).link_bandwidth
    except RecipeError:
        return 0.0


def _pairs(links: list[tuple[int, Link]], readings: Readings) -> str:
    if len(links) > 1 and len(links) == len(readings.links):
        return "every two GPUs"
    return ", ".join(f"GPU {link.first} and {link.second}" for _, link in links)


def _kind(link: Link) -> str | None:
    return "NV#" if link.nvlinks else link.path


def _pcie(gpu: Gpu, topic: str, field: str) -> Iterator[Finding]:
    generation, width = gpu.pcie_generation, gpu.pcie_width
    if not generation or not width:
        return
    most_generation = gpu.pcie_generation_max or generation
    most_width = max(gpu.pcie_width_card or 0, gpu.pcie_width_max or 0, width)
    speed, best = _speed(most_generation, width), _speed(most_generation, most_width)
    if width < most_width:
        slot = gpu.pcie_width_max is not None and gpu.pcie_width_max < most_width
        yield Finding(
            topic=topic, severity="advice", field=f"{field}.pcie_width", value=width,
            sentence=f"PCIe runs with {width} of the card's {most_width} lanes ({speed:.1f} of {best:.1f} GB/s each "
                     "way): offload, loading data and exchange between cards take that much longer; training that "
                     "stays on the card hardly notices",
            action=f"{'its slot has only that many: ' if slot else ''}put the card into a x{most_width} slot that is "
                   "wired to the processor, without a riser; look whether another card or an SSD shares the lanes",
        )  # fmt: skip
    if generation < most_generation and busy(gpu):
        yield Finding(
            topic=topic, severity="advice", field=f"{field}.pcie_generation", value=generation,
            sentence=f"PCIe {generation}.0 under load, of {most_generation}.0 that card and slot serve: transfers at "
                     f"{_speed(generation, width):.1f} of {speed:.1f} GB/s",
            action="set the slot's generation in the firmware; a riser cable may be made for an older one",
        )  # fmt: skip
    elif width == most_width:
        saving = f", {generation}.0 while it is idle" if generation < most_generation else ""
        yield Finding(topic=topic, severity="ok", field=f"{field}.pcie_width", value=width,
                      sentence=f"PCIe {most_generation}.0 x{width}{saving}: {speed:.1f} GB/s each way")


def _speed(generation: int, width: int) -> float:
    return LANE.get(generation, LANE[max(LANE)]) * width
