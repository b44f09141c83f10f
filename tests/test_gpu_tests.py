"""The benchmark that runs the tests of a GPU: what passed before is not run again, and nothing recorded is lost."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.benchmark_modules import benchmark

BEFORE = {"tests/a.py::one": {"outcome": "passed", "seconds": 1.0, "commit": "abc"},
          "tests/a.py::two": {"outcome": "failed", "seconds": 2.0, "commit": "abc", "said": "why"}}


@pytest.mark.parametrize("left", [True, False])
def test_what_passed_before_is_left_out_and_kept(tmp_path, monkeypatch, left):
    gpu_tests = benchmark("gpu_tests")
    monkeypatch.setattr(gpu_tests.record, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_tests.record, "device_slug", lambda: "card")
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py", *["--left"] * left, "-q"])
    (tmp_path / "gpu_tests-card.json").write_text(json.dumps({"tests": BEFORE}))
    asked = []

    def run(arguments, plugins):
        asked.extend(arguments)
        plugins[0].pytest_runtest_logreport(
            SimpleNamespace(when="call", passed=True, outcome="passed", duration=3.0, nodeid="tests/a.py::two"))
        return 0

    monkeypatch.setattr(gpu_tests.pytest, "main", run)
    assert gpu_tests.main() == 0
    assert [word for word in asked if word.startswith("--deselect")] == ["--deselect=tests/a.py::one"] * left
    assert "--left" not in asked
    found = json.loads((tmp_path / "gpu_tests-card.json").read_text())
    assert found["tests"]["tests/a.py::one"] == BEFORE["tests/a.py::one"]
    assert found["tests"]["tests/a.py::two"]["outcome"] == "passed"
    assert (found["passed"], found["failed"]) == (2, 0)
