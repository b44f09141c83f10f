"""The benchmark of steps larger than the memory that they are given, as far as it runs on a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.benchmark_modules import BENCHMARKS, benchmark


@pytest.mark.cold
def test_streamed_steps_are_the_resident_ones(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "beyond_gpu.py"), "--dry", str(tmp_path), "--only", "exact"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    found = json.loads((tmp_path / "beyond_gpu-h200.json").read_text())
    assert found["streamed_is_resident"] is found["resident_is_itself"] is True
    assert not found["failures"]
    rows = benchmark("beyond_gpu").kept_rows(tmp_path / "beyond_gpu.jsonl", "H200")
    assert {*rows} == {"exact: resident", "exact: resident again", "exact: streamed"}
