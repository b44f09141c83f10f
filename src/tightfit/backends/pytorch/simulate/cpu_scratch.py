"""Memory that the CPU's kernels ask for and give back while they run, from the shapes of their arguments.

Counted is what torch's CPU allocator hands out beyond the results, at the worst moment inside one op, where that moves
a peak of `results/plan_vs_cpu.json` by more than 0.2 %; what does less is left out, and so are MKL's own buffers.
Formulas are read from torch 2.13's aten/src/ATen/native; each names its file.

oneDNN chooses the blocks of its products and convolutions by instruction set, cache sizes and number of threads, and
documents no size. So each of those kernels is run once on zeros, in a thread of its own where no mode of the caller
holds, and the allocator's events are read. Products that would take long or much memory count nothing: their blocks
are small against their factors. A convolution's memory grows evenly with the samples.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from tightfit.backends.pytorch.techniques.attention.kernels import HALF

Arguments = tuple[Any, ...]
Formula = Callable[[Arguments, Any], int]
"""Bytes by the op's arguments and its result."""

MOST_WORK, MOST_VALUES = 2**33, 2**26
"""Multiplications of a product, and values in one of its factors or in its result, up to which it is tried: a fraction
of a second, and 128 MiB in half precision."""

TRIED_SAMPLES = 8
"""Samples of a convolution that is tried; for more, it is tried with half of them as well."""


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
        return formula(args, result)
    if torch.Tag.pointwise in func.tags and not name.startswith(("_foreach_", "masked_fill", "where")):
        return _casts([a for a in args if isinstance(a, Tensor)], result, name.endswith("_"))
    return 0


def _size(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _casts(operands: list[Tensor], result: Any, in_place: bool) -> int:
    """Copies of the operands whose format is not the one computed in, and of a result that is written in place
    (aten/src/ATen/TensorIterator.cpp, compute_types)."""
    made = result.dtype if isinstance(result, Tensor) else None
    if not operands or {t.dtype for t in operands} == {made}:
        return 0
    common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    if made is not None and made.is_floating_point and not common.is_floating_point:
        common = made
    total = sum(_size(t, common) for t in operands if t.dtype != common and t.dim())
    if in_place and operands[0].dtype != common:
        total += _size(operands[0], common)
    return total


def _mean(args: Arguments, result: Any) -> int:
    """In half precision: a copy in fp32, and its sum (ReduceOps.cpp, mean)."""
    return _size(args[0], torch.float32) + _size(result, torch.float32) if result.dtype in HALF else 0


def _index_add(args: Arguments, result: Any) -> int:
    """In half precision, along the first or the last dimension, sums are taken in a copy in fp32
    (TensorAdvancedIndexing.cpp, index_add_cpu_); along the first a thread needs a row alone where all lies in one
    piece (cpu/ScatterGatherKernel.cpp, cpu_scatter_reduce_expanded_index)."""
    dims, dim = result.dim(), args[1] % max(result.dim(), 1)
    if result.dtype not in HALF or dims < 2 or dim not in (0, dims - 1):
        return 0
    by_rows = dim == 0 and result.is_contiguous() and args[3].is_contiguous()
    return 0 if by_rows else _size(result, torch.float32)


def _in_one_piece(args: Arguments, result: Any) -> int:
    """A copy of an input that does not lie in one piece: softmax (SoftMax.cpp), an embedding's gradient, such as a part
    of what several embeddings were joined to (Embedding.cpp)."""
    return 0 if args[0].is_contiguous() else _size(args[0])


def _safe_softmax(args: Arguments, result: Any) -> int:
    """First the softmax's; then which scores are -inf (transformers/attention.cpp)."""
    return max(int(args[0].numel()), _in_one_piece(args, result))


# Kernels that are run on zeros: oneDNN's, and our own of several.


class _Form(NamedTuple):
    """A tensor without its values, as a kernel sees it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def zeros(self) -> Tensor:
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        values = torch.zeros(reach + 1 if all(self.shape) else 0, dtype=self.dtype)
        return values.as_strided(self.shape, self.stride)


def _product(args: Arguments, result: Any) -> int:
    """Scratch of `mm`, `addmm`, `bmm` and `baddbmm`, in the formats that oneDNN computes in on this processor; the rest
    is MKL's, whose buffers are its own."""
    left, right = [a for a in args if isinstance(a, Tensor)][-2:]
    return _of_factors(left, right, result.numel())


def _grouped_product(args: Arguments, result: Any) -> int:
    """Scratch of the product of one of several groups, as if all were alike (GroupedMMUtils.h)."""
    left, right, ends = args[:3]
    if ends is None:
        return 0
    groups = ends.shape[0]
    inner = left.dim() == right.dim()  # whether the dimension that is summed over is what groups share

    def one(tensor: Tensor, dim: int) -> Tensor:
        return tensor[0] if tensor.dim() == 3 else tensor.narrow(dim, 0, -(-tensor.shape[dim] // groups))

    return _of_factors(one(left, int(inner)), one(right, int(not inner)), result.numel() // groups)


def _of_factors(left: Tensor, right: Tensor, values: int) -> int:
    """Scratch of a product. values: in its result."""
    largest = max(left.numel(), right.numel(), values)
    if not _by_onednn(left.dtype) or largest > MOST_VALUES or values * left.shape[-1] > MOST_WORK:
        return 0
    func = torch.ops.aten.mm.default if left.dim() == 2 else torch.ops.aten.bmm.default
    return _run_on_zeros(func, (_Form.of(left), _Form.of(right)), torch.get_num_threads())


def _by_onednn(dtype: torch.dtype) -> bool:
    """Whether products in this format are oneDNN's on this processor."""
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return known is not None and torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, known)())


def _convolution(args: Arguments, result: Any) -> int:
    """Scratch of `convolution` and `convolution_backward`."""
    if isinstance(result, Tensor):
        func, batched = torch.ops.aten.convolution.default, 1
    else:
        func, batched = torch.ops.aten.convolution_backward.default, 2
    forms: list[Any] = [_Form.of(a) if isinstance(a, Tensor) else tuple(a) if isinstance(a, list) else a for a in args]
    samples, threads = int(args[0].shape[0]), torch.get_num_threads()

    def tried(count: int) -> int:
        fewer = [form._replace(shape=(count, *form.shape[1:])) for form in forms[:batched]]
        return _run_on_zeros(func, (*fewer, *forms[batched:]), threads)

    if samples <= TRIED_SAMPLES:
        return tried(samples)
    some = tried(TRIED_SAMPLES)
    return some + (some - tried(TRIED_SAMPLES // 2)) * (samples - TRIED_SAMPLES) // (TRIED_SAMPLES - TRIED_SAMPLES // 2)


def _dequantized(args: Arguments, result: Any) -> int:
    """Scratch of one piece of a weight: others follow in the same memory."""
    from tightfit.backends.pytorch.techniques.adapters.quantization import (  # who quantizes
        BLOCK,
        DEQUANTIZE,
        PIECE_SIZE,
    )

    *parts, shape, dtype, again = args
    count, kind = math.prod(shape), "nf4" if len(parts) > 2 else "int8"
    blocks = -(-count // BLOCK[kind])
    kept = min(blocks, PIECE_SIZE // BLOCK[kind])
    forms = [_Form((-(-part.shape[0] * kept // blocks),), (1,), part.dtype) for part in parts]
    if kind == "nf4":
        forms[-1] = _Form.of(parts[-1])
    return _run_on_zeros(DEQUANTIZE[kind], (*forms, (min(count, PIECE_SIZE),), dtype, again), torch.get_num_threads())


@functools.cache
def _run_on_zeros(func: Any, forms: tuple[Any, ...], threads: int) -> int:
    """The most bytes that one run on so many threads holds beyond its results."""
    found: list[int] = []

    def run() -> None:
        torch.set_num_threads(threads)  # a new thread starts with the process's number, not with its maker's
        found.append(_extra_bytes(func, forms))

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    return found[0] if found else 0


def _extra_bytes(func: Any, forms: tuple[Any, ...]) -> int:
    arguments = [f.zeros() if isinstance(f, _Form) else list(f) if isinstance(f, tuple) else f for f in forms]
    live = most = 0
    result, changes = _watched(func, arguments)
    for change in changes:
        live += change
        most = max(most, live)
    del result
    return most - max(live, 0)


def _watched(func: Any, arguments: list[Any]) -> tuple[Any, list[int]]:
    """The result, and every allocation and release, in bytes and in order. torch's older profiler hears of them and
    prints nothing; a private interface, named here alone. Without it nothing is heard."""
    autograd: Any = torch.autograd
    if not hasattr(autograd, "_enable_profiler_legacy"):
        return func(*arguments), []
    options = torch._C._profiler._ExperimentalConfig()
    settings = autograd.ProfilerConfig(autograd.ProfilerState.CPU, False, True, False, False, False, options)
    autograd._enable_profiler_legacy(settings)
    try:
        result = func(*arguments)
    finally:
        threads = autograd._disable_profiler_legacy()
    return result, [e.cpu_memory_usage() for events in threads for e in events if e.kind() == "memory_alloc"]


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("convolution", "convolution_backward"), _convolution),
    **dict.fromkeys(("index_add", "index_add_"), _index_add),
    **dict.fromkeys(("_softmax", "_log_softmax", "embedding_dense_backward"), _in_one_piece),
    **dict.fromkeys(("dequantize_nf4", "dequantize_int8"), _dequantized),
    "mean": _mean,
    "_grouped_mm": _grouped_product,
    "_safe_softmax": _safe_softmax,
}
"""By the op's name, whatever its overload."""
