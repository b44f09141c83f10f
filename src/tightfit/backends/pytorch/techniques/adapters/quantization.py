"""Weights in 4 or 8 bits with scales by blocks: how they are made, and how they become weights again.

4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314): 16 values that a normal distribution takes equally often,
times a scale for each 64 weights; the scales less their mean in 8 bits, with an fp32 scale for each 256. 8 bits: the
integers from -127 to 127, times an fp32 scale for each 256 weights.

Each of the four is one op, so that a trace sees its bytes and a compiler leaves it whole. On CUDA dequantization is
compiled to one kernel where Triton is there; elsewhere it goes through the weights in pieces of `PIECE_SIZE`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

BLOCK = {"nf4": 64, "int8": 256}
"""Weights that share a scale."""
SCALES = 256
"""Scales of nf4 that share one of their own."""
PIECE_SIZE = 1 << 20
"""Weights that are worked on at a time, where that is not compiled."""
OFFSET = (1 - 1 / 30 + 1 - 1 / 32) / 2
"""The largest probability whose quantile is a value of nf4, as the paper's code has it."""


@functools.cache
def nf4_values() -> tuple[float, ...]:
    """The 16 values of nf4, ascending from -1 to 1: 7 below zero, zero, and 8 above."""
    quantile = NormalDist().inv_cdf
    above = [quantile(OFFSET + (0.5 - OFFSET) * step / 8) for step in range(8)]
    below = [-quantile(OFFSET + (0.5 - OFFSET) * step / 7) for step in range(7)]
    return tuple(value / max(above) for value in sorted([*below, 0.0, *above]))


def _pieces(count: int, block: int) -> Iterator[slice]:
    """Slices of so many weights, each of whole blocks and no more than `PIECE_SIZE`."""
    step = max(PIECE_SIZE // block, 1) * block
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    """Weights as (blocks, block) in fp32, with zeros behind the last."""
    missing = -flat.numel() % block
    return torch.nn.functional.pad(flat.float(), (0, missing)).view(-1, block)


def _quantize_nf4(weight: Tensor) -> list[Tensor]:
    """Codes, two a byte, uint8 (n / 2,); scales' codes, int8 (n / 64,); their scales, fp32; the scales' mean, fp32
    (1,). n: the weights, made whole blocks."""
    flat, table = weight.reshape(-1), torch.tensor(nf4_values(), device=weight.device)
    borders, codes, scales = (table[1:] + table[:-1]) / 2, [], []
    for piece in _pieces(flat.numel(), BLOCK["nf4"]):
        rows = _in_blocks(flat[piece], BLOCK["nf4"])
        scale = rows.abs().amax(1)
        found = torch.bucketize(rows / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None], borders,
                                out_int32=True).to(torch.uint8).view(-1, 2)
        codes.append(found[:, 0] << 4 | found[:, 1])
        scales.append(scale)
    every = torch.cat(scales)
    mean = every.mean().view(1)
    grouped = _in_blocks(every - mean, SCALES)
    outer = grouped.abs().amax(1)
    inner = (grouped / outer.clamp(min=torch.finfo(torch.float32).tiny)[:, None] * 127).round().to(torch.int8)
    return [torch.cat(codes), inner.view(-1)[: every.numel()].clone(), outer, mean]


def _fake_quantize_nf4(weight: Tensor) -> list[Tensor]:
    blocks = _blocks(weight.numel(), BLOCK["nf4"])
    return [weight.new_empty(blocks * 32, dtype=torch.uint8), weight.new_empty(blocks, dtype=torch.int8),
            weight.new_empty(_blocks(blocks, SCALES), dtype=torch.float32), weight.new_empty(1, dtype=torch.float32)]


def _quantize_int8(weight: Tensor) -> list[Tensor]:
    """Codes, int8 (n,), and scales, fp32 (n / 256,). n: the weights, made whole blocks."""
    flat, codes, scales = weight.reshape(-1), [], []
    for piece in _pieces(flat.numel(), BLOCK["int8"]):
        rows = _in_blocks(flat[piece], BLOCK["int8"])
        scale = rows.abs().amax(1) / 127
        codes.append((rows / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8))
        scales.append(scale)
    return [torch.cat(codes).view(-1), torch.cat(scales)]


def _fake_quantize_int8(weight: Tensor) -> list[Tensor]:
    blocks = _blocks(weight.numel(), BLOCK["int8"])
    return [weight.new_empty(blocks * BLOCK["int8"], dtype=torch.int8), weight.new_empty(blocks, dtype=torch.float32)]


def _nf4_weights(
    codes: Tensor, inner: Tensor, outer: Tensor, mean: Tensor, table: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weights of whole blocks, flat."""
    scales = inner.float() * (outer / 127)[:, None].expand(-1, SCALES).reshape(-1)[: inner.numel()] + mean
    each = torch.stack((codes >> 4, codes & 15), -1).view(-1).int()
    values = torch.index_select(table, 0, each).view(-1, BLOCK["nf4"])
    return values.mul_(scales[:, None]).to(dtype).view(-1)


def _int8_weights(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of whole blocks, flat."""
    return (codes.view(-1, BLOCK["int8"]) * scales[:, None]).to(dtype).view(-1)


@functools.cache
def _compiled(weights: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One kernel, for weights of any number."""
    return torch.compile(weights, dynamic=True)


def _is_compiled(codes: Tensor) -> bool:
    return codes.is_cuda and importlib.util.find_spec("triton") is not None


def _dequantize_nf4(
    codes: Tensor, inner: Tensor, outer: Tensor, mean: Tensor, shape: Sequence[int], dtype: torch.dtype, again: bool
) -> Tensor:
    """The weight again. again: whether a backward pass asks, whose call no compiler may take for the forward's."""
    table, count, block = torch.tensor(nf4_values(), device=codes.device), math.prod(shape), BLOCK["nf4"]
    if _is_compiled(codes):
        return _compiled(_nf4_weights)(codes, inner, outer, mean, table, dtype)[:count].view(shape)
    return _in_pieces(lambda first, last: _nf4_weights(  # a piece begins with a scale's own scale
        codes[first * block // 2 : last * block // 2], inner[first:last],
        outer[first // SCALES : _blocks(last, SCALES)], mean, table, dtype,
    ), codes.new_empty(count, dtype=dtype), block).view(shape)  # fmt: skip


def _dequantize_int8(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, again: bool) -> Tensor:
    """The weight again; `again` as of nf4."""
    count, block = math.prod(shape), BLOCK["int8"]
    if _is_compiled(codes):
        return _compiled(_int8_weights)(codes, scales, dtype)[:count].view(shape)
    return _in_pieces(lambda first, last: _int8_weights(
        codes[first * block : last * block], scales[first:last], dtype,
    ), codes.new_empty(count, dtype=dtype), block).view(shape)  # fmt: skip


def _in_pieces(weights: Callable[[int, int], Tensor], result: Tensor, block: int) -> Tensor:
    """`result`, filled piece by piece. weights: makes those from one block up to another."""
    for piece in _pieces(result.numel(), block):
        made = weights(piece.start // block, _blocks(piece.stop, block))
        result[piece] = made[: piece.stop - piece.start]
    return result


def _fake_dequantize(codes: Tensor, *rest: Any) -> Tensor:
    shape, dtype, _ = rest[-3:]
    return codes.new_empty(shape, dtype=dtype)


def _op(work: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Work as one op of the dispatcher, named as its function. fake: the shapes that it makes."""
    op: Any = torch.library.custom_op(f"tightfit::{work.__name__.lstrip('_')}", work, mutates_args=())
    op.register_fake(fake)
    made: Callable[..., Any] = op
    return made


QUANTIZE = {"nf4": _op(_quantize_nf4, _fake_quantize_nf4), "int8": _op(_quantize_int8, _fake_quantize_int8)}
"""Makers of a weight's parts, by kind."""
DEQUANTIZE = {"nf4": _op(_dequantize_nf4, _fake_dequantize), "int8": _op(_dequantize_int8, _fake_dequantize)}
"""Makers of the weight again."""


class QuantizedProduct(torch.autograd.Function):
    """values (..., in) times a quantized weight: dequantized for the forward pass, and again for the backward pass,
    which gives the values' gradient alone. Between the two nothing is kept but the codes."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, bias: Tensor | None, kind: str, shape: Sequence[int], transposed: bool, *parts: Tensor
    ) -> Tensor:  # fmt: skip
        """shape: of the weight, (out, in), or `transposed` (in, out). parts: as `QUANTIZE` made them."""
        ctx.save_for_backward(*parts)
        ctx.facts = kind, shape, transposed
        weight: Tensor = DEQUANTIZE[kind](*parts, shape, values.dtype, False)
        return torch.nn.functional.linear(values, weight.t() if transposed else weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kind, shape, transposed = ctx.facts
        parts = ctx.saved_tensors  # once: checkpointing unpacks each but once
        weight: Tensor = DEQUANTIZE[kind](*parts, shape, gradient.dtype, True)
        found = gradient @ (weight.t() if transposed else weight)
        return (found, None, None, None, None, *(None for _ in parts))
