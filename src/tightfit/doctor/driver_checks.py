"""What to say of the driver, and whether PyTorch can use the cards with it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tightfit.doctor.findings import Finding, Severity
from tightfit.doctor.readings import Gpu, Readings

LEAST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
"""The oldest Linux driver that serves every release of a CUDA major version (CUDA toolkit release notes, minimum
driver for minor-version compatibility)."""
OLDEST_CARDS = {12: (5, 0), 13: (7, 5)}
"""The oldest compute capability that a CUDA major version compiles for (CUDA toolkit release notes)."""

IN_CONTAINER = ("start the container with the cards: docker run --gpus all (podman run --device nvidia.com/gpu=all); "
                "the host needs NVIDIA's driver and the NVIDIA Container Toolkit")
INSTALL = "install NVIDIA's driver from the system's packages (on Ubuntu: sudo ubuntu-drivers install), then restart"


def driver_checks(readings: Readings) -> Iterator[Finding]:
    """Driver and cards, whether or not either is there."""
    driver = readings.driver
    contained = readings.host.container not in (None, "wsl")
    if driver.nvml == "ok":
        yield _driver(readings)
        if not readings.gpus and driver.pci_cards:
            yield _say("problem", "pci_cards", f"the driver has none of the machine's {len(driver.pci_cards)} NVIDIA "
                       "cards", len(driver.pci_cards), "look for NVRM and Xid lines in `dmesg`; reseat the card and "
                       "its power leads")
    elif driver.nvml == "mismatch":
        yield _say("problem", "nvml", "the driver's library and the loaded kernel module are of different versions, as "
                   f"after an update (module {driver.module or 'unknown'}): no CUDA program starts", "mismatch",
                   "restart the machine")
    elif driver.nvml == "no-permission":
        yield _say("problem", "nvml", f"this user may not open the cards: {driver.said}", driver.nvml,
                   "look at the rights of /dev/nvidia*; add the user to their group")
    elif driver.nvml == "no-binding":
        if driver.module or driver.pci_cards or readings.gpus:
            yield _say("advice", "nvml", "power, temperature, processes and links cannot be read: NVML's Python "
                       "binding is not installed", driver.nvml, "pip install 'tightfit[gpu]'")
    elif readings.software.cuda_devices:
        yield _say("info", "nvml", f"NVML does not answer ({driver.said}), PyTorch has the cards all the same; power "
                   "and temperature cannot be read", driver.nvml)
    elif driver.nvml == "failed":
        yield _say("problem", "nvml", f"the driver does not answer: {driver.said}", driver.nvml, "restart the machine; "
                   "look for NVRM lines in `dmesg`")
    elif contained and (driver.module or driver.pci_cards):
        yield _say("problem", "pci_cards", "the host has an NVIDIA card, and this container was not given it",
                   len(driver.pci_cards), IN_CONTAINER)
    elif driver.nouveau and driver.pci_cards:
        yield _say("problem", "nouveau", "Linux's own driver, nouveau, holds the card, and CUDA needs NVIDIA's", True,
                   INSTALL)
    elif driver.module:
        yield _say("problem", "nvml", f"the kernel module {driver.module} is loaded and the driver's libraries are "
                   f"missing: {driver.said}", driver.nvml, "install the rest of the driver, of the same version")
    elif driver.pci_cards:
        yield _say("problem", "pci_cards", "there is an NVIDIA card and no driver for it: "
                   f"{', '.join(driver.pci_cards)}", len(driver.pci_cards), INSTALL)
    if not readings.gpus and not driver.pci_cards and not driver.module:
        yield Finding(
            topic="GPU", severity="info", field="gpus", value=0,
            sentence="no NVIDIA GPU here: training runs on the processor; `tightfit plan --gpu NAME` needs none",
            action=f"if the host has one, {IN_CONTAINER}" if contained else "",
        )  # fmt: skip


def torch_device_checks(readings: Readings) -> Iterator[Finding]:
    """Whether PyTorch, the driver and the cards go together."""
    software, gpus = readings.software, [gpu for gpu in readings.gpus if gpu.error is None]
    if software.torch is None or not (gpus or readings.driver.pci_cards):
        return
    version = software.torch.partition("+")[0]
    if software.torch_cuda is None:
        serves = readings.driver.cuda
        newest = f" for CUDA {serves} or older, which is what the driver serves" if serves else ""
        yield _torch("problem", "torch_cuda", f"PyTorch {software.torch} is built without CUDA, and there is a GPU",
                     None, f"pip uninstall torch, then install torch {version} by the command that "
                     f"pytorch.org/get-started/locally gives{newest}")
        return
    if old := _too_old(readings):
        yield old
    elif gpus and not software.cuda_devices:
        hidden = software.environment.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
            yield _torch("advice", "environment", "CUDA_VISIBLE_DEVICES hides every card: training runs on the "
                         "processor", hidden, "unset CUDA_VISIBLE_DEVICES")
        else:
            said = software.cuda_error or "no reason was given"
            yield _torch("problem", "cuda_error", f"PyTorch cannot use the GPU: {said}", software.cuda_error,
                         f"the driver reads {readings.driver.version or 'unknown'}, PyTorch is built for CUDA "
                         f"{software.torch_cuda}; restart the machine where the two go together")
    elif software.cuda_error:
        yield _torch("problem", "cuda_error", f"the first kernel failed: {software.cuda_error}", software.cuda_error,
                     "look whether another process has the card, and for Xid errors in `dmesg`")
    elif 0 < software.cuda_devices < len(gpus):
        yield _torch("info", "cuda_devices", f"PyTorch sees {software.cuda_devices} of {len(gpus)} GPUs",
                     software.cuda_devices)
    for place, gpu in enumerate(readings.gpus):
        yield from _architecture(gpu, place, readings)


def covers(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether kernels for those architectures run on a card of that capability.

    Machine code (sm_) runs on later minor versions of its major version; sm_90a on that version alone, sm_100f on its
    family. Portable code (compute_) is compiled by the driver for any later card. (CUDA programming guide.)
    """
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if found is None:
            continue
        own = int(found[2]), int(found[3])
        if found[4] == "a":
            served = capability == own
        elif found[1] == "compute" and not found[4]:
            served = capability >= own
        else:
            served = capability[0] == own[0] and capability[1] >= own[1]
        if served:
            return True
    return False


def _driver(readings: Readings) -> Finding:
    driver = readings.driver
    wanted = readings.software.torch_cuda
    serves = f", serves CUDA up to {driver.cuda}" if driver.cuda else ""
    sentence = f"NVIDIA driver {driver.version or 'of unknown version'}{serves}"
    if driver.cuda and wanted and _numbers(driver.cuda) < _numbers(wanted) and _too_old(readings) is None:
        return _say("info", "cuda", f"{sentence}; PyTorch is built for {wanted}, which runs in compatibility mode",
                    driver.cuda, "a newer driver lets the driver itself compile kernels of that version")
    return _say("ok", "version", sentence, driver.version)


def _too_old(readings: Readings) -> Finding | None:
    """The finding that the driver is older than PyTorch's CUDA allows; None where it is not, or works all the same (the
    data-center cards' forward compatibility packages)."""
    version, wanted = readings.driver.version, readings.software.torch_cuda
    least = LEAST_DRIVER.get(_numbers(wanted)[0]) if wanted else None
    if version is None or least is None or readings.software.cuda_devices or _numbers(version) >= least:
        return None
    words = ".".join(map(str, least))
    return _say("problem", "version", f"driver {version} is too old for PyTorch built for CUDA {wanted}, which needs "
                f"{words} or later", version, f"update the driver to {words} or later, or install a PyTorch built for "
                f"{f'CUDA {_numbers(readings.driver.cuda)[0]}' if readings.driver.cuda else 'an older CUDA'}")


def _architecture(gpu: Gpu, place: int, readings: Readings) -> Iterator[Finding]:
    software = readings.software
    if gpu.capability is None or not software.architectures or covers(software.architectures, gpu.capability):
        return
    major, minor = gpu.capability
    cuda = _numbers(software.torch_cuda or "0")[0]
    dropped = gpu.capability < OLDEST_CARDS.get(cuda, (0, 0))
    yield Finding(
        topic=f"GPU {gpu.index}", severity="problem", field=f"gpus[{place}].capability", value=list(gpu.capability),
        sentence=f"PyTorch {software.torch} has no kernels for compute capability {major}.{minor}; it has "
                 f"{', '.join(software.architectures)}",
        action=f"CUDA {cuda} left such cards out: install a PyTorch built for CUDA {cuda - 1}" if dropped
               else "install a newer PyTorch, or one built for a newer CUDA",
    )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0]))) or (0,)


def _say(severity: Severity, name: str, sentence: str, value: object, action: str = "") -> Finding:
    return Finding(topic="driver", severity=severity, sentence=sentence, field=f"driver.{name}", value=value,
                   action=action)


def _torch(severity: Severity, name: str, sentence: str, value: object, action: str = "") -> Finding:
    return Finding(topic="PyTorch", severity=severity, sentence=sentence, field=f"software.{name}", value=value,
                   action=action)
