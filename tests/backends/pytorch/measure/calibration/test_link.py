"""The figures of copies between host and device, on a machine whose speeds are known; on a GPU, that they are sane."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightfit.backends.pytorch.measure.calibration import link as measuring
from tightfit.backends.pytorch.measure.calibration.link import link_of, measure_link, seconds_beside
from tightfit.backends.pytorch.techniques.by_block.transfers import StreamEvent
from tightfit.trace import Stream

IN, OUT = Stream.COPY_IN, Stream.COPY_OUT
COPIED = 1e9


class Machine:
    """Streams of work that slow one another. speed: pieces a second of a stream, while those streams are busy."""

    def __init__(self, speed: Callable[[Stream, frozenset[Stream]], float]) -> None:
        self.now = 0.0
        self.queued, self.ended = (dict.fromkeys((IN, OUT), 0.0) for _ in range(2))
        self._speed = speed

    def work(self, stream: Stream) -> Callable[[], StreamEvent]:
        """A piece of work on the stream."""

        def begin() -> StreamEvent:
            self.queued[stream] += 1
            last = self.ended[stream] + self.queued[stream]

            def there() -> bool:
                return self.ended[stream] > last - 1e-9

            event: Any = SimpleNamespace(query=there, synchronize=lambda: self._run(there))
            return StreamEvent(event)

        return begin

    def _run(self, there: Callable[[], bool]) -> None:
        """Let time go on until then, from one piece's end to the next."""
        while not there():
            busy = frozenset(stream for stream, left in self.queued.items() if left > 1e-9)
            speeds = {stream: self._speed(stream, busy) for stream in busy}
            step = min(min(self.queued[s] % 1 or 1.0, self.queued[s]) / speeds[s] for s in busy)
            self.now += step
            for stream in busy:
                self.queued[stream] -= step * speeds[stream]
                self.ended[stream] += step * speeds[stream]


def speed(stream: Stream, busy: frozenset[Stream]) -> float:
    """Copies of 20 and 25 GB/s that lose a fifth to one another."""
    return {IN: 20, OUT: 25}[stream] * (0.8 if {IN, OUT} <= busy else 1)


def test_the_figures_are_the_machines():
    machine = Machine(speed)
    locked = {stream: machine.work(stream) for stream in (IN, OUT)}
    found = link_of(locked, locked, int(COPIED), lambda: machine.now)

    for rates, alone in ((found.to_device, 20e9), (found.to_host, 25e9)):
        assert (rates.alone, rates.both_ways, rates.pageable) == pytest.approx((alone, 0.8 * alone, alone))


def test_what_runs_beside_is_asked_for_until_it_outlasts():
    """Copies that nearly stop beside those back want many more of them than they would take by themselves."""
    machine = Machine(lambda stream, busy: 1 if stream is IN and OUT in busy else 10)
    beside = seconds_beside(machine.work(IN), machine.work(OUT), clock=lambda: machine.now)

    assert beside == pytest.approx(1.0)


def test_the_work_itself_runs_on_a_processor(monkeypatch):
    monkeypatch.setattr(measuring, "COPIED_BYTES", 1 << 12)
    monkeypatch.setattr(measuring, "ROUND_SECONDS", 1e-4)
    found = measure_link(torch.device("cpu"))

    assert found is not None
    assert min(found.to_device.alone, found.to_device.both_ways, found.to_host.pageable) > 0


@pytest.mark.gpu
def test_on_a_gpu_copies_are_as_fast_as_a_link_can_be():
    found = measure_link(torch.device("cuda"))

    assert found is not None
    for rates in (found.to_device, found.to_host):
        assert 1e9 < rates.alone < 1e12
        assert rates.both_ways < 1.1 * rates.alone
        assert rates.pageable < 1.1 * rates.alone
