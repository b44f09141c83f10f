"""Readings of cards, driver and links, from NVML. What cannot be read is None."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from typing import Any

from tightfit.doctor.readings import Driver, Gpu, Link, Process
from tightfit.nvml import CORE_TEMPERATURE, Lost, NoNvml, Nvml, nvml_session
from tightfit.system import read_text

REASONS = {
    0x1: "idle", 0x2: "clocks-set", 0x4: "power-cap", 0x8: "hardware-slowdown", 0x10: "sync-boost",
    0x20: "software-thermal", 0x40: "hardware-thermal", 0x80: "power-brake", 0x100: "display-clocks",
}  # fmt: skip
"""Bits of NVML's clock event reasons (nvml.h, nvmlClocksEventReasons)."""
PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's topology levels by the names that `nvidia-smi topo -m` prints; level 0, two chips on one board, is nearer
still and counted as PIX."""
COMPUTE_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}

SHUTDOWN, SLOWDOWN = 0, 1
"""NVML_TEMPERATURE_THRESHOLD_ of those names."""
UNCORRECTED, SINCE_LOADED, P2P_OK, AT_SWITCH, MAX_NVLINKS = 1, 0, 0, 2, 18
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_P2P_STATUS_OK, NVML_NVLINK_DEVICE_TYPE_SWITCH and
NVML_NVLINK_MAX_LINKS."""

PCI = Path("/sys/bus/pci/devices")
MODULES = Path("/sys/module")
NVIDIA = "0x10de"


def read_cards() -> tuple[Driver, tuple[Gpu, ...], tuple[Link, ...]]:
    """The driver, every card that it has, and what lies between each two."""
    try:
        with nvml_session() as nvml:
            handles = nvml.cards()
            gpus = tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles))
            there = [(index, handle) for index, handle in enumerate(handles) if not isinstance(handle, Lost)]
            links = tuple(_link(nvml, *first, *second) for first, second in combinations(there, 2))
            number = nvml.ask("nvmlSystemGetCudaDriverVersion")
            cuda = None if number is None else f"{number // 1000}.{number % 1000 // 10}"
            return Driver(nvml="ok", version=nvml.driver(), cuda=cuda, **_without_nvml()), gpus, links
    except NoNvml as missing:
        return Driver(nvml=missing.reason, said=missing.said, **_without_nvml()), (), ()


def _gpu(nvml: Nvml, index: int, handle: Any) -> Gpu:
    if isinstance(handle, Lost):
        return Gpu(index=index, name="a card that does not answer", error=handle.said)

    def ask(name: str, *arguments: Any) -> Any:
        return nvml.ask(f"nvmlDeviceGet{name}", handle, *arguments)

    total, used, reserved = nvml.memory(handle) or (None, None, None)
    bus = _bus(ask("PciInfo"))
    reasons = _first(ask("CurrentClocksEventReasons"), ask("CurrentClocksThrottleReasons"))
    rates, mig, display = ask("UtilizationRates"), ask("MigMode"), ask("DisplayActive")
    return Gpu(
        index=index,
        name=ask("Name") or "unknown",
        uuid=ask("UUID"),
        pci_bus=bus,
        capability=ask("CudaComputeCapability"),
        memory_total=total, memory_used=used, memory_reserved=reserved,
        utilization=None if rates is None else int(rates.gpu),
        power_draw=_watts(ask("PowerUsage")),
        power_limit=_watts(_first(ask("EnforcedPowerLimit"), ask("PowerManagementLimit"))),
        power_limit_default=_watts(ask("PowerManagementDefaultLimit")),
        power_limit_max=_watts((ask("PowerManagementLimitConstraints") or (None, None))[1]),
        # The newer call comes first: the older one goes away with CUDA 14.
        temperature=_first(ask("TemperatureV", CORE_TEMPERATURE), ask("Temperature", CORE_TEMPERATURE)),
        temperature_slowdown=ask("TemperatureThreshold", SLOWDOWN),
        temperature_shutdown=ask("TemperatureThreshold", SHUTDOWN),
        throttling=None if reasons is None else tuple(name for bit, name in REASONS.items() if reasons & bit),
        pcie_generation=ask("CurrPcieLinkGeneration"), pcie_generation_max=ask("MaxPcieLinkGeneration"),
        pcie_width=ask("CurrPcieLinkWidth"), pcie_width_max=ask("MaxPcieLinkWidth"), pcie_width_card=_own_width(bus),
        mig=None if mig is None else bool(mig[0]),
        compute_mode=COMPUTE_MODES.get(ask("ComputeMode")),
        display=None if display is None else bool(display),
        memory_errors=ask("TotalEccErrors", UNCORRECTED, SINCE_LOADED),
        processes=_processes(nvml, handle),
    )  # fmt: skip


def _processes(nvml: Nvml, handle: Any) -> tuple[Process, ...] | None:
    found = nvml.processes(handle)
    if found is None:
        return None
    # some drivers name the whole command line
    names = {pid: str(nvml.ask("nvmlSystemGetProcessName", pid) or "").split(" ")[0].split("/")[-1] for pid in found}
    return tuple(Process(pid=pid, name=names[pid] or None, memory=used) for pid, used in found.items()
                 if pid != os.getpid())


def _link(nvml: Nvml, first: int, one: Any, second: int, other: Any) -> Link:
    peer = nvml.ask("nvmlDeviceGetP2PStatus", one, other, 0)  # 0: reading
    return Link(first=first, second=second, nvlinks=_nvlinks(nvml, one, other),
                path=PATHS.get(nvml.ask("nvmlDeviceGetTopologyCommonAncestor", one, other)),
                peer=None if peer is None else peer == P2P_OK)


def _bus(pci: Any) -> str | None:
    """A PCI address in lower case, as Linux writes it."""
    if pci is None:
        return None
    return (pci.busId.decode(errors="replace") if isinstance(pci.busId, bytes) else str(pci.busId)).lower()


def _nvlinks(nvml: Nvml, one: Any, other: Any) -> int:
    """Active NVLinks between two cards: those that end at the other card, or at a switch where both have some."""
    ends = _link_ends(nvml, one)
    direct = ends.count(_bus(nvml.ask("nvmlDeviceGetPciInfo", other)) or "?")
    return direct or min(ends.count("switch"), _link_ends(nvml, other).count("switch"))


def _link_ends(nvml: Nvml, handle: Any) -> list[str]:
    """The other end of each active NVLink of a card: the other card's PCI address, or `switch`."""
    ends = []
    for link in range(MAX_NVLINKS):
        if nvml.ask("nvmlDeviceGetNvLinkState", handle, link):
            at_switch = nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == AT_SWITCH
            bus = _bus(nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            ends.append("switch" if at_switch else bus or "")
    return ends


def _without_nvml() -> dict[str, Any]:
    """NVIDIA's cards as Linux itself knows them; nothing elsewhere."""
    cards = [device.name for device in sorted(PCI.glob("*"))
             if read_text(device / "vendor").strip() == NVIDIA and read_text(device / "class").startswith("0x03")]
    return {"module": read_text(MODULES / "nvidia/version").strip() or None, "pci_cards": tuple(cards),
            "nouveau": (MODULES / "nouveau").exists()}


def _own_width(bus: str | None) -> int | None:
    """Lanes that the card's own connector has, whatever slot it is in, as Linux reads them off the card."""
    # NVML writes a domain of eight digits, Linux one of four.
    width = read_text(PCI / (bus or "")[-12:] / "max_link_width").strip()
    return int(width) if width.isdecimal() and 0 < int(width) <= 32 else None


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
