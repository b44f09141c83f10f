"""Seconds that one op keeps the device busy: from the device's figures, or from what was measured on it.

Without measurements an op takes its kernels' starts and the longest of three: its FLOPs over what the format's peak
sustains (see `contractions`), its bytes over the share of the bandwidth that such ops reach, and its elements times the
cycles that each takes of a multiprocessor. `benchmarks/ops_vs_gpu.py` holds all this to public recordings.

| constant | figure | where it comes from |
|---|---|---|
| `Card.sustains` | by card | the catalogue says which is fitted on recordings of that card and which is assumed |
| `FULL_CLOCK_SHARE` | 85 % | products of 16 bits on A100, H100, H200, B200, L40S and RTX PRO 6000 |
| `PLAIN_SHARE`, `LESS_POWER` | by generation, 1.1 | matmuls without tensor cores: recordings on V100, T4, A100 and H100; the others on few |
| `FLASH_RATE`, `FLASH_SHARE` | 1.42, 1.17 operations a cycle in thousands; 1.0, 0.74 of what matmuls sustain | FlashAttention-2 on A100 and RTX 4090, forward and backward |
| `EFFICIENT_RATE` | 0.55, 0.40 thousand operations a cycle | recordings on A100, H200 and B200 that are not public here |
| `CUDNN_SHARE` | 0.70, 0.58; Blackwell 0.66, 0.50 | cuDNN 9 on the H200 |
| `MEMORY_SHARE` | by generation | element-wise ops on V100, T4, A100, L4; GeForce cards assumed as their generation's |
| `CYCLES` and the like | by class and layout | traced kernels on an H100, public recordings of norms, softmax and cross-entropy on A100, H100, L4, T4 and V100 |
| `CACHE_BYTES` | 16 a cycle | what products reach on an L40S whose operands are in the cache |
| `KERNEL_START` | 2 to 4 microseconds | the same |
| `CPU_MATMUL_RATE`, `CPU_BANDWIDTH` | 50 GFLOP/s a core, 8 GB/s a core up to 4 | a rough default; one core of an AMD EPYC (Zen 4) measured 97 GFLOP/s and 13 to 30 GB/s (PyTorch 2.13) |

Optimizers' kernels, and kernels that a compiler fuses, have no public recordings: `FUSED_SHARE` of the bandwidth is
assumed for them, and that operands which the cache still holds are read from it, as by other ops.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from tightfit.calibration import BATCH, Calibration, family_of
from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.planning.timing import contractions
from tightfit.planning.timing.contractions import PLAIN_PROLOGUE, Matmul
from tightfit.planning.timing.link import copy_rate
from tightfit.planning.timing.network import collective_seconds
from tightfit.trace import COPIES, FUSED_PREFIX, PAGEABLE, Op, OpClass, Stream

T = TypeVar("T")

PLAIN_SHARE = {
    (7, 0): 1.0, (7, 5): 0.9, (8, 6): 0.66, (8, 9): 0.6, (9, 0): 0.74, (10, 0): 0.68,
}  # fmt: skip
"""Share of the fp32 peak that matmuls without tensor cores reach, by compute capability, from that one on."""
FULL_CLOCK_SHARE = 0.85
"""Share of the peak that 16-bit products reach in their tiles at the boost clock: only where all multiprocessors are
busy does a card's power limit what it sustains. No product of tf32 was recorded."""
LESS_POWER = 1.1
"""Factor by which a card's power carries further without tensor cores."""
FLASH_RATE, FLASH_SHARE = (1.42e3, 1.17e3), (1.0, 0.74)
EFFICIENT_RATE = (0.55e3, 0.4e3)
CUDNN_SHARE = {(8, 0): (0.6, 0.5), (9, 0): (0.7, 0.58), (10, 0): (0.66, 0.5)}
CUDNN_SMALL_HEADS = 0.82
"""cuDNN's speed with heads of fewer than 128 features."""
MEMORY_SHARE = {
    (7, 0): 0.91, (7, 5): 0.74, (8, 0): 0.87, (8, 6): 0.83, (8, 9): 0.78, (9, 0): 0.87, (12, 0): 0.83,
}  # fmt: skip
"""Share of the bandwidth that contiguous element-wise ops reach, by compute capability, from that one on."""
FUSED_SHARE = {OpClass.NORMALIZATION: 0.75, OpClass.MOVEMENT: 0.75, OpClass.OTHER: 0.5, OpClass.COMMUNICATION: 0.75}
"""The same for a compiler's and an optimizer's kernels, 0.85 for other classes, and for ops of other kinds."""
BACKWARD_SHARE = 0.62
"""Share of the bandwidth of the backward passes of norms, and of softmax over long rows."""
CYCLES = {"strided": 0.72, "cast": 0.83, "": 0.28}
"""Cycles of a multiprocessor for each element of an element-wise op or a copy, by its layout."""
NORM_CYCLES, BACKWARD_NORM_CYCLES, NORM_FP32 = (200, 0.33), (750, 0.62), 3
"""Cycles for each row and each element of a norm; how many times as many an element takes in fp32."""
NORM_ROWS = 16
"""Rows of a norm that one multiprocessor works on at a time: where they are more than the cache holds, each is read
again."""
SOFTMAX_CYCLES, LONG_ROW = (0.55, 0.85, 1.33), 1024
"""Cycles for each element of a softmax over longer rows: aligned to 16 bytes, in 16 and in 32 bits; else."""
CACHED_SHARE, CACHED_PRODUCT = 0.7, 0.16
"""Share of the L2 cache that an op's bytes may take to be there still from the op before; a matrix product's, whose
weights other ops have come between."""
CACHE_BYTES = 16
"""Bytes a cycle that each multiprocessor reads from the L2 cache."""
SPILLED_ROW, UNALIGNED = 100_000, 1.3
"""Bytes of a softmax's row from which on it is read three times; and the bytes of rows that are not aligned to 16
bytes, beside those of rows that are."""
NLL_SECONDS = 27e-9
"""Seconds of a row of the negative log likelihood, which one block of threads adds up."""
KERNEL_START, STRIDED_START = 2e-6, 3e-6
CLASS_START = {OpClass.CONTRACTION: 2.3e-6, OpClass.NORMALIZATION: 4e-6}
"""Seconds of a kernel's start and end, of some kinds more."""
CPU_MATMUL_RATE, CPU_BANDWIDTH, CPU_BANDWIDTH_CORES = 50e9, 8e9, 4
FUSED = (FUSED_PREFIX, "aten._foreach_", "aten._fused_ad", "aten._fused_sgd", "aten._amp_")
"""Prefixes of the names of a compiler's and of optimizers' kernels."""

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
        return op.bytes_written / copy_rate(device, calibration, op.stream, pinned=not op.name.endswith(PAGEABLE))
    if device.kind == "cuda" and op.stream is Stream.NETWORK and op.op_class is OpClass.COMMUNICATION:
        return collective_seconds(op, device)
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
    busy = max(_compute_seconds(op, device, tf32), _memory_seconds(op, device))
    if "nll_loss_forward" in op.name:
        busy += NLL_SECONDS * op.shapes[0][0]
    return busy + _start(op) * op.kernels


def _compute_seconds(op: Op, device: Device, tf32: bool) -> float:
    """Seconds of arithmetic on a GPU."""
    if not op.flops:
        return 0.0
    if contractions.attention_length(op):
        return op.flops / _attention_rate(op, device)
    tf32 = tf32 or "convolution" in op.name  # cuDNN's default, torch.backends.cudnn.allow_tf32
    matmul = contractions.matmul_of(op)
    if matmul is None:
        return op.flops / _matmul_rate(op.dtype, device, tf32)
    return _matmul_seconds(matmul, op.dtype, device, tf32)


def _matmul_seconds(matmul: Matmul, dtype: str, device: Device, tf32: bool) -> float:
    rate = _matmul_rate(dtype, device, tf32)
    if not on_tensor_cores(dtype, device, tf32):
        return contractions.matmul_seconds(matmul, rate, device.units, PLAIN_PROLOGUE)
    aligned = contractions.alignment(matmul, ITEM_BYTES.get(dtype, 4), device)
    prologue = PLAIN_PROLOGUE if aligned == contractions.ODD_BATCHED else contractions.PROLOGUE
    full = rate if ITEM_BYTES.get(dtype, 4) > 2 else max(device.peak(dtype) * FULL_CLOCK_SHARE, rate)
    return max(contractions.matmul_seconds(matmul, full * aligned, device.units, prologue), matmul.flops / rate)


def on_tensor_cores(dtype: str, device: Device, tf32: bool) -> bool:
    """Whether matmuls of a dtype run on tensor cores."""
    return device.peak(dtype, tf32) > device.flops.get("fp32", 0.0)


def _matmul_rate(dtype: str, device: Device, tf32: bool) -> float:
    """Operations a second that large matmuls sustain."""
    share = device.sustains
    if not on_tensor_cores(dtype, device, tf32):
        share = min(_of_generation(PLAIN_SHARE, device), LESS_POWER * share)
    return device.peak(dtype, tf32) * share


def _attention_rate(op: Op, device: Device) -> float:
    """Operations a second of a fused attention kernel."""
    backward, cycles = "backward" in op.name, _cycles_a_second(device)
    generation = device.capability[0] if device.capability is not None else 0
    if "efficient" in op.name or not device.has_flash:
        rate = EFFICIENT_RATE[backward] * cycles
    elif "cudnn" in op.name:
        small = contractions.head_size(op) < 128
        rate = device.peak(op.dtype) * _of_generation(CUDNN_SHARE, device)[backward]
        rate *= CUDNN_SMALL_HEADS if small else 1.0
    else:
        rate = min(FLASH_RATE[backward] * cycles, FLASH_SHARE[backward] * _matmul_rate(op.dtype, device, False))
    return rate * contractions.attention_speed(op, generation, device.units)


def _cycles_a_second(device: Device) -> float:
    """Cycles of all multiprocessors together, from the fp32 peak: two operations a lane."""
    lanes = 64 if device.capability in ((7, 0), (7, 5), (8, 0)) else 128
    return device.flops.get("fp32", 0.0) / 2 / lanes


def memory_share(device: Device) -> float:
    """Share of the bandwidth that contiguous element-wise ops reach."""
    return _of_generation(MEMORY_SHARE, device)


def _memory_seconds(op: Op, device: Device) -> float:
    """Seconds of moving an op's bytes and of working on its elements, whichever are longer."""
    share, cycles, times = memory_share(device), 0.0, 1.0
    item = ITEM_BYTES.get(op.dtype, 4)
    elements = max(map(math.prod, op.shapes), default=0)
    backward = "backward" in op.name
    if op.name.startswith(FUSED) or op.op_class in (OpClass.OTHER, OpClass.COMMUNICATION):
        share = FUSED_SHARE.get(op.op_class, 0.85)
    elif "softmax" in op.name:
        row = op.shapes[0][-1] if op.shapes and op.shapes[0] else 1
        aligned = row * item % 16 == 0
        if row > LONG_ROW and backward:  # both inputs are read twice
            share, times = BACKWARD_SHARE, 5 / 3
        elif row > LONG_ROW:
            cycles = elements * SOFTMAX_CYCLES[(item > 2) if aligned else 2]
            times = 2.0 if row * item > SPILLED_ROW else times
        times = max(times, 1.0 if aligned else UNALIGNED)
    elif "_norm" in op.name and op.shapes and op.shapes[0]:
        row, (each_row, each) = op.shapes[0][-1], BACKWARD_NORM_CYCLES if backward else NORM_CYCLES
        cycles = elements / row * each_row + elements * each * (NORM_FP32 if item > 2 else 1)
        if backward:
            share = BACKWARD_SHARE
        elif device.units * NORM_ROWS * row * item > CACHED_SHARE * device.l2_bytes:
            times = 1.5
    elif op.op_class in (OpClass.ELEMENTWISE, OpClass.MOVEMENT):
        cycles = elements * CYCLES[op.layout]
    elif op.op_class is OpClass.NORMALIZATION:
        share = FUSED_SHARE[op.op_class]
    moved, speed = times * (op.bytes_read + op.bytes_written), device.bandwidth * share
    if moved < (CACHED_PRODUCT if op.op_class is OpClass.CONTRACTION else CACHED_SHARE) * device.l2_bytes:
        speed = max(speed, CACHE_BYTES * _cycles_a_second(device))
    return max(moved / speed, cycles / _cycles_a_second(device))


def _start(op: Op) -> float:
    """Seconds of a kernel's start and end."""
    if op.layout == "strided" and op.op_class in (OpClass.ELEMENTWISE, OpClass.MOVEMENT):
        return STRIDED_START
    return KERNEL_START if op.name.startswith(FUSED) else CLASS_START.get(op.op_class, KERNEL_START)


def _of_generation(table: Mapping[tuple[int, int], T], device: Device) -> T:
    """The table's entry for the newest generation that the device is at least of, or the oldest."""
    capability = device.capability or (0, 0)
    return table[max((known for known in table if known <= capability), default=min(table))]


def _on_cpu(op: Op, cores: int) -> float:
    """A rough guess for a processor of which nothing was measured but its number of cores, the same for every format:
    some multiply half precision faster than fp32, some far slower."""
    rate = cores * CPU_MATMUL_RATE
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
