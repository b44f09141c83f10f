"""Readings of the machine around the cards: processor, memory, container, disk. What cannot be read is None."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tightfit.calibration import processor
from tightfit.doctor.readings import Disk, Host
from tightfit.system import cores, host_memory

TOOLS = ("nvidia-smi", "nvcc", "docker", "podman", "nvidia-ctk")
FLAGS = {"avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512-bf16", "amx_bf16": "amx-bf16"}
"""Linux's names for instructions that PyTorch's own kernels use."""

BYTES, CHUNK = 256 << 20, 8 << 20
"""Written to and read from the disk, at most; and at a time."""


def read_host() -> Host:
    """This machine, as this process may use it."""
    memory = host_memory()
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin/nvcc"
    compiler = shutil.which("nvcc") or (str(toolkit) if toolkit.exists() else None)
    shared = Path("/dev/shm")
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    known = flags[1].split() if flags else []
    return Host(
        system=f"{platform.system()} {platform.release()}",
        processor=processor().rpartition(",")[0],
        cores=cores(),
        cores_all=os.cpu_count() or 1,
        memory_total=memory.total,
        memory_available=memory.available,
        shared_memory=shutil.disk_usage(shared).total if shared.exists() else None,
        number_formats=tuple(name for flag, name in FLAGS.items() if flag in known),
        container=_container(),
        tools=tuple(name for name in TOOLS if shutil.which(name)),
        nvcc=None if compiler is None else _nvcc(compiler),
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _container() -> str | None:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    for name, sign in (("podman", "/run/.containerenv"), ("docker", "/.dockerenv")):
        if Path(sign).exists():
            return name
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


def read_disk(folder: Path, measure: bool = True, most: int = BYTES) -> Disk:
    """Size and free space of the disk that `folder` is on, and its speeds.

    measure: whether to write and read a file there: at most `most` bytes, and at most a sixteenth of what is free.
    The write counts until the disk says that it has the data. For the read the system is asked to forget the file
    first; where it cannot be asked, no reading speed is given.
    """
    total = free = None
    try:
        total, _, free = shutil.disk_usage(folder)
        size = min(most, free // 16) // CHUNK * CHUNK if measure else 0
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # nameless on Linux: gone even after a kill
            write = _write_speed(file.fileno(), size) if size else None
            read = _read_speed(file.fileno(), size) if size else None
    except OSError as error:
        return Disk(folder=str(folder), total=total, free=free, error=error.strerror or str(error))
    return Disk(folder=str(folder), total=total, free=free, measured=size or None, write=write, read=read)


def _write_speed(descriptor: int, size: int) -> float:
    """Bytes a second. Raises OSError where nothing can be written."""
    chunk = os.urandom(CHUNK)  # some disks compress, and would find zeros easy
    began = time.perf_counter()
    for _ in range(size // CHUNK):
        left = memoryview(chunk)
        while left:  # a nearly full disk takes a part first, and fails at the next
            left = left[os.write(descriptor, left):]
    os.fsync(descriptor)
    return size / (time.perf_counter() - began)


def _read_speed(descriptor: int, size: int) -> float | None:
    if not hasattr(os, "posix_fadvise"):
        return None
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    began = time.perf_counter()
    while os.read(descriptor, CHUNK):
        pass
    return size / (time.perf_counter() - began)
