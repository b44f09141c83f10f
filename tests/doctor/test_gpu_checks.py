"""Memory, number formats, power, temperature, throttling: one card's own readings."""

from __future__ import annotations

import pytest

from tests.doctor.recordings import changed, one, recorded, said
from tightfit.doctor.card_checks import has_power_cables, power_cables
from tightfit.doctor.checks import checks, problems
from tightfit.doctor.readings import Process

MIB = 1 << 20


@pytest.mark.parametrize(("celsius", "severity", "words"), [
    (38, "ok", "38 C: good is below 80 C, best 70 to 75 C"), (79, "ok", "good is below 80 C"),
    (80, "advice", "good is below 80 C"), (97, "advice", "own limit is 97 C"), (98, "problem", "off at 100 C"),
])  # fmt: skip
def test_temperature_under_load(celsius, severity, words):
    found = one(recorded("healthy", temperature=celsius, utilization=99), "gpus[0].temperature")
    assert found.severity == severity
    assert words in found.sentence
    assert found.value == celsius


def test_an_idle_card_is_to_be_looked_at_again():
    assert "while it trains" in one(recorded("healthy"), "gpus[0].temperature").sentence


@pytest.mark.parametrize(("capability", "severity", "words"), [
    ((6, 1), "advice", "no tensor cores"), ((7, 5), "advice", "for fp16; not bf16, tf32, fp8"),
    ((8, 6), "ok", "for fp16, bf16, tf32; not fp8"), ((8, 9), "ok", "for fp16, bf16, tf32, fp8"),
    ((12, 0), "ok", "for fp16, bf16, tf32, fp8"),
])  # fmt: skip
def test_number_formats(capability, severity, words):
    readings = recorded("healthy", capability=capability)
    found = one(readings, "gpus[0].capability")
    assert found.severity == severity
    assert words in found.sentence


def test_throttling_is_told_apart():
    found = said(recorded("hot-and-throttled"), "gpus[0].throttling")
    assert [(f.severity, f.sentence.split(":")[0]) for f in found] == [
        ("info", "power-cap"), ("advice", "software-thermal")]
    assert said(recorded("healthy"), "gpus[0].throttling") == []
    lowered = recorded("hot-and-throttled", power_limit=250.0)
    assert said(lowered, "gpus[0].throttling")[0].severity == "advice"
    brake = one(recorded("healthy", throttling=("power-brake",)), "gpus[0].throttling")
    assert "cables" in brake.action


def test_memory_held_by_others_is_said_with_what_is_left():
    found = one(recorded("hot-and-throttled"), "gpus[0].memory_used")
    assert found.severity == "advice"
    assert "python (4127, 21.0 GiB)" in found.sentence
    assert found.action.endswith("--gpu-memory 2.3GiB")
    assert said(recorded("hot-and-throttled"), "gpus[0].utilization")


def test_a_desktop_is_no_cause_for_advice():
    assert one(recorded("x4-link"), "gpus[0].memory_used").severity == "info"


def test_a_full_card_stops_training():
    full = recorded("healthy", memory_used=23900 * MIB, processes=(Process(pid=7, name="python"),))
    assert "python (7)" in one(full, "gpus[0].memory_used", "problem").sentence


def test_processes_are_said_where_memory_is_not():
    found = one(recorded("healthy", memory_used=None, processes=(Process(pid=7),)), "gpus[0].processes")
    assert found.value == 1
    assert "a process (7)" in found.sentence


def test_what_is_wrong_with_another_card_stops_nothing():
    server = recorded("server-in-trouble")
    assert problems(checks(server)) == []
    assert one(server, "gpus[1].memory_used").severity == "advice"
    assert one(server, "gpus[3].error").severity == "advice"
    second_first = changed(server, software=changed(server.software, cuda_uuids=(server.gpus[1].uuid,)))
    assert [f.topic for f in problems(checks(second_first))] == ["GPU 1"]
    unusable = changed(server, software=changed(server.software, cuda_devices=0, cuda_error="unknown error"))
    assert {f.topic for f in problems(checks(unusable))} == {"GPU 1", "GPU 3", "PyTorch"}


@pytest.mark.parametrize(("change", "field", "severity"), [
    ({"compute_mode": "prohibited"}, "compute_mode", "problem"),
    ({"compute_mode": "exclusive", "processes": (Process(pid=7),)}, "compute_mode", "problem"),
    ({"mig": True}, "mig", "info"),
    ({"memory_errors": 3}, "memory_errors", "advice"),
    ({"power_limit": 300.0}, "power_limit", "advice"),
])
def test_states_that_someone_set(change, field, severity):
    assert said(recorded("healthy"), f"gpus[0].{field}", severity) == []
    assert one(recorded("healthy", **change), f"gpus[0].{field}", severity).action or severity == "info"
    if field == "compute_mode":
        assert said(recorded("healthy", compute_mode="exclusive"), "gpus[0].compute_mode") == []


def test_a_card_of_which_only_torch_knows_is_described():
    bare = recorded("healthy", **dict.fromkeys((
        "memory_used", "memory_reserved", "utilization", "power_draw", "power_limit",
        "power_limit_default", "power_limit_max", "temperature", "throttling", "pcie_generation", "pcie_width",
        "processes", "compute_mode")))
    fields = [f.field for f in checks(bare) if f.topic == "GPU 0"]
    assert fields == ["gpus[0].name", "gpus[0].capability"]


@pytest.mark.parametrize(("watts", "words"), [
    (70, "slot's 75 W"), (75, "slot's 75 W"), (120, "one 6-pin"), (200, "one 8-pin"), (225, "one 8-pin"),
    (285, "6-pin"), (350, "two 8-pin"), (450, "three 8-pin"), (525, "three 8-pin"), (575, "marked for 600 W"),
    (675, "marked for 600 W"),
])  # fmt: skip
def test_leads_carry_the_limit(watts, words):
    assert words in (power_cables(watts) or "")


def test_no_lead_carries_more():
    assert power_cables(700) is None


@pytest.mark.parametrize("name", [
    "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GB200", "NVIDIA GB10",
    "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM2-16GB",
])
def test_modules_and_laptops_have_no_leads(name):
    assert not has_power_cables(name)
    assert not [f for f in said(recorded("healthy", name=name), "gpus[0].power_limit") if "cables" in f.sentence]
    assert said(recorded("healthy", name=name), "gpus[*].power_limit") == []


@pytest.mark.parametrize("name", [
    "NVIDIA GeForce RTX 4090", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L40S",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "Tesla T4", "NVIDIA B40",
])
def test_cards_in_slots_have_leads(name):
    assert has_power_cables(name)


def test_leads_and_supply_are_said():
    sentence = next(f.sentence for f in said(recorded("healthy"), "gpus[0].power_limit") if "cables" in f.sentence)
    for words in ("450 W", "three 8-pin", "cable of its own", "no pigtail", "slot gives 75 W"):
        assert words in sentence
    assert "about 900 W" in one(recorded("healthy"), "gpus[*].power_limit").sentence
    found = one(recorded("two-without-nvlink"), "gpus[*].power_limit")
    assert found.value == 900
    assert "about 1450 W" in found.sentence
