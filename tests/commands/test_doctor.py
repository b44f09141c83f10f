"""`tightfit doctor` as a person meets it."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.doctor.recordings import NAMES, recorded
from tightfit.calibration import Calibration
from tightfit.cli import app
from tightfit.commands import doctor as command
from tightfit.doctor.checks import checks
from tightfit.doctor.readings import Readings
from tightfit.doctor.report import show
from tightfit.errors import RecipeError
from tightfit.system import cores


@pytest.fixture
def doctor(monkeypatch):
    """Runs the command on a recording."""
    def run(name, *words):
        monkeypatch.setattr(command, "gather", lambda folder, disk: recorded(name))
        return CliRunner().invoke(app, ["doctor", *words])

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_machine_without_a_gpu_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--json", "--no-disk"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values["healthy"] is True
    assert values["readings"]["gpus"] == []
    assert values["readings"]["disk"]["write"] is None
    assert Readings.model_validate_json(json.dumps(values["readings"])).software.torch
    assert {"topic", "severity", "sentence", "field", "value", "action"} == values["findings"][0].keys()


def test_a_problem_is_exit_1_and_named_last(doctor):
    done = doctor("driver-too-old")
    assert done.exit_code == 1
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("This stops training: driver: driver 525.147.05 is too old")
    as_json = doctor("driver-too-old", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["healthy"] is False


def test_advice_is_exit_0(doctor):
    done = doctor("hot-and-throttled")
    assert done.exit_code == 0
    assert done.stdout.strip().splitlines()[-1] == "Nothing stops training; 4 lines of advice above."
    assert doctor("healthy").stdout.strip().endswith("Nothing stops training.")


def test_a_pipe_gets_a_line_a_finding(doctor):
    lines = doctor("x4-link").stdout.splitlines()
    (link,) = [line for line in lines if "lanes" in line]
    assert link.startswith("advice   GPU 0: PCIe runs with 4")
    assert " -> its slot" in link


def test_the_matrix_is_printed(doctor):
    out = doctor("two-with-nvlink").stdout
    assert "  GPU0    X       NV4\n  GPU1    NV4     X\n  NV# that many NVLinks" in out


@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_gets_lines_that_fit(name):
    stream = io.StringIO()
    readings = recorded(name)
    show(Console(file=stream, force_terminal=True, width=100, color_system=None), readings, checks(readings))
    assert max(len(line.rstrip()) for line in stream.getvalue().splitlines()) <= 100
    for finding in checks(readings):
        assert " ".join(finding.sentence.split()[:3]) in " ".join(stream.getvalue().split())


def test_a_device_without_calibration_is_bad_input():
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert isinstance(done.exception, RecipeError)  # which main() prints in one line, with exit status 2
    assert "--calibrate" in str(done.exception)


def test_calibration_can_be_json(tmp_path, monkeypatch):
    path = tmp_path / "cpu.json"
    path.write_text('{"device": "CPU"}')
    calibration = Calibration(device="CPU", kind="cpu", processor="p", torch="2.13.0", threads=1)
    monkeypatch.setattr(command, "calibrate", lambda device, progress: (calibration, path))
    assert json.loads(CliRunner().invoke(app, ["doctor", "--calibrate", "--json"]).stdout) == {"device": "CPU"}
    for busy, warns in ((1.0, False), (90.0, True)):
        monkeypatch.setattr(command, "psutil", SimpleNamespace(cpu_percent=lambda interval, busy=busy: busy,
                                                               cpu_count=lambda: 4 * cores()))
        said = CliRunner().invoke(app, ["doctor", "--calibrate"])
        assert "kept in" in said.stdout
        assert ("something else keeps the machine busy (90%" in said.stderr) == warns
