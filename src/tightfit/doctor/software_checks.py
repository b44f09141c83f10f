"""Judging versions: PyTorch, cuDNN, what libraries ask of each other, and what would be worth installing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tightfit.doctor.findings import Finding, Say
from tightfit.doctor.readings import Readings, Software

TESTED = ((2, 11), (2, 13))
"""The first and the last PyTorch that tightfit is tested with."""
CUDNN = 90000
"""cuDNN 9 brought the attention that sdpa's cuDNN kernel runs; PyTorch 2.4 and later are built with it."""

SLOWER = {
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel: for finding errors, not for training",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "gives memory back after every use: slow, and nothing is as planned",
    "TORCHDYNAMO_DISABLE": "turns torch.compile off",
    "NCCL_P2P_DISABLE": "sends what cards exchange through the host's memory",
}
"""Variables that cost speed when they are set and not 0."""


class Optional(NamedTuple):
    """A library that tightfit makes use of where it is installed. capability: the least of a card that it serves; None
    where it needs no card."""

    name: str
    gives: str
    install: str
    capability: tuple[int, int] | None = None


OPTIONAL = (
    Optional("nvidia-ml-py", "power, temperature, processes and links in this check-up, and the CUDA context's share "
             "of memory", "pip install 'tightfit[gpu]'", (0, 0)),
    Optional("flash-attn", "attention=flash-attn, as fast as sdpa's flash kernel or faster on the newest GPUs; it is "
             "built against the installed PyTorch, which takes nvcc and minutes to hours",
             "pip install flash-attn --no-build-isolation", (8, 0)),
    Optional("triton", "compile=per-block and compile=whole on the GPU; PyTorch's CUDA builds for Linux bring it",
             "pip install triton", (7, 0)),
    Optional("accelerate", "trackers of a run (report_to), and Hugging Face's own loop with tightfit.apply",
             "pip install accelerate"),
    Optional("tensorboard", "curves of a run with report_to=[tensorboard]", "pip install accelerate tensorboard"),
    Optional("datasets", "data from the Hugging Face hub, and saved datasets", "pip install datasets"),
    Optional("pyarrow", "data in Parquet files", "pip install pyarrow"),
    Optional("pillow", "folders of images as data", "pip install pillow"),
)


def check_torch(software: Software, say: Say, readings: Readings) -> Iterator[Finding]:
    """tightfit, PyTorch and cuDNN."""
    yield say("ok", "python", f"tightfit {software.tightfit} on Python {software.python}")
    if software.torch is None:
        yield say("problem", "torch", f"PyTorch does not load: {software.broken.get('torch', 'it is not installed')}",
                  "install it again by the command that pytorch.org/get-started/locally gives")
        return
    found = tuple(map(int, re.findall(r"\d+", software.torch)[:2]))
    built = f" built for CUDA {software.torch_cuda}" if software.torch_cuda else ", built without CUDA"
    cudnn = f", cuDNN {_cudnn(software.cudnn)}" if software.torch_cuda and software.cudnn else ""
    sentence = f"PyTorch {software.torch.partition('+')[0]}{built}{cudnn}"
    first, last = (".".join(map(str, version)) for version in TESTED)
    if found < TESTED[0]:
        yield say("problem", "torch", f"{sentence}: older than {first}, the oldest that tightfit runs with",
                  f"pip install 'torch>={first}'")
    elif found > TESTED[1]:
        yield say("advice", "torch", f"{sentence}: newer than {last}, the newest that tightfit was tested with",
                  f"take predictions with care, or pip install 'torch=={last}.*'")
    else:
        yield say("ok", "torch", sentence)
    if software.torch_cuda and software.cudnn is not None and software.cudnn < CUDNN:
        yield say("advice", "cudnn", f"cuDNN {_cudnn(software.cudnn)} is older than 9: sdpa's cuDNN kernel is not "
                  "there", f"pip install 'nvidia-cudnn-cu{software.torch_cuda.split('.')[0]}>=9', or a PyTorch that "
                  "brings its own")


def check_libraries(software: Software, say: Say, readings: Readings) -> Iterator[Finding]:
    """Libraries that do not go together or do not load, those that are there, and those that would be of use."""
    torch = (software.torch or "").partition("+")[0]
    for place, conflict in enumerate(software.conflicts):
        wants = re.sub(r"(?=[<>=!~])", " ", conflict.wants, count=1)
        own = conflict.library == "tightfit"
        consequence = "tightfit may fail" if own else f"{conflict.library} may fail or fall back to slow paths"
        yield say("problem" if own else "advice", f"conflicts[{place}]", f"{conflict.library} asks for {wants}, and "
                  f"{conflict.installed} is installed: {consequence}", f"pip install '{conflict.wants}'",
                  value=conflict.installed)
    for name, said in software.broken.items():
        if name == "torch" or (name == "torchao" and software.torch_cuda is None):
            continue  # torchao's wheels hold CUDA kernels, which a PyTorch without CUDA rightly leaves out
        yield say("advice", "broken", f"{name} {software.libraries.get(name, '')} does not load whole with PyTorch "
                  f"{torch}: {said}", f"install the {name} that was built for PyTorch {torch} (pip install "
                  f"--force-reinstall --no-deps {name}{' --no-build-isolation' if name == 'flash-attn' else ''})",
                  value=said)
    present = [f"{name} {version}" for name, version in software.libraries.items() if name != "torch"]
    if present:
        yield say("ok", "libraries", ", ".join(present), value=len(present))
    capability = max((gpu.capability for gpu in readings.gpus if gpu.capability), default=None)
    for library in OPTIONAL:
        serves = library.capability is None or (capability is not None and capability >= library.capability)
        said_already = library.name == "nvidia-ml-py" and readings.driver.nvml == "no-binding"
        if library.name not in software.libraries and serves and not said_already:
            yield say("info", "libraries", f"{library.name} is not installed; it gives {library.gives}",
                      library.install, value=library.name)


def check_environment(software: Software, say: Say, readings: Readings) -> Iterator[Finding]:
    """Variables that cost speed."""
    for name, value in software.environment.items():
        if name in SLOWER and value not in ("", "0"):
            yield say("advice", "environment", f"{name}={value} {SLOWER[name]}", f"unset {name}", value=value)
        elif name == "NVIDIA_TF32_OVERRIDE" and value == "0":
            yield say("advice", "environment", f"{name}=0 turns tf32 off for every library: precision=tf32 has no "
                      "effect", f"unset {name}", value=value)


def check_calibration(software: Software, say: Say, readings: Readings) -> Iterator[Finding]:
    """Whether times in plans come from this machine's own measurement."""
    if software.calibrated is not None:
        yield say("ok", "calibrated", "times in plans are calibrated by this machine's measurement of "
                  f"{software.calibrated}")
    elif software.torch is not None:
        yield say("info", "calibrated", "times in plans are not calibrated for this machine with PyTorch "
                  f"{software.torch.partition('+')[0]}", "tightfit doctor --calibrate")


def _cudnn(number: int) -> str:
    """9.10.2 of 91002; before 9 the number was 8902 for 8.9.2."""
    major, rest = divmod(number, 10000 if number >= CUDNN else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
