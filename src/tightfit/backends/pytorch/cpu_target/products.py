"""What oneDNN's matrix products and convolutions ask for while they run on this machine's processor.

oneDNN chooses its blocks by instruction set, cache sizes and number of threads, and tells nobody their size. So each
kernel is run once on zeros, in a thread of its own where no mode of the caller holds, and the allocator's events are
read. Products that would take long or much memory are tried at a smaller size with blocks cut in the same way, and a
convolution's memory grows evenly with the samples.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = tuple[Any, ...]


MOST_WORK, MOST_VALUES = 2**33, 2**26
"""Multiplications of a product, and values in one of its factors or in its result, up to which it is tried as it is: a
fraction of a second, and 128 MiB in half precision."""

STEP = 1024
"""Sides are cut down by multiples of this, so that what is left over at the end of the blocks stays the same."""

SHORTEST = (1, STEP, 4 * STEP, STEP)
"""What is left at least of the products in a batch, of rows, of values in a sum and of columns. A sum is kept longest:
its length changes the blocks most."""

MOST_MATRICES = 64
"""Products in a batch beyond which what oneDNN asks for stays the same (found by trying; oneDNN 3.12)."""

FEW = 8
"""Samples of a convolution that is tried; for more, it is tried with half of them as well."""


class _Form(NamedTuple):
    """What a kernel sees of a tensor besides its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self) -> Tensor:
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        values = torch.zeros(reach + 1 if all(self.shape) else 0, dtype=self.dtype)
        return values.as_strided(self.shape, self.stride)


def product(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Of `mm`, `bmm`, `addmm`, `baddbmm`, `mv` and `addmv`: copies of factors that the library cannot read as they lie
    (LinearAlgebra.cpp, addmm_impl_cpu_ and bmm_out_or_baddbmm_; mkldnn/Matmul.cpp), and oneDNN's blocks. What is not
    oneDNN's is MKL's, whose buffers are its own."""
    left, right = [a for a in args if isinstance(a, Tensor)][-2:]
    onednn = by_onednn(left.dtype)
    packed = onednn and (left.dim() == 3 or right.dim() == 1)
    fits = [_readable(factor, packed) for factor in (left, right)]
    copied = sum(
        _bytes(factor) if packed or factor.dim() < 3 else _bytes(factor[0])
        for factor, readable in zip((left, right), fits, strict=True) if not readable
    )  # fmt: skip
    if not onednn:
        return copied
    name = "mv" if right.dim() == 1 else "bmm" if left.dim() == 3 else "mm"
    batch = left.shape[:-2] and (min(int(left.shape[0]), MOST_MATRICES),)
    _, rows, inner, columns = cut(math.prod(batch), *left.shape[-2:], 1 if name == "mv" else int(right.shape[-1]))
    shapes = ((*batch, rows, inner), (inner,) if name == "mv" else (*batch, inner, columns))
    forms = tuple(_form(*each) for each in zip((left, right), shapes, fits, strict=True))
    return copied + _run_on_zeros(getattr(torch.ops.aten, name).default, forms, torch.get_num_threads())


def cut(*sides: int) -> tuple[int, ...]:
    """A product of no more than MOST_WORK and MOST_VALUES, where SHORTEST allows. sides: of the batch, rows, values in
    a sum, columns; of those, the longest is cut first."""
    found = list(sides)
    while math.prod(found) > MOST_WORK or _values(found) > MOST_VALUES:
        least = [short + (side - short) % STEP for side, short in zip(sides, SHORTEST, strict=True)]
        at = max(range(1, len(found)), key=lambda n: found[n] - least[n])
        if found[at] <= least[at]:
            break
        found[at] -= -(-(found[at] - least[at]) // (2 * STEP)) * STEP
    return tuple(found)


def _values(sides: list[int]) -> int:
    """In the largest of the factors and the result of a product."""
    batch, *matrix = sides
    return batch * max(a * b for a, b in itertools.combinations(matrix, 2))


def by_onednn(dtype: torch.dtype) -> bool:
    """Whether products in this format are oneDNN's on this processor."""
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return known is not None and torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, known)())


def attention_products(query: Tensor, rows: int, keys: int) -> int:
    """Of the products inside attention's backward pass over blocks of so many queries and keys."""
    if not by_onednn(query.dtype):
        return 0
    size, dtype, threads = query.shape[-1], query.dtype, torch.get_num_threads()
    of_rows = (_Form((rows, keys), (keys, 1), dtype), _Form((keys, size), (size, 1), dtype))
    of_keys = (_Form((keys, rows), (1, keys), dtype), _Form((rows, size), (size, 1), dtype))
    found = max(_run_on_zeros(torch.ops.aten.mm.default, forms, threads) for forms in (of_rows, of_keys))
    return found + 4 if found else 0  # a factor is a tensor of its own


@functools.cache
def packs_attention(dtype: torch.dtype) -> bool:
    """Whether attention's forward pass packs its factors for the processor's matrix instructions (AMX). Tried: of 64
    keys with one value each, it then takes more than a block of scores, statistics and output."""
    if not by_onednn(dtype):
        return False
    count, threads = 64, 1
    factor = _Form((1, 1, count, 1), (count, count, 1, 1), dtype)
    found = _run_on_zeros(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (factor,) * 3, threads)
    return found > threads * 32 * ((count + 3) * 4 + count * dtype.itemsize)


def convolution(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Of `convolution` and `convolution_backward`."""
    if isinstance(result, Tensor):
        func, batched = torch.ops.aten.convolution.default, 1
    else:
        func, batched = torch.ops.aten.convolution_backward.default, 2
    forms = [_Form(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else _frozen(a) for a in args]
    samples, threads = int(args[0].shape[0]), torch.get_num_threads()

    def tried(count: int) -> int:
        fewer = [form._replace(shape=(count, *form.shape[1:])) for form in forms[:batched]]
        return _run_on_zeros(func, (*fewer, *forms[batched:]), threads)

    if samples <= FEW:
        return tried(samples)
    some = tried(FEW)
    return some + (some - tried(FEW // 2)) * (samples - FEW) // (FEW - FEW // 2)


def _readable(factor: Tensor, packed: bool) -> bool:
    """Whether a factor's matrices lie in rows or in columns; packed: without a gap between them either."""
    if factor.dim() < 2:
        return True
    rows, columns = factor.shape[-2:]
    down, across = factor.stride()[-2:]
    if packed:
        return factor.is_contiguous() or factor.transpose(-1, -2).is_contiguous()
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _form(factor: Tensor, shape: tuple[int, ...], as_it_lies: bool) -> _Form:
    """A factor of another size, in rows or in columns as it was."""
    if len(shape) == 1:
        return _Form(shape, (1,), factor.dtype)
    rows, columns = shape[-2:]
    in_columns = as_it_lies and factor.stride(-1) != 1 and factor.stride(-2) == 1
    return _Form(shape, (rows * columns, *((1, rows) if in_columns else (columns, 1)))[-len(shape) :], factor.dtype)


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


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
    arguments = [form.zeros() if isinstance(form, _Form) else _thawed(form) for form in forms]
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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
