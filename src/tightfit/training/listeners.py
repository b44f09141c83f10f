"""Progress of a run for a person: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tightfit.text import seconds


class Listener:
    """A run's audience: called as the run goes on, and entered for its length. This one is silent; another overrides
    what it wants to show.

    unit: of the rate that it is called with, which the Trainer sets: of images samples, for they have no tokens.
    """

    unit = "tokens/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """The run has ended."""

    def message(self, text: str) -> None:
        """A line that a person should read."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """Work before the first step."""

    def started(self, step: int, steps: int) -> None:
        """The first step is about to run."""

    def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A step has ended. tokens_per_second: 0 where none was timed, as in a profiled step."""

    def stopping(self, by: str, again: bool) -> None:
        """A signal, `by` its name, asks to stop after the step at hand; again: a Ctrl-C after one. Called by a thread
        of its own."""

    def finished(self) -> None:
        """No more steps."""


class LastingConsole(Console):
    """A console that falls silent where nobody reads it any more, instead of ending the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal(Listener):
    """A progress bar with loss, speed and time left; plain lines, some seconds apart, where there is no terminal."""

    def __init__(self, console: Console, seconds_between_lines: float = 10.0) -> None:
        self.console = console
        self._between = 0.1 if console.is_terminal else seconds_between_lines
        self._last = 0.0
        self._gone = False
        self._began = time.monotonic()
        self._first = 0
        self._steps = 0
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False), TimeRemainingColumn(), console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def message(self, text: str) -> None:
        if self._gone:
            return
        try:
            self.console.print(text, highlight=False, markup=False)
        except OSError:  # such as a full disk behind it; the run goes on
            self._gone = True

    def preparing(self, what: str, done: int, total: int) -> None:
        if not self._due(done >= total):
            return
        if self._bar.disable:
            self.message(f"{what}: {done}/{total}")
        elif self._task is None:
            self._task = self._bar.add_task(what, total=total, completed=done, figures="")
        else:
            self._bar.update(self._task, description=what, total=total, completed=done)

    def started(self, step: int, steps: int) -> None:
        self._first, self._steps, self._began = step, steps, time.monotonic()
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("training", total=steps, completed=step, figures="")

    def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
        if not self._due(step >= self._steps):
            return
        speed = f"  {tokens_per_second:,.0f} {self.unit}" if tokens_per_second else ""
        figures = f"loss {loss:.4f}{speed}"
        if self._bar.disable:
            left = (time.monotonic() - self._began) / max(step - self._first, 1) * (self._steps - step)
            left_text = seconds(left) if left >= 120 else f"{left:.0f} s"
            self.message(f"step {step}/{self._steps}  {figures}  {left_text} left")
        elif self._task is not None:
            self._bar.update(self._task, completed=step, figures=figures)

    def stopping(self, by: str, again: bool) -> None:
        if not again:
            self.message(f"{by}: the run ends after this step, saved; Ctrl-C now ends it at once, without this step")

    def finished(self) -> None:
        self._bar.stop()

    def _due(self, last: bool) -> bool:
        now = time.monotonic()
        if not last and now - self._last < self._between:
            return False
        self._last = now
        return True
