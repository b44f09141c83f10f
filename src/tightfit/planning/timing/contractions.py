"""Time of a tensor contraction on a GPU, from its shape: tiles, waves, alignment, and attention's lengths.

A matrix product is cut into tiles of its result, one for a streaming multiprocessor at a time. Tiles that reach over
the edge compute for nothing (tile quantization); the last wave of tiles leaves multiprocessors idle (wave
quantization); rows that do not begin at multiples of 16 bytes load slower. After NVIDIA's Matrix Multiplication
Background User's Guide (2023), which names the tiles. What they cost is fitted on public recordings: `benchmarks/
ops_vs_gpu.py` says on which, and how far off it is where it was not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tightfit.devices import Device
from tightfit.planning.timing.attention import attention_length
from tightfit.trace import Op

TILES = tuple(dict.fromkeys(
    (rows, columns, speed)
    for long, short, speed in ((256, 128, 1.0), (128, 128, 0.95), (256, 64, 0.85), (128, 64, 0.8), (64, 64, 0.6))
    for rows, columns in ((long, short), (short, long))
))  # fmt: skip
"""Rows and columns of cuBLAS's tiles (the guide), either way round, and how fast each runs beside the largest:
assumed."""

SPLITS, SPLIT_SECONDS, NEWER_WAVES = (1, 2, 4, 8, 16), 3e-6, 4
"""Parts that a product with few tiles is cut into along K, and what adding them up takes; waves up to which that is
done from Hopper on, as an H100's gradients of weights show."""

PROLOGUE, PLAIN_PROLOGUE = 150, 8
"""Filling a tile's pipeline and storing its result, as so many more steps of K, with tensor cores and without."""

ALIGNMENT = {128: 1.0, 64: 1.0, 32: 0.96, 16: 0.93, 8: 0.6, 4: 0.45, 2: 0.38, 1: 0.38}
"""Speed on tensor cores by the bytes that the rows of both operands and of the result are a multiple of. 16 matter
from Ampere on, 128 on the A100 and its successors (the guide); 8, 4 and 2 as 430 products on an H100 have it, of which
4 and 8 cost nothing on a V100 and a T4."""
NEWER_ALIGNMENT = {4: 0.35, 2: 0.165, 1: 0.165}
"""The same of 16-bit products from Hopper on, whose kernels for such rows are an older generation's: vocabularies of
30,522 and 50,257 in training steps on an H100 (CUDA 13): results/gpu_kernels-h100-80gb-hbm3.json."""
ODD_BATCHED = 0.1
"""The same from Hopper on for batched products over odd rows of 16 bits, whose kernels have a short prologue: attention
written out, 264 recordings on an H100."""


class Matmul(NamedTuple):
    """Matrix products (M, K) by (K, N), `batch` of them alike. rows: the elements from one row to the next of both
    operands and of the result, where they are known."""

    batch: int
    m: int
    n: int
    k: int
    rows: tuple[int, ...] = ()

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


def matmul_of(op: Op) -> Matmul | None:
    """The matrix product that an op's shapes and FLOPs agree on; None for attention and shapes that tell nothing."""
    if not op.flops or attention_length(op):
        return None
    shapes = [shape for shape in op.shapes if len(shape) >= 2]
    for a, b in pairwise(shapes):
        found = _matmul(a, b)
        if found is not None and found.flops == op.flops:
            return found._replace(rows=op.leading)
    if len(shapes) >= 2 and len(shapes[-1]) >= 3:  # a convolution: its weight is (channels out, channels in, ...)
        n, k = shapes[-1][0], math.prod(shapes[-1][1:])
        return Matmul(1, max(op.flops // (2 * n * k), 1), n, k)
    return None


def _matmul(a: Sequence[int], b: Sequence[int]) -> Matmul | None:
    if len(a) == len(b) and a[-1] == b[-2]:
        return Matmul(math.prod(a[:-2]), a[-2], b[-1], a[-1])
    if len(a) == 2 and len(b) == 3 and a[-1] == b[-2]:  # groups of rows, each by its own matrix
        return Matmul(b[0], max(a[0] // b[0], 1), b[-1], a[-1]) if a[0] % b[0] == 0 else Matmul(1, a[0], b[-1], a[-1])
    if len(b) == 2 and a[-1] == b[-1]:  # a linear layer's weight is (N, K)
        return Matmul(1, math.prod(a[:-1]), b[0], a[-1])
    if len(b) == 2 and a[-1] == b[-2]:
        return Matmul(1, math.prod(a[:-1]), b[-1], a[-1])
    return None


def alignment(matmul: Matmul, item_bytes: int, device: Device) -> float:
    """Speed, up to 1, that its rows' multiples allow on a device's tensor cores; without known rows, those of
    contiguous tensors."""
    common = math.gcd(*(matmul.rows or (matmul.n, matmul.k))) * item_bytes
    multiple = min(common & -common, 128)
    if multiple >= (16 if device.at_least(8) else 4) and not device.wants_wide_rows:
        return 1.0
    if not device.at_least(9) or item_bytes > 2:
        return ALIGNMENT[multiple]
    return ODD_BATCHED if multiple == 2 and matmul.batch > 1 else NEWER_ALIGNMENT.get(multiple, ALIGNMENT[multiple])


def matmul_seconds(matmul: Matmul, rate: float, units: int, prologue: int = PROLOGUE, most_waves: int = 1) -> float:
    """Seconds for a matmul on `units` multiprocessors that together do `rate` operations a second: the best way of
    cutting it into tiles. most_waves: of parts; a product that fills so many is cut no finer along K."""
    best = math.inf
    for rows, columns, speed in TILES:
        tiles = matmul.batch * -(-matmul.m // rows) * -(-matmul.n // columns)
        for parts in SPLITS:
            waves = -(-tiles * parts // units)
            seconds = waves * 2 * rows * columns * (matmul.k / parts + prologue) * units / (rate * speed)
            best = min(best, seconds + (SPLIT_SECONDS if parts > 1 else 0.0))
            if tiles * parts >= most_waves * units:
                break
    return best
