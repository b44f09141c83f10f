"""Every check, from readings alone: the same readings give the same findings on any machine."""

from __future__ import annotations

from dataclasses import replace

from tightfit.doctor.driver_checks import driver_checks, torch_device_checks
from tightfit.doctor.findings import Finding
from tightfit.doctor.gpu_checks import gpu_checks
from tightfit.doctor.host_checks import container_checks, disk_checks, host_checks
from tightfit.doctor.link_checks import link_checks
from tightfit.doctor.readings import Readings
from tightfit.doctor.software_checks import software_checks

ORDER = (gpu_checks, link_checks, driver_checks, torch_device_checks, software_checks, host_checks, disk_checks,
         container_checks)


def checks(readings: Readings) -> list[Finding]:
    """What there is to say, topic by topic: cards first."""
    found = [_weighed(finding, readings) for check in ORDER for finding in check(readings)]
    first = {finding.topic: place for place, finding in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda finding: (not finding.topic.startswith("GPU"), first[finding.topic]))


def _weighed(finding: Finding, readings: Readings) -> Finding:
    """A run takes PyTorch's first card: what is wrong with another one stops nothing while that one works."""
    if finding.severity != "problem" or not finding.topic.startswith("GPU ") or not readings.software.cuda_devices:
        return finding
    uuids = readings.software.cuda_uuids
    first = next((gpu.index for gpu in readings.gpus if uuids and gpu.uuid == uuids[0]), 0)
    return finding if finding.topic == f"GPU {first}" else replace(finding, severity="advice")


def problems(findings: list[Finding]) -> list[Finding]:
    """Those that stop training."""
    return [finding for finding in findings if finding.severity == "problem"]
