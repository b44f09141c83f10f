"""The order of what is measured on a GPU, with a stand-in for the measurements."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.benchmark_modules import BENCHMARKS

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="needs the command timeout, of GNU coreutils")

STAND_IN = """#!/bin/sh
echo "$@" >> "$TOLD"
env > "$(dirname "$TOLD")/settings"
case $1 in
  */gpu_tests.py) exit 3 ;;
  */calibration.py) sleep "$SLOW" ;;
esac
"""


def gpu_sh(folder, *arguments, limit="200", slow="0"):
    """Its exit status, its output, and what it had run."""
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    told = folder / "told"
    told.write_text("")
    settings = {**os.environ, "PYTHON": str(stand_in), "TOLD": str(told), "LIMIT": limit,
                "SLOW": slow, "TIGHTFIT_RESULTS": str(folder)}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *arguments]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, told.read_text().splitlines()


def names(ran):
    return [line.split()[0].removeprefix("benchmarks/").removesuffix(".py") for line in ran]


def test_every_part_runs_whatever_becomes_of_the_others(tmp_path):
    status, output, ran = gpu_sh(tmp_path, limit="1", slow="30")
    assert names(ran)[:5] == ["context_bytes", "calibration", "beyond_gpu", "gpu_tests", "plan_vs_gpu"]
    assert {*names(ran)} >= {"record_ladders", "frontier", "convergence", "quickstart", "allocator_snapshots"}
    assert all((BENCHMARKS / f"{name}.py").is_file() for name in names(ran))
    assert status == 1
    table = output.splitlines()[-len(ran):]
    assert [line.split()[0] for line in table] == names(ran)
    assert not [*tmp_path.glob("gpu_parts-*")]
    verdicts = {line.split()[0]: line.partition(" s  ")[2] for line in table}
    assert verdicts["calibration"] == "took longer than 1 seconds"
    assert verdicts["gpu_tests"] == "ended with status 3"
    assert verdicts["plan_vs_gpu"] == verdicts["convergence"] == "went well"


def test_the_next_call_goes_on_behind_the_last_part_that_ended(tmp_path):
    _, output, ran = gpu_sh(tmp_path, "--minutes", "0")
    assert (names(ran), "no time was left from here on: context_bytes" in output) == ([], True)
    _, _, every = gpu_sh(tmp_path, "--minutes", "60")
    (ended,) = tmp_path.glob("gpu_parts-*.txt")
    lines = ended.read_text().splitlines()
    assert lines[0] == "1 context_bytes"
    ended.write_text("\n".join(lines[:1]) + "\n")
    _, _, behind = gpu_sh(tmp_path, "--minutes", "60")
    assert names(behind) == names(every)[1:]
    assert len(ended.read_text().splitlines()) == len(every)
    assert gpu_sh(tmp_path, "--minutes", "60")[2] == []


def test_a_part_has_the_minutes_that_are_left(tmp_path):
    _, _, ran = gpu_sh(tmp_path)
    assert "benchmarks/beyond_gpu.py --minutes 3" in ran


def test_one_part_runs_alone(tmp_path):
    status, output, ran = gpu_sh(tmp_path, "plan_vs_gpu", "--part", "2/5")
    assert (status, ran) == (0, ["benchmarks/plan_vs_gpu.py --part 2/5"])
    assert "went well" in output


def test_an_unknown_part_is_named(tmp_path):
    status, output, ran = gpu_sh(tmp_path, "plan_vs_tpu")
    assert (status, ran) == (2, [])
    assert "there is no benchmarks/plan_vs_tpu.py" in output


def test_plans_are_made_before(tmp_path):
    _, _, ran = gpu_sh(tmp_path, "--prepare", "h200")
    assert ran == [f"benchmarks/{name}.py --plan h200" for name in ("plan_vs_gpu", "beyond_gpu", "frontier")]


def test_wheels_that_were_brought_along_are_on_the_path(tmp_path):
    (tmp_path / "one.whl").touch()
    _, _, ran = gpu_sh(tmp_path, "--wheels", str(tmp_path), "quickstart")
    assert ran[0].startswith("-m pip install")
    assert ran[0].endswith(str(tmp_path / "one.whl"))
    site = ran[0].partition("--target ")[2].split()[0]
    assert f"{site}\n" in (tmp_path / "settings").read_text().partition("PYTHONPATH=src:")[2]


def test_a_dry_run_asks_for_no_gpu_and_leaves_results_alone(tmp_path):
    _status, _output, ran = gpu_sh(tmp_path, "--dry", str(tmp_path / "records"))
    assert {*names(ran)} == {"gpu_tests", "calibration", "gpu_ops", "plan_vs_gpu", "beyond_gpu", "record_ladders",
                             "frontier", "quickstart", "convergence"}
    assert all(any(word in line for word in ("--dry", "cpu", "reduced", "steps", "collect", "calibration"))
               for line in ran)
    settings = (tmp_path / "settings").read_text()
    assert f"TIGHTFIT_RESULTS={tmp_path / 'records'}" in settings
    assert f"HOME={tmp_path / 'records'}" in settings
