"""Scratch memory of oneDNN's matrix products and convolutions on this machine's processor.

oneDNN chooses its blocks by instruction set, cache sizes and number of threads, and documents no size. So each kernel
is run once on zeros, in a thread of its own where no mode of the caller holds, and the allocator's events are read.
Products that would take long or much memory count nothing: their blocks are small against their factors. A
convolution's memory grows evenly with the samples.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = tuple[Any, ...]

MOST_WORK, MOST_VALUES = 2**33, 2**26
"""Multiplications of a product, and values in one of its factors or in its result, up to which it is tried: a fraction
of a second, and 128 MiB in half precision."""

FEW = 8
"""Samples of a convolution that is tried; for more, it is tried with half of them as well."""


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


def product(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Of `mm` and `addmm`, in the formats that oneDNN computes in on this processor; the rest is MKL's, whose buffers
    are its own."""
    left, right = [a for a in args if isinstance(a, Tensor)][-2:]
    (rows, inner), columns = left.shape, right.shape[1]
    largest = max(rows * inner, inner * columns, rows * columns)
    if not by_onednn(left.dtype) or largest > MOST_VALUES or rows * inner * columns > MOST_WORK:
        return 0
    forms = (_Form.of(left), _Form.of(right))
    return _run_on_zeros(torch.ops.aten.mm.default, forms, torch.get_num_threads())


def by_onednn(dtype: torch.dtype) -> bool:
    """Whether products in this format are oneDNN's on this processor."""
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return known is not None and torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, known)())


def convolution(args: Arguments, kwargs: dict[str, Any], result: Any) -> int:
    """Of `convolution` and `convolution_backward`."""
    if isinstance(result, Tensor):
        func, batched = torch.ops.aten.convolution.default, 1
    else:
        func, batched = torch.ops.aten.convolution_backward.default, 2
    forms: list[Any] = [
        _Form.of(a) if isinstance(a, Tensor) else tuple(a) if isinstance(a, list) else a for a in args]
    samples, threads = int(args[0].shape[0]), torch.get_num_threads()

    def tried(count: int) -> int:
        fewer = [form._replace(shape=(count, *form.shape[1:])) for form in forms[:batched]]
        return _run_on_zeros(func, (*fewer, *forms[batched:]), threads)

    if samples <= FEW:
        return tried(samples)
    some = tried(FEW)
    return some + (some - tried(FEW // 2)) * (samples - FEW) // (FEW - FEW // 2)


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
