"""Draw the pictures of the pages: a plan as it stands in a terminal, the page of a profile and the recorded ladders'
charts in a browser, and what results/beyond.json and results/scale.json say of streamed steps and of many GPUs.

    python docs/pictures.py                  # all; the profile's and the ladders' need Chromium on the PATH
    python docs/pictures.py beyond           # plan, report, ladders, beyond, scale: only those named
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from html import escape
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import tightfit
from ladders import recorded_ladders
from tightfit.display.plan_table import show_plan
from tightfit.ladder.charts import draw
from tightfit.ladder.results import heading

PICTURES = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parents[1] / "results"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Of Okabe and Ito's palette, dark enough for lines on white."""
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
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run([sys.executable, "-m", "tightfit", "profile", "quickstart", f"output_dir={run}"], check=True)
        _photograph(run / "report.html", PICTURES / "report.png", *WINDOW)


def ladder_pictures() -> None:
    """The charts of each ladder in results/ladder-*.jsonl, at the size that ran, one below the other."""
    for run, path in recorded_ladders():
        title, machine, *_ = heading(run)
        charts = [chart for chart in draw(run) if not chart.name.startswith("full")]
        parts = [f"<body style='margin: 20px; font: 15px system-ui'><h1>{escape(title)}</h1><p>{escape(machine)}</p>"]
        parts += [f"<h2>{escape(chart.title)}</h2>{chart.figure.to_html(full_html=False)}" for chart in charts]
        with TemporaryDirectory() as folder:
            page = Path(folder) / "ladder.html"
            page.write_text("\n".join(parts), "utf-8")
            _photograph(page, path.with_suffix(".png"), 1100, 130 + sum(70 + c.figure.layout.height for c in charts))


def _photograph(page: Path, picture: Path, width: int, height: int) -> None:
    """A page as a browser without a window shows it."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("this picture needs Chromium on the PATH; install it, for instance: apt-get install chromium")
    with TemporaryDirectory() as folder:
        subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-background-networking", f"--window-size={width},{height}", "--virtual-time-budget=20000",
             f"--user-data-dir={folder}", f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip


def beyond_picture() -> None:
    """Speed of streamed steps beside that without copies, by tokens of a global batch, a line for each card."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    recorded = json.loads((RESULTS / "beyond.json").read_text("utf-8"))
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, card in enumerate(recorded["cards"]):
        rows = [row for row in recorded["rows"] if row["gpu"] == card["gpu"] and row["fits"] == "yes"]
        axes.plot([row["tokens"] / 1000 for row in rows], [row["of_speed_without_copies"] for row in rows],
                  marker="os^D"[place % 4], markersize=5, color=COLOURS[place % 4], label=card["gpu"])
    axes.axhline(recorded["share"], color="0.5", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}k")
    axes.set(ylim=(0, 1.03), xlabel="tokens in a global batch", ylabel="speed beside that without copies",
             title=f"{recorded['model']}, full fine-tuning from host memory, predicted")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    with rc_context({"svg.hashsalt": "beyond", "svg.fonttype": "none"}):
        figure.savefig(PICTURES / "beyond.svg", metadata={"Date": None})


def scale_picture() -> None:
    """Tokens a second of each GPU by their number, a line for each network."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    recorded = json.loads((RESULTS / "scale.json").read_text("utf-8"))
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    networks = dict.fromkeys(row["network"] for row in recorded["rows"] if row["network"])
    for place, network in enumerate(networks):
        rows = [row for row in recorded["rows"] if row["network"] in (None, network)]
        axes.plot([row["gpus"] for row in rows], [row["per_gpu"] for row in rows], marker="os^D"[place % 4],
                  markersize=5, color=COLOURS[place % 4], label=f"{network} a machine")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylim=(0, None), xlabel=f"{recorded['gpu']} cards", ylabel="tokens a second of each",
             title=f"{recorded['model']}, {recorded['tokens']:,} tokens a step, predicted")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    with rc_context({"svg.hashsalt": "scale", "svg.fonttype": "none"}):
        figure.savefig(PICTURES / "scale.svg", metadata={"Date": None})


DRAWN = {"plan": plan_picture, "report": report_picture, "ladders": ladder_pictures, "beyond": beyond_picture,
         "scale": scale_picture}

if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or DRAWN:
        DRAWN[name]()
