"""Judging what lies between cards, and the interconnect matrix with its legend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tightfit.devices import find_device
from tightfit.doctor.findings import Finding, Say, Severity
from tightfit.doctor.readings import Link, Readings
from tightfit.errors import RecipeError


class Path(NamedTuple):
    """A kind of path between two cards: what `nvidia-smi topo -m` means by it, how it is to be taken, what it means for
    a parallel run, and what to do."""

    legend: str
    severity: Severity
    meaning: str
    action: str = ""


PAST = "the cards talk past the processor at PCIe's speed: data parallelism suits; sharding waits at large layers"
PATHS = {
    "NV#": Path("that many NVLinks, bonded", "ok", "data parallelism hides its gradient exchange; sharding (FSDP, "
                "ZeRO), which fetches weights at every layer, runs well too"),
    "PIX": Path("at most one PCIe bridge", "ok", PAST),
    "PXB": Path("several PCIe bridges, without the processor's", "ok", PAST),
    "PHB": Path("through the processor's PCIe host bridge", "info", "every exchange passes the processor: data "
                "parallelism exchanges once a step and suits, more so with gradient accumulation; sharding exchanges "
                "at every layer and is slowed down", "prefer data parallelism where the model fits one card"),
    "NODE": Path("between host bridges of one processor's memory (NUMA node)", "info", "every exchange passes two host "
                 "bridges: data parallelism suits with gradient accumulation; sharding is slowed down",
                 "prefer data parallelism where the model fits one card"),
    "SYS": Path("between processors, over their own link", "advice", "every exchange crosses between the processors, "
                "the slowest way: data parallelism wants much gradient accumulation; sharding is slow", "use cards of "
                "one processor where that is enough (CUDA_VISIBLE_DEVICES), or raise gradient accumulation"),
}  # fmt: skip
"""Nearest first."""


def label(link: Link) -> str | None:
    """The matrix's entry: NV4, PHB; None where neither was read."""
    return f"NV{link.nvlinks}" if link.nvlinks else link.path


def _kind(link: Link) -> str | None:
    return "NV#" if link.nvlinks else link.path


def matrix(readings: Readings) -> list[list[str]]:
    """The interconnect matrix with its headings, empty for fewer than two cards."""
    if len(readings.gpus) < 2 or not readings.links:
        return []
    names = {frozenset((link.first, link.second)): label(link) or "?" for link in readings.links}
    indices = [gpu.index for gpu in readings.gpus]
    rows = [[f"GPU{a}", *("X" if a == b else names.get(frozenset((a, b)), "?") for b in indices)] for a in indices]
    return [["", *(f"GPU{index}" for index in indices)], *rows]


def legend(readings: Readings) -> list[str]:
    """The words for the matrix's entries, of those that are in it."""
    kinds = {_kind(link) for link in readings.links}
    return [f"{name} {path.legend}" for name, path in PATHS.items() if name in kinds]


def check_links(links: tuple[Link, ...], say: Say, readings: Readings) -> Iterator[Finding]:
    """The paths between each two cards; pairs that are alike are said once."""

    def of(chosen: list[int], severity: Severity, field: str, sentence: str, action: str, value: object) -> Finding:
        every = len(chosen) == len(links) > 1
        pairs = "every two GPUs" if every else ", ".join(f"GPU {links[n].first} and {links[n].second}" for n in chosen)
        one = Say(say.topic, f"links[{chosen[0]}]", links[chosen[0]])
        return one(severity, field, sentence.format(pairs=pairs), action, value=value)

    groups: dict[str, list[int]] = {}
    for place, link in enumerate(links):
        if (name := label(link)) is not None:
            groups.setdefault(name, []).append(place)
    for name, places in groups.items():
        path = PATHS[_kind(links[places[0]]) or "SYS"]
        yield of(places, path.severity, "nvlinks" if links[places[0]].nvlinks else "path",
                 f"{name} between {{pairs}}: {path.meaning}", path.action, name)
    if apart := [place for place, link in enumerate(links) if link.peer is False]:
        yield of(apart, "advice", "peer", "no peer access between {pairs}: what they exchange is copied through the "
                 "host's memory", "GeForce cards have none over PCIe; with others, look at the IOMMU and ACS in the "
                 "firmware", False)
    for place, link in enumerate(links):
        pair = {gpu.name for gpu in readings.gpus if gpu.index in (link.first, link.second)}
        if not link.nvlinks and len(pair) == 1 and _catalogued_link(pair.pop()):
            yield of([place], "advice", "nvlinks", "no NVLink is active between {pairs}, which are made for one",
                     "an NVLink bridge speeds up every exchange; where there is one, reseat it", 0)


def _catalogued_link(name: str) -> float:
    try:
        return find_device(name).link_bandwidth
    except RecipeError:
        return 0.0
