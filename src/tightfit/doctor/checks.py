"""The table of checks: what is judged, under which heading. The same readings give the same findings on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tightfit.doctor import card_checks, host_checks, software_checks
from tightfit.doctor.findings import Finding, FindingBuilder
from tightfit.doctor.readings import Readings

Judge = Callable[[Any, FindingBuilder, Readings], Iterator[Finding]]


def checks(readings: Readings) -> list[Finding]:
    """All findings, heading by heading: cards first."""
    driver, software, host = readings.driver, readings.software, readings.host
    table: list[tuple[str, str, Any, Judge]] = [
        ("GPU", "driver", driver, software_checks.check_presence),
        *((f"GPU {gpu.index}", f"gpus[{at}]", gpu, card_checks.check_card) for at, gpu in enumerate(readings.gpus)),
        ("power", "gpus[*]", readings.gpus, card_checks.check_supply),
        ("links", "links", readings.links, host_checks.check_links),
        ("driver", "driver", driver, software_checks.check_driver),
        ("PyTorch", "software", software, software_checks.check_cuda),
        ("PyTorch", "software", software, software_checks.check_torch),
        ("libraries", "software", software, software_checks.check_libraries),
        ("environment", "software", software, software_checks.check_environment),
        ("plans", "software", software, software_checks.check_calibration),
        ("host", "host", host, host_checks.check_host),
        ("disk", "disk", readings.disk, host_checks.check_disk),
        ("container", "host", host, host_checks.check_container),
    ]
    return [_downgrade_unused_cards(finding, readings) for topic, place, part, judge in table if part is not None
            for finding in judge(part, FindingBuilder(topic, place, part), readings)]


def problems(findings: list[Finding]) -> list[Finding]:
    """Findings that stop training."""
    return [finding for finding in findings if finding.severity == "problem"]


def _downgrade_unused_cards(finding: Finding, readings: Readings) -> Finding:
    """A run takes PyTorch's first card: what is wrong with another one stops nothing while that one works."""
    if finding.severity != "problem" or not finding.topic.startswith("GPU ") or not readings.software.cuda_devices:
        return finding
    uuids = readings.software.cuda_uuids
    first = next((gpu.index for gpu in readings.gpus if uuids and gpu.uuid == uuids[0]), 0)
    return finding if finding.topic == f"GPU {first}" else replace(finding, severity="advice")
