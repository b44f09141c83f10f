"""The quickstart, recorded: its summary, its loss curve and a plot of it.

Run: python benchmarks/quickstart.py [key=value ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import record
import tightfit
from tightfit.recipe.lookup import load_recipe
from tightfit.training.listeners import Terminal


def plot(lines: list[dict[str, Any]], unigram: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="tight")
    axis = figure.subplots()
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held_out = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    axis.plot(*zip(*train, strict=True), color="tab:blue", label="training")
    axis.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held out")
    axis.axhline(unigram, color="gray", linestyle="--", label="unigram baseline")
    axis.set(xlabel="step", ylabel="loss, nats a token", title="tightfit train quickstart")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder, Terminal(Console()) as terminal:
        recipe = load_recipe("quickstart", [*sys.argv[1:], f"output_dir={folder}/run"], cuda=cuda)
        summary = tightfit.Trainer(recipe=recipe, listener=terminal).train()
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    assert summary.unigram_loss is not None
    name = f"quickstart-{record.device_slug()}" if cuda else "quickstart"
    values = {**summary.to_dict(), "output_dir": None, "curve": lines}
    print(record.write(name, {"overrides": sys.argv[1:], "summary": values}))
    plot(lines, summary.unigram_loss, record.RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
