"""The tests that need a CUDA device, and what became of each: results/gpu_tests-GPU.json, written after every test.

Run: python benchmarks/gpu_tests.py [PYTEST ARGUMENT ...]   (needs a CUDA device, but for --collect-only)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

import record

ROOT = Path(__file__).resolve().parent.parent
SAID = 2000
"""How much of a failure is kept, in characters."""


class Outcomes:
    """Keeps the outcome of each test as it comes."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        row: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        if not report.passed:
            row["said"] = report.longreprtext[-SAID:]
        self.tests[report.nodeid] = row
        counts = {outcome: sum(test["outcome"] == outcome for test in self.tests.values())
                  for outcome in ("passed", "failed", "skipped")}
        seconds = round(time.monotonic() - self._began, 1)
        record.write(f"gpu_tests-{record.device_slug()}", {**counts, "seconds": seconds, "tests": self.tests})


def main() -> int:
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *sys.argv[1:]]
    return int(pytest.main([*options, str(ROOT / "tests")], plugins=[Outcomes()]))


if __name__ == "__main__":
    sys.exit(main())
