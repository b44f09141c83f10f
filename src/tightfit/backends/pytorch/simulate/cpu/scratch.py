"""Memory that the CPU's kernels ask for and give back while they run, from the shapes of their arguments.

Counted is what torch's CPU allocator hands out beyond the results, at the worst moment inside one op, where that has
moved a peak by more than 0.2 % in some model; what does less is left out, such as attention's blocks, and so are MKL's
own buffers. Formulas are read from torch 2.13's aten/src/ATen/native; each names its file. What oneDNN asks for has no
formula: see `onednn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.pytorch.formats import HALF
from tightfit.backends.pytorch.simulate.cpu.onednn import convolution, product

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
    if torch.Tag.pointwise in func.tags and not name.startswith(("_foreach_", "masked_fill")):
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


def _chosen(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """`where`: the condition is never cast."""
    return _casts([a for a in args[1:] if isinstance(a, Tensor)], result, False)


def _mean(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """In half precision: a copy in fp32, and its sum (ReduceOps.cpp, mean)."""
    if result.dtype in HALF:
        return _size(args[0], torch.float32) + _size(result, torch.float32)
    return _accumulated(args, kwargs, result)


def _accumulated(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A reduction in another format than its input's casts all of it (ReduceOps.cpp, make_reduction)."""
    return _size(args[0], result.dtype) if args[0].dtype != result.dtype else 0


def _index_add(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """In half precision, along the first or the last dimension, sums are taken in a copy in fp32
    (TensorAdvancedIndexing.cpp, index_add_cpu_); along the first a thread needs a row alone where all lies in one
    piece (cpu/ScatterGatherKernel.cpp, cpu_scatter_reduce_expanded_index)."""
    dims, dim = result.dim(), args[1] % max(result.dim(), 1)
    if result.dtype not in HALF or dims < 2 or dim not in (0, dims - 1):
        return 0
    by_rows = dim == 0 and result.is_contiguous() and args[3].is_contiguous()
    return 0 if by_rows else _size(result, torch.float32)


def _in_one_piece(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """A copy of an input that does not lie in one piece: softmax (SoftMax.cpp)."""
    return 0 if args[0].is_contiguous() else _size(args[0])


def _safe_softmax(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """First the softmax's; then which scores are -inf, and which rows are so throughout
    (transformers/attention.cpp)."""
    count = int(args[0].numel())
    return max(count + count // max(int(args[0].shape[args[1]]), 1), _in_one_piece(args, kwargs, result))


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "addmm"), product),
    **dict.fromkeys(("convolution", "convolution_backward"), convolution),
    **dict.fromkeys(("sum", "prod"), _accumulated),
    **dict.fromkeys(("index_add", "index_add_"), _index_add),
    **dict.fromkeys(("_softmax", "_log_softmax"), _in_one_piece),
    "where": _chosen,
    "mean": _mean,
    "_safe_softmax": _safe_softmax,
}
"""By the op's name, whatever its overload."""
