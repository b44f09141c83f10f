"""How a benchmark's outcome is recorded: JSON with the machine, the versions, the commit and the date."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or None,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "accelerate")},
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Minimum, quartiles and maximum."""
    ordered = sorted(values)
    low, middle, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return {"min": ordered[0], "p25": low, "median": middle, "p75": high, "max": ordered[-1]}


def write(name: str, values: dict[str, Any]) -> Path:
    """Write results/<name>.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **values}, indent=1) + "\n")
    return path
