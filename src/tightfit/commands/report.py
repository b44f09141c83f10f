"""`tightfit report`: a run's profile, drawn as one HTML file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tightfit.errors import ReportError
from tightfit.profiling import AGAINST, REPORT
from tightfit.profiling.profile import load
from tightfit.profiling.report.compare import headline, side_by_side
from tightfit.profiling.report.page import write_report
from tightfit.training.summary import finished_rows


def run_report(run_dir: Path, other: Path | None = None, output: Path | None = None) -> Path:
    """Draw the profile in `run_dir`, print its headline and where the report is, and return that path.

    other: a second run's folder to compare with, whose headline is then printed next to the first. output: where it
    goes; by default `report.html` in `run_dir`, or with a second run `report-against-<its name>.html`. Raises
    ReportError for a folder without a profile, and where the report cannot be written.
    """
    profile = load(run_dir)
    second = None if other is None else load(other)
    name = REPORT if other is None else f"{AGAINST}{other.resolve().name}.html"
    path = output or run_dir / name
    names = (str(run_dir), str(other))
    try:
        write_report(path, profile, second, finished_rows(run_dir), names)
    except OSError as error:
        raise ReportError(f"{path}: the report cannot be written ({error.strerror or error}); write --output "
                          "elsewhere") from None
    console = Console(soft_wrap=True)
    text = headline(profile) if second is None else side_by_side(profile, second, names)
    console.print(text, markup=False, highlight=False)
    console.print(f"report: {path}", markup=False, highlight=False)
    return path
