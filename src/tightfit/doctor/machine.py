"""Readings of the machine around the cards: processor, memory, container, disk, versions of libraries, and what PyTorch
says of the cards; and all readings in one go. What cannot be read is None."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from tightfit import calibration
from tightfit.doctor.cards import read_cards
from tightfit.doctor.readings import Disk, Gpu, Host, Readings, Software
from tightfit.doctor.software_checks import OPTIONAL, SLOWER
from tightfit.system import cores, host_memory, installed, version_of

TOOLS = ("docker", "nvidia-ctk")
DISK_TEST_BYTES, DISK_TEST_CHUNK = 256 << 20, 8 << 20
"""Written to and read from the disk, at most; and at a time."""
LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "torchao", "torch-optimi",
    "bitsandbytes", "apex", "xformers", "liger-kernel", "deepspeed", "jax", "jaxlib", "optax", "pyarrow", "peft",
    *(library.name for library in OPTIONAL),
)  # fmt: skip
COMPILED = {"flash-attn": "flash_attn", "torchao": "torchao", "bitsandbytes": "bitsandbytes"}
"""Libraries with kernels of their own, which are built for one version of PyTorch and say so only when they load."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", *SLOWER,
)  # fmt: skip


def gather(folder: Path, disk: bool = True) -> Readings:
    """Read the machine: seconds. A missing binding, driver or card is a reading, not an error.

    folder: where runs would be written, whose disk is measured.
    disk: whether to measure its speed; its size and free space are read in any case.
    """
    driver, gpus, links = read_cards()  # before PyTorch, whose own use of the cards would be read otherwise
    host = read_host()
    software, seen = read_software()
    return Readings(
        date=datetime.now(UTC).isoformat(timespec="seconds"), driver=driver, host=host, software=software,
        disk=read_disk(folder, disk), gpus=gpus or seen, links=links,
    )  # fmt: skip


def read_host() -> Host:
    """This machine, as this process may use it."""
    memory = host_memory()
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin/nvcc"
    shared = Path("/dev/shm")
    return Host(
        system=f"{platform.system()} {platform.release()}",
        processor=calibration.processor().rpartition(",")[0],
        cores=cores(),
        cores_all=os.cpu_count() or 1,
        memory_total=memory.total,
        memory_available=memory.available,
        shared_memory=shutil.disk_usage(shared).total if shared.exists() else None,
        container=_container(),
        tools=tuple(filter(shutil.which, TOOLS)),
        nvcc=_nvcc(shutil.which("nvcc") or str(toolkit)),
    )


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
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
        if found := re.search(r"release (\d+\.\d+)", said):
            return found[1]
    return None


def read_disk(folder: Path, measure: bool = True, most: int = DISK_TEST_BYTES) -> Disk:
    """Size and free space of the disk that `folder` is on, and its speeds.

    measure: whether to write and read a file there: at most `most` bytes, and at most a sixteenth of what is free.
    The write counts until the disk says that it has the data. For the read the system is asked to forget the file
    first; where it cannot be asked, no reading speed is given.
    """
    found = Disk(folder=str(folder))
    try:
        total, _, free = shutil.disk_usage(folder)
        found = Disk(folder=str(folder), total=total, free=free)
        size = min(most, free // 16) // DISK_TEST_CHUNK * DISK_TEST_CHUNK if measure else 0
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # nameless on Linux: gone even after a kill
            if not size:
                return found
            return found.model_copy(update={"measured": size, "write": _write_speed(file.fileno(), size),
                                            "read": _read_speed(file.fileno(), size)})
    except OSError as error:
        return found.model_copy(update={"error": error.strerror or str(error)})


def _write_speed(descriptor: int, size: int) -> float:
    """Bytes a second. Raises OSError where nothing can be written."""
    chunk = os.urandom(DISK_TEST_CHUNK)  # some disks compress, and would find zeros easy
    began = time.perf_counter()
    for _ in range(size // DISK_TEST_CHUNK):
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
    while os.read(descriptor, DISK_TEST_CHUNK):
        pass
    return size / (time.perf_counter() - began)


def read_software() -> tuple[Software, tuple[Gpu, ...]]:
    """Versions, and the cards as PyTorch names them, which stand in where the driver cannot be asked."""
    libraries = installed(LIBRARIES)
    common: dict[str, Any] = {
        "python": platform.python_version(),
        "tightfit": version_of("tightfit") or "not installed",
        "libraries": libraries,
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is missing
        return Software(**common, broken={"torch": _one_line(error)}), ()
    with warnings.catch_warnings(record=True, action="always") as said:
        usable = torch.cuda.is_available()
    problem = None if usable else " ".join(_one_line(w.message) for w in said if "CUDA" in str(w.message)) or None
    gpus: tuple[Gpu, ...] = ()
    if usable:
        try:
            gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
            torch.ones(1, device="cuda").add_(1).item()  # shows what no version does: a card that is full or broken
        except RuntimeError as error:
            problem = _one_line(error)
    broken, cudnn = _broken(libraries), None
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError as error:  # it finds an older one than it was built with
        broken["cudnn"] = _one_line(error)
    measured = calibration.load(gpus[0].name if gpus else "CPU", threads=0 if gpus else torch.get_num_threads())
    return Software(
        **common,
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        cudnn=cudnn,
        cuda_devices=torch.cuda.device_count() if usable else 0,
        cuda_uuids=tuple(gpu.uuid for gpu in gpus if gpu.uuid is not None),
        cuda_error=problem,
        broken=broken,
        calibrated=None if measured is None else measured.date or "earlier",
    ), gpus


def _gpu(index: int) -> Gpu:
    import torch

    about = torch.cuda.get_device_properties(index)
    return Gpu(index=index, name=about.name, uuid=f"GPU-{about.uuid}", capability=(about.major, about.minor),
               memory_total=about.total_memory)


def _broken(libraries: dict[str, str]) -> dict[str, str]:
    """Errors, or warnings in the log, of libraries with kernels of their own as they load; kept from the screen."""
    found = {}
    for name, module in COMPILED.items():
        if name not in libraries:
            continue
        logger, heard = logging.getLogger(module), BufferingHandler(100)
        before = logger.level, logger.propagate
        logger.addHandler(heard)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(module)
        except Exception as error:  # whatever a library raises on loading, it is not usable
            found[name] = f"{type(error).__name__}: {_one_line(error)}"
        finally:
            logger.removeHandler(heard)
            logger.setLevel(before[0])
            logger.propagate = before[1]
        if heard.buffer:
            found.setdefault(name, _one_line(heard.buffer[0].getMessage()))
    return found


def _one_line(value: object) -> str:
    """A message's beginning in one line; of paths the file's name alone."""
    return re.sub(r"(?:/[^\s/:]+)+/", "", re.sub(r"\s+", " ", str(value)).strip())[:300]
