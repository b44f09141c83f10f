"""Measuring steps of the run that takes them: some as they are, then one with every op and every allocation followed.

The plain steps give wall seconds: of the wait for data, of each phase, of the whole. The last one runs under
torch.profiler, with a mark around every op that is dispatched; from that come what each op took, and every allocation.
The marks and the profiler slow that step down, which is why there are plain ones; what an op took on its device is not
touched by it, and neither is what the step learns. On CUDA the allocator's own peak and record are given as well.
"""

from __future__ import annotations

import errno
import gc
import gzip
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tightfit.backends.measurements import Measurement
from tightfit.backends.pytorch.batch import TensorGlobalBatch
from tightfit.backends.pytorch.checkpoints import random_state, restore_random
from tightfit.backends.pytorch.measure.events import measured_lanes, measured_trace, read
from tightfit.backends.pytorch.measure.marks import Marks, said
from tightfit.backends.pytorch.pending_step import PendingStep
from tightfit.backends.pytorch.replaced import replaced
from tightfit.backends.pytorch.step import Step
from tightfit.errors import ReportError
from tightfit.files import replacing
from tightfit.garbage import gc_paused
from tightfit.trace import WALL_PHASES, Phase

ENTRIES = 2_000_000
"""Entries of the CUDA allocator's record that are kept at most; the oldest go first."""


@dataclass
class _Followed:
    """Results of following a step. seconds: of the whole. peak, record: the CUDA allocator's, where it has them."""

    marks: Marks
    profiler: Any = None
    seconds: float = 0.0
    peak: int | None = None
    record: dict[str, Any] | None = None


class StepProfiler:
    """See `backends.base.StepProfiler` for what each method promises."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._cuda = step.build.torch_device.type == "cuda"
        self._clock = _Clock(self._cuda)
        self._timed: list[tuple[float, dict[Phase, float]]] = []
        self._found: _Followed | None = None
        self._failure: str | None = None
        self._unrecorded: list[str] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        self._clock.begin()
        began = time.perf_counter()
        with replaced(self._step, "watch", self._clock.enter), self._updates_timed():
            yield
        self._clock.end()
        self._timed.append((time.perf_counter() - began, self._clock.read()))

    def profiled(self, global_batch: TensorGlobalBatch, learning_rate: float) -> PendingStep:
        restore, failures = self._restorer(), []
        # On an H100 autograd failed in recomputing steps ("run_backward returned NULL without setting an exception")
        # while the allocator's record was kept; whether they can be followed without it was not tried yet.
        for recording in (True, False) if self._cuda else (False,):
            found = _Followed(Marks(self._step.build, self._step.optimizer))
            pending: PendingStep | None = None
            try:
                with self._following(found, recording):
                    pending = self._step(global_batch, learning_rate)
                    pending.read()
            except Exception as error:
                failures.append(said(error))
                if pending is None and (found.marks.phase is Phase.OPTIMIZER or not self._step.intact):
                    raise  # weights may have changed: there is no way back
            else:
                self._found, self._unrecorded = found, failures
                return pending
            if pending is not None:
                break
            restore()  # here, where no traceback holds the attempt's tensors any more
        self._failure = failures[-1]
        return pending or self._step(global_batch, learning_rate)

    def measurement(self, chrome_trace: Path | None = None) -> Measurement:
        found, failure = self._found, self._failure
        if failure is None and found is not None:
            failure = found.marks.failure
        if failure is not None or found is None:
            raise ReportError(f"the step could not be followed: {failure or 'none was taken'}")
        wall, phases = self._median()
        if chrome_trace is not None:
            _export(found.profiler, chrome_trace)
        kind = self._step.build.torch_device.type
        events = read(found.profiler.profiler.kineto_results, kind)
        trace = measured_trace(found.marks, events, kind)
        trace.notes += [f"no memory.pickle: with the allocator's record, {why}" for why in self._unrecorded]
        with_data = found.seconds + phases[Phase.DATA]
        return Measurement(
            trace=trace, step_seconds=wall, phase_seconds=phases, overhead=with_data / wall if wall else 1.0,
            peak_bytes=trace.peak()[1] if found.peak is None else found.peak, memory_record=found.record or None,
            lanes=measured_lanes(found.marks, events),
        )  # fmt: skip

    def _median(self) -> tuple[float, dict[Phase, float]]:
        """The plain step of median length: its wall seconds, and those of its phases."""
        return sorted(self._timed, key=lambda each: each[0])[len(self._timed) // 2]

    def _updates_timed(self) -> AbstractContextManager[None]:
        """Context in which updates of blocks within another phase count as updates, as they do in a trace."""
        blocks = self._step.blocks
        return nullcontext() if blocks is None else replaced(blocks, "around_updates", self._clock.updating)

    def _restorer(self) -> Callable[[], None]:
        """A function that brings the step back to where it is now, as long as no weight was changed since."""
        model, streams = self._step.build.model, random_state()
        buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in model.buffers()]

        @torch.no_grad()
        def restore() -> None:
            restore_random(*streams)
            for buffer, values in buffers:
                buffer.copy_(values)

        return restore

    @contextmanager
    def _following(self, found: _Followed, recording: bool) -> Iterator[None]:
        """Context of a step: the profiler, the marks, the allocator's record where that is to be kept, and no garbage
        collection in between."""
        build, cuda = self._step.build, self._cuda
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        held = torch.cuda.memory_allocated() if cuda else None
        gc.collect()
        with gc_paused(), ExitStack() as stack:
            found.profiler = stack.enter_context(profile(activities=activities, profile_memory=True))
            stack.enter_context(found.marks.following(build.model, held))
            if cuda:
                torch.cuda.synchronize()
                self._step.restart_peak()
                if recording:
                    # No stacks of releases, which may be what failed.
                    memory: Any = torch.cuda.memory  # whose record, for PyTorch's memory_viz, is private
                    memory._record_memory_history(max_entries=ENTRIES, context="alloc", stacks="python")
                    stack.callback(memory._record_memory_history, enabled=None)
            began = time.perf_counter()
            try:
                with replaced(self._step, "watch", found.marks.enter):
                    yield
            finally:
                found.marks.close()
            found.seconds = time.perf_counter() - began
            if cuda:
                found.peak = torch.cuda.max_memory_allocated()
                found.record = memory._snapshot() if recording else None


def _export(profiler: Any, path: Path) -> None:
    """The profiler's own trace, gzipped, whole or not at all. Raises OSError."""
    with replacing(path) as temporary, tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        if not plain.exists():  # it raises nothing, and leaves what it has written under another name
            raise OSError(errno.EIO, "the profiler could not write it; is the disk full?")
        with plain.open("rb") as source, gzip.open(temporary, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)


class _Clock:
    """Beginning of each phase of a step, on the device's own clock. On CUDA the device is not waited for in between."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._began = self._got = 0.0
        self._marks: list[tuple[Phase | None, Any]] = []

    def begin(self) -> None:
        """A step begins with its wait for a global batch."""
        self._wait()
        self._marks = []
        self._began = time.perf_counter()

    def enter(self, phase: Phase) -> None:
        if not self._marks:
            self._got = time.perf_counter()
        self._marks.append((phase, self._now()))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context of an update within a phase, which goes on behind it."""
        outer = self._marks[-1][0]
        assert outer is not None
        self.enter(Phase.OPTIMIZER)
        yield
        self.enter(outer)

    def end(self) -> None:
        """The last phase ends, and the step with it."""
        self._marks.append((None, self._now()))
        self._wait()

    def read(self) -> dict[Phase, float]:
        """Seconds of each phase, a global batch's micro-batches together."""
        found = dict.fromkeys(WALL_PHASES, 0.0)
        found[Phase.DATA] = self._got - self._began
        for (phase, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            assert phase is not None
            found[phase] += start.elapsed_time(stop) / 1000 if self._cuda else stop - start
        return found

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
