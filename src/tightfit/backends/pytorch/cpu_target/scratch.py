"""Memory that the CPU's kernels ask for and give back while they run, from the shapes of their arguments.

Counted is what torch's CPU allocator hands out beyond the results, at the worst moment inside one op. Formulas are
read from torch 2.13's aten/src/ATen/native; each names its file. What oneDNN asks for has no formula: see
`products`. MKL's own buffers do not come from torch's allocator. A Python number that meets a tensor takes 12 bytes
for a moment; those are left out, and so are tables of a few bytes a channel (group normalization, interpolation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.cpu_target.attention_scratch import attention, attention_backward
from tightfit.backends.pytorch.cpu_target.products import convolution, product
from tightfit.backends.pytorch.formats import HALF

Arguments = tuple[Any, ...]
Formula = Callable[[Arguments, dict[str, Any], Any], int]


def scratch(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that `func(*args, **kwargs)`, which gave `result`, takes on the CPU beyond its result while it runs.

    func: an OpOverload. Reads shapes, dtypes and strides alone, and torch.get_num_threads().
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return 0
    name = schema.name.rpartition("::")[2]
    formula = FORMULAS.get(name)
    if formula is not None:
        return formula(args, kwargs, result)
    if name.startswith("_foreach_"):
        return _each_cast(args, name.endswith("_"))
    if torch.Tag.pointwise in func.tags:
        return _casts([a for a in args if isinstance(a, Tensor)], result, name.endswith("_"))
    return 0


def _size(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _casts(operands: list[Tensor], result: Any, in_place: bool) -> int:
    """Copies of the operands whose format is not the one computed in, and of a result that is written in place
    (aten/src/ATen/TensorIterator.cpp, compute_types)."""
    if not operands:
        return 0
    common = _common_dtype(operands)
    if isinstance(result, Tensor) and result.is_floating_point() and not common.is_floating_point:
        common = result.dtype
    total = sum(_size(t, common) for t in operands if t.dtype != common and t.dim())
    if in_place and operands[0].dtype != common:
        total += _size(operands[0], common)
    return total


def _common_dtype(operands: Iterable[Tensor]) -> torch.dtype:
    """The format that operands are computed in: tensors without dimensions count only by their kind of number."""
    kinds: list[torch.dtype | None] = [None, None]
    for tensor in operands:
        at = 0 if tensor.dim() else 1
        known = kinds[at]
        kinds[at] = tensor.dtype if known is None else torch.promote_types(known, tensor.dtype)
    wide, bare = kinds
    if wide is None or bare is None:
        return wide or bare or torch.float32
    return torch.promote_types(wide, bare) if _kind(bare) > _kind(wide) else wide


def _kind(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _each_cast(args: Arguments, in_place: bool) -> int:
    """A multi-tensor op on the CPU is a loop over its tensors (ForeachOpsKernels.cpp)."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if len(lists) < 2:
        return 0
    return max(_casts(list(together), None, in_place) for together in zip(*lists, strict=False))


def _chosen(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """`where`: the condition is never cast."""
    return _casts([a for a in args[1:] if isinstance(a, Tensor)], result, False)


def _nothing(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    return 0


def _accumulated(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A reduction in another format than its input's casts all of it (ReduceOps.cpp, make_reduction)."""
    return _size(args[0], result.dtype) if args[0].dtype != result.dtype else 0


def _mean(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """In half precision: a copy in fp32, and its sum (ReduceOps.cpp, mean)."""
    if result.dtype in HALF:
        return _size(args[0], torch.float32) + _size(result, torch.float32)
    return _accumulated(args, kwargs, result)


def _logsumexp(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """The exponentials, and each row's maximum (ReduceOps.cpp, logsumexp_out_impl)."""
    return _size(args[0], result.dtype) + _size(result)


def _index_select(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Along the second dimension the input is read in one piece (TensorAdvancedIndexing.cpp, index_select_out_cpu_)."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return _in_pieces(args, 1) if args[0].dim() > 1 and dim % args[0].dim() == 1 else 0


def _index_add(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """In half precision, along the first or the last dimension, this is `scatter_add` with an index that is the same
    for every value of a row (TensorAdvancedIndexing.cpp, index_add_cpu_)."""
    dims, dim, source = result.dim(), args[1] % max(result.dim(), 1), args[3]
    if result.dtype not in HALF or dims < 2 or dim not in (0, dims - 1):
        return 0
    return _rows_of_sums(result) if dim == 0 and _whole(result, source) else _size(result, torch.float32)


def _scattered(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """In half precision sums are taken in a copy in fp32 (cpu/ScatterGatherKernel.cpp, create_acc_buffer)."""
    return _size(result, torch.float32) if result.dtype in HALF else 0


def _scatter_add(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """As other scattering, but for whole rows (ScatterGatherKernel.cpp, cpu_scatter_reduce_expanded_index)."""
    if result.dtype in HALF and _of_rows(args[1], args[2]) and _whole(args[0], args[3]):
        return _rows_of_sums(result)
    return _scattered(args, kwargs, result)


def _gather(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """As scattering, but for whole rows (cpu/ScatterGatherKernel.cpp, cpu_gather_expanded_index_kernel)."""
    return 0 if _of_rows(args[1], args[2]) and _whole(args[0]) else _scattered(args, kwargs, result)


def _of_rows(dim: int, index: Tensor) -> bool:
    """Whether an index along the first dimension is the same for every value of a row."""
    if index.dim() < 2 or dim % index.dim():
        return False
    return index.stride(0) == 1 and not any(index.stride()[1:])


def _whole(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _rows_of_sums(result: Tensor) -> int:
    """A row of sums in fp32 in every thread."""
    return torch.get_num_threads() * _size(result, torch.float32) // max(int(result.shape[0]), 1)


def _copied(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A copy of a matrix in columns into one in rows."""
    source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) and args[0] is result else args[0]
    return _turned(source) if result.is_contiguous() and source.dtype == result.dtype else 0


def _turned(matrix: Tensor) -> int:
    """The buffer through which a matrix that lies in columns is copied into rows: 60 of either
    (Copy.cpp, copy_same_type_transpose_); 120 of numbers of one byte."""
    if matrix.dim() != 2 or matrix.stride() != (1, matrix.shape[0]) or matrix.numel() < 60 * 60:
        return 0
    side = 120 if matrix.element_size() == 1 else 60
    return side * side * matrix.element_size()


def _safe_softmax(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """First the softmax's; then which scores are -inf, which rows are so throughout, and a zero
    (transformers/attention.cpp)."""
    scores, dim = args[0], args[1]
    count = int(scores.numel())
    found = count + count // max(int(scores.shape[dim]), 1) + int(scores.element_size())
    return max(found, _in_pieces(args, 1))


def _sort(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """One row's indices (Sorting.cpp)."""
    along = next((a for a in args[1:] if type(a) is int), kwargs.get("dim", -1))
    return int(args[0].shape[along]) * 8 if args[0].dim() else 0


def _resized(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Several channels are resized side by side: a copy of the input in that order, and of the result
    (cpu/UpSampleKernel.cpp)."""
    image = args[0]
    beside = image.shape[1] == 1 or image.is_contiguous(memory_format=torch.channels_last)
    return 0 if beside else _size(image) + _size(result)


def _batch_norm_backward(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """The gradient of what was normalized, before it is scaled (Normalization.cpp)."""
    return _size(args[0])


def _in_pieces(args: Arguments, count: int) -> int:
    """Bytes of those of the first `count` arguments that do not lie in one piece."""
    apart = [t for t in args[:count] if not t.is_contiguous()]
    return sum(map(_size, apart)) + max(map(_turned, apart), default=0)


def _first(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A copy of the input in one piece: softmax (SoftMax.cpp), layer normalization (layer_norm.cpp), and others."""
    return _in_pieces(args, 1)


def _both(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A copy in one piece of the gradient and of the output, or of the indices (SoftMax.cpp, Embedding.cpp)."""
    return _in_pieces(args, 2)


def _embedding(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """The indices in one piece (Embedding.cpp)."""
    return _in_pieces(args[1:], 1)


def _layer_norm_backward(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Gradient and input in one piece, and for each thread a row of the weight's gradient and one of the bias's
    (layer_norm.cpp, cpu/layer_norm_kernel.cpp)."""
    row = math.prod(args[2]) * int(args[1].element_size())
    rows = 2 * torch.get_num_threads() if args[7][1] or args[7][2] else 0
    apart = [t for t in args[:2] if not t.is_contiguous()]
    return sum(map(_size, apart)) + max(rows * row, *map(_turned, apart), 0)


IN_ONE_PIECE = (
    "_softmax", "_log_softmax", "native_layer_norm", "native_dropout",
    "nll_loss_forward", "max_pool2d_with_indices", "avg_pool2d",
)  # fmt: skip
"""Ops that copy an input that does not lie in one piece."""

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"), product),
    **dict.fromkeys(("convolution", "convolution_backward"), convolution),
    **dict.fromkeys(("sum", "prod", "cumsum", "cumprod"), _accumulated),
    **dict.fromkeys(("scatter", "scatter_", "scatter_reduce", "scatter_reduce_"), _scattered),
    **dict.fromkeys(("scatter_add", "scatter_add_"), _scatter_add),
    **dict.fromkeys(("index_add", "index_add_"), _index_add),
    **dict.fromkeys(("clone", "copy_", "masked_fill"), _copied),
    **dict.fromkeys(("masked_fill_", "_foreach_copy_"), _nothing),
    **dict.fromkeys(IN_ONE_PIECE, _first),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data", "embedding_dense_backward"), _both),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_nearest2d"), _resized),
    "where": _chosen,
    "gather": _gather,
    "index_select": _index_select,
    "mean": _mean,
    "sort": _sort,
    "native_batch_norm_backward": _batch_norm_backward,
    "logsumexp": _logsumexp,
    "_safe_softmax": _safe_softmax,
    "embedding": _embedding,
    "native_layer_norm_backward": _layer_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
"""By the op's name, whatever its overload."""
