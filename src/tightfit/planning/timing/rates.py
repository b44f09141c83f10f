"""Rates of a GPU: operations, cycles and bytes a second that kernels of a kind sustain, from the catalogue's figures.

| constant | figure | where it comes from |
|---|---|---|
| `PLAIN_SHARE`, `LESS_POWER` | by generation, 1.1 | matmuls without tensor cores: recordings on V100, T4, A100 and H100; the others on few |
| `TF32_SHARE` | 0.85 | a calibration and steps on an H100 |
| `LASTING_SHARE` | 0.92 from Hopper on | five steps of llama-3.1-8b on an H100, repeated for half a minute each: results/beyond_gpu-h100-80gb-hbm3.json |
| `MEMORY_SHARE` | by generation | element-wise ops on V100, T4, A100, L4, H100; GeForce cards assumed as their generation's |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tightfit.devices import Device

T = TypeVar("T")

PLAIN_SHARE = {
    (7, 0): 1.0, (7, 5): 0.9, (8, 6): 0.66, (8, 9): 0.6, (9, 0): 0.75, (10, 0): 0.68,
}  # fmt: skip
"""Share of the fp32 peak that matmuls without tensor cores reach, by compute capability, from that one on."""
TF32_SHARE = 0.85
"""Speed of products of tf32 beside what those of 16 bits are of their peak, on an H100."""
LESS_POWER = 1.1
"""Factor by which a card's power carries further without tensor cores."""
LASTING_SHARE = {(7, 0): 1.0, (9, 0): 0.92, (12, 0): 1.0}
"""Speed of tensor cores in steps one after another, beside that in the short runs that recordings and calibrations are:
power holds their clock down. Of GeForce cards nothing is known."""
MEMORY_SHARE = {
    (7, 0): 0.91, (7, 5): 0.74, (8, 0): 0.87, (8, 6): 0.83, (8, 9): 0.78, (9, 0): 0.9, (12, 0): 0.83,
}  # fmt: skip
"""Share of the bandwidth that contiguous element-wise ops reach, by compute capability, from that one on."""


def on_tensor_cores(dtype: str, device: Device, tf32: bool) -> bool:
    """Whether matmuls of a dtype run on tensor cores."""
    return device.peak(dtype, tf32) > device.flops.get("fp32", 0.0)


def matmul_rate(dtype: str, device: Device, tf32: bool) -> float:
    """Operations a second that large matmuls sustain."""
    share = device.sustains
    if not on_tensor_cores(dtype, device, tf32):
        share = min(of_generation(PLAIN_SHARE, device), LESS_POWER * share)
    elif dtype == "float32":
        share *= TF32_SHARE
    return device.peak(dtype, tf32) * share


def cycles_a_second(device: Device) -> float:
    """Cycles of all multiprocessors together, from the fp32 peak: two operations a lane."""
    lanes = 64 if device.capability in ((7, 0), (7, 5), (8, 0)) else 128
    return device.flops.get("fp32", 0.0) / 2 / lanes


def memory_share(device: Device) -> float:
    """Share of the bandwidth that contiguous element-wise ops reach."""
    return of_generation(MEMORY_SHARE, device)


def lasting_share(device: Device) -> float:
    """Share of the speed of tensor cores in a short run that steps one after another have."""
    return of_generation(LASTING_SHARE, device) if device.kind == "cuda" else 1.0


def of_generation(table: Mapping[tuple[int, int], T], device: Device) -> T:
    """The table's entry for the newest generation that the device is at least of, or the oldest."""
    capability = device.capability or (0, 0)
    return table[max((known for known in table if known <= capability), default=min(table))]
