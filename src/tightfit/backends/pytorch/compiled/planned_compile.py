"""torch.compile in a prediction: regions that report to the tracker what their kernels would do."""

from __future__ import annotations

from functools import partial

from torch import nn

from tightfit.backends.pytorch.build import Build, CompileBackend
from tightfit.backends.pytorch.compiled.region_schedule import Scratch
from tightfit.backends.pytorch.compiled.regions import CompiledCall, planning_backend
from tightfit.backends.pytorch.tracing.tracker import Tracker
from tightfit.devices import Device


class Regions:
    """The compiled regions of one prediction, which may take several traces: what one compiled serves the next.

    `notes` says how sure their figures are, each sentence once.
    """

    def __init__(self, device: Device, scratch: Scratch) -> None:
        self.notes: list[str] = []
        self._tracker: Tracker | None = None
        self._backend = partial(planning_backend, self._record, gpu=device.kind == "cuda", scratch=scratch,
                                begin=self._begin)

    def reporting_to(self, tracker: Tracker) -> CompileBackend:
        """What gives torch.compile its backend, by name and mode; from now on calls are reported to `tracker`."""
        self._tracker = tracker
        return lambda name, mode: self._backend(backend=name, mode=mode)

    def _begin(self) -> None:
        assert self._tracker is not None
        self._tracker.region_begins()

    def _record(self, call: CompiledCall) -> None:
        assert self._tracker is not None
        self._tracker.region(call.ops(), call.scratch_bytes, call.name)
        note = f"compile: {call.sure}"
        if note not in self.notes:
            self.notes.append(note)


def compiled_modules(build: Build) -> list[nn.Module]:
    """The modules that the recipe compiles: inside them nothing is seen but the region."""
    if build.compile_backend is None:
        return []
    if build.recipe.compile != "auto" and build.recipe.compile.one_region:
        return [build.model]
    return [block for stack in build.stacks for block in stack]
