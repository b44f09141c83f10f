"""Reading this machine: processor, disk, versions."""

from __future__ import annotations

import importlib
import logging
import os
import resource
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest

from tests.failing import failing
from tightfit import system
from tightfit.doctor import machine
from tightfit.doctor.machine import DISK_TEST_CHUNK, read_disk
from tightfit.doctor.readings import Driver, Gpu, Software
from tightfit.system import HostMemory


def test_the_host_is_read():
    found = machine.read_host()
    assert 1 <= found.cores <= found.cores_all
    assert 0 < found.memory_available <= found.memory_total
    assert found.processor


V1 = "9:name=systemd:/x\n4:memory:/a/b\n0::/\n"


@pytest.mark.parametrize(("own", "files", "cores", "limits"), [
    ("", {}, 8, []),
    ("0::/\n", {"cpu.max": "150000 100000", "memory.max": "1073741824", "memory.current": "1048576"}, 2,
     [(1 << 30, 1 << 20)]),
    ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, 8, []),
    ("0::/a:b/c d\n", {"a:b/c d/memory.max": "max", "a:b/memory.max": "2048", "a:b/memory.current": "24",
                         "a:b/c d/cpu.max": "max 100000", "a:b/cpu.max": "250000 100000"}, 3,
     [(2048, 24)]),
    ("0::/../other\n", {"memory.max": "4096"}, 8, [(4096, 0)]),
    (V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000",
          "memory/a/b/memory.limit_in_bytes": "1073741824", "memory/a/b/memory.usage_in_bytes": "4096",
          "memory/memory.limit_in_bytes": "2147483648", "memory/memory.usage_in_bytes": "0"}, 4,
     [(1 << 30, 4096), (2 << 30, 0)]),
    (V1, {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9223372036854771712"}, 8, []),
], ids=["none", "own", "unlimited", "nested", "outside", "old", "old-unlimited"])  # fmt: skip
def test_a_containers_limits_count(monkeypatch, tmp_path, own, files, cores, limits):
    for name, text in {"cgroup": own, **{f"fs/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(system, "CONTROL_GROUPS", tmp_path / "fs")
    monkeypatch.setattr(system, "OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert system.cores() == cores
    assert list(system.memory_limits()) == limits


def test_the_least_of_all_limits_on_the_memory_counts(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100, available=60))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=20))
    monkeypatch.setattr(system, "process_limits", lambda: [(90, 70), (95, 0)])
    for groups, found in (([(1000, 1)], (90, 20, 0)), ([(80, 75)], (80, 5, 0)), ([(50, 90)], (50, 0, 0))):
        monkeypatch.setattr(system, "memory_limits", lambda groups=groups: groups)
        assert system.host_memory() == HostMemory(total=found[0], available=found[1], swap=found[2])
    monkeypatch.setattr(system, "memory_limits", list)
    for limits, swap in (([], 20), ([(110, 0)], 10)):
        monkeypatch.setattr(system, "process_limits", lambda limits=limits: limits)
        assert system.host_memory() == HostMemory(total=100, available=60, swap=swap)


@pytest.mark.parametrize("which", [resource.RLIMIT_AS, resource.RLIMIT_DATA], ids=["address-space", "data"])
def test_a_shells_limits_count(which):
    source = ("import resource; from tightfit.system import host_memory, process_limits;"
              f"resource.setrlimit({int(which)}, (1 << 31, resource.RLIM_INFINITY));"
              "((limit, used),) = process_limits(); found = host_memory();"
              "print(limit, found.total, 1 << 20 < used < 1 << 31, found.available <= (1 << 31) - used)")
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["2147483648", "2147483648", "True", "True"]


def test_the_compilers_version(tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    compiler.chmod(0o755)
    assert machine._nvcc(str(compiler)) == "13.0"
    assert machine._nvcc(str(tmp_path / "none")) is None


def test_the_disk_is_measured_and_left_as_it_was(tmp_path):
    found = read_disk(tmp_path, most=2 * DISK_TEST_CHUNK)
    assert found.measured == 2 * DISK_TEST_CHUNK
    assert found.write > 0
    assert 0 < found.free <= found.total
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_left_alone_on_request(tmp_path):
    found = read_disk(tmp_path, measure=False)
    assert (found.measured, found.write, found.read, found.error) == (None, None, None, None)
    assert found.free > 0


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    assert read_disk(tmp_path / "gone").error == "No such file or directory"
    monkeypatch.setattr(os, "write", failing(OSError(28, "No space left on device")))
    assert read_disk(tmp_path, most=DISK_TEST_CHUNK).error == "No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_versions_are_read():
    found, gpus = machine.read_software()
    assert found.torch == metadata.version("torch") or found.torch.partition("+")[0] in metadata.version("torch")
    assert found.libraries["transformers"] == metadata.version("transformers")
    assert len(gpus) == found.cuda_devices


def test_what_a_library_says_on_loading_is_heard(monkeypatch, capsys):
    def load(name):
        if name == "torchao":
            logging.getLogger("torchao").warning("Failed to load %s", "/opt/lib/torchao/_C.abi3.so: no symbol")
        else:
            raise ImportError("/x/flash_attn_2_cuda.so: undefined symbol: _ZN3c10")

    logger = logging.getLogger("torchao")
    monkeypatch.setattr(logger, "level", logging.ERROR)  # as the command line has it
    logger.manager._clear_cache()
    monkeypatch.setattr(importlib, "import_module", load)
    found = machine._broken({"torchao": "0.18.0", "flash-attn": "2.8.3"})
    assert found == {"torchao": "Failed to load _C.abi3.so: no symbol",
                     "flash-attn": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10"}
    assert capsys.readouterr().err == ""
    assert logger.level == logging.ERROR


@pytest.mark.parametrize(("first", "index"), [("from the driver", 0), ("from PyTorch", 1)])
def test_pytorchs_cards_stand_in_for_the_drivers(monkeypatch, tmp_path, first, index):
    """And the driver is asked before PyTorch takes any memory of a card."""
    asked = []
    driver, own = Driver(nvml="ok" if index == 0 else "no-binding"), Gpu(index=0, name="from the driver")
    there = (own,) if index == 0 else ()
    seen = (Gpu(index=0, name="from PyTorch"),)
    versions = Software(python="3.12", tightfit="0.1.0")
    monkeypatch.setattr(machine, "read_cards", lambda: asked.append("driver") or (driver, there, ()))
    monkeypatch.setattr(machine, "read_software", lambda: asked.append("PyTorch") or (versions, seen))
    assert [gpu.name for gpu in machine.gather(tmp_path, disk=False).gpus] == [first]
    assert asked == ["driver", "PyTorch"]


def test_a_torch_that_cannot_load_is_a_reading(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found, gpus = machine.read_software()
    assert found.torch is None
    assert "torch" in found.broken
    assert gpus == ()


def test_a_cudnn_that_cannot_load_is_a_reading(monkeypatch):
    version = failing(RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 20, 0)"))
    monkeypatch.setattr("torch.backends.cudnn.version", version)
    found, _ = machine.read_software()
    assert found.cudnn is None
    assert found.broken["cudnn"].startswith("cuDNN version incompatibility")
