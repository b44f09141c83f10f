"""The table of checks: what is judged, under which heading. The same readings give the same findings on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tightfit.doctor.card_checks import check_card, check_supply
from tightfit.doctor.findings import Finding, Say
from tightfit.doctor.host_checks import check_container, check_disk, check_host, check_links
from tightfit.doctor.readings import Readings
from tightfit.doctor.software_checks import (
    check_calibration,
    check_cuda,
    check_driver,
    check_environment,
    check_kernels,
    check_libraries,
    check_torch,
)


class Check(NamedTuple):
    """A judgement of one part of the readings. place: that part's field in `Readings`; with `[]` each of its items,
    whose number the heading ends in; with `[*]` all of them together."""

    topic: str
    place: str
    judge: Callable[[Any, Say, Readings], Iterator[Finding]]


CHECKS = (
    Check("GPU", "gpus[]", check_card),
    Check("GPU", "gpus[]", check_kernels),
    Check("power", "gpus[*]", check_supply),
    Check("links", "links[*]", check_links),
    Check("driver", "driver", check_driver),
    Check("PyTorch", "software", check_cuda),
    Check("PyTorch", "software", check_torch),
    Check("libraries", "software", check_libraries),
    Check("environment", "software", check_environment),
    Check("plans", "software", check_calibration),
    Check("host", "host", check_host),
    Check("disk", "disk", check_disk),
    Check("container", "host", check_container),
)
"""In the order of the headings."""


def checks(readings: Readings) -> list[Finding]:
    """All findings, heading by heading: cards first."""
    found = [_weighed(finding, readings) for check in CHECKS for finding in _judged(check, readings)]
    first = {finding.topic: place for place, finding in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda finding: (not finding.topic.startswith("GPU"), first[finding.topic]))


def problems(findings: list[Finding]) -> list[Finding]:
    """Those that stop training."""
    return [finding for finding in findings if finding.severity == "problem"]


def _judged(check: Check, readings: Readings) -> Iterator[Finding]:
    name, each, _ = check.place.partition("[]")
    part = getattr(readings, name.removesuffix("[*]"))
    if each:
        for place, item in enumerate(part):
            yield from check.judge(item, Say(f"{check.topic} {item.index}", f"{name}[{place}]", item), readings)
    elif part is not None:
        yield from check.judge(part, Say(check.topic, check.place, part), readings)


def _weighed(finding: Finding, readings: Readings) -> Finding:
    """A run takes PyTorch's first card: what is wrong with another one stops nothing while that one works."""
    if finding.severity != "problem" or not finding.topic.startswith("GPU ") or not readings.software.cuda_devices:
        return finding
    uuids = readings.software.cuda_uuids
    first = next((gpu.index for gpu in readings.gpus if uuids and gpu.uuid == uuids[0]), 0)
    return finding if finding.topic == f"GPU {first}" else replace(finding, severity="advice")
