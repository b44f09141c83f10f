"""Time of fused attention on a GPU: its kernels' rates, by length, features of a head, causality and dropout.

| constant | figure | where it comes from |
|---|---|---|
| `FLASH_RATE`, `FLASH_SHARE` | 1.42, 1.17 operations a cycle in thousands; 1.0, 0.74 of what matmuls sustain | FlashAttention-2 on A100 and RTX 4090, forward and backward |
| `EFFICIENT_RATE` | 0.55, 0.40 thousand operations a cycle | recordings on A100, H200 and B200 that are not public here |
| `CUDNN_SHARE` | 0.70, 0.58; Blackwell 0.66, 0.50 | cuDNN 9 on the H200 |
| `CUDNN_SMALL_HEADS`, `PLAIN_ATTENTION`, `CUDNN_DROPOUT`, `DROPOUT` | below | kernels of training steps on an H100, torch 2.11: results/gpu_kernels-h100-80gb-hbm3.json |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import math

from tightfit.devices import Device
from tightfit.planning.timing.rates import cycles_a_second, matmul_rate, of_generation
from tightfit.trace import Op

FLASH_RATE, FLASH_SHARE = (1.42e3, 1.17e3), (1.0, 0.74)
EFFICIENT_RATE = (0.55e3, 0.4e3)
CUDNN_SHARE = {(8, 0): (0.6, 0.5), (9, 0): (0.7, 0.58), (10, 0): (0.66, 0.5)}
CUDNN_SMALL_HEADS = (0.72, 0.66)
"""cuDNN's speed with heads of fewer than 128 features, forward and backward."""
PLAIN_ATTENTION = (0.65, 0.78)
"""Speed of attention in fp32 beside that of products without tensor cores, forward and backward."""
CUDNN_DROPOUT, DROPOUT = (0.45, 0.85), (0.7, 0.9)
"""Speed of cuDNN's attention, and of others', with dropout, forward and backward."""
CAUSAL_HALF, FULL_HALF = {8: 400, 9: 500, 10: 650}, 150
"""Attention over so many positions reaches half of what it does over long sequences, by generation."""
QUERIES = 128
"""Rows of queries that one block of a fused attention kernel works on (FlashAttention-2)."""


def attention_rate(op: Op, device: Device) -> float:
    """Operations a second of a fused attention kernel."""
    backward, cycles = "backward" in op.name, cycles_a_second(device)
    generation = device.capability[0] if device.capability is not None else 0
    if "efficient" in op.name or not device.has_flash:
        rate = EFFICIENT_RATE[backward] * cycles
        if op.dtype == "float32":
            rate = min(rate, PLAIN_ATTENTION[backward] * matmul_rate(op.dtype, device, False))
    elif "cudnn" in op.name:
        small = head_size(op) < 128
        rate = device.peak(op.dtype) * of_generation(CUDNN_SHARE, device)[backward]
        rate *= CUDNN_SMALL_HEADS[backward] if small else 1.0
    else:
        rate = min(FLASH_RATE[backward] * cycles, FLASH_SHARE[backward] * matmul_rate(op.dtype, device, False))
    return rate * drop_speed(op) * attention_speed(op, generation, device.units)


def drop_speed(op: Op) -> float:
    """Speed, up to 1, that dropout leaves a fused attention op."""
    if op.layout != "dropout":
        return 1.0
    return (CUDNN_DROPOUT if "cudnn" in op.name else DROPOUT)["backward" in op.name]


def attention_length(op: Op) -> int:
    """Positions of a fused attention op's keys; 0 for another op. Of packed documents, all of them together."""
    if "attention" not in op.name and "attn" not in op.name:
        return 0
    return max((max(shape[1:-1]) if len(shape) == 4 else shape[0] for shape in op.shapes if len(shape) in (3, 4)),
               default=0)


def head_size(op: Op) -> int:
    """Features of an attention op's heads."""
    return next((shape[-1] for shape in op.shapes if len(shape) in (3, 4)), 0)


def attention_speed(op: Op, generation: int, units: int) -> float:
    """Speed, up to 1, that an attention op's length and its blocks of queries allow on so many multiprocessors.

    generation: the major compute capability.
    """
    length = attention_length(op)
    half = CAUSAL_HALF.get(generation, CAUSAL_HALF[8]) if _skips_pairs(op) else FULL_HALF
    shape = next((shape for shape in op.shapes if len(shape) == 4), None)
    waves = math.prod(shape[:2]) * -(-shape[2] // QUERIES) / units if shape is not None and units else 1.0
    return length / (length + half) * min(waves / math.ceil(waves), 1.0)


def _skips_pairs(op: Op) -> bool:
    """Whether an attention op leaves out pairs of positions, as a causal one does."""
    shape = next((shape for shape in op.shapes if len(shape) == 4), None)
    if shape is None:
        return True
    pairs = math.prod(shape[:2]) * shape[2] * attention_length(op)
    return op.flops < 0.75 * 4 * pairs * shape[3] * (2.5 if "backward" in op.name else 1)
