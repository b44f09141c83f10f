"""Stopping on request: SIGTERM, Ctrl-C and a terminal that closes end the run after the step at hand, saved."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from tightfit.system import SIGNALS


class StopRequest:
    """A context manager that turns SIGTERM, SIGINT and SIGHUP into a flag. A second Ctrl-C interrupts at once.

    heard: called by a thread of its own with the first signal's name and False, and for a Ctrl-C after it with True:
    while the main thread is in a long operation, where Python lets handlers wait. Outside the main thread, where Python
    allows no handlers, it never asks to stop.
    """

    def __init__(self, heard: Callable[[str, bool], None]) -> None:
        self.signal: signal.Signals | None = None
        self._heard = heard
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._request)
            self._receives, self._sends = socket.socketpair()
            self._sends.setblocking(False)
            self._woken_before = signal.set_wakeup_fd(self._sends.fileno(), warn_on_full_buffer=False)
            self._listening = threading.Thread(target=self._listen, daemon=True)
            self._listening.start()
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._woken_before)
            self._sends.send(b"\0")
            self._listening.join()
            self._receives.close()
            self._sends.close()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def _listen(self) -> None:
        """Read the numbers of signals, which Python writes as they come, until a zero."""
        heard = False
        while number := self._receives.recv(1)[0]:
            again = heard and number == signal.SIGINT
            if number in self._before and (again or not heard):
                self._heard(signal.Signals(number).name, again)
                heard = True
