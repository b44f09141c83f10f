"""The check-up for reading: a table on a terminal, a line for each finding elsewhere, or one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.doctor.checks import problems
from tightfit.doctor.findings import Finding
from tightfit.doctor.host_checks import PATHS, label, matrix
from tightfit.doctor.readings import Readings

COLOURS = {"ok": "green", "info": "cyan", "advice": "yellow", "problem": "bold red"}


def as_dict(readings: Readings, findings: list[Finding]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"healthy": not problems(findings), "findings": list(map(asdict, findings)),
            "readings": readings.model_dump(mode="json")}


def show(console: Console, readings: Readings, findings: list[Finding]) -> None:
    """Print it: wrapped and in colour on a terminal; one line a finding, unwrapped, in a file or pipe."""
    lines = []
    if console.is_terminal:
        console.print(_table(findings))
    else:
        lines += [f"{f.severity:<8} {f.topic}: {f.sentence}{f' -> {f.action}' if f.action else ''}" for f in findings]
    if rows := matrix(readings):
        kinds = {label(link, "#") for link in readings.links}
        lines += ["", "interconnect, as nvidia-smi topo -m names it"]
        lines += ["  " + "".join(f"{entry:<8}" for entry in row).rstrip() for row in rows]
        lines += [f"  {name} {path.legend}" for name, path in PATHS.items() if name in kinds]
    for line in [*lines, "", verdict(findings)]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def verdict(findings: list[Finding]) -> str:
    """The last sentence: whether training can start, and what stops it."""
    if stops := problems(findings):
        return "This stops training: " + "; ".join(f"{f.topic}: {f.sentence}" for f in stops) + "."
    advice = sum(finding.severity == "advice" for finding in findings)
    return f"Nothing stops training; {advice} to look at." if advice else "Nothing stops training."


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column()
    last = ""
    for finding in findings:
        body = Text(finding.sentence)
        if finding.action:
            body.append(f"\n-> {finding.action}", style="italic")
        heading = "" if finding.topic == last else finding.topic
        last = finding.topic
        table.add_row(heading, Text(finding.severity, style=COLOURS[finding.severity]), body)
    return table
