"""The check-up for reading: a table on a terminal, a line for each finding elsewhere, or one JSON object."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.doctor.checks import problems
from tightfit.doctor.findings import Finding
from tightfit.doctor.host_checks import legend, matrix
from tightfit.doctor.readings import Readings

COLOURS = {"ok": "green", "info": "cyan", "advice": "yellow", "problem": "bold red"}


def as_dict(readings: Readings, findings: list[Finding]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "healthy": not problems(findings),
        "findings": [finding.to_dict() for finding in findings],
        "readings": readings.to_dict(),
    }


def show(console: Console, readings: Readings, findings: list[Finding]) -> None:
    """Print it: wrapped and in colour on a terminal; one line a finding, unwrapped, in a file or pipe."""
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for finding in findings:
            action = f" -> {finding.action}" if finding.action else ""
            _plain(console, f"{finding.severity:<8} {finding.topic}: {finding.sentence}{action}")
    rows = matrix(readings)
    if rows:
        _plain(console, "\ninterconnect, as nvidia-smi topo -m names it")
        for row in rows:
            _plain(console, "  " + "".join(f"{entry:<8}" for entry in row).rstrip())
        for line in legend(readings):
            _plain(console, f"  {line}")
    _plain(console, f"\n{verdict(findings)}")


def verdict(findings: list[Finding]) -> str:
    """The last sentence: whether training can start, and what stops it."""
    stops = problems(findings)
    if stops:
        return "This stops training: " + "; ".join(f"{f.topic}: {f.sentence}" for f in stops) + "."
    advice = sum(finding.severity == "advice" for finding in findings)
    return f"Nothing stops training; {advice} to look at." if advice else "Nothing stops training."


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column()
    topic = ""
    for finding in findings:
        body = Text(finding.sentence)
        if finding.action:
            body.append(f"\n-> {finding.action}", style="italic")
        heading = finding.topic if finding.topic != topic else ""
        topic = finding.topic
        table.add_row(heading, Text(finding.severity, style=COLOURS[finding.severity]), body)
    return table


def _plain(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False)
