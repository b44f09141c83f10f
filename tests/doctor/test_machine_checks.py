"""Versions, libraries, processor, memory, disk, container."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doctor.recordings import one, recorded, said
from tightfit.doctor.software_checks import OPTIONAL, TESTED

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


@pytest.mark.parametrize(("version", "severity"), [
    ("2.10.0+cu128", "problem"), ("2.11.0+cu130", "ok"), ("2.13.1+cu130", "ok"), ("2.14.0", "advice"),
    ("2.14.0.dev20260601+cu130", "advice"),
])
def test_torch_outside_the_tested_range(version, severity):
    assert one(recorded("healthy", software={"torch": version}), "software.torch").severity == severity


def test_the_tested_range_is_the_one_declared():
    least = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    newest = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (least[1], newest[1]) == tuple(".".join(map(str, version)) for version in TESTED)


def test_cudnn_is_named():
    assert one(recorded("healthy"), "software.torch").sentence.endswith("cuDNN 9.15")


def test_a_torch_that_does_not_load_stops_training():
    readings = recorded("no-gpu", software={"torch": None, "broken": {"torch": "libcudart.so.13: cannot open"}})
    assert "libcudart" in one(readings, "software.torch", "problem").sentence


@pytest.mark.parametrize(("machine", "severity"), [("healthy", "problem"), ("no-gpu", "advice")])
def test_a_cudnn_that_does_not_load_stops_training_on_a_gpu(machine, severity):
    readings = recorded(machine, software={"cudnn": None, "broken": {"cudnn": "cuDNN version incompatibility"}})
    assert "incompatibility" in one(readings, "software.broken", severity).sentence


def test_libraries_that_do_not_load():
    assert "undefined symbol" in one(recorded("old-card"), "software.broken").sentence


def test_torchao_without_its_cuda_kernels_is_right_without_cuda():
    broken = {"torchao": "Failed to load _C_mxfp8.so"}
    assert said(recorded("no-gpu", software={"broken": broken}), "software.broken") == []
    assert one(recorded("healthy", software={"broken": broken}), "software.broken").severity == "advice"


@pytest.mark.parametrize(("name", "value", "speaks"), [
    ("CUDA_LAUNCH_BLOCKING", "1", True), ("CUDA_LAUNCH_BLOCKING", "0", False), ("NVIDIA_TF32_OVERRIDE", "0", True),
    ("OMP_NUM_THREADS", "1", False),
])
def test_variables_that_cost_speed(name, value, speaks):
    assert bool(said(recorded("healthy", software={"environment": {name: value}}), "software.environment")) is speaks


def missing(readings):
    return {f.value: f.action for f in said(readings, "software.libraries", "info")}


def test_optional_libraries_say_what_they_give_and_how_to_get_them():
    assert missing(recorded("healthy"))["flash-attn"] == "pip install flash-attn --no-build-isolation"
    assert "flash-attn" not in missing(recorded("healthy", capability=(7, 5)))
    assert set(missing(recorded("no-gpu"))) == {"accelerate", "tensorboard", "pillow"}
    everything = {library.name: "1.0" for library in OPTIONAL}
    assert missing(recorded("healthy", software={"libraries": everything})) == {}


def test_calibration_is_offered_once():
    assert one(recorded("healthy"), "software.calibrated").severity == "ok"
    assert one(recorded("x4-link"), "software.calibrated").action == "tightfit doctor --calibrate"


def test_host_memory():
    assert one(recorded("no-gpu"), "host.memory_available").severity == "advice"
    ample = one(recorded("healthy"), "host.memory_available")
    assert ample.severity == "ok"
    assert "7.3 billion parameters" in ample.sentence
    small = recorded("healthy", host={"memory_total": 16 * GIB, "memory_available": 12 * GIB})
    assert "less than the card's 24.0 GiB" in one(small, "host.memory_total").sentence


def test_few_cores_for_the_cards():
    assert said(recorded("server-in-trouble"), "host.cores", "advice") == []
    assert one(recorded("server-in-trouble", host={"cores": 5}), "host.cores", "advice").action


@pytest.mark.parametrize(("disk", "field", "severity"), [
    ({"free": 100 << 20}, "disk.free", "problem"), ({"free": 8 * GIB}, "disk.free", "advice"),
    ({"free": 800 * GIB}, "disk.free", "ok"), ({"write": 1e8}, "disk.write", "advice"),
    ({"error": "Read-only file system"}, "disk.error", "problem"),
])
def test_disk(disk, field, severity):
    assert one(recorded("healthy", disk=disk), field).severity == severity


def test_disk_speed_is_told_as_a_checkpoints_time():
    sentence = one(recorded("x4-link"), "disk.write").sentence
    assert "writes 95 MB/s, reads 130 (measured with 256 MiB)" in sentence
    assert "a billion parameters takes 126 s" in sentence
    assert "too slow to offload" in sentence
    assert "fast enough to offload" in one(recorded("healthy"), "disk.write").sentence
    assert said(recorded("healthy", disk={"write": None, "measured": None}), "disk.write") == []


def test_containers():
    inside = recorded("container-without-card")
    assert "--ipc=host" in one(inside, "host.shared_memory").action
    assert one(inside, "host.container").value == "docker"
    assert "nvcr.io/nvidia/pytorch" in one(recorded("healthy"), "host.nvcc").action
    assert one(recorded("x4-link"), "host.nvcc").severity == "advice"
    assert said(recorded("no-gpu"), "host.nvcc") == []
    assert said(recorded("healthy"), "host.tools") == []
    assert "nvidia-container-toolkit" in one(recorded("healthy", host={"tools": ("docker",)}), "host.tools").action
