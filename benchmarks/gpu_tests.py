"""The tests that need a CUDA device, and what became of each: results/gpu_tests-GPU.json, written after every test.

They run in several processes where pytest-xdist is installed: most of their time the device waits for a compiler.
Run: python benchmarks/gpu_tests.py [PYTEST ARGUMENT ...]   (needs a CUDA device, but for --collect-only)
     python benchmarks/gpu_tests.py --left [...]            those alone that did not pass before, by the record
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import record

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 10
ALONE = "tests/test_plan_vs_gpu.py"
"""Its figures are of a device that nothing else uses; plan_vs_gpu.py itself is measured after this."""
SAID = 2000
"""How much of a failure is kept, in characters."""


class Outcomes:
    """Keeps the outcome of each test as it comes, beside what was recorded before."""

    def __init__(self, before: dict[str, dict[str, Any]]) -> None:
        self.tests = dict(before)
        self._commit = record.environment()["commit"]
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        row: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 2), "commit": self._commit}
        if not report.passed:
            row["said"] = report.longreprtext[-SAID:]
        self.tests[report.nodeid] = row
        counts = {outcome: sum(test["outcome"] == outcome for test in self.tests.values())
                  for outcome in ("passed", "failed", "skipped")}
        seconds = round(time.monotonic() - self._began, 1)
        record.write(name(), {**counts, "seconds": seconds, "tests": self.tests})


def name() -> str:
    """The record's, of the device at hand."""
    return f"gpu_tests-{record.device_slug()}"


def recorded() -> dict[str, dict[str, Any]]:
    """The rows of the device's record, by test."""
    path = record.RESULTS / f"{name()}.json"
    return dict(json.loads(path.read_text("utf-8"))["tests"]) if path.exists() else {}


def files() -> list[str]:
    """The files that have such tests, that of every technique last: it has most of them."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    paths = sorted(found, key=lambda path: (path.name == "test_contract.py", path))
    return [str(path) for path in paths if path != ROOT / ALONE]


def main() -> int:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX leaves the other processes something
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    arguments, before = [word for word in sys.argv[1:] if word != "--left"], recorded()
    if "--left" in sys.argv:
        options += [f"--deselect={test}" for test, row in before.items() if row["outcome"] == "passed"]
    if importlib.util.find_spec("xdist") is not None and "--collect-only" not in arguments:
        options += ["--numprocesses", str(PROCESSES), "--dist", "worksteal"]
    return int(pytest.main([*options, *arguments, *files()], plugins=[Outcomes(before)]))


if __name__ == "__main__":
    sys.exit(main())
