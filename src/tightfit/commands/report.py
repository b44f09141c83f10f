"""`tightfit report`: a run and its profile, drawn as one HTML file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tightfit.errors import writing
from tightfit.files import write_atomically
from tightfit.profiling import AGAINST, REPORT
from tightfit.profiling.profile import home_of, how_to_profile, load
from tightfit.profiling.report.compare import headline, in_columns, records_by_figure, side_by_side
from tightfit.profiling.report.page import report, report_of_runs
from tightfit.training.record import record_of


def run_report(run_dir: Path, other: Path | None = None, output: Path | None = None) -> Path:
    """Draw the profile in `run_dir`, print its headline, the run's figures and where the report is, and return that
    path; of a step without a prediction, why it has none; of a run without a profile, its figures and its losses.

    other: a second run's folder to compare with: headlines and profiles, or where one of the two has no profile, the
    figures and losses that both recorded. output: where it goes; by default `report.html` in `run_dir`, or with a
    second run `report-against-<its name>.html`. Raises TightfitError for a folder with neither, or a damaged one, and
    where the report cannot be written.
    """
    folders = [run_dir] if other is None else [run_dir, other]
    names, records = [str(folder) for folder in folders], [record_of(folder) for folder in folders]
    runs = [run for run in records if run is not None and run.recipe is not None]
    missing = next((how_to_profile(folder) for folder in folders if home_of(folder) is None), None)
    alone = records[0] if other is None else None
    recorded = [] if alone is None else [f"{name}: {value}" for name, value in alone.rows]
    if missing is not None and len(runs) == len(folders):
        page = report_of_runs(runs, names, missing)
        compared = [] if other is None else [in_columns([("", *names), *records_by_figure(*runs)])]
        said = [*recorded, *compared, f"no step was profiled: {missing}"]
    else:
        blank = [folder for folder, run in zip(folders, records, strict=True) if run is None or run.recipe is None]
        profiles = {folder: load(folder) for folder in dict.fromkeys([*blank, *folders])}  # what lacks most, first
        profile, second = profiles[run_dir], None if other is None else profiles[other]
        page = report(profile, second, records[0], names)
        shown = headline(profile) if second is None else side_by_side(profile, second, names)
        reasons = [profile.not_predicted] if second is None and profile.not_predicted else []
        said = [shown, *reasons, *recorded]
    path = output or run_dir / (REPORT if other is None else f"{AGAINST}{other.resolve().name}.html")
    with writing(f"{path}: the report", "write --output elsewhere"):
        write_atomically(path, page)
    console = Console(soft_wrap=True)
    console.print(*said, f"report: {path}", sep="\n", markup=False, highlight=False)
    return path
