"""Reading versions, what PyTorch says of the cards, and what the libraries ask of each other."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from tightfit import calibration
from tightfit.doctor.readings import Conflict, Gpu, Software
from tightfit.system import installed, version_of

LIBRARIES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "accelerate", "datasets", "torchao",
    "torch-optimi", "flash-attn", "bitsandbytes", "apex", "xformers", "liger-kernel", "deepspeed", "jax", "jaxlib",
    "optax", "nvidia-ml-py", "pyarrow", "pillow", "tensorboard", "peft",
)  # fmt: skip
COMPILED = {"flash-attn": "flash_attn", "torchao": "torchao", "bitsandbytes": "bitsandbytes"}
"""Libraries with kernels of their own, which are built for one version of PyTorch and say so only when they load."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCHDYNAMO_DISABLE",
)  # fmt: skip


def read_software() -> tuple[Software, tuple[Gpu, ...]]:
    """Versions, and the cards as PyTorch names them, which stand in where the driver cannot be asked."""
    libraries = installed(LIBRARIES)
    common: dict[str, Any] = {
        "python": platform.python_version(),
        "tightfit": version_of("tightfit") or "not installed",
        "libraries": libraries,
        "conflicts": read_conflicts(["tightfit", *libraries]),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is missing
        return Software(**common, broken={"torch": _one_line(error)}), ()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    problem = None if usable else " ".join(_one_line(w.message) for w in said if "CUDA" in str(w.message)) or None
    gpus: tuple[Gpu, ...] = ()
    if usable:
        try:
            gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
            torch.ones(1, device="cuda").add_(1).item()  # shows what no version does: a card that is full or broken
        except RuntimeError as error:
            problem = _one_line(error)
    return Software(
        **common,
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        architectures=tuple(torch.cuda.get_arch_list()) if torch.version.cuda else (),
        cuda_devices=torch.cuda.device_count() if usable else 0,
        cuda_uuids=tuple(gpu.uuid for gpu in gpus if gpu.uuid is not None),
        cuda_error=problem,
        broken=_broken(libraries),
        calibrated=_calibrated(gpus[0].name if gpus else "CPU", 0 if gpus else torch.get_num_threads()),
    ), gpus


def _gpu(index: int) -> Gpu:
    import torch

    about = torch.cuda.get_device_properties(index)
    uuid = getattr(about, "uuid", None)
    return Gpu(index=index, name=about.name, uuid=None if uuid is None else f"GPU-{uuid}",
               capability=(about.major, about.minor), memory_total=about.total_memory)


def _calibrated(device: str, threads: int) -> str | None:
    found = calibration.load(device, threads=threads)
    return None if found is None else found.date or "earlier"


def read_conflicts(names: list[str]) -> tuple[Conflict, ...]:
    """Requirements of the named libraries, by their own metadata, that the installed versions do not meet.

    A library that is asked for and absent is left out: extras and other systems ask for many.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:  # comes with transformers
        return ()
    found = []
    for name in names:
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in asked:
            try:
                wants = Requirement(line)
            except InvalidRequirement:
                continue
            present = version_of(wants.name)
            applies = wants.marker is None or wants.marker.evaluate({"extra": ""})
            if present and applies and not wants.specifier.contains(present, prereleases=True):
                found.append(Conflict(library=name, wants=f"{wants.name}{wants.specifier}", installed=present))
    return tuple(found)


def _broken(libraries: dict[str, str]) -> dict[str, str]:
    """Errors, or warnings in the log, of libraries with kernels of their own as they load."""
    found = {}
    for name, module in COMPILED.items():
        if name not in libraries:
            continue
        with _heard(module) as lines, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever a library raises on loading, it is not usable
                lines.insert(0, f"{type(error).__name__}: {_one_line(error)}")
        if lines:
            found[name] = lines[0]
    return found


@contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    """Warnings and errors that a library logs, kept from the screen."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(_one_line(record.getMessage()))

    logger, listener = logging.getLogger(name), Listener(logging.WARNING)
    before = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _one_line(value: object) -> str:
    """A message's beginning in one line; of paths the file's name alone."""
    return re.sub(r"(?:/[^\s/:]+)+/", "", re.sub(r"\s+", " ", str(value)).strip())[:300]
