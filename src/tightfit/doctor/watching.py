"""Watching a card while steps run: what the driver says of it, ten times a second, from a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.system import NoNvml, Nvml, nvml_session

INTERVAL = 0.1
"""Seconds between two looks."""
GRAPHICS_CLOCK, CORE_TEMPERATURE = 0, 0
"""NVML_CLOCK_GRAPHICS and NVML_TEMPERATURE_GPU."""

Series = dict[str, list[float | None]]
"""By name with its unit; None where a look found nothing."""


@contextmanager
def watched(uuid: str) -> Iterator[Series]:
    """The series, which grow until the end of the block; empty where there is no card, or no way to ask.

    uuid: the card's, as the driver writes it (`GPU-...`): its number there may be another than the framework's.
    """
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
    try:
        with nvml_session() as nvml:
            card = nvml.ask("nvmlDeviceGetHandleByUUID", uuid) if uuid else None
            if card is None:
                return
            while True:
                for name, value in _look(nvml, card):
                    series.setdefault(name, []).append(value)
                if done.wait(INTERVAL):
                    return
    except NoNvml:
        return


def _look(nvml: Nvml, handle: Any) -> Iterator[tuple[str, float | None]]:
    rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    memory = nvml.memory(handle)
    power = nvml.ask("nvmlDeviceGetPowerUsage", handle)
    yield "utilization %", None if rates is None else float(rates.gpu)
    yield "memory GiB", None if memory is None else memory[1] / (1 << 30)
    yield "power W", None if power is None else power / 1000
    yield "temperature C", _number(nvml.ask("nvmlDeviceGetTemperature", handle, CORE_TEMPERATURE))
    yield "clock MHz", _number(nvml.ask("nvmlDeviceGetClockInfo", handle, GRAPHICS_CLOCK))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
