"""Memory that CUDA kernels ask the allocator for and give back while they run, which no op's result shows.

Formulas are read from aten/src/ATen/native of torch 2.11 to 2.13 and name their file. They were not measured one by
one, but in the peaks of whole steps (`benchmarks/plan_vs_gpu.py`).

Counted is what may move the peak of a step: sums of columns, by 1.2 % for a classifier, a softmax that looks for rows
without any score, and the gradients of queries of long sequences. The rest moves none by 0.01 %: sorting, copies of
what does not lie in one piece or in another format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tightfit.backends.pytorch.simulated_device import simulated_device

Arguments = Sequence[Any]
Formula = Callable[[Arguments, Any], int]
"""Bytes by the op's arguments and its result."""

FLOAT_BYTES = 4
"""Bytes of a number in fp32."""


def scratch(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that `func(*args, **kwargs)`, which gave `result`, takes on CUDA beyond its result, at its worst moment.

    func: an OpOverload. Reads shapes, dtypes and strides alone.
    """
    formula = FORMULAS.get(getattr(func, "_name", "").partition(".")[0])
    return 0 if formula is None else int(formula(args, result))


def _column_sums(args: Arguments, result: Any) -> int:
    """cuda/Reduce.cuh, setReduceConfig and global_memory_size: in a bias's gradient, where few columns are each the sum
    of many rows, blocks of 32 x 4 threads with 4 columns each share them, and leave what they have in a buffer, which
    has room for all of a block's threads: some 100 MiB on a large GPU."""
    source, over = args[0], (args[1] if len(args) > 1 else None) or ()
    device, columns = simulated_device(source), int(result.numel())
    leading = 0 < len(over) < source.dim() and sorted(dim % source.dim() for dim in over) == list(range(len(over)))
    if device is None or not leading or not source.is_contiguous() or columns < 128:
        return 0
    rows, blocks = int(source.numel()) // columns, -(-columns // 128)
    wanted = device.units * device.resident_threads // 128
    if rows < 1024 or blocks > wanted:
        return 0
    shared = max(min(-(-wanted // blocks), -(-rows // 64)), -(-rows // 1024))
    return FLOAT_BYTES * (columns * 128 * shared + blocks)


def _safe_softmax(args: Arguments, result: Any) -> int:
    """transformers/attention.cpp: which scores are minus infinity, which rows are so throughout, and two scalars."""
    count = args[0].numel()
    return int(count + count // max(args[0].shape[args[1]], 1) + 2 * result.element_size())


def _attention_backward(grouped: bool, args: Arguments, result: Any) -> int:
    """Gradients of the queries in fp32 and a sum for each query's row; and where heads share keys that the kernel takes
    `grouped`, the keys' and values' gradients for every head (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd;
    attention_backward.cu; cuDNN's frontend). Queries are (B, H, T, D), or (T, H, D) of packed documents."""
    query, key = args[1:3]
    heads = -2 if query.dim() == 3 else 1
    shared = query.shape[heads] // key.shape[heads] if grouped else 1
    expanded = 2 * key.nbytes * shared if shared > 1 else 0
    return int((query.numel() + query.shape[:-1].numel()) * FLOAT_BYTES + expanded)


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("aten::_scaled_dot_product_flash_attention_backward", "torch_attn::_varlen_attn_backward"),
                    partial(_attention_backward, True)),
    **dict.fromkeys(("aten::_scaled_dot_product_efficient_attention_backward",
                     "aten::_scaled_dot_product_cudnn_attention_backward"), partial(_attention_backward, False)),
    "aten::sum": _column_sums,
    "aten::_safe_softmax": _safe_softmax,
}
"""By the op's name in the dispatcher, whatever its overload."""
