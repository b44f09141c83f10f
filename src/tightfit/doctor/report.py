"""The check-up for reading: a line for each finding, or one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from tightfit.doctor.checks import problems
from tightfit.doctor.findings import Finding
from tightfit.doctor.host_checks import PATHS, label, matrix
from tightfit.doctor.readings import Readings
from tightfit.text import counted

COLOURS = {"ok": "green", "info": "cyan", "advice": "yellow", "problem": "bold red"}


def as_dict(readings: Readings, findings: list[Finding]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"healthy": not problems(findings), "findings": list(map(asdict, findings)),
            "readings": readings.model_dump(mode="json")}


def show(console: Console, readings: Readings, findings: list[Finding]) -> None:
    """Print a line a finding: wrapped and in colour on a terminal, unwrapped in a file or pipe."""
    lines = [Text.assemble((f"{f.severity:<8}", COLOURS[f.severity]), f" {f.topic}: {f.sentence}",
                           (f" -> {f.action}" if f.action else "", "italic")) for f in findings]
    if rows := matrix(readings):
        kinds = {label(link, "#") for link in readings.links}
        lines += [Text(), Text("interconnect, as nvidia-smi topo -m names it")]
        lines += [Text("  " + "".join(f"{entry:<8}" for entry in row).rstrip()) for row in rows]
        lines += [Text(f"  {name} {path.legend}") for name, path in PATHS.items() if name in kinds]
    for line in [*lines, Text(), Text(verdict(findings))]:
        console.print(line, soft_wrap=not console.is_terminal)


def verdict(findings: list[Finding]) -> str:
    """The last sentence: whether training can start, and what stops it."""
    if stops := problems(findings):
        return "This stops training: " + "; ".join(f"{f.topic}: {f.sentence}" for f in stops) + "."
    advice = sum(finding.severity == "advice" for finding in findings)
    return "Nothing stops training" + (f"; {counted(advice, 'line')} of advice above." if advice else ".")
