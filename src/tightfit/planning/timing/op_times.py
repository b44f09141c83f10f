"""Seconds that one op keeps the device busy: from the device's figures, or from what was measured on it.

Without measurements an op takes the longer of its FLOPs over the format's peak and its bytes over the memory's
bandwidth, each times the share that such ops reach:

| constant | figure | where it comes from |
|---|---|---|
| `MATMUL_SHARE` 8.0, 9.0, 10.0 | 0.87, 0.80, 0.78 | best bf16 matmul over the peak, A100 SXM, H100 SXM and B200: S. Bekman, ML Engineering, table of maximum achievable matmul FLOPS (2025) |
| `MATMUL_SHARE`, others | 0.75 to 0.85 | assumed from their neighbours; not yet measured |
| `SIMPLE_SHARE` | 0.90 | matmuls without tensor cores: assumed, not yet measured |
| `FLASH_SHARE` 8.0 | 0.73 forward, 0.63 backward | Dao 2023, FlashAttention-2, A100, long sequences |
| `FLASH_SHARE` 9.0 | 0.35 | Shah et al. 2024, FlashAttention-3, of FlashAttention-2 on the H100 |
| `CUDNN_SHARE` | 0.60 forward, 0.45 backward | assumed from the same paper's figures; not yet measured |
| `EFFICIENT_SHARE` | 0.40 forward, 0.30 backward | the FlashAttention-2 paper's range for the first FlashAttention; assumed for the memory-efficient kernel |
| `MEMORY_SHARE` | 0.50 to 0.85 | assumed, not yet measured |
| `KERNEL_START` | 2 microseconds | a kernel's start and end on the device: assumed, not yet measured |
| `CPU_MATMUL_RATE`, `CPU_BANDWIDTH` | 50 GFLOP/s a core, 8 GB/s a core up to 4 | a rough default; one core of an AMD EPYC (Zen 4) measured 97 GFLOP/s and 13 to 30 GB/s (PyTorch 2.13) |
| `LINK_SHARE`, `PAGEABLE_SHARE` | 0.8, 0.4 | of PCIe's bandwidth, from pinned and from ordinary memory: assumed, not yet measured |
| `CPU_SLOW` | 16-bit floats 0.02 | half precision that the processor cannot multiply: 1 to 20 GFLOP/s on the same machine |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tightfit.calibration import BATCH, Calibration, family_of
from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.planning.timing import contractions
from tightfit.planning.timing.contractions import Matmul
from tightfit.trace import COPIES, Op, OpClass, Stream

T = TypeVar("T")

MATMUL_SHARE = {
    (7, 0): 0.80, (7, 5): 0.75, (8, 0): 0.87, (8, 6): 0.85, (8, 9): 0.85, (9, 0): 0.80, (10, 0): 0.78, (12, 0): 0.80,
}  # fmt: skip
"""Share of the tensor cores' peak that large matmuls reach, by compute capability, from that one on."""

SIMPLE_SHARE = 0.90
FLASH_SHARE = {(8, 0): (0.73, 0.63), (9, 0): (0.35, 0.35), (12, 0): (0.73, 0.63)}
CUDNN_SHARE = (0.60, 0.45)
EFFICIENT_SHARE = (0.40, 0.30)
MEMORY_SHARE = {
    OpClass.ELEMENTWISE: 0.85, OpClass.NORMALIZATION: 0.75, OpClass.MOVEMENT: 0.75, OpClass.CONTRACTION: 0.85,
    OpClass.COMMUNICATION: 0.75, OpClass.OTHER: 0.50,
}  # fmt: skip
KERNEL_START = 2e-6
CPU_MATMUL_RATE, CPU_BANDWIDTH, CPU_BANDWIDTH_CORES = 50e9, 8e9, 4
CPU_SLOW = {"float16": 0.02}
LINK_SHARE, PAGEABLE_SHARE = 0.8, 0.4
UNKNOWN_LINK = 16e9
"""Bytes a second of a link that is not known: PCIe 3.0 with 16 lanes."""
PAGEABLE = "pageable"
"""How the name ends of a copy to or from host memory that is not page-locked."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
FRESH_BYTES = 32 << 20
"""Results above this size get fresh pages from the system each time (glibc's largest M_MMAP_THRESHOLD), which a
matrix product's measured rate does not show: its largest result is smaller."""


def op_seconds(op: Op, device: Device, calibration: Calibration | None = None, *, tf32: bool = False) -> float:
    """Seconds that the op keeps the device busy, the host's part left out. Raises TightfitError for a CUDA device
    without figures and without measurements.

    tf32: whether matmuls of float32 may run on the tensor cores.
    """
    if not op.kernels:
        return 0.0
    if device.kind == "cuda" and op.stream in COPIES:
        return op.bytes_written / link_bandwidth(device, calibration, pinned=not op.name.endswith(PAGEABLE))
    if device.kind == "cuda" and op.stream is Stream.HOST:
        return _on_cpu(op, CPU_BANDWIDTH_CORES)
    measured = None if calibration is None else _measured(op, device, calibration, tf32)
    if measured is not None:
        return measured
    if device.kind == "cpu":
        return _on_cpu(op, max(device.units, 1))
    if not device.bandwidth or not device.units or not device.flops:
        raise TightfitError(f"device: the figures of {device.name} are not known; write --gpu with one that is in the "
                            "catalogue, or run: tightfit doctor --calibrate")
    memory = (op.bytes_read + op.bytes_written) / (device.bandwidth * MEMORY_SHARE[op.op_class])
    return max(_compute_seconds(op, device, tf32), memory) + KERNEL_START * op.kernels


def link_bandwidth(device: Device, calibration: Calibration | None, *, pinned: bool) -> float:
    """Bytes a second between the host's memory and a GPU's, the same in both directions, each by itself."""
    if calibration is not None and calibration.host_to_device:
        return calibration.host_to_device * (1.0 if pinned else PAGEABLE_SHARE / LINK_SHARE)
    return (device.pcie_bandwidth or UNKNOWN_LINK) * (LINK_SHARE if pinned else PAGEABLE_SHARE)


def _compute_seconds(op: Op, device: Device, tf32: bool) -> float:
    """Seconds of arithmetic on a GPU."""
    if not op.flops:
        return 0.0
    if contractions.attention_length(op):
        rate = device.peak(op.dtype, tf32) * _attention_share(op, device)
        return op.flops / (rate * contractions.attention_speed(op))
    matmul = contractions.matmul_of(op)
    if matmul is None:
        return op.flops / _matmul_rate(op.dtype, device, tf32)
    return _matmul_seconds(matmul, op.dtype, device, tf32)


def _matmul_seconds(matmul: Matmul, dtype: str, device: Device, tf32: bool) -> float:
    return contractions.matmul_seconds(matmul, _matmul_rate(dtype, device, tf32, matmul), device.units)


def _matmul_rate(dtype: str, device: Device, tf32: bool, matmul: Matmul | None = None) -> float:
    """Operations a second of large matmuls, on tensor cores as far as a matmul's dimensions allow."""
    peak = device.peak(dtype, tf32)
    if peak <= device.flops.get("fp32", 0.0):
        return peak * SIMPLE_SHARE
    rate = peak * _of_generation(MATMUL_SHARE, device)
    wide = device.wants_wide_rows
    return rate if matmul is None else rate * contractions.alignment(matmul, ITEM_BYTES.get(dtype, 4), wide)


def _attention_share(op: Op, device: Device) -> float:
    if "efficient" in op.name or not device.at_least(8):
        forward, backward = EFFICIENT_SHARE
    elif "cudnn" in op.name:
        forward, backward = CUDNN_SHARE
    else:
        forward, backward = _of_generation(FLASH_SHARE, device)
    return backward if "backward" in op.name else forward


def _of_generation(table: Mapping[tuple[int, int], T], device: Device) -> T:
    """The table's entry for the newest generation that the device is at least of, or the oldest."""
    capability = device.capability or (0, 0)
    return table[max((known for known in table if known <= capability), default=min(table))]


def _on_cpu(op: Op, cores: int) -> float:
    """A rough guess for a processor of which nothing was measured but its number of cores."""
    rate = cores * CPU_MATMUL_RATE * CPU_SLOW.get(op.dtype, 1.0)
    bandwidth = min(cores, CPU_BANDWIDTH_CORES) * CPU_BANDWIDTH
    return max(op.flops / rate, (op.bytes_read + op.bytes_written) / bandwidth)


def _measured(op: Op, device: Device, calibration: Calibration, tf32: bool) -> float | None:
    """Seconds from the machine's own measurements; None where they say nothing of such an op."""
    dtype = "tf32" if tf32 and op.dtype == "float32" else op.dtype
    length = contractions.attention_length(op)
    if op.flops and length:
        direction = "backward" if "backward" in op.name else "forward"
        rate = calibration.attention_rate(direction, op.dtype, length, contractions.head_size(op))
        return None if rate is None else op.flops / rate
    if op.flops:
        return _measured_matmul(op, device, calibration, dtype)
    return calibration.memory_seconds(family_of(op.name), op.dtype, op.bytes_read + op.bytes_written)


def _measured_matmul(op: Op, device: Device, calibration: Calibration, dtype: str) -> float | None:
    side = max(round((op.flops / 2) ** (1 / 3)), 1)
    matmul = contractions.matmul_of(op) or Matmul(1, side, side, side)
    grid = calibration.matmuls.get(dtype)
    if matmul.batch > 1:
        grid = calibration.batched_matmuls.get(dtype, grid)
    if grid is None:
        return None
    if device.kind == "cpu" or not device.units or not device.flops:
        seconds = op.flops / grid.rate(matmul.m, matmul.n, matmul.k)
        if op.bytes_written > FRESH_BYTES and device.kind == "cpu":
            seconds += calibration.memory_seconds("zeros", op.dtype, op.bytes_written) or 0.0
        return seconds
    # The shape's own tiles and waves from the model, its level from the measured shapes around it.
    tf32 = dtype == "tf32"
    ratio, batch = 0.0, BATCH if grid is calibration.batched_matmuls.get(dtype) else 1
    for (i, j, h), share in grid.corners(matmul.m, matmul.n, matmul.k):
        near = Matmul(batch, grid.sizes[i], grid.sizes[j], grid.sizes[h])
        ratio += share * near.flops / grid.rates[i][j][h] / _matmul_seconds(near, op.dtype, device, tf32)
    return ratio * _matmul_seconds(matmul, op.dtype, device, tf32)
