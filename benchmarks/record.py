"""How a benchmark's outcome is recorded: JSON with the machine, the versions, the commit and the date."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tightfit.system import installed

RESULTS = Path(os.environ.get("TIGHTFIT_RESULTS") or Path(__file__).resolve().parent.parent / "results")
"""Where records go; a trial of a benchmark sends them elsewhere."""


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    commit = ""
    with contextlib.suppress(OSError):  # a measurement is not lost because a machine has no git
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                                check=False).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or None,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **installed(("torch", "transformers", "accelerate")),
    }


def slug(device: str) -> str:
    """A device's name as records of it have it: `h200` for `NVIDIA H200`."""
    return "-".join(word for word in device.lower().replace("/", " ").split() if word != "nvidia")


def device_slug() -> str:
    """That of the CUDA device at hand, `cpu` without one."""
    return slug(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def quantiles(values: list[float]) -> dict[str, float]:
    """Minimum, quartiles and maximum."""
    ordered = sorted(values)
    low, middle, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return {"min": ordered[0], "p25": low, "median": middle, "p75": high, "max": ordered[-1]}


def apart(file: str, *arguments: str, seconds: float, environment: dict[str, str] | None = None) -> tuple[str, str]:
    """What a Python file prints, run by a new process, and how it failed; empty where it did not."""
    try:
        done = subprocess.run([sys.executable, file, *arguments], env=environment, capture_output=True, text=True,
                              timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "", f"took more than {seconds} seconds"
    return done.stdout, (done.stderr or done.stdout)[-2000:] if done.returncode else ""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What a file of JSON lines holds, if there is one, but for a line that was cut off as it was written."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def write(name: str, values: dict[str, Any], folder: Path | None = None) -> Path:
    """Write <name>.json into results/, or another folder, and return its path."""
    folder = folder or RESULTS
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **values}, indent=1) + "\n")
    return path
