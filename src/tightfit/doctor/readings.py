"""Readings of a machine: plain values, no judgement, and JSON in and out, so that one machine's readings can be looked
at on another.

None stands for what could not be read, or what the card does not have. Memory is in bytes, power in watts, temperature
in degrees Celsius, bandwidth in bytes a second.
"""

from __future__ import annotations

from pydantic import BaseModel


class Reading(BaseModel, frozen=True, extra="forbid"):
    """A part of the readings. An unknown field is an error: a misspelled recording is not read as a missing value."""


class Process(Reading):
    """A process on a card other than the check-up's own."""

    pid: int
    name: str | None = None
    memory: int | None = None


class Gpu(Reading):
    """A card, as the driver describes it; as PyTorch does where the driver cannot be asked.

    error: the driver's message on a card that does not answer. memory_reserved: kept by the driver, not in
    `memory_used`. utilization: percent of the last moments in which a kernel ran. throttling: why the clocks are lower
    than they could be, by the names in `cards.REASONS`. pcie_generation_max, pcie_width_max: of card and slot together;
    widths are lanes, pcie_width_card the card's own, whatever slot it is in. compute_mode: default, exclusive or
    prohibited. display: whether a screen is driven by it. memory_errors: uncorrected, since the driver was loaded.
    """

    index: int
    name: str
    uuid: str | None = None
    pci_bus: str | None = None
    error: str | None = None
    capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None
    utilization: int | None = None
    power_draw: float | None = None
    power_limit: float | None = None
    power_limit_default: float | None = None
    power_limit_max: float | None = None
    temperature: int | None = None
    temperature_slowdown: int | None = None
    temperature_shutdown: int | None = None
    throttling: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_width_card: int | None = None
    mig: bool | None = None
    compute_mode: str | None = None
    display: bool | None = None
    memory_errors: int | None = None
    processes: tuple[Process, ...] | None = None


class Link(Reading):
    """The path between two cards, by their indices.

    path: PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo -m` names them; beneath an NVLink, too. peer: whether one card
    can read the other's memory.
    """

    first: int
    second: int
    path: str | None = None
    nvlinks: int = 0
    peer: bool | None = None


class Driver(Reading):
    """The driver and its library.

    nvml: `ok`, or why the driver could not be asked (`tightfit.nvml.Missing`); said: its message. module: version of
    the kernel's module that is loaded. cuda: the newest CUDA version that it serves. nouveau: whether Linux's own
    driver holds the cards. pci_cards: PCI addresses of NVIDIA's graphics devices, found without any driver.
    """

    nvml: str
    said: str = ""
    version: str | None = None
    module: str | None = None
    cuda: str | None = None
    nouveau: bool = False
    pci_cards: tuple[str, ...] = ()


class Host(Reading):
    """The machine around the cards.

    cores: that this process may use, a container's limit included, as it is in memory_total. shared_memory: size of
    /dev/shm, through which data workers hand over batches. container: docker, podman, kubernetes, wsl, or other; None
    outside of one. tools: those of `machine.TOOLS` that are on the path. nvcc: CUDA version of the toolkit's compiler.
    """

    system: str
    processor: str
    cores: int
    cores_all: int
    memory_total: int
    memory_available: int
    shared_memory: int | None = None
    container: str | None = None
    tools: tuple[str, ...] = ()
    nvcc: str | None = None


class Disk(Reading):
    """The disk that runs are written to. measured: bytes written and read for the speeds, which are None where they
    were not measured."""

    folder: str
    total: int | None = None
    free: int | None = None
    measured: int | None = None
    write: float | None = None
    read: float | None = None
    error: str | None = None


class Software(Reading):
    """Versions, and what PyTorch says of the cards.

    torch_cuda: CUDA version that PyTorch was built for; None for a build without CUDA. cudnn: as PyTorch numbers it:
    91002 is 9.10.2. cuda_devices: that PyTorch can use; cuda_uuids: of those, in PyTorch's order, which is not always
    the driver's; a run takes the first. cuda_error: PyTorch's message where it can use no card, or where its first
    kernel failed.
    libraries: versions of what is installed, by the name on PyPI. broken: libraries that are installed and do not load,
    or load in part, with what they said. environment: variables that change how training runs, where they are set.
    calibrated: the date of the calibration that plans for this machine use.
    """

    python: str
    tightfit: str
    torch: str | None = None
    torch_cuda: str | None = None
    cudnn: int | None = None
    cuda_devices: int = 0
    cuda_uuids: tuple[str, ...] = ()
    cuda_error: str | None = None
    libraries: dict[str, str] = {}
    broken: dict[str, str] = {}
    environment: dict[str, str] = {}
    calibrated: str | None = None


class Readings(Reading):
    """All that was read of a machine."""

    date: str
    driver: Driver
    host: Host
    software: Software
    disk: Disk | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
