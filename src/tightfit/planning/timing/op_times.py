"""Seconds that one op keeps the device busy: from the device's figures, or from what was measured on it.

Without measurements an op takes its kernels' starts and the longest of three: its FLOPs over what the format's peak
sustains (see `contractions`), its bytes over the share of the bandwidth that such ops reach, and its elements times the
cycles that each takes of a multiprocessor. `benchmarks/ops_vs_gpu.py` holds all this to public recordings.

| constant | figure | where it comes from |
|---|---|---|
| `Card.sustains` | by card | the catalogue says which is fitted on recordings of that card and which is assumed |
| `FULL_CLOCK_SHARE` | 85 % | products of 16 bits on A100, H100, H200, B200, L40S and RTX PRO 6000 |
| `CYCLES` and the like | by class and layout | traced kernels on an H100, public recordings of norms, softmax and cross-entropy on A100, H100, L4, T4 and V100 |
| `COLUMN_SHARE`, `READ_TWICE`, `NORM_FP32` | below | kernels of steps on an H100: results/gpu_kernels-h100-80gb-hbm3.json |
| `SAFE_SOFTMAX` | 3.2 | results/calibration-h100-80gb-hbm3.json |
| `CACHE_BYTES` | 16 a cycle | what products reach on an L40S whose operands are in the cache |
| `KERNEL_START` | 2 to 4 microseconds | the same |
| `NO_HALF_SHARE` | 0.1 | products on such a processor, below |
| `CPU_MATMUL_RATE`, `CPU_BANDWIDTH` | 50 GFLOP/s a core, 8 GB/s a core up to 4 | a rough default; one core of an AMD EPYC (Zen 4) measured 97 GFLOP/s and 13 to 30 GB/s (PyTorch 2.13) |

Optimizers' kernels, and kernels that a compiler fuses, have no public recordings: `FUSED_SHARE` of the bandwidth is
assumed for them, and that operands which the cache still holds are read from it, as by other ops.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import math

from tightfit.calibration import MATMULS_IN_OP, Calibration, family_of
from tightfit.devices import Device
from tightfit.errors import TightfitError
from tightfit.planning.timing import contractions
from tightfit.planning.timing.attention import attention_length, attention_rate, drop_speed, head_size
from tightfit.planning.timing.collectives import collective_seconds
from tightfit.planning.timing.contractions import PLAIN_PROLOGUE, Matmul
from tightfit.planning.timing.link import copy_rate
from tightfit.planning.timing.rates import cycles_a_second, lasting_share, matmul_rate, memory_share, on_tensor_cores
from tightfit.system import multiplies_half
from tightfit.trace import COPIES, FUSED_PREFIX, PAGEABLE, Op, OpClass, Stream

FULL_CLOCK_SHARE = 0.85
"""Share of the peak that 16-bit products reach in their tiles at the boost clock: only where all multiprocessors are
busy does a card's power limit what it sustains."""
FUSED_SHARE = {OpClass.NORMALIZATION: 0.75, OpClass.MOVEMENT: 0.75, OpClass.OTHER: 0.5, OpClass.COMMUNICATION: 0.75}
"""The same for a compiler's and an optimizer's kernels, 0.85 for other classes, and for ops of other kinds."""
BACKWARD_SHARE = 0.62
"""Share of the bandwidth of the backward passes of norms, and of softmax over long rows."""
COLUMN_SHARE = 0.4
"""Share of the bandwidth of sums of columns, such as a bias's gradient."""
CYCLES = {"strided": 0.72, "cast": 0.83, "": 0.28}
"""Cycles of a multiprocessor for each element of an element-wise op or a copy, by its layout. A cast from fp32 is as
any other."""
NORM_CYCLES, BACKWARD_NORM_CYCLES, NORM_FP32 = (200, 0.33), (750, 0.62), (2.2, 2.7)
"""Cycles for each row and each element of a norm; how many times as many an element takes in fp32, forward and
backward."""
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
READ_TWICE = 5 / 3
"""Bytes of a long row's softmax, backward, where both inputs are read twice: on an A100, and no more on an H100."""
SAFE_SOFTMAX = 3.2
"""Passes of a softmax that looks for rows without any score, as an H100 takes them."""
SPILLED_ROW, UNALIGNED = 100_000, 1.3
"""Bytes of a softmax's row from which on it is read three times; and the bytes of rows that are not aligned to 16
bytes, beside those of rows that are."""
NLL_SECONDS = 27e-9
"""Seconds of a row of the negative log likelihood, which one block of threads adds up."""
KERNEL_START, STRIDED_START = 2e-6, 3e-6
CLASS_START = {OpClass.CONTRACTION: 2.3e-6, OpClass.NORMALIZATION: 4e-6}
"""Seconds of a kernel's start and end, of some kinds more."""
CPU_MATMUL_RATE, CPU_BANDWIDTH, CPU_BANDWIDTH_CORES = 50e9, 8e9, 4
HALF_FORMATS, NO_HALF_SHARE = ("bfloat16", "float16"), 0.1
"""Speed of products of 16 bits beside fp32's on a processor without instructions that PyTorch computes them with. One
core of an AMD EPYC without AVX-512 (PyTorch 2.13) takes 7 to 10 times as long for a linear layer's, and 82 times as
long for one of 1024 x 1024 x 1024; attention no longer."""
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
    moved = _memory_seconds(op, device) * (1.0 if calibration is None else _measured_memory(device, calibration))
    busy = max(_compute_seconds(op, device, tf32), moved)
    if "nll_loss_forward" in op.name:
        busy += NLL_SECONDS * op.shapes[0][0]
    return busy + _start(op) * op.kernels


def lasting_seconds(op: Op, device: Device, calibration: Calibration | None = None, *, tf32: bool = False) -> float:
    """`op_seconds` in steps one after another, where tensor cores are slower than in a short run."""
    seconds = op_seconds(op, device, calibration, tf32=tf32)
    return seconds / lasting_share(device) if computes_on_tensor_cores(op, device, tf32) else seconds


def computes_on_tensor_cores(op: Op, device: Device, tf32: bool) -> bool:
    """Whether an op is products on tensor cores, fused attention's among them. cuDNN's convolutions take tf32 whatever
    is asked of matmuls: torch.backends.cudnn.allow_tf32."""
    return op.flops > 0 and on_tensor_cores(op.dtype, device, tf32 or "convolution" in op.name)


def _compute_seconds(op: Op, device: Device, tf32: bool) -> float:
    """Seconds of arithmetic on a GPU."""
    if not op.flops:
        return 0.0
    if attention_length(op):
        return op.flops / attention_rate(op, device)
    tf32 = tf32 or "convolution" in op.name  # as `computes_on_tensor_cores` says
    matmul = contractions.matmul_of(op)
    if matmul is None:
        return op.flops / matmul_rate(op.dtype, device, tf32)
    return _matmul_seconds(matmul, op.dtype, device, tf32)


def _matmul_seconds(matmul: Matmul, dtype: str, device: Device, tf32: bool) -> float:
    rate, waves = matmul_rate(dtype, device, tf32), contractions.NEWER_WAVES if device.at_least(9) else 1
    if not on_tensor_cores(dtype, device, tf32):
        return contractions.matmul_seconds(matmul, rate, device.units, PLAIN_PROLOGUE, waves)
    aligned = contractions.alignment(matmul, ITEM_BYTES.get(dtype, 4), device)
    prologue = PLAIN_PROLOGUE if aligned == contractions.ODD_BATCHED else contractions.PROLOGUE
    full = rate if ITEM_BYTES.get(dtype, 4) > 2 else max(device.peak(dtype) * FULL_CLOCK_SHARE, rate)
    busy = contractions.matmul_seconds(matmul, full * aligned, device.units, prologue, waves)
    return max(busy, matmul.flops / rate)


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
        if row > LONG_ROW and backward:
            share, times = BACKWARD_SHARE, 1.0 if device.at_least(9) else READ_TWICE
        elif row > LONG_ROW:
            cycles = elements * SOFTMAX_CYCLES[(item > 2) if aligned else 2]
            times = 2.0 if row * item > SPILLED_ROW else 1.0
        if not backward:
            times = max(times, 1.0 if aligned else UNALIGNED)
        times *= SAFE_SOFTMAX if "_safe_softmax" in op.name and device.at_least(9) else 1.0
    elif "_norm" in op.name and op.shapes and op.shapes[0]:
        row, (each_row, each) = op.shapes[0][-1], BACKWARD_NORM_CYCLES if backward else NORM_CYCLES
        cycles = elements / row * each_row + elements * each * (NORM_FP32[backward] if item > 2 else 1)
        if backward:
            share = BACKWARD_SHARE
        elif device.units * NORM_ROWS * row * item > CACHED_SHARE * device.l2_bytes:
            times = 1.5
    elif op.op_class in (OpClass.ELEMENTWISE, OpClass.MOVEMENT):
        cycles = elements * CYCLES["" if op.layout == "cast" and item > 2 else op.layout]
    elif op.op_class is OpClass.NORMALIZATION:
        columns = op.name.startswith("aten.sum") and any(s[-1:] == (op.bytes_written // item,) for s in op.shapes[:1])
        share = COLUMN_SHARE if columns else FUSED_SHARE[op.op_class]
    moved, speed = times * (op.bytes_read + op.bytes_written), device.bandwidth * share
    if moved < (CACHED_PRODUCT if op.op_class is OpClass.CONTRACTION else CACHED_SHARE) * device.l2_bytes:
        speed = max(speed, CACHE_BYTES * cycles_a_second(device))
    return max(moved / speed, cycles / cycles_a_second(device))


def _start(op: Op) -> float:
    """Seconds of a kernel's start and end."""
    if op.layout == "strided" and op.op_class in (OpClass.ELEMENTWISE, OpClass.MOVEMENT):
        return STRIDED_START
    return KERNEL_START if op.name.startswith(FUSED) else CLASS_START.get(op.op_class, KERNEL_START)


def _on_cpu(op: Op, cores: int) -> float:
    """A rough guess for a processor of which nothing was measured but its number of cores, the same for every format
    that it multiplies."""
    rate = cores * CPU_MATMUL_RATE
    if op.flops and op.dtype in HALF_FORMATS and not attention_length(op) and not multiplies_half():
        rate *= NO_HALF_SHARE
    bandwidth = min(cores, CPU_BANDWIDTH_CORES) * CPU_BANDWIDTH
    return max(op.flops / rate, (op.bytes_read + op.bytes_written) / bandwidth)


def _measured_memory(device: Device, calibration: Calibration) -> float:
    """Seconds that the largest addition took, over the model's: how the card's memory compares with its kind's."""
    curve = calibration.memory.get("add", {}).get("float32")
    if curve is None:
        return 1.0
    return curve.values[-1] / (curve.sizes[-1] / (device.bandwidth * memory_share(device)) + KERNEL_START)


def _measured(op: Op, device: Device, calibration: Calibration, tf32: bool) -> float | None:
    """Seconds from the machine's own measurements; None where no such op was measured. Ops bound by memory on a GPU of
    the catalogue have None too: the measured families do not tell strided from contiguous tensors, which
    `_memory_seconds` does, and `_measured_memory` scales that by the bandwidth that was measured."""
    dtype = "tf32" if tf32 and op.dtype == "float32" else op.dtype
    length = attention_length(op)
    if op.flops and length:
        if "efficient" in op.name and device.has_flash:
            return None  # what was measured is the kernel that is taken by itself
        direction = "backward" if "backward" in op.name else "forward"
        rate = calibration.attention_rate(direction, op.dtype, length, head_size(op))
        return None if rate is None else op.flops / rate / drop_speed(op)
    if op.flops:
        return _measured_matmul(op, device, calibration, dtype)
    if device.kind == "cuda" and device.bandwidth and device.units and device.flops:
        return None
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
    ratio, batch = 0.0, MATMULS_IN_OP if grid is calibration.batched_matmuls.get(dtype) else 1
    for (i, j, h), share in grid.corners(matmul.m, matmul.n, matmul.k):
        near = Matmul(batch, grid.sizes[i], grid.sizes[j], grid.sizes[h])
        ratio += share * near.flops / grid.rates[i][j][h] / _product_seconds(near, op.dtype, device, tf32)
    return ratio * _product_seconds(matmul, op.dtype, device, tf32)


def _product_seconds(matmul: Matmul, dtype: str, device: Device, tf32: bool) -> float:
    """Seconds of a product's kernel: of its arithmetic or its bytes, and its start."""
    elements = matmul.batch * (matmul.m * matmul.k + matmul.k * matmul.n + matmul.m * matmul.n)
    moved = elements * ITEM_BYTES.get(dtype, 4) / (device.bandwidth * memory_share(device))
    return max(_matmul_seconds(matmul, dtype, device, tf32), moved) + CLASS_START[OpClass.CONTRACTION]
