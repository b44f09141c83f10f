"""The driver, and whether PyTorch can use the cards with it."""

from __future__ import annotations

import pytest

from tests.doctor.recordings import one, recorded, said
from tightfit.doctor.checks import checks, problems
from tightfit.doctor.software_checks import covers


def stops(readings):
    return [(f.field, f.action) for f in problems(checks(readings))]


@pytest.mark.parametrize(("driver", "field", "words"), [
    ({"nouveau": False}, "driver.pci_cards", "install NVIDIA's driver"),
    ({"nouveau": False, "module": "580.95.05"}, "driver.nvml", "rest of the driver"),
    ({"nvml": "mismatch", "module": "580.95.05"}, "driver.nvml", "restart"),
    ({"nvml": "no-permission"}, "driver.nvml", "/dev/nvidia"),
    ({"nvml": "failed", "said": "Unknown Error"}, "driver.nvml", "restart"),
    ({"nvml": "ok", "version": "580.95.05"}, "driver.pci_cards", "dmesg"),
])
def test_a_driver_that_does_not_answer(driver, field, words):
    found = stops(recorded("no-driver", driver=driver))
    assert [f for f, _ in found] == [field]
    assert words in found[0][1]


def test_a_container_is_told_how_to_get_the_card():
    assert "--gpus all" in stops(recorded("container-without-card"))[0][1]
    without = recorded("no-gpu", host={"container": "docker"})
    assert "--gpus all" in one(without, "gpus").action
    assert one(recorded("no-gpu"), "gpus").action == ""


def test_a_missing_binding_is_advice_where_there_is_a_card():
    readings = recorded("healthy", driver={"nvml": "no-binding"})
    assert one(readings, "driver.nvml", "advice").action == "pip install 'tightfit[gpu]'"
    assert said(recorded("no-gpu", driver={"nvml": "no-binding"}), "driver.nvml") == []


def test_a_torch_that_works_without_nvml_is_no_problem():
    readings = recorded("healthy", driver={"nvml": "no-library", "said": "not found"})
    assert stops(readings) == []
    assert one(readings, "driver.nvml").severity == "info"


def test_an_old_driver_says_which_would_do():
    action = stops(recorded("driver-too-old"))[0][1]
    assert "580 or later" in action
    assert action.endswith("built for CUDA 12")


@pytest.mark.parametrize(("version", "cuda", "old"), [
    ("525.60.12", "12.6", True), ("525.60.13", "12.6", False), ("579.99", "13.0", True), ("580.65.06", "13.0", False),
    ("450.80.02", "11.8", False), ("450.66", "11.8", True),
])
def test_the_least_driver_of_each_cuda(version, cuda, old):
    readings = recorded("driver-too-old", driver={"version": version}, software={"torch_cuda": cuda})
    assert bool(said(readings, "driver.version", "problem")) is old
    assert stops(readings)  # PyTorch cannot use the card either way


def test_an_old_driver_that_works_all_the_same_is_only_said():
    readings = recorded("driver-too-old", software={"cuda_devices": 1, "cuda_error": None})
    assert stops(readings) == []
    assert one(readings, "driver.cuda").severity == "info"


def test_a_torch_without_cuda_beside_a_card_stops_training():
    readings = recorded("healthy", software={"torch": "2.13.0+cpu", "torch_cuda": None, "cuda_devices": 0})
    found = stops(readings)
    assert [f for f, _ in found] == ["software.torch_cuda"]
    assert "CUDA 13.0 or older" in found[0][1]
    assert stops(recorded("no-gpu")) == []


def test_cards_that_someone_hid():
    hidden = recorded("healthy", software={"cuda_devices": 0, "environment": {"CUDA_VISIBLE_DEVICES": ""}})
    assert stops(hidden) == []
    assert one(hidden, "software.environment").severity == "advice"
    broken = recorded("healthy", software={"cuda_devices": 0, "cuda_error": "CUDA unknown error"})
    assert [f for f, _ in stops(broken)] == ["software.cuda_error"]
    first_kernel = recorded("healthy", software={"cuda_error": "CUDA error: out of memory"})
    assert [f for f, _ in stops(first_kernel)] == ["software.cuda_error"]
    some = recorded("two-with-nvlink", software={"cuda_devices": 1})
    assert "1 of 2" in one(some, "software.cuda_devices").sentence


@pytest.mark.parametrize(("architectures", "capability", "served"), [
    (("sm_80", "sm_90"), (8, 6), True), (("sm_86",), (8, 0), False), (("sm_80",), (9, 0), False),
    (("compute_80",), (12, 0), True), (("compute_120",), (9, 0), False), (("sm_90a",), (9, 0), True),
    (("sm_100a",), (10, 3), False), (("sm_100f",), (10, 3), True), (("sm_120",), (12, 1), True),
    (("sm_75", "compute_75", "gfx90a"), (7, 0), False), ((), (8, 0), False),
])  # fmt: skip
def test_which_kernels_run_where(architectures, capability, served):
    assert covers(architectures, capability) is served


def test_kernels_that_are_missing_say_which_torch_has_them():
    assert "built for CUDA 12" in stops(recorded("old-card"))[0][1]
    newer = recorded("healthy", capability=(13, 0), software={"architectures": ("sm_90", "sm_120")})
    assert "newer" in stops(newer)[0][1]


def test_a_lost_card_alone_is_still_a_problem():
    readings = recorded("healthy", error="GPU is lost", software={"cuda_devices": 0})
    assert [f for f, _ in stops(readings)] == ["gpus[0].error"]
