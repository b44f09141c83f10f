"""A stopwatch for training steps, whoever takes them: the step's own loop, another trainer's, a bare one.

Every step but the last is timed from the end of the one before it, so that the wait for data and whatever else a loop
does in between count. The last is for memory alone: on the CPU the profiler, which slows a step down, follows it.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from tightfit.backends.measurements import Timings
from tightfit.backends.pytorch.gpu_memory import gpu_memory


class Meter:
    """Call `start` before the first step and `end` after each; stop after `total` steps and take `read`.

    warm_up: steps before any is timed. steps: that are timed.
    """

    def __init__(self, device: torch.device, *, warm_up: int, steps: int, seed: int = 0) -> None:
        self.total = warm_up + steps + 1
        self._device, self._warm_up, self._seed = device, warm_up, seed
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._last = 0.0
        self._base = 0
        self._profiler: Any = None
        self._allocated = 0

    @property
    def done(self) -> bool:
        return len(self._losses) >= self.total

    def start(self) -> None:
        """The first step is about to begin. Random numbers are drawn anew from the seed: dropout is then the same for
        every loop that takes the same steps."""
        torch.manual_seed(self._seed)
        self._wait()
        self._last = time.perf_counter()

    def end(self, loss: float) -> None:
        """A step has ended. loss: of it, per token or sample."""
        self._wait()
        now = time.perf_counter()
        if self._warm_up <= len(self._losses) < self.total - 1:
            self._seconds.append(now - self._last)
        self._losses.append(loss)
        if self._profiler is not None:
            self._allocated = self._stop()
        elif len(self._losses) == self.total - 1 and self._device.type == "cpu":
            gc.collect()
            self._base = live_bytes()
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        self._last = time.perf_counter()

    def read(self) -> Timings:
        assert self.done, f"{len(self._losses)} of {self.total} steps were taken"
        if self._device.type == "cpu":
            return Timings(seconds=tuple(self._seconds), losses=tuple(self._losses), peak_allocated=self._allocated,
                           peak_reserved=self._allocated)
        return Timings(
            seconds=tuple(self._seconds), losses=tuple(self._losses),
            peak_allocated=torch.cuda.max_memory_allocated(), peak_reserved=torch.cuda.max_memory_reserved(),
            context=gpu_memory().context,
        )  # fmt: skip

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _stop(self) -> int:
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        live = highest = self._base
        changes = [(event.start_ns(), number, event.nbytes())
                   for number, event in enumerate(profiler.profiler.kineto_results.events())
                   if event.name() == "[memory]"]
        for _, _, change in sorted(changes):
            live += change
            highest = max(highest, live)
        return highest


def live_bytes() -> int:
    """Bytes of the storages on the CPU that any tensor within Python's reach holds, each once."""
    held: dict[int, int] = {}
    for found in gc.get_objects():
        kind = type(found)  # what an object says of its own class may run its code
        if not issubclass(kind, Tensor) or kind is FakeTensor:
            continue
        for tensor in (found, found.grad if found.is_leaf else None):
            # What only stands for others, as quantized optimizer states do, counts by those, which are found as well.
            if (tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided
                    and not hasattr(tensor, "__tensor_flatten__")):
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    held.pop(0, None)
    return sum(held.values())
