"""The order of what is measured on a GPU, with a stand-in for the measurements."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.benchmark_modules import BENCHMARKS

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="needs the command timeout, of GNU coreutils")

PEERS = "--peer plain --peer hf-trainer "
STAND_IN = """#!/bin/sh
echo "$@" >> "$TOLD"
env > "$(dirname "$TOLD")/settings"
case $1 in
  */cuda_op_tables.py) exit 3 ;;
  */calibration.py) sleep 30 ;;
esac
"""


def gpu_sh(folder, *arguments):
    """Its exit status, its output, and what it had run."""
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    told = folder / "told"
    told.touch()
    settings = {**os.environ, "PYTHON": str(stand_in), "TOLD": str(told), "LIMIT": "1"}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *arguments]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, told.read_text().splitlines()


def test_every_part_runs_whatever_becomes_of_the_others(tmp_path):
    status, output, ran = gpu_sh(tmp_path)
    assert ran == [
        "benchmarks/context_bytes.py", "benchmarks/calibration.py", "benchmarks/cuda_op_tables.py",
        "benchmarks/plan_vs_gpu.py --part 1/3 --minutes 7.5", "benchmarks/beyond_gpu.py --minutes 7.5",
        *(f"benchmarks/plan_vs_gpu.py --part {number}/3 --minutes 7.5" for number in (2, 3)),
        "benchmarks/beyond_gpu.py --minutes 7.5",
        *(f"benchmarks/record_ladders.py {name} {peers}--minutes 7.5" for name, peers in (
            ("bert-large", PEERS), ("transformer-156m", PEERS), ("transformer-156m-jax", ""), ("fp16-batch", PEERS))),
        *(f"benchmarks/frontier.py --budget {budget} --minutes 7.5" for budget in ("8GB", "16GB", "24GB", "80GB")),
        "benchmarks/allocator_snapshots.py --output results/allocator_snapshots", "benchmarks/quickstart.py",
        "benchmarks/convergence.py --steps 300 --name convergence_gpu",
    ]  # fmt: skip
    assert status == 1
    table = output.splitlines()[-len(ran):]
    assert [line.split()[0] for line in table] == [line.split("/")[1].split(".py")[0] for line in ran]
    verdicts = {line.split()[0]: line.partition(" s  ")[2] for line in table}
    assert verdicts["calibration"] == "took longer than 1 seconds"
    assert verdicts["cuda_op_tables"] == "ended with status 3"
    assert verdicts["plan_vs_gpu"] == verdicts["convergence"] == "went well"


def test_one_part_runs_alone(tmp_path):
    status, output, ran = gpu_sh(tmp_path, "plan_vs_gpu", "2/5")
    assert (status, ran) == (0, ["benchmarks/plan_vs_gpu.py --part 2/5 --minutes 7.5"])
    assert "went well" in output


def test_an_unknown_part_is_named(tmp_path):
    status, output, ran = gpu_sh(tmp_path, "plan_vs_tpu")
    assert (status, ran) == (2, [])
    assert "'plan_vs_tpu' is not one of context_bytes" in output


def test_every_part_has_a_file():
    for name in ("context_bytes", "calibration", "cuda_op_tables", "plan_vs_gpu", "beyond_gpu",
                 "allocator_snapshots", "quickstart", "convergence"):  # fmt: skip
        assert (BENCHMARKS / f"{name}.py").is_file()


def test_a_dry_run_asks_for_no_gpu_and_leaves_results_alone(tmp_path):
    _status, output, ran = gpu_sh(tmp_path, "--dry", str(tmp_path / "records"))
    assert "needs a GPU" in output
    assert {line.split()[0].removeprefix("benchmarks/") for line in ran} == {
        "calibration.py", "plan_vs_gpu.py", "beyond_gpu.py", "record_ladders.py", "frontier.py", "quickstart.py",
        "convergence.py"}
    assert all("--dry" in line or "cpu" in line or "reduced" in line or "steps" in line
               for line in ran if "calibration" not in line)
    assert "TIGHTFIT_RESULTS=" + str(tmp_path / "records") in (tmp_path / "settings").read_text()
