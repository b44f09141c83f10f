"""Memory that CUDA kernels ask the allocator for and give back while they run, which no op's result shows.

Formulas are read from aten/src/ATen/native of torch 2.11 to 2.13 and name their file (without a folder: `cuda/`). Not
yet measured on a GPU: `benchmarks/cuda_op_tables.py` does that. Kernels that compute in another format than their
operands' cast as they read, which takes nothing, and multi-tensor kernels keep their lists in their arguments.

Left out, because their sizes are a library's own: cuDNN's convolutions, and its attention beyond what its frontend
asks for; and what is small: temporary storage of sums over one dimension and of top-k, group and batch normalization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.formats import HALF
from tightfit.backends.pytorch.simulate.cuda import attention_scratch as attention
from tightfit.backends.pytorch.simulate.cuda.attention_scratch import FLOAT, Arguments, at, copied
from tightfit.backends.pytorch.simulate.cuda.reductions import VECTOR, reduction_buffer
from tightfit.backends.pytorch.simulated_device import simulated_device
from tightfit.devices import Device

Formula = Callable[[Device | None, Arguments, dict[str, Any], Any], int]

INDEX = 8
"""Bytes of an index, a 64-bit integer."""
FEW_INDICES = 3072
"""Up to so many indices, an embedding's gradient takes no sorting."""
LONG_COLUMN = 65536
"""From more rows than this on, a normalization's weight gradient is summed in two steps."""


def scratch(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that `func(*args, **kwargs)`, which gave `result`, takes on CUDA beyond its result, at its worst moment.

    func: an OpOverload; the tensors are those of a `target.PlanningMode`, whose device says how many multiprocessors
    work together. Without one, what depends on that counts for nothing. Reads shapes, dtypes and strides alone.
    """
    name = getattr(func, "_name", "")
    formula = FORMULAS.get(name) or FORMULAS.get(name.partition(".")[0])
    return 0 if formula is None else int(formula(_device_of(args), args, kwargs, result))


def _device_of(args: Arguments) -> Device | None:
    first = args[0] if args else None
    first = first[0] if isinstance(first, list | tuple) and first else first
    return simulated_device(first)


# Copies in one piece


def _in_one_piece(which: Sequence[int], device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """Copies of those arguments that do not lie in one piece."""
    return sum(copied(at(args, index)) for index in which)


def _product(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas: a matrix neither of whose dimensions is
    dense is copied."""
    factors = args[1:3] if isinstance(at(args, 2), Tensor) else args[:2]
    return sum(_whole(factor) for factor in factors if not _for_cublas(factor))


def _for_cublas(matrix: Tensor) -> bool:
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    if (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows)):
        return True
    return matrix.is_contiguous() and down != 0 and right != 0


def _chosen(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """TensorCompare.cpp, where: an operand that is not in the result's format is cast."""
    operands = [a for a in args[1:] if isinstance(a, Tensor) and a.dim()]
    return sum(_whole(operand, result.dtype) for operand in operands if operand.dtype != result.dtype)


def _whole(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    return int(tensor.numel()) * (dtype or tensor.dtype).itemsize


# Reductions


def _reduction(
    device: Device | None, args: Arguments, kwargs: Any, result: Any, *, accumulator: int = FLOAT, over: int = 1,
    casts: bool = True,
) -> int:  # fmt: skip
    """ReduceOpsUtils.h, make_reduction: the input in the result's format, unless half precision is summed to fp32; and
    Reduce.cuh's buffer.

    accumulator: bytes of a partial result; 0 for those of an element. over: which argument names the dimensions.
    """
    source = args[0]
    made = result[0] if isinstance(result, list | tuple) else result
    cast = casts and source.dtype != made.dtype and not (source.dtype in HALF and made.dtype == torch.float32)
    dims = at(args, over)
    dims = [dims] if type(dims) is int else dims
    copies = _whole(source, made.dtype) if cast else 0
    if device is None:
        return copies
    itemsize = max(made.element_size(), FLOAT) if accumulator == FLOAT else accumulator or source.element_size()
    return copies + reduction_buffer(
        source.shape, source.stride(), source.element_size(), dims, device, offset=int(source.storage_offset()),
        accumulator=itemsize, vector=2 * VECTOR if source.dtype in HALF and accumulator == FLOAT else VECTOR,
    )


def _logsumexp(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """ReduceOps.cpp, logsumexp_out_impl: the exponentials, and each row's maximum."""
    return _whole(args[0], result.dtype) + _whole(result)


def _safe_softmax(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """transformers/attention.cpp: which scores are minus infinity, which rows are so throughout, and two scalars."""
    scores, count = args[0], int(args[0].numel())
    rows = count // max(int(scores.shape[at(args, 1, -1)]), 1)
    return max(count + rows + 2 * int(result.element_size()), copied(scores))


def _norm_backward(wanted: int, device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """layer_norm_kernel.cu: gradient and input in one piece, and for a long column of short rows partial sums of the
    weight's and the bias's gradients. wanted: which argument says what is asked for, the input's gradient first."""
    source, shape, sums = args[1], [int(n) for n in args[2]], sum(map(bool, args[wanted][1:]))
    copies = copied(args[0]) + copied(source)
    size = math.prod(shape)
    rows = int(source.numel()) // max(size, 1)
    if device is None or not sums or rows <= LONG_COLUMN or size // 32 >= device.units // 2:
        return copies
    blocks = min(LONG_COLUMN // 2 // -(-size // 32), -(-rows // 32))
    itemsize, width = int(source.element_size()), shape[-1]
    summed = reduction_buffer((blocks, width), (width, 1), itemsize, [0], device)
    return copies + sums * blocks * width * itemsize + summed


def _foreach_norm(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """ForeachReduceOp.cu: one number for each chunk of 65536 elements, as many for each tensor as the longest needs."""
    tensors = args[0]
    return len(tensors) * -(-max((t.numel() for t in tensors), default=0) // 65536) * FLOAT


# Sorting


def _embedding_backward(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """Embedding.cu and EmbeddingBackwardKernel.cu: many indices are sorted, and each ten rows of one index summed in
    fp32; few and long segments are summed into the gradient itself, in half precision into one in fp32."""
    gradient, indices, rows = args[0], args[1], int(args[2])
    count, width, itemsize = int(indices.numel()), int(gradient.shape[-1]), int(indices.element_size())
    copies = copied(gradient) + copied(indices)
    if count <= FEW_INDICES and not at(args, 4, False):
        return copies
    segments = min(count, rows)
    partials = count // 10 + segments
    sorting = (3 * count + 2 * segments + partials) * itemsize + copies
    block = min(-(-width // 32) * 32, 1024)
    blocks = -(-segments * (-(-width // 32) * 32) // block)
    busy = 4 * (device.units if device is not None else 0)
    if blocks < busy and partials > 4 * blocks and not torch.are_deterministic_algorithms_enabled():
        return sorting + partials * itemsize + (rows * width * FLOAT if gradient.dtype in HALF else 0)
    return sorting + partials * width * max(FLOAT, int(gradient.element_size()))


def _index_put(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """Indexing.cu, index_put_with_sort_kernel: values are added in the order of their places, sorted: four lists of
    indices, the sort's own two, and the values in one piece. Without accumulation nothing is sorted."""
    target, indices, values = args[0], [i for i in args[1] if i is not None], args[2]
    exact = torch.are_deterministic_algorithms_enabled() and int(values.numel()) > 1
    if not (at(args, 3, False) or exact) or not indices or indices[0].dtype == torch.bool:
        return 0
    places = math.prod(torch.broadcast_shapes(*(i.shape for i in indices)))
    whole = places * math.prod(s for n, s in enumerate(target.shape) if at(args[1], n) is None)
    spread = 0 if values.numel() == whole and values.is_contiguous() else whole * int(values.element_size())
    return int(6 * places * INDEX + spread + copied(target))


def _sort(device: Device | None, args: Arguments, kwargs: Any, result: Any) -> int:
    """Sort.cpp and SortStable.cu: up to 4096 in place; more by cub, with a copy of keys and indices, and the indices
    to begin with (for a few rows at once: which row each belongs to, twice, and the keys once more)."""
    keys = args[0]
    along = next((a for a in args[1:] if type(a) is int), kwargs.get("dim", -1))
    length = int(keys.shape[along]) if keys.dim() else 1
    if length <= 4096:
        return length * INDEX
    key, rows = int(keys.element_size()), int(keys.numel()) // length
    if rows == 1 or length >= 1_000_000:
        return length * (INDEX + key + INDEX)
    extra = INDEX + key if rows < 128 else 0
    return rows * length * (INDEX + extra + key + INDEX)


IN_ONE_PIECE: dict[str, tuple[int, ...]] = {
    "_softmax": (0,), "_log_softmax": (0,), "_softmax_backward_data": (0, 1), "_log_softmax_backward_data": (0, 1),
    "native_layer_norm": (0,), "_fused_rms_norm": (0,), "nll_loss_forward": (0, 1), "nll_loss_backward": (2,),
    "cumsum": (0,), "cumprod": (0,),
}  # fmt: skip
"""Ops that copy what does not lie in one piece: SoftMax.cu, layer_norm_kernel.cu, NLLLoss.cu, ScanUtils.cuh."""

FORMULAS: dict[str, Formula] = {
    **{f"aten::{name}": partial(_in_one_piece, which) for name, which in IN_ONE_PIECE.items()},
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), _product),
    **dict.fromkeys(("aten::sum", "aten::mean", "aten::prod", "aten::nansum"), _reduction),
    **dict.fromkeys(("aten::amax", "aten::amin"), partial(_reduction, accumulator=0)),
    **dict.fromkeys(("aten::argmax", "aten::argmin", "aten::max.dim", "aten::min.dim"),
                    partial(_reduction, accumulator=16, casts=False)),
    **dict.fromkeys(("aten::var.correction", "aten::std.correction", "aten::var_mean.correction"),
                    partial(_reduction, accumulator=16)),
    **dict.fromkeys(("aten::index_put", "aten::index_put_", "aten::_unsafe_index_put"), _index_put),
    "aten::linalg_vector_norm": partial(_reduction, over=2),
    "aten::where.self": _chosen,
    "aten::logsumexp": _logsumexp,
    "aten::_safe_softmax": _safe_softmax,
    "aten::native_layer_norm_backward": partial(_norm_backward, 7),
    "aten::_fused_rms_norm_backward": partial(_norm_backward, 5),
    "aten::_foreach_norm": _foreach_norm,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::sort": _sort,
    "aten::_scaled_dot_product_flash_attention": attention.flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "torch_attn::_varlen_attn_backward": attention.varlen_backward,
    "aten::_scaled_dot_product_efficient_attention": attention.efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": attention.cudnn_backward,
}
"""By the op's name in the dispatcher, with its overload where only that one is meant."""
