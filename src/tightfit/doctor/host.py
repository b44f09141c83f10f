"""Reading the machine around the cards: processor, memory, container. What cannot be read is None."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from tightfit.calibration import processor
from tightfit.control_groups import cores
from tightfit.doctor.readings import Host
from tightfit.host_memory import host_memory

TOOLS = ("nvidia-smi", "nvcc", "docker", "podman", "nvidia-ctk")
FLAGS = {"avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512-bf16", "amx_bf16": "amx-bf16"}
"""Linux's names for instructions that PyTorch's own kernels use."""


def read_host() -> Host:
    """This machine, as this process may use it."""
    memory = host_memory()
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin/nvcc"
    compiler = shutil.which("nvcc") or (str(toolkit) if toolkit.exists() else None)
    return Host(
        system=f"{platform.system()} {platform.release()}",
        processor=processor().rpartition(",")[0],
        cores=cores(),
        cores_all=os.cpu_count() or 1,
        memory_total=memory.total,
        memory_available=memory.available,
        shared_memory=_shared_memory(),
        number_formats=_number_formats(),
        container=_container(),
        tools=tuple(name for name in TOOLS if shutil.which(name)),
        nvcc=None if compiler is None else _nvcc(compiler),
    )


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _number_formats() -> tuple[str, ...]:
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ()
    words = set(found[1].split()) if found else set()
    return tuple(name for flag, name in FLAGS.items() if flag in words)


def _container() -> str | None:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if Path("/run/.containerenv").exists():
        return "podman"
    if Path("/.dockerenv").exists():
        return "docker"
    if "container" in os.environ:  # systemd's and others' sign
        return "other"
    return "wsl" if "microsoft" in platform.release().lower() else None


def _nvcc(path: str) -> str | None:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else None
