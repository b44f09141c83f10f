"""Progress on the error stream: plain lines where there is no terminal, a bar that stays where it is on one."""

from __future__ import annotations

import io
import time

from rich.console import Console

from tightfit.display.progress import SearchProgress


def test_lines_say_since_when_and_what_is_counted_of_how_many(monkeypatch):
    clock = iter((100.0, 112.3, 115.0, 120.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with SearchProgress(console, "planning", "traces", between=0.0) as progress:
        progress(3, 30, "now whether [RTX 5090] would do")
        progress(1, None, "now that")
        progress(7, 7, "done")
    assert console.file.getvalue() == ("planning: 12 s, 3 of 30 traces done, now whether [RTX 5090] would do\n"
                                       "planning: 15 s, 1 trace done, now that\n")


def test_the_first_line_comes_with_the_first_call_and_the_next_some_seconds_later():
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with SearchProgress(console, "planning", "traces") as progress:
        progress(0, None, "now this")
        progress(1, None, "now that")
    assert console.file.getvalue() == "planning: 0 s, 0 traces done, now this\n"


def test_on_a_terminal_the_text_comes_after_the_bar():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with SearchProgress(console, "planning", "traces") as progress:
        progress(3, 30, "now this")
    line = next(line for line in console.file.getvalue().splitlines() if "this" in line)
    assert line.index("0:00:0") < line.index("━") < line.index("3 of 30 traces done, now this")
