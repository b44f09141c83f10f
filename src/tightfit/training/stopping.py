"""Stopping on request: SIGTERM, Ctrl-C and a terminal that closes end the run after the step at hand, saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from tightfit.system import STOPPING


class StopRequest:
    """A context manager that turns SIGTERM, SIGINT and SIGHUP into a flag. A second Ctrl-C interrupts at once.

    heard: called with the first signal's name. Outside the main thread, where Python allows no handlers, it never asks
    to stop.
    """

    def __init__(self, heard: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self._heard = heard
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.signal = self.signal is None, signal.Signals(number)
        if first:
            self._heard(self.signal.name)
