"""Draw the README's pictures: a plan as it stands in a terminal, and the page of a profile in a browser.

Run: python docs/pictures.py. Needs Chromium on the PATH, for the second.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import tightfit
from tightfit.display.plan_table import show_plan

PICTURES = Path(__file__).parent / "pictures"
COLUMNS = 150
WINDOW = (1300, 1000)


def plan_picture() -> None:
    """The plan of gpt2-large for an RTX 4090, its two first parts."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    plan = tightfit.plan("gpt2-large", {"seq_len": 1024}, gpu="rtx-4090")
    show_plan(plan, console)
    console.save_svg(str(PICTURES / "plan.svg"), title="tightfit plan gpt2-large seq_len=1024 --gpu rtx-4090")


def report_picture() -> None:
    """The head of the quickstart's report, measured on this machine."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("the report's picture needs Chromium on the PATH; install it, for instance: apt-get install chromium")
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run([sys.executable, "-m", "tightfit", "profile", "quickstart", f"output_dir={run}"], check=True)
        subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-background-networking", f"--window-size={WINDOW[0]},{WINDOW[1]}", "--virtual-time-budget=20000",
             f"--user-data-dir={folder}/browser", f"--screenshot={PICTURES / 'report.png'}",
             (run / "report.html").as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    plan_picture()
    report_picture()
