"""Which device a plan is for, with and without a GPU in the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.failing import failing
from tightfit.calibration import Calibration, processor, save, torch_version
from tightfit.devices import Device, find_device, parse_memory
from tightfit.errors import RecipeError, Refused
from tightfit.planning.targets import gpu_target, own_target, with_figures
from tightfit.system import host_memory

OWN = Device(kind="cuda", name="NVIDIA GeForce RTX 4090", memory_bytes=25_000_000_000, capability=(8, 9), units=127)


def nobody():
    return None


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def measured(device, threads=0):
    kind = "cpu" if threads else "cuda"
    found = Calibration(device=device, kind=kind, processor=processor(), torch=torch_version(), threads=threads)
    save(found)
    return found


def test_a_named_gpu_needs_none_in_the_machine():
    target = gpu_target("rtx-4090", None, nobody)
    assert target.device == find_device("rtx-4090")
    assert target.calibration is None


@pytest.mark.parametrize(("gpu", "memory"), [(None, "24GB"), ("24 GB", None)])
def test_memory_alone_is_any_card_of_that_size(gpu, memory):
    target = gpu_target(gpu, memory, nobody)
    assert target.device.memory_bytes == parse_memory("24GB")
    assert "assumed" in target.device.notes


def test_memory_beside_a_name_replaces_the_cards():
    target = gpu_target("a100-80gb-sxm", "20GiB", nobody)
    assert target.device.memory_bytes == 20 << 30
    assert target.device.flops == find_device("a100-80gb-sxm").flops
    assert "A100" in target.device.name


def test_no_gpu_and_no_name_says_what_to_write():
    with pytest.raises(Refused, match=r"--gpu.*rtx-4090.*tightfit gpus.*--gpu cpu.*--gpu 24GB"):
        gpu_target(None, None, nobody)


@pytest.mark.parametrize(("gpu", "memory", "expected"), [
    ("rtx-4091", None, "rtx-4090"), ("rtx-4090", "lots", "24GB"), (None, "12", "12"), ("a100", None, "a100-40gb"),
])
def test_wrong_names_and_sizes_are_refused_before_the_machine_is_looked_at(gpu, memory, expected):
    with pytest.raises(RecipeError, match=expected):
        gpu_target(gpu, memory, failing(AssertionError()))


def test_the_machines_own_gpu_has_the_catalogues_figures_and_its_own_memory(home):
    target = gpu_target(None, None, lambda: OWN)
    card = find_device("rtx-4090")
    assert target.device == replace(card, name=OWN.name, memory_bytes=OWN.memory_bytes, units=127,
                                    host_bytes=host_memory().total)
    assert target.calibration is None


def test_a_gpu_that_is_not_in_the_catalogue_is_like_one_of_its_size():
    own = Device(kind="cuda", name="Unheard Of", memory_bytes=24 << 30, capability=(8, 6), units=10)
    device = with_figures(own)
    assert (device.name, device.memory_bytes, device.units, device.capability) == ("Unheard Of", 24 << 30, 10, (8, 6))
    assert device.bandwidth > 0
    assert device.flops
    assert "Unheard Of is not in the catalogue" in device.notes


def test_what_was_measured_is_used_for_that_card_alone(home):
    kept = measured(OWN.name)
    assert gpu_target(None, None, lambda: OWN).calibration == kept
    assert gpu_target("4090", None, lambda: OWN).calibration == kept
    assert gpu_target("4090", "12GB", lambda: OWN).calibration == kept
    assert gpu_target("l4", None, lambda: OWN).calibration is None
    assert gpu_target("4090", None, nobody).calibration is None


def test_the_processors_calibration_belongs_to_a_number_of_threads(home):
    kept = measured("CPU", threads=2)
    cpu = Device(kind="cpu", name="CPU", memory_bytes=1 << 33, units=2)
    assert own_target(cpu).calibration == kept
    assert own_target(replace(cpu, units=1)).calibration is None
