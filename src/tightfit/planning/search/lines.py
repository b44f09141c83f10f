"""A combination of techniques at any micro-batch, from two traces of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tightfit.planning.estimate import unseen
from tightfit.planning.search.interpolation import align, interpolate
from tightfit.planning.search.splicing import micro_batches, with_micro_batches, with_second
from tightfit.trace import Category, Phase, Trace

LONGER = 50_000
"""Ops and allocations by which a trace at a larger micro-batch may outgrow the larger of the two that a line has. They
grow with it where every document's attention is computed by itself, as packed ones' is on a processor."""

RESIDENT = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


class Line:
    """One combination's step, at any micro-batch.

    low, high: traces of a window of two micro-batches of `at_low` and `at_high` samples each; or, where these are
        None, nothing but what was traced at each size itself.
    exact: traces by micro-batch of the very recipe.
    trace_exactly: makes another of these.
    """

    def __init__(
        self,
        low: Trace | None,
        at_low: int,
        high: Trace | None,
        at_high: int,
        exact: Mapping[int, Trace],
        trace_exactly: Callable[[int], Trace],
    ) -> None:
        aligned = align(low, high) if low is not None and high is not None else None
        self.low, self.high = aligned or (low, high)
        self.at_low, self.at_high = at_low, at_high
        self.exact = exact
        self._trace_exactly = trace_exactly
        self._alike = aligned is not None
        self._ends = None if aligned is None else (_timed_part(aligned[0]), _timed_part(aligned[1]))
        self._curves: dict[bool, tuple[np.ndarray, np.ndarray] | None] = {}
        self._peaks: tuple[int, int] | None = None

    @property
    def rigid(self) -> bool:
        """Whether nothing can be interpolated, because the two traces differ in more than sizes."""
        return self.low is not None and not self._alike

    def reaches(self, micro: int) -> bool:
        """Whether a trace at that micro-batch, where it has to be made, is not far longer than those that were."""
        if not self.rigid or micro <= self.at_high:
            return True
        assert self.low is not None
        assert self.high is not None
        more = (_events(self.high) - _events(self.low)) / (self.at_high - self.at_low)
        return more * (micro - self.at_high) <= LONGER

    @property
    def sample(self) -> Trace:
        """Any trace of it."""
        return self.low if self.low is not None else next(iter(self.exact.values()))

    def trace(self, micro: int, batch: int) -> Trace:
        """The step over a window of `batch` samples in micro-batches of `micro`: traced, or interpolated.

        Interpolated, a last micro-batch that is smaller than the others is as large as they are, unless there are two.
        """
        made = self.exact.get(micro) or self.made(micro, batch)
        return self._trace_exactly(micro) if made is None else made

    def made(self, micro: int, batch: int) -> Trace | None:
        """The same, interpolated; None where the two traces do not allow it."""
        found = self._at(micro)
        if found is None:
            return None
        full, rest = divmod(batch, micro)
        if full == 1 and rest:
            smaller = self._at(rest)
            return None if smaller is None else with_second(found, smaller)
        return with_micro_batches(found, full + (rest > 0))

    def peak(self, micro: int, batch: int) -> int:
        """The most that is allocated at once, with what the allocator holds unseen; not rounded."""
        full, rest = divmod(batch, micro)
        whole = self.exact.get(micro)
        if whole is None and full == 1 and rest:
            whole = self.made(micro, batch)
        if whole is not None:
            return whole.peak()[1] + unseen(whole, "allocator")
        assert self.low is not None
        assert self.high is not None
        share = (micro - self.at_low) / (self.at_high - self.at_low)
        extra = unseen(self.low, "allocator") * (1 - share) + unseen(self.high, "allocator") * share
        curves = self._curve(full + (rest > 0) == 1)
        if curves is None:  # not one sequence of events: the peaks themselves are taken to be affine
            self._peaks = self._peaks or (self.low.peak()[1], self.high.peak()[1])
            low, high = self._peaks
            return max(round(low + (high - low) * share + extra), 0)
        low_curve, high_curve = curves
        return int(np.max(low_curve + (high_curve - low_curve) * share)) + round(extra)

    def _at(self, micro: int) -> Trace | None:
        if self._ends is None:
            return None
        low, high = self._ends
        return interpolate(low, self.at_low, high, self.at_high, micro, compared=True)

    def _curve(self, alone: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """Bytes after each change at both micro-batches, for windows of one micro-batch or of more."""
        if alone not in self._curves:
            low, high = self.low, self.high
            assert low is not None
            assert high is not None
            found = None
            if self._alike:
                if alone:
                    low = with_micro_batches(low, 1) or low
                    high = with_micro_batches(high, 1) or high
                (ticks, low_live), (high_ticks, high_live) = low.curve(), high.curve()
                if len(ticks) == len(high_ticks):
                    found = (low_live.astype(np.float64), high_live.astype(np.float64))
            self._curves[alone] = found
        return self._curves[alone]


def _events(trace: Trace) -> int:
    return len(trace.ops) + len(trace.allocations)


def _timed_part(trace: Trace) -> Trace:
    """The trace with no ops but those of its last step, which alone are timed."""
    step = trace.last_step()
    if step is None:
        return trace
    return replace(trace, ops=[op for op in trace.ops if step.start <= op.tick < step.stop])


def resident(trace: Trace) -> int:
    """Bytes of weights, gradients and optimizer states as the last step's optimizer begins: what every combination
    with these weights and this optimizer holds at once."""
    step = trace.last_step()
    spans = [s for s in trace.spans if step is not None and s.step == step.step and s.name == "optimizer"]
    held = trace.by_category(spans[0].start if spans else trace.peak()[0])
    return sum(held[category] for category in RESIDENT)


def parameters(trace: Trace) -> int:
    """Numbers in the model's weights and buffers."""
    step = trace.last_step()
    tick = step.start if step is not None else trace.peak()[0]
    return sum(
        int(np.prod(a.shape, dtype=np.int64)) for a in trace.alive(tick) if a.category is Category.WEIGHTS
    )


def largest_block(trace: Trace) -> int:
    """Numbers in the weights of the repeated block with the most; of the whole model where none is found."""
    step = trace.last_step()
    tick = step.start if step is not None else trace.peak()[0]
    blocks: dict[str, int] = {}
    for a in trace.alive(tick):
        if a.category is Category.WEIGHTS:
            parts = a.module.split(".")
            number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
            name = ".".join(parts[: number + 1])
            blocks[name] = blocks.get(name, 0) + int(np.prod(a.shape, dtype=np.int64))
    return max(blocks.values(), default=0)


def optimizer_only(trace: Trace) -> Trace | None:
    """The trace with nothing but its last optimizer's ops, to be timed by themselves; None where there are none."""
    step = trace.last_step()
    if step is None:
        return None
    groups = micro_batches(trace)
    ops = [op for op in trace.ops if op.phase is Phase.OPTIMIZER and step.start <= op.tick < step.stop]
    spans = [s for s in trace.spans if not any(s in group for group in groups)]
    return replace(trace, ops=ops, allocations=[], spans=spans) if ops else None
