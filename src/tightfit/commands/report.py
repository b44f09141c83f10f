"""`tightfit report`: a run and its profile, drawn as one HTML file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tightfit.errors import ReportError
from tightfit.files import write_atomically
from tightfit.profiling import AGAINST, REPORT
from tightfit.profiling.profile import home_of, how_to_profile, load
from tightfit.profiling.report.compare import headline, side_by_side
from tightfit.profiling.report.page import report, report_of_run
from tightfit.training.run_folder import RunFolder
from tightfit.training.summary import record_of


def run_report(run_dir: Path, other: Path | None = None, output: Path | None = None) -> Path:
    """Draw the profile in `run_dir`, print its headline and where the report is, and return that path; of a run without
    one, its figures and its losses.

    other: a second run's folder to compare with, whose headline is then printed next to the first. output: where it
    goes; by default `report.html` in `run_dir`, or with a second run `report-against-<its name>.html`. Raises
    ReportError for a folder with neither, for a second one without a profile, and where the report cannot be written.
    """
    run, recipe = record_of(run_dir), None
    if run is not None and other is None and home_of(run_dir) is None:
        recipe = RunFolder(run_dir).saved_recipe()
    if run is not None and recipe is not None:
        missing = how_to_profile(run_dir)
        page = report_of_run(run, recipe, missing)
        said = "\n".join([*(f"{name}: {value}" for name, value in run.rows), f"no step was profiled: {missing}"])
    else:
        profile = load(run_dir)
        second = None if other is None else load(other)
        names = (str(run_dir), str(other))
        page = report(profile, second, run, names)
        said = headline(profile) if second is None else side_by_side(profile, second, names)
    path = output or run_dir / (REPORT if other is None else f"{AGAINST}{other.resolve().name}.html")
    try:
        write_atomically(path, page)
    except OSError as error:
        raise ReportError(f"{path}: the report cannot be written ({error.strerror or error}); write --output "
                          "elsewhere") from None
    console = Console(soft_wrap=True)
    console.print(said, markup=False, highlight=False)
    console.print(f"report: {path}", markup=False, highlight=False)
    return path
