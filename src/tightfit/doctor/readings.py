"""Readings of a machine: plain values, no judgement, and JSON in and out, so that one machine's readings can be looked
at on another.

None stands for what could not be read, or what the card does not have. Memory is in bytes, power in watts, temperature
in degrees Celsius, bandwidth in bytes a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter


class _Strict:
    """A field that is not known is an error, so that a misspelled recording is not read as a missing value."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Process(_Strict):
    """A process on a card other than the check-up's own."""

    pid: int
    name: str | None = None
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu(_Strict):
    """A card, as the driver describes it; as PyTorch does where the driver cannot be asked."""

    index: int
    name: str
    uuid: str | None = None
    pci_bus: str | None = None
    error: str | None = None
    """The driver's message on a card that does not answer."""
    capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None
    """Kept by the driver, not in `memory_used`."""
    utilization: int | None = None
    """Percent of the last moments in which a kernel ran."""
    power_draw: float | None = None
    power_limit: float | None = None
    power_limit_default: float | None = None
    power_limit_max: float | None = None
    temperature: int | None = None
    temperature_slowdown: int | None = None
    temperature_shutdown: int | None = None
    throttling: tuple[str, ...] | None = None
    """Why the clocks are lower than they could be, by the names in `cards.REASONS`."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    """Of card and slot together."""
    pcie_width: int | None = None
    """Lanes."""
    pcie_width_max: int | None = None
    """Of card and slot together."""
    pcie_width_card: int | None = None
    """The card's own, whatever slot it is in."""
    mig: bool | None = None
    compute_mode: str | None = None
    """default, exclusive or prohibited."""
    display: bool | None = None
    """Whether a screen is driven by it."""
    memory_errors: int | None = None
    """Uncorrected, since the driver was loaded."""
    processes: tuple[Process, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Link(_Strict):
    """The path between two cards, by their indices."""

    first: int
    second: int
    path: str | None = None
    """PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo -m` names them; beneath an NVLink, too."""
    nvlinks: int = 0
    peer: bool | None = None
    """Whether one card can read the other's memory."""


@dataclass(frozen=True, kw_only=True)
class Driver(_Strict):
    """The driver and its library. `nvml` is `ok`, or why the driver could not be asked (`tightfit.system.Missing`)."""

    nvml: str
    said: str = ""
    version: str | None = None
    module: str | None = None
    """Version of the kernel's module that is loaded."""
    cuda: str | None = None
    """The newest CUDA version that it serves."""
    nouveau: bool = False
    """Whether Linux's own driver holds the cards."""
    pci_cards: tuple[str, ...] = ()
    """PCI addresses of NVIDIA's graphics devices, found without any driver."""


@dataclass(frozen=True, kw_only=True)
class Host(_Strict):
    """The machine around the cards."""

    system: str
    processor: str
    cores: int
    """That this process may use, a container's limit included."""
    cores_all: int
    memory_total: int
    """A container's limit included."""
    memory_available: int
    shared_memory: int | None = None
    """Size of /dev/shm, through which data workers hand over batches."""
    number_formats: tuple[str, ...] = ()
    """Of the processor's own instructions: avx2, avx512, avx512-bf16, amx-bf16."""
    container: str | None = None
    """docker, podman, kubernetes, wsl, or other; None outside of one."""
    tools: tuple[str, ...] = ()
    """Those of nvidia-smi, nvcc, docker, podman, nvidia-ctk that are on the path."""
    nvcc: str | None = None
    """CUDA version of the toolkit's compiler."""


@dataclass(frozen=True, kw_only=True)
class Disk(_Strict):
    """The disk that runs are written to; speeds None where they were not measured."""

    folder: str
    total: int | None = None
    free: int | None = None
    measured: int | None = None
    """Bytes written and read for the speeds."""
    write: float | None = None
    read: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conflict(_Strict):
    """One library's own requirement that the installed version of another does not meet."""

    library: str
    wants: str
    installed: str


@dataclass(frozen=True, kw_only=True)
class Software(_Strict):
    """Versions, and what PyTorch says of the cards."""

    python: str
    tightfit: str
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA version that PyTorch was built for; None for a build without CUDA."""
    cudnn: int | None = None
    """As PyTorch numbers it: 91002 is 9.10.2, 8902 is 8.9.2."""
    architectures: tuple[str, ...] = ()
    """That PyTorch has kernels for: sm_90, compute_120."""
    cuda_devices: int = 0
    """That PyTorch can use."""
    cuda_uuids: tuple[str, ...] = ()
    """Of those, in PyTorch's order, which is not always the driver's; a run takes the first."""
    cuda_error: str | None = None
    """PyTorch's message where it can use no card, or where its first kernel failed."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions of what is installed, by the name on PyPI."""
    conflicts: tuple[Conflict, ...] = ()
    broken: dict[str, str] = field(default_factory=dict)
    """Libraries that are installed and do not load, or load in part, with what they said."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that change how training runs, where they are set."""
    calibrated: str | None = None
    """The date of the calibration that plans for this machine use."""


@dataclass(frozen=True, kw_only=True)
class Readings(_Strict):
    """All that was read of a machine."""

    date: str
    driver: Driver
    host: Host
    software: Software
    disk: Disk | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON knows."""
        values: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return values


def readings_from_json(text: str) -> Readings:
    """The readings that `to_dict` gave, from JSON. Raises ValueError for anything else."""
    return _adapter().validate_json(text)


@cache
def _adapter() -> TypeAdapter[Readings]:
    return TypeAdapter(Readings)
