"""What a real `generate` on the CPU allocates, by torch.profiler's own allocation events."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "tightfit:"


def measured_peaks(
    model: nn.Module, run: Callable[[], object], context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, int]:
    """The most bytes alive at once in the model's first forward pass of `run` with what surrounds it (`prefill`), and
    in all later ones (`decode`).

    context: what surrounds the whole run, such as autocast. The model's weights and buffers are counted.
    """
    marks = _Marks()
    hook = model.register_forward_pre_hook(marks.begin)
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, torch.no_grad(), context():
            marks.enter("prefill")
            run()
            marks.close()
    finally:
        gc.enable()
        hook.remove()
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}.values())
    return {name: held + peak for name, peak in _peaks(profiler.profiler.kineto_results.events()).items()}


class _Marks:
    """Marks in the profile where a pass begins."""

    def __init__(self) -> None:
        self._open: Any = nullcontext()
        self._passes = 0

    def begin(self, model: nn.Module, args: Any) -> None:
        self._passes += 1
        if self._passes > 1:
            self.enter("decode")

    def enter(self, name: str) -> None:
        self.close()
        self._open = record_function(MARK + name)
        self._open.__enter__()

    def close(self) -> None:
        self._open.__exit__(None, None, None)
        self._open = nullcontext()


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _peaks(events: Iterable[Any]) -> dict[str, int]:
    """The highest running sum of what is allocated inside the marks of each name."""
    changes: list[tuple[int, int]] = []
    marks: list[tuple[int, int, str]] = []
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(MARK):
            marks.append((event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix(MARK)))
    changes.sort(key=lambda change: change[0])
    live = list(accumulate(size for _, size in changes))
    peaks: dict[str, int] = {}
    for start, stop, name in marks:
        before = [held for (at, _), held in zip(changes, live, strict=True) if at < start][-1:]
        inside = [held for (at, _), held in zip(changes, live, strict=True) if start <= at <= stop]
        peaks[name] = max([peaks.get(name, 0), *before, *inside])
    return peaks
