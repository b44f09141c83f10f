"""Memory that CUDA kernels ask the allocator for and give back while they run, which no op's result shows.

Formulas are read from aten/src/ATen/native of torch 2.11 to 2.13 and name their file (without a folder: `cuda/`). They
were not measured one by one, but in the peaks of whole steps (`benchmarks/plan_vs_gpu.py`).

Left out is what moves the peaks of training steps by less than 0.2 %: the buffers of sorting and of reductions other
than sums of columns, what attention's forward kernels take, the rounding of its blocks; and what is a library's own, as
of cuDNN's convolutions. Kernels that cast their operands cast as they read, which takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.simulated_device import simulated_device

Arguments = Sequence[Any]
Formula = Callable[[Arguments, Any], int]
"""Bytes by the op's arguments and its result."""

FLOAT_BYTES, INDEX_BYTES = 4, 8
"""Bytes of a number in fp32, and of an index."""
FEW_INDICES = 3072
"""Up to so many indices, an embedding's gradient takes no sorting."""


def scratch(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that `func(*args, **kwargs)`, which gave `result`, takes on CUDA beyond its result, at its worst moment.

    func: an OpOverload. Reads shapes, dtypes and strides alone.
    """
    name = getattr(func, "_name", "")
    formula = FORMULAS.get(name) or FORMULAS.get(name.partition(".")[0])
    return 0 if formula is None else int(formula(args, result))


def _whole(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    return int(tensor.numel()) * (dtype or tensor.dtype).itemsize


def _copied(tensor: Any) -> int:
    """Bytes of a copy in one piece, where a tensor does not lie so already."""
    return 0 if not isinstance(tensor, Tensor) or tensor.is_contiguous() else _whole(tensor)


def _in_one_piece(which: Sequence[int], args: Arguments, result: Any) -> int:
    """Copies of those arguments that do not lie in one piece."""
    return sum(_copied(args[index]) for index in which)


def _product(args: Arguments, result: Any) -> int:
    """Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas: a matrix neither of whose dimensions is
    dense is copied."""
    factors = args[1:3] if len(args) > 2 and isinstance(args[2], Tensor) else args[:2]
    return sum(_whole(factor) for factor in factors if not _for_cublas(factor))


def _for_cublas(matrix: Tensor) -> bool:
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return bool((right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows)))


def _chosen(args: Arguments, result: Any) -> int:
    """TensorCompare.cpp, where: an operand that is not in the result's format is cast."""
    operands = [a for a in args[1:] if isinstance(a, Tensor) and a.dim()]
    return sum(_whole(operand, result.dtype) for operand in operands if operand.dtype != result.dtype)


def _logsumexp(args: Arguments, result: Any) -> int:
    """ReduceOps.cpp, logsumexp_out_impl: the exponentials, and each row's maximum."""
    return _whole(args[0], result.dtype) + _whole(result)


def _safe_softmax(args: Arguments, result: Any) -> int:
    """transformers/attention.cpp: which scores are minus infinity, which rows are so throughout, and two scalars."""
    count = int(args[0].numel())
    rows = count // max(int(args[0].shape[args[1]]), 1)
    return max(count + rows + 2 * int(result.element_size()), _copied(args[0]))


def _column_sums(args: Arguments, result: Any) -> int:
    """Reduce.cuh, setReduceConfig and global_memory_size: in a bias's gradient, where few columns are each the sum of
    many rows, blocks of 32 x 4 threads with 4 columns each share them, and leave what they have in a buffer, which has
    room for all of a block's threads: some 100 MiB on a large GPU."""
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


def _embedding_backward(args: Arguments, result: Any) -> int:
    """EmbeddingBackwardKernel.cu: many indices are sorted, and each ten rows of one index summed in fp32."""
    gradient, indices, rows = args[0], args[1], int(args[2])
    count = int(indices.numel())
    if count <= FEW_INDICES:
        return _copied(gradient)
    partials = count // 10 + min(count, rows)
    return int(partials * gradient.shape[-1] * FLOAT_BYTES + 5 * count * INDEX_BYTES + _copied(gradient))


def _attention_backward(grouped: bool, args: Arguments, result: Any) -> int:
    """Gradients of the queries in fp32 and a sum for each query's row; and where heads share keys that the kernel takes
    `grouped`, the keys' and values' gradients for every head (flash_attn/flash_api.cpp, mha_bwd; attention_backward.cu;
    cuDNN's frontend). Queries are (B, H, T, D), or (T, H, D) of packed documents."""
    gradient, query, key = args[:3]
    gathered = int(query.numel() + query.shape[:-1].numel()) * FLOAT_BYTES
    heads = -2 if query.dim() == 3 else 1
    shared = query.shape[heads] // key.shape[heads] if grouped else 1
    expanded = 2 * _whole(key) * shared if shared > 1 else 0
    return gathered + expanded + _copied(gradient if query.dim() == 3 else gradient.transpose(1, 2))


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax", "aten::native_layer_norm", "aten::_fused_rms_norm"),
                    partial(_in_one_piece, (0,))),
    **dict.fromkeys(("aten::_softmax_backward_data", "aten::_log_softmax_backward_data",
                     "aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward"),
                    partial(_in_one_piece, (0, 1))),
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), _product),
    **dict.fromkeys(("aten::_scaled_dot_product_flash_attention_backward", "torch_attn::_varlen_attn_backward"),
                    partial(_attention_backward, True)),
    **dict.fromkeys(("aten::_scaled_dot_product_efficient_attention_backward",
                     "aten::_scaled_dot_product_cudnn_attention_backward"), partial(_attention_backward, False)),
    "aten::sum": _column_sums,
    "aten::where.self": _chosen,
    "aten::logsumexp": _logsumexp,
    "aten::_safe_softmax": _safe_softmax,
    "aten::embedding_dense_backward": _embedding_backward,
}
"""By the op's name in the dispatcher, with its overload where only that one is meant."""
