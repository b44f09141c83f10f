"""What to say of versions: PyTorch, cuDNN, what libraries ask of each other, and what would be worth installing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tightfit.doctor.findings import Finding, Severity
from tightfit.doctor.libraries import OPTIONAL
from tightfit.doctor.readings import Readings

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


def software_checks(readings: Readings) -> Iterator[Finding]:
    """Everything that versions decide."""
    software = readings.software
    yield _say("ok", "python", f"tightfit {software.tightfit} on Python {software.python}", software.python,
               topic="software")
    if software.torch is None:
        said = software.broken.get("torch", "it is not installed")
        yield _say("problem", "torch", f"PyTorch does not load: {said}", None,
                   "install it again by the command that pytorch.org/get-started/locally gives")
    else:
        yield _version(readings)
        if software.torch_cuda and software.cudnn is not None and software.cudnn < CUDNN:
            yield _say("advice", "cudnn", f"cuDNN {_cudnn(software.cudnn)} is older than 9: sdpa's cuDNN kernel is not "
                       "there", software.cudnn, f"pip install 'nvidia-cudnn-cu{software.torch_cuda.split('.')[0]}>=9', "
                       "or a PyTorch that brings its own")
    yield from _conflicts(readings)
    yield from _broken(readings)
    yield from _environment(readings)
    yield from _optional(readings)
    if software.torch is not None and software.calibrated is None:
        yield Finding(topic="plans", severity="info", field="software.calibrated", value=None,
                      sentence="times in plans are not calibrated for this machine with PyTorch "
                      f"{software.torch.partition('+')[0]}", action="tightfit doctor --calibrate")
    elif software.calibrated is not None:
        yield Finding(topic="plans", severity="ok", field="software.calibrated", value=software.calibrated,
                      sentence=f"times in plans are calibrated by this machine's measurement of {software.calibrated}")


def _version(readings: Readings) -> Finding:
    software = readings.software
    assert software.torch is not None
    numbers = re.findall(r"\d+", software.torch)
    found = int(numbers[0]), int(numbers[1])
    built = f" built for CUDA {software.torch_cuda}" if software.torch_cuda else ", built without CUDA"
    dnn = f", cuDNN {_cudnn(software.cudnn)}" if software.torch_cuda and software.cudnn else ""
    sentence = f"PyTorch {software.torch.partition('+')[0]}{built}{dnn}"
    first, last = (".".join(map(str, version)) for version in TESTED)
    if found < TESTED[0]:
        return _say("problem", "torch", f"{sentence}: older than {first}, the oldest that tightfit runs with",
                    software.torch, f"pip install 'torch>={first}'")
    if found > TESTED[1]:
        return _say("advice", "torch", f"{sentence}: newer than {last}, the newest that tightfit was tested with",
                    software.torch, f"take predictions with care, or pip install 'torch=={last}.*'")
    return _say("ok", "torch", sentence, software.torch)


def _conflicts(readings: Readings) -> Iterator[Finding]:
    for place, conflict in enumerate(readings.software.conflicts):
        wants = re.sub(r"(?=[<>=!~])", " ", conflict.wants, count=1)
        own = conflict.library == "tightfit"
        consequence = "tightfit may fail" if own else f"{conflict.library} may fail or fall back to slow paths"
        yield Finding(
            topic="libraries", severity="problem" if own else "advice", field=f"software.conflicts[{place}]",
            value=conflict.installed, action=f"pip install '{conflict.wants}'",
            sentence=f"{conflict.library} asks for {wants}, and {conflict.installed} is installed: {consequence}",
        )  # fmt: skip


def _broken(readings: Readings) -> Iterator[Finding]:
    software = readings.software
    for name, said in software.broken.items():
        if name == "torch" or (name == "torchao" and software.torch_cuda is None):
            continue  # torchao's wheels hold CUDA kernels, which a PyTorch without CUDA rightly leaves out
        torch = (software.torch or "").partition("+")[0]
        yield _say("advice", "broken", f"{name} {software.libraries.get(name, '')} does not load whole with PyTorch "
                   f"{torch}: {said}", said, f"install the {name} that was built for PyTorch {torch} (pip install "
                   f"--force-reinstall --no-deps {name}{' --no-build-isolation' if name == 'flash-attn' else ''})",
                   topic="libraries")


def _environment(readings: Readings) -> Iterator[Finding]:
    for name, value in readings.software.environment.items():
        if name in SLOWER and value not in ("", "0"):
            yield _say("advice", "environment", f"{name}={value} {SLOWER[name]}", value, f"unset {name}",
                       topic="environment")
        elif name == "NVIDIA_TF32_OVERRIDE" and value == "0":
            yield _say("advice", "environment", f"{name}=0 turns tf32 off for every library: precision=tf32 has no "
                       "effect", value, f"unset {name}", topic="environment")


def _optional(readings: Readings) -> Iterator[Finding]:
    installed = readings.software.libraries
    capability = max((gpu.capability for gpu in readings.gpus if gpu.capability), default=None)
    present = [f"{name} {version}" for name, version in installed.items() if name != "torch"]
    if present:
        yield _say("ok", "libraries", ", ".join(present), len(present), topic="libraries")
    for library in OPTIONAL:
        serves = library.capability is None or (capability is not None and capability >= library.capability)
        said_already = library.name == "nvidia-ml-py" and readings.driver.nvml == "no-binding"
        if library.name not in installed and serves and not said_already:
            yield _say("info", "libraries", f"{library.name} is not installed; it gives {library.gives}", library.name,
                       library.install, topic="libraries")


def _cudnn(number: int | None) -> str:
    """9.10.2 of 91002; before 9 the number was 8902 for 8.9.2."""
    assert number is not None
    major, rest = divmod(number, 10000 if number >= CUDNN else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _say(
    severity: Severity, name: str, sentence: str, value: object, action: str = "", topic: str = "PyTorch"
) -> Finding:
    return Finding(topic=topic, severity=severity, sentence=sentence, field=f"software.{name}", value=value,
                   action=action)
