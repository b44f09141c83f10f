"""Reading cards, driver and links, from a binding whose functions answer as a driver would."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pynvml
import pytest

from tests.failing import failing
from tightfit.doctor import cards as reading
from tightfit.doctor.readings import Gpu, Process
from tightfit.nvml import NoNvml, nvml_session, process_bytes, watched

GIB = 1 << 30
BUSES = {"one": b"00000000:01:00.0", "two": b"00000000:02:00.0"}


def unsupported(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Sets what functions of the binding answer; every other one is unsupported, as is a driver's own file system."""
    for name in dir(pynvml):
        if name.startswith(("nvmlDeviceGet", "nvmlSystemGet")):
            monkeypatch.setattr(pynvml, name, unsupported)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(reading, "PCI", tmp_path / "pci")
    monkeypatch.setattr(reading, "MODULES", tmp_path / "module")

    def answers(**functions):
        for name, answer in functions.items():
            answer = answer if callable(answer) else lambda *arguments, value=answer: value
            monkeypatch.setattr(pynvml, f"nvml{name}", answer)

    return answers


def cards(driver, *names):
    driver(DeviceGetCount=len(names), DeviceGetHandleByIndex=lambda index: names[index],
           DeviceGetPciInfo=lambda handle: SimpleNamespace(busId=BUSES[handle]))


def test_a_card_that_tells_nothing_is_read_all_the_same(driver):
    cards(driver, "one")
    _, gpus, links = reading.read_cards()
    assert gpus == (Gpu(index=0, name="unknown", pci_bus="00000000:01:00.0"),)
    assert links == ()


def test_units_and_names(driver, tmp_path):
    cards(driver, "one")
    lanes = tmp_path / "pci/0000:01:00.0/max_link_width"
    lanes.parent.mkdir(parents=True)
    lanes.write_text("16\n")

    def memory(handle, version=None):
        assert version == pynvml.nvmlMemory_v2
        return SimpleNamespace(total=24 * GIB, used=2 * GIB, reserved=GIB)

    driver(
        DeviceGetName="NVIDIA GeForce RTX 4090", DeviceGetMemoryInfo=memory, DeviceGetPowerUsage=61500,
        DeviceGetEnforcedPowerLimit=450000, DeviceGetPowerManagementLimitConstraints=[150000, 600000],
        DeviceGetTemperature=55, DeviceGetTemperatureThreshold=lambda handle, which: {0: 100, 1: 97}[which],
        DeviceGetCurrentClocksThrottleReasons=0x4 | 0x40, DeviceGetCudaComputeCapability=(8, 9),
        DeviceGetCurrPcieLinkWidth=4, DeviceGetMigMode=[0, 0], DeviceGetComputeMode=2,
        SystemGetDriverVersion="580.95.05", SystemGetCudaDriverVersion=13000,
    )
    found, (gpu,), _ = reading.read_cards()
    assert (found.nvml, found.version, found.cuda) == ("ok", "580.95.05", "13.0")
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_reserved) == (24 * GIB, 2 * GIB, GIB)
    assert (gpu.power_draw, gpu.power_limit, gpu.power_limit_max) == (61.5, 450.0, 600.0)
    assert (gpu.temperature, gpu.temperature_slowdown, gpu.temperature_shutdown) == (55, 97, 100)
    assert gpu.throttling == ("power-cap", "hardware-thermal")
    assert (gpu.capability, gpu.mig, gpu.compute_mode) == ((8, 9), False, "prohibited")
    assert (gpu.pcie_width, gpu.pcie_width_card) == (4, 16)


def test_the_newer_calls_come_first(driver):
    cards(driver, "one")
    driver(DeviceGetTemperatureV=60, DeviceGetTemperature=1, DeviceGetCurrentClocksEventReasons=0x80,
           DeviceGetCurrentClocksThrottleReasons=0)
    _, (gpu,), _ = reading.read_cards()
    assert (gpu.temperature, gpu.throttling) == (60, ("power-brake",))


def test_older_drivers_and_bindings_have_fewer_calls(driver, monkeypatch):
    cards(driver, "one")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetTemperatureV")

    def memory(handle, version=None):
        return unsupported() if version else SimpleNamespace(total=8 * GIB, used=GIB)

    driver(DeviceGetMemoryInfo=memory, DeviceGetTemperature=44)
    _, (gpu,), _ = reading.read_cards()
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_reserved, gpu.temperature) == (8 * GIB, GIB, None, 44)


def test_a_lost_card_leaves_the_others(driver):
    cards(driver, "one", "two")

    def handle(index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return "two"

    driver(DeviceGetHandleByIndex=handle)
    _, (lost, there), links = reading.read_cards()
    assert lost.error == "GPU is lost"
    assert (there.error, there.index) == (None, 1)
    assert links == ()


def test_processes_but_this_one(driver):
    cards(driver, "one")
    listed = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5), SimpleNamespace(pid=7, usedGpuMemory=GIB)]
    screen = [SimpleNamespace(pid=8, usedGpuMemory=(1 << 64) - 1)]
    driver(DeviceGetComputeRunningProcesses=listed, DeviceGetGraphicsRunningProcesses=screen,
           SystemGetProcessName={7: "/usr/bin/python", 8: "/usr/lib/xorg/Xorg"}.get)
    _, (gpu,), _ = reading.read_cards()
    assert gpu.processes == (Process(pid=7, name="python", memory=GIB), Process(pid=8, name="Xorg", memory=None))


def links(driver, ends, kinds=lambda handle, link: 0):
    """ends: for each card the bus at which each of its active NVLinks ends."""
    cards(driver, "one", "two")
    driver(
        DeviceGetNvLinkState=lambda handle, link: int(link < len(ends[handle])) if link < 18 else unsupported(),
        DeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId=ends[handle][link]),
        DeviceGetNvLinkRemoteDeviceType=kinds, DeviceGetTopologyCommonAncestor=50, DeviceGetP2PStatus=5,
    )
    return reading.read_cards()[2]


def test_nvlinks_to_the_other_card_are_counted(driver):
    (link,) = links(driver, {"one": [BUSES["two"]] * 4, "two": [BUSES["one"]] * 4})
    assert (link.first, link.second, link.path, link.nvlinks, link.peer) == (0, 1, "SYS", 4, False)


def test_nvlinks_through_a_switch_are_counted(driver):
    switch = [b"00000000:C3:00.0"]
    (link,) = links(driver, {"one": switch * 18, "two": switch * 16},
                    lambda handle, link: pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
    assert link.nvlinks == 16


def test_nvlinks_to_a_third_card_are_not_counted(driver):
    (link,) = links(driver, {"one": [b"00000000:09:00.0"] * 4, "two": []})
    assert link.nvlinks == 0


@pytest.mark.parametrize(("number", "reason"), [
    (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no-library"), (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no-driver"),
    (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "mismatch"), (pynvml.NVML_ERROR_NO_PERMISSION, "no-permission"),
    (pynvml.NVML_ERROR_UNKNOWN, "failed"),
])
def test_why_there_is_no_answer(driver, monkeypatch, number, reason):
    monkeypatch.setattr(pynvml, "nvmlInit", failing(pynvml.NVMLError(number)))
    found, gpus, _ = reading.read_cards()
    assert found.nvml == reason
    assert found.said
    assert gpus == ()


def test_a_missing_binding_is_a_reading(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert reading.read_cards()[0].nvml == "no-binding"
    with pytest.raises(NoNvml), nvml_session():
        pass


def test_cards_are_found_without_a_driver(driver, monkeypatch, tmp_path):
    for address, vendor, kind in (("0000:01:00.0", "0x10de", "0x030000"), ("0000:01:00.1", "0x10de", "0x040300"),
                                  ("0000:02:00.0", "0x1002", "0x030000"), ("0000:03:00.0", "0x10de", "0x030200")):
        device = tmp_path / "pci" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "module/nouveau").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found, _, _ = reading.read_cards()
    assert found.pci_cards == ("0000:01:00.0", "0000:03:00.0")
    assert found.nouveau


def test_this_process_and_the_others(driver):
    def listed(*pairs):
        driver(DeviceGetHandleByUUID=lambda uuid: "one" if uuid == "GPU-1" else unsupported(),
               DeviceGetComputeRunningProcesses=[SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in pairs])
        return process_bytes("GPU-1")

    assert listed((os.getpid(), 5 * GIB), (7, GIB), (8, GIB)) == (5 * GIB, 2 * GIB)
    assert listed((os.getpid(), 5 * GIB)) == (5 * GIB, 0)
    assert listed((os.getpid(), None), (7, None)) == (None, None)
    assert listed((7, GIB)) == (None, None)  # a container's own process ids
    assert process_bytes("GPU-2") == (None, None)


def test_a_card_is_watched_while_a_block_runs(driver):
    driver(DeviceGetHandleByUUID="one", DeviceGetUtilizationRates=SimpleNamespace(gpu=0), DeviceGetPowerUsage=90_500)
    deadline = time.monotonic() + 10
    with watched("GPU-1") as series:
        while "clock MHz" not in series and time.monotonic() < deadline:
            time.sleep(0.01)
    seen = {name: values[0] for name, values in series.items()}
    assert seen == {"utilization %": 0.0, "memory GiB": None, "power W": 90.5, "temperature C": None, "clock MHz": None}
    looks = len(series["power W"])
    time.sleep(0.15)
    assert len(series["power W"]) == looks


def test_nothing_is_watched_without_a_card(driver):
    with watched("") as series:
        time.sleep(0.02)
    assert series == {}
