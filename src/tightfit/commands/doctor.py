"""`tightfit doctor`: the check-up, and calibration."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from tightfit.display.progress import SearchProgress
from tightfit.display.tables import two_columns
from tightfit.doctor.calibrate import calibrate, calibration_rows
from tightfit.doctor.checks import checks, problems
from tightfit.doctor.machine import gather
from tightfit.doctor.report import as_dict, show
from tightfit.system import cores


def run_doctor(as_json: bool, disk: bool) -> int:
    """Look the machine over and print what there is to say. The exit status: 1 where something stops training, else 0.

    disk: whether to measure the disk of the working folder.
    """
    with Console(stderr=True).status("looking the machine over"):
        readings = gather(Path.cwd(), disk)
    findings = checks(readings)
    if as_json:
        print(json.dumps(as_dict(readings, findings), indent=1))
    else:
        show(Console(), readings, findings)
    return 1 if problems(findings) else 0


def run_calibration(device: str, as_json: bool) -> None:
    """Measure, keep and show. device: `auto`, `cpu` or `cuda`. Raises TightfitError as `calibrate` does.

    as_json: print the record that is kept instead of the table.
    """
    processors, busy = psutil.cpu_count() or 1, psutil.cpu_percent(interval=1) / 100
    with SearchProgress(Console(stderr=True), "measuring", "percent") as progress:
        calibration, path = calibrate(device, lambda what, share: progress(round(100 * share), 100, f"now {what}"))
    if processors * (1 - busy) < 0.75 * cores():
        Console(stderr=True).print(f"warning: something else keeps the machine busy ({busy:.0%} of {processors} "
                                   "processors), which shows in every figure: end it, and calibrate again")
    if as_json:
        print(path.read_text("utf-8"))
        return
    console = Console()
    console.print(two_columns(calibration_rows(calibration)))
    console.print(Text(f"kept in {path}; plans for this device are calibrated by it from now on"))
