"""Judging the driver, whether PyTorch can use the cards with it, versions of libraries, and what would be worth
installing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tightfit.doctor.findings import Finding, Say
from tightfit.doctor.readings import Driver, Gpu, Readings, Software

LEAST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
"""The oldest Linux driver that serves every release of a CUDA major version (CUDA toolkit release notes, minimum
driver for minor-version compatibility)."""
OLDEST_CARDS = {12: (5, 0), 13: (7, 5)}
"""The oldest compute capability that a CUDA major version compiles for (CUDA toolkit release notes)."""

IN_CONTAINER = ("start the container with the cards: docker run --gpus all (podman run --device nvidia.com/gpu=all); "
                "the host needs NVIDIA's driver and the NVIDIA Container Toolkit")
INSTALL = "install NVIDIA's driver from the system's packages (on Ubuntu: sudo ubuntu-drivers install), then restart"

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


def check_driver(driver: Driver, say: Say, readings: Readings) -> Iterator[Finding]:
    """Driver and cards, whether or not either is there."""
    nvml, cards = driver.nvml, driver.pci_cards
    contained = readings.host.container not in (None, "wsl")
    if nvml == "ok":
        yield _version(driver, say, readings)
        if cards and not readings.gpus:
            yield say("problem", "pci_cards", f"the driver has none of the machine's {len(cards)} NVIDIA cards",
                      "look for NVRM and Xid lines in `dmesg`; reseat the card and its power leads")
    elif nvml == "mismatch":
        yield say("problem", "nvml", "the driver's library and the loaded kernel module are of different versions, as "
                  f"after an update (module {driver.module or 'unknown'}): no CUDA program starts",
                  "restart the machine")
    elif nvml == "no-permission":
        yield say("problem", "nvml", f"this user may not open the cards: {driver.said}",
                  "look at the rights of /dev/nvidia*; add the user to their group")
    elif nvml == "no-binding":
        if driver.module or cards or readings.gpus:
            yield say("advice", "nvml", "power, temperature, processes and links cannot be read: NVML's Python binding "
                      "is not installed", "pip install 'tightfit[gpu]'")
    elif readings.software.cuda_devices:
        yield say("info", "nvml", f"NVML does not answer ({driver.said}), PyTorch has the cards all the same; power "
                  "and temperature cannot be read")
    elif nvml == "failed":
        yield say("problem", "nvml", f"the driver does not answer: {driver.said}",
                  "restart the machine; look for NVRM lines in `dmesg`")
    elif contained and (driver.module or cards):
        yield say("problem", "pci_cards", "the host has an NVIDIA card, and this container was not given it",
                  IN_CONTAINER)
    elif driver.nouveau and cards:
        yield say("problem", "nouveau", "Linux's own driver, nouveau, holds the card, and CUDA needs NVIDIA's", INSTALL)
    elif driver.module:
        yield say("problem", "nvml", f"the kernel module {driver.module} is loaded and the driver's libraries are "
                  f"missing: {driver.said}", "install the rest of the driver, of the same version")
    elif cards:
        yield say("problem", "pci_cards", f"there is an NVIDIA card and no driver for it: {', '.join(cards)}", INSTALL)
    if not (readings.gpus or cards or driver.module):
        yield Finding(
            topic="GPU", severity="info", field="gpus", value=0,
            sentence="no NVIDIA GPU here: training runs on the processor; `tightfit plan --gpu NAME` needs none",
            action=f"if the host has one, {IN_CONTAINER}" if contained else "",
        )  # fmt: skip
    if too_old := _least_driver(readings):
        wanted = readings.software.torch_cuda
        other = f"CUDA {_numbers(driver.cuda)[0]}" if driver.cuda else "an older CUDA"
        yield say("problem", "version", f"driver {driver.version} is too old for PyTorch built for CUDA {wanted}, "
                  f"which needs {too_old} or later", f"update the driver to {too_old} or later, or install a PyTorch "
                  f"built for {other}")


def check_cuda(software: Software, say: Say, readings: Readings) -> Iterator[Finding]:
    """Whether PyTorch, the driver and the cards go together."""
    driver, gpus = readings.driver, [gpu for gpu in readings.gpus if gpu.error is None]
    if software.torch is None or not (gpus or driver.pci_cards):
        return
    if software.torch_cuda is None:
        newest = f" for CUDA {driver.cuda} or older, which is what the driver serves" if driver.cuda else ""
        yield say("problem", "torch_cuda", f"PyTorch {software.torch} is built without CUDA, and there is a GPU",
                  f"pip uninstall torch, then install torch {software.torch.partition('+')[0]} by the command that "
                  f"pytorch.org/get-started/locally gives{newest}")
    elif _least_driver(readings):
        return
    elif gpus and not software.cuda_devices:
        hidden = software.environment.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
            yield say("advice", "environment", "CUDA_VISIBLE_DEVICES hides every card: training runs on the processor",
                      "unset CUDA_VISIBLE_DEVICES", value=hidden)
        else:
            yield say("problem", "cuda_error", "PyTorch cannot use the GPU: "
                      f"{software.cuda_error or 'no reason was given'}", f"the driver reads "
                      f"{driver.version or 'unknown'}, PyTorch is built for CUDA {software.torch_cuda}; restart the "
                      "machine where the two go together")
    elif software.cuda_error:
        yield say("problem", "cuda_error", f"the first kernel failed: {software.cuda_error}",
                  "look whether another process has the card, and for Xid errors in `dmesg`")
    elif 0 < software.cuda_devices < len(gpus):
        yield say("info", "cuda_devices", f"PyTorch sees {software.cuda_devices} of {len(gpus)} GPUs")


def check_kernels(gpu: Gpu, say: Say, readings: Readings) -> Iterator[Finding]:
    """Whether PyTorch has kernels for a card."""
    software = readings.software
    if gpu.capability is None or not software.architectures or covers(software.architectures, gpu.capability):
        return
    cuda = _numbers(software.torch_cuda or "0")[0]
    dropped = gpu.capability < OLDEST_CARDS.get(cuda, (0, 0))
    yield say("problem", "capability", f"PyTorch {software.torch} has no kernels for compute capability "
              f"{'.'.join(map(str, gpu.capability))}; it has {', '.join(software.architectures)}",
              f"CUDA {cuda} left such cards out: install a PyTorch built for CUDA {cuda - 1}" if dropped
              else "install a newer PyTorch, or one built for a newer CUDA")


def check_torch(software: Software, say: Say, readings: Readings) -> Iterator[Finding]:
    """tightfit, PyTorch and cuDNN."""
    yield say("ok", "python", f"tightfit {software.tightfit} on Python {software.python}")
    if software.torch is None:
        yield say("problem", "torch", f"PyTorch does not load: {software.broken.get('torch', 'it is not installed')}",
                  "install it again by the command that pytorch.org/get-started/locally gives")
        return
    found = _numbers(software.torch)[:2]
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


def covers(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether kernels for those architectures run on a card of that capability.

    Machine code (sm_) runs on later minor versions of its major version; sm_90a on that version alone, sm_100f on its
    family. Portable code (compute_) is compiled by the driver for any later card. (CUDA programming guide.)
    """
    for found in filter(None, (re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name) for name in architectures)):
        own, newest = (int(found[2]), int(found[3])), (int(found[2]), 9)
        if found[4] == "a":
            newest = own
        elif found[1] == "compute" and not found[4]:
            newest = (99, 9)
        if own <= capability <= newest:
            return True
    return False


def _version(driver: Driver, say: Say, readings: Readings) -> Finding:
    wanted = readings.software.torch_cuda
    serves = f", serves CUDA up to {driver.cuda}" if driver.cuda else ""
    sentence = f"NVIDIA driver {driver.version or 'of unknown version'}{serves}"
    if driver.cuda and wanted and _numbers(driver.cuda) < _numbers(wanted) and not _least_driver(readings):
        return say("info", "cuda", f"{sentence}; PyTorch is built for {wanted}, which runs in compatibility mode",
                   "a newer driver lets the driver itself compile kernels of that version")
    return say("ok", "version", sentence)


def _least_driver(readings: Readings) -> str:
    """The oldest driver that serves PyTorch's CUDA, where the driver is older; empty where it is not, or works all the
    same (the data-center cards' forward compatibility packages)."""
    version, software = readings.driver.version, readings.software
    least = LEAST_DRIVER.get(_numbers(software.torch_cuda)[0]) if software.torch_cuda else None
    if software.torch is None or version is None or least is None or software.cuda_devices:
        return ""
    return ".".join(map(str, least)) if _numbers(version) < least else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0]))) or (0,)


def _cudnn(number: int) -> str:
    """9.10.2 of 91002; before 9 the number was 8902 for 8.9.2."""
    major, rest = divmod(number, 10000 if number >= CUDNN else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
