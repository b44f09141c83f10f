"""The driver, and whether PyTorch can use the cards with it."""

from __future__ import annotations

import pytest

from tests.doctor.recordings import one, recorded, said
from tightfit.doctor.checks import checks, problems


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


def test_an_old_driver_says_what_would_do():
    assert stops(recorded("driver-too-old"))[0][1].endswith("or install a PyTorch built for CUDA 12")


@pytest.mark.parametrize(("served", "wanted", "old"), [
    ("12.0", "13.0", True), ("12.0", "12.6", False), ("13.0", "13.0", False), ("13.0", "12.8", False),
])
def test_a_driver_of_an_older_major_version_is_too_old(served, wanted, old):
    readings = recorded("driver-too-old", driver={"cuda": served}, software={"torch_cuda": wanted})
    assert bool(said(readings, "driver.version", "problem")) is old
    assert stops(readings)  # PyTorch cannot use the card either way


def test_an_old_driver_that_works_all_the_same_is_only_said():
    readings = recorded("driver-too-old", software={"cuda_devices": 1, "cuda_error": None})
    assert stops(readings) == []


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


def test_kernels_that_are_missing_are_said():
    assert stops(recorded("old-card")) == [
        ("software.cuda_error", "install a PyTorch that was built for this card: newer ones leave old cards out")]


def test_a_lost_card_alone_is_still_a_problem():
    readings = recorded("healthy", error="GPU is lost", software={"cuda_devices": 0})
    assert [f for f, _ in stops(readings)] == ["gpus[0].error"]
