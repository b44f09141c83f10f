"""What `tightfit doctor --calibrate` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.doctor.calibrate import calibrate, ceiling_rows
from tightfit.reporting.search_progress import SearchProgress


def run_calibration(device: str) -> None:
    """Measure, keep and show. device: `auto`, `cpu` or `cuda`. Raises TightfitError as `calibrate` does."""
    with SearchProgress(Console(stderr=True), "measuring") as progress:
        ceilings, path = calibrate(device, lambda what, share: progress(round(100 * share), 100, what))
    console = Console()
    table = Table.grid(padding=(0, 2))
    for name, figure in ceiling_rows(ceilings):
        table.add_row(Text(name), Text(figure))
    console.print(table)
    console.print(Text(f"kept in {path}; plans for this device are calibrated by it from now on"))
    console.print(Text("The rest of the check-up is not there yet."))
