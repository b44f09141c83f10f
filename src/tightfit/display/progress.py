"""The progress of a search, on the error stream: standard output is for the plan."""

from __future__ import annotations

import math
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0


class SearchProgress:
    """A bar that goes away when the work is done; where there is no terminal, plain lines: the first with the
    first call, the others some seconds apart.

    Called with the number done, how many there are or None, and the rest of the line: what comes next. what: the work,
    such as `planning`. counted: the things that are counted.
    """

    def __init__(self, console: Console, what: str, counted: str, between: float = SECONDS_BETWEEN_LINES) -> None:
        self._console, self._what, self._counted, self._between = console, what, counted, between
        self._began = time.monotonic()
        self._last = -math.inf  # of the last plain line
        self._bar = Progress(
            SpinnerColumn(), TimeElapsedColumn(), BarColumn(bar_width=20),  # what stays as wide comes first
            TextColumn("{task.description}", markup=False), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int | None, text: str) -> None:
        of = "" if total is None else f" of {total}"
        things = self._counted.removesuffix("s") if done == 1 and total is None else self._counted
        line = f"{done}{of} {things} done, {text}"
        self._bar.update(self._task, description=line, completed=done, total=total)
        now = time.monotonic()
        if self._bar.disable and done != total and now - self._last >= self._between:
            self._last = now
            self._console.print(f"{self._what}: {now - self._began:.0f} s, {line}", highlight=False, markup=False,
                                soft_wrap=True)
