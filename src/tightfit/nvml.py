"""NVIDIA's management library (NVML).

    with nvml_session() as nvml:
        for handle in nvml.cards():
            nvml.ask("nvmlDeviceGetName", handle)

Asking NVML makes no CUDA context, so that it takes no memory of the card and works while another process fills it. What
a card, a driver or an older binding does not know reads as None.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

Missing = Literal["no-binding", "no-library", "no-driver", "mismatch", "no-permission", "failed"]
"""Reasons why NVML cannot be asked: the binding is not installed; the driver's library is not there; the driver is not
loaded; library and loaded driver differ, as after an update without a restart; the devices may not be opened; anything
else."""

_MISSING: dict[str, Missing] = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no-library",
    "NVML_ERROR_DRIVER_NOT_LOADED": "no-driver",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "mismatch",
    "NVML_ERROR_NO_PERMISSION": "no-permission",
}
NOT_KNOWN = (1 << 64) - 1
"""The reading of a counter of 64 bits that has no value."""
MEMORY_V2 = 0x02000028
"""nvmlMemory_v2, the version of an answer that says what the driver keeps."""
GRAPHICS_CLOCK, CORE_TEMPERATURE = 0, 0
"""NVML_CLOCK_GRAPHICS and NVML_TEMPERATURE_GPU."""
LOOK_SECONDS = 0.1
"""Seconds between two looks of `watched`."""

Series = dict[str, list[float | None]]
"""Readings of a card over time, by name with its unit; None where a look found nothing."""


class NoNvml(Exception):
    """NVML cannot be asked here. reason: which of the known cases it is."""

    def __init__(self, reason: Missing, said: str) -> None:
        super().__init__(reason, said)
        self.reason, self.said = reason, said


@dataclass(frozen=True)
class Lost:
    """A card that is there and cannot be asked, with what the driver said."""

    said: str


class Nvml:
    """An open session; handles are the binding's own."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding

    def ask(self, function: str, *arguments: Any) -> Any:
        """The function's answer as text or number; None where there is none."""
        try:
            answer = getattr(self._binding, function)(*arguments)
        except (AttributeError, self._binding.NVMLError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def driver(self) -> str | None:
        """The loaded driver's version, such as `580.65.06`."""
        version: str | None = self.ask("nvmlSystemGetDriverVersion")
        return version

    def cards(self) -> list[Any]:
        """A handle for each card in the driver's order; `Lost` in the place of one that does not answer."""
        found: list[Any] = []
        for index in range(self.ask("nvmlDeviceGetCount") or 0):
            try:
                found.append(self._binding.nvmlDeviceGetHandleByIndex(index))
            except self._binding.NVMLError as error:
                found.append(Lost(str(error)))
        return found

    def memory(self, handle: Any) -> tuple[int, int, int | None] | None:
        """Bytes of the card: total, in use, kept by the driver. In use excludes what the driver keeps, where the driver
        counts that separately."""
        if (both := self.ask("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)) is not None:
            return int(both.total), int(both.used), int(both.reserved)
        if (old := self.ask("nvmlDeviceGetMemoryInfo", handle)) is not None:
            return int(old.total), int(old.used), None
        return None

    def processes(self, handle: Any) -> dict[int, int | None] | None:
        """Bytes that each process has on the card, by its id; None bytes where the driver does not say, as in some
        containers and on Windows."""
        lists = [self.ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics")]
        if lists == [None, None]:
            return None
        found: dict[int, int | None] = {}
        for process in (p for some in lists for p in some or ()):
            used = process.usedGpuMemory
            found[int(process.pid)] = None if used is None or used == NOT_KNOWN else int(used)
        return found


@contextmanager
def nvml_session() -> Iterator[Nvml]:
    """NVML, until the end of the block. Raises NoNvml where it cannot be asked."""
    try:
        binding = importlib.import_module("pynvml")
    except ImportError as error:
        raise NoNvml("no-binding", str(error)) from None
    try:
        binding.nvmlInit()
    except binding.NVMLError as error:
        known = {getattr(binding, name, None): reason for name, reason in _MISSING.items()}
        raise NoNvml(known.get(error.value, "failed"), str(error)) from None
    try:
        yield Nvml(binding)
    finally:
        Nvml(binding).ask("nvmlShutdown")


def process_bytes(uuid: str) -> tuple[int | None, int | None]:
    """Bytes that this process, and that others have on the card of that UUID (`GPU-...`), as the driver counts them:
    CUDA contexts, loaded kernels and libraries' own memory included. None where it cannot be said, as in a container
    that hides process ids."""
    found = None
    with suppress(NoNvml), nvml_session() as nvml:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
        found = None if handle is None else nvml.processes(handle)
    if found is None or os.getpid() not in found:
        return None, None
    own = found.pop(os.getpid())
    others = [used for used in found.values() if used is not None]
    return own, sum(others) if len(others) == len(found) else None


def driver_version() -> str | None:
    """The loaded driver's version; None where there is none, or it does not say."""
    with suppress(NoNvml), nvml_session() as nvml:
        return nvml.driver()
    return None


@contextmanager
def watched(uuid: str) -> Iterator[Series]:
    """Readings of the card of that UUID, ten a second until the end of the block; none where there is no card, or no
    way to ask."""
    series: Series = {}
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(uuid, series, done), daemon=True)
    thread.start()
    try:
        yield series
    finally:
        done.set()
        thread.join()


def _watch(uuid: str, series: Series, done: threading.Event) -> None:
    with suppress(NoNvml), nvml_session() as nvml:
        card = nvml.ask("nvmlDeviceGetHandleByUUID", uuid) if uuid else None
        while card is not None:
            rates, memory = nvml.ask("nvmlDeviceGetUtilizationRates", card), nvml.memory(card)
            power = nvml.ask("nvmlDeviceGetPowerUsage", card)
            for name, value in (
                ("utilization %", rates and rates.gpu), ("memory GiB", memory and memory[1] / (1 << 30)),
                ("power W", power and power / 1000),
                ("temperature C", nvml.ask("nvmlDeviceGetTemperature", card, CORE_TEMPERATURE)),
                ("clock MHz", nvml.ask("nvmlDeviceGetClockInfo", card, GRAPHICS_CLOCK)),
            ):
                series.setdefault(name, []).append(None if value is None else float(value))
            if done.wait(LOOK_SECONDS):
                return
