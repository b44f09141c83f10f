"""Memory that CUDA's attention kernels take while they run, from the shapes of their arguments.

Read from aten/src/ATen/native of torch 2.11 to 2.13: transformers/cuda/flash_attn/flash_api.cpp, attention_backward.cu,
mem_eff_attention/kernel_{forward,backward}.h and kernels/cutlass{F,B}.h, and from cuDNN's frontend 1.18 to 1.22. Not
yet measured on a GPU.

Shapes are (B, H, T, D) unless a formula says otherwise. What cuDNN's own plans take on top is not published. Each
formula takes the device and the op's arguments and result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.backends.pytorch.formats import HALF
from tightfit.devices import Device

Arguments = Sequence[Any]

FLOAT = 4
"""Bytes of an fp32 number."""

LITTLE_SHARED = ((7, 0), (7, 5), (8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities on which a block of threads has 99 KiB of shared memory or less. The wide blocks of the
efficient kernel's backward pass need 118.5 KiB (fp32) to 158.5 KiB (fp16 with dropout), as torch 2.11 is built."""


def copied(tensor: Any) -> int:
    """Bytes of a copy in one piece, where a tensor does not lie so already."""
    if not isinstance(tensor, Tensor) or tensor.is_contiguous():
        return 0
    return tensor.numel() * tensor.element_size()


def at(args: Arguments, index: int, default: Any = None) -> Any:
    """An argument that may be left out."""
    return args[index] if len(args) > index else default


def flash_forward(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """set_params_splitkv: partial outputs and sums, in fp32, where the keys are split to keep a large GPU busy."""
    query, key = args[:2]
    batch, heads, length, size = query.shape
    if at(args, 3, 0.0) or device is None or not device.units:
        return 0
    if length == 1 and heads > key.shape[1]:  # one query: heads that share keys take the place of positions
        length, heads = heads // key.shape[1], key.shape[1]
    width = 256 if size <= 64 else 128 if size <= 128 else 64
    splits = _splits(batch * heads * _pieces(length, 64), 2 * device.units, _pieces(key.shape[2], width))
    return int(splits * batch * heads * length * (_head(size) + 1) * FLOAT) if splits > 1 else 0


def _splits(blocks: int, units: int, pieces: int) -> int:
    """num_splits_heuristic: the fewest splits that come within 15 % of the best occupancy."""
    if blocks >= 0.8 * units:
        return 1
    most = min(128, units, pieces)
    usable = [n for n in range(1, most + 1) if n == 1 or _pieces(pieces, n) != _pieces(pieces, n - 1)]
    waves = {n: blocks * n / units for n in usable}
    occupancy = {n: wave / max(math.ceil(wave), 1) for n, wave in waves.items()}
    best = max(occupancy.values())
    return next(n for n in usable if occupancy[n] >= 0.85 * best)


def flash_backward(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """mha_bwd: gradients of the queries in fp32, a row sum for each query, and, where heads share keys, the keys' and
    values' gradients for every head. Gradient and output are copied where they do not lie in one piece."""
    gradient, query, key, _, out = args[:5]
    batch, heads, length, size = query.shape
    rows = batch * _up(length, 128) * heads
    grouped = _every_head(heads, key.shape[1], key)
    copies = copied(gradient.transpose(1, 2)) + copied(out.transpose(1, 2))
    return int(rows * (_head(size) * _parts(device, batch * heads) + 1) * FLOAT + grouped + copies)


def varlen_backward(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """mha_varlen_bwd, of (T, H, D): as `flash_backward`, with 128 rows more for each document."""
    gradient, query, key, _, out, _, starts = args[:7]  # starts: (documents + 1,)
    tokens, heads, size = query.shape
    documents = starts.shape[0] - 1
    rows = (tokens + 128 * documents) * heads
    grouped = _every_head(heads, key.shape[1], key)
    parts = _parts(device, max(documents, 1) * heads)
    return int(rows * (_head(size) * parts + 1) * FLOAT + grouped + copied(gradient) + copied(out))


def _parts(device: Device | None, blocks: int) -> int:
    """Deterministic sums are taken in parts that are added in order."""
    exact = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return _pieces(device.units, blocks) if exact and device is not None and device.units else 1


def _every_head(heads: int, key_heads: int, key: Tensor) -> int:
    return 0 if heads == key_heads else 2 * key.numel() * heads // key_heads * key.element_size()


def efficient_forward(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """kNeedsOutputAccumulatorBuffer: half precision gathers the output of wide heads in fp32."""
    query, value = args[0], args[2]
    wide = max(query.shape[-1], value.shape[-1]) > 128 and query.dtype in HALF
    return int(query.shape[:3].numel() * value.shape[-1] * FLOAT) if wide else 0


class Blocks(NamedTuple):
    """Queries and keys in a block of the efficient kernel's backward pass; whether the gradients of keys and values
    stay in registers; whether the kernel itself sums each row of gradient times output."""

    queries: int
    keys: int
    in_registers: bool
    sums: bool


def efficient_blocks(capability: tuple[int, int], dtype: torch.dtype, size: int, dropout: float) -> Blocks:
    """The kernel that dispatch_cutlassB takes: the first whose heads are wide enough and whose shared memory fits.

    size: features of the widest head.
    """
    roomy = capability not in LITTLE_SHARED
    if dtype not in HALF:
        return Blocks(128 if size > 64 and roomy and capability >= (8, 0) else 64, 64, False, False)
    if size <= 64:
        return Blocks(64, 64, True, True)
    if size > 128:
        return Blocks(128, 64, False, capability[0] != 7 or capability == (7, 5))
    if capability < (8, 0):
        return Blocks(128, 64, True, True)
    if size <= 96 and capability in ((8, 6), (8, 9)) and not dropout:
        return Blocks(128, 64, True, True)
    return Blocks(128, 128, True, True) if roomy else Blocks(64, 64, False, True)


def efficient_backward(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """workspace_size: gradients of the queries in fp32, block by block; those of keys and values where they do not
    stay in registers; and a row sum for each query, which some kernels want made from a whole product beforehand."""
    gradient, query, key, value = args[:4]
    batch, heads, length, size = query.shape
    width, keys = value.shape[-1], key.shape[2]
    capability = (8, 0) if device is None or device.capability is None else device.capability
    blocks = efficient_blocks(capability, query.dtype, max(size, width), at(args, 9, 0.0))
    gathered = _pieces(length, blocks.queries) * _pieces(size, blocks.keys) * (blocks.queries * blocks.keys + 4)
    if query.dtype in HALF and not blocks.in_registers:
        splits = _pieces(keys, blocks.keys)
        if batch * heads >= 256 and keys <= 2 * blocks.keys:
            splits = 1
        splits = max(min(splits, 200 // (batch * heads)), 1)
        gathered += splits * blocks.keys * (_up(size, blocks.queries) + _up(width, blocks.queries))
    workspace = batch * heads * _up(gathered, 4) * FLOAT
    sums = batch * heads * length * FLOAT
    product = 0
    if not blocks.sums:
        copies = 3 if query.dtype in HALF else 1  # in half precision both factors are cast first
        product = copies * gradient.numel() * FLOAT + sums
    return int(copied(gradient.transpose(1, 2)) + sums + max(workspace, product))


def cudnn_backward(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """get_fe_workspace_size_node: gradients of the queries and a row sum for each, in fp32. A gradient whose last
    dimension is not dense is copied."""
    gradient, query = args[:2]
    batch, heads, length, size = query.shape
    dense = gradient.stride(-1) == 1
    return int(batch * heads * length * (size + 1) * FLOAT + (0 if dense else gradient.nbytes))


def _head(size: int) -> int:
    """Features of a head as the flash kernels round them."""
    return _up(size, 32 if size <= 128 else 64)


def _up(number: int, unit: int) -> int:
    return _pieces(number, unit) * unit


def _pieces(number: int, size: int) -> int:
    return -(-int(number) // int(size))
