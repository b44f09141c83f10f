"""Judging the driver, whether PyTorch can use the cards with it, versions of libraries, and what would be worth
installing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from packaging.version import Version

from tightfit.doctor.findings import Finding, FindingBuilder
from tightfit.doctor.readings import Driver, Readings, Software
from tightfit.errors import install_command

IN_CONTAINER = ("start the container with the cards: docker run --gpus all (podman run --device nvidia.com/gpu=all); "
                "the host needs NVIDIA's driver and the NVIDIA Container Toolkit")
INSTALL = "install NVIDIA's driver from the system's packages (on Ubuntu: sudo ubuntu-drivers install), then restart"

TESTED = ((2, 11), (2, 13))
"""The first and the last PyTorch that tightfit is tested with."""

SLOWER = {
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel: for finding errors, not for training",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "gives memory back after every use: slow, and nothing is as planned",
    "TORCHDYNAMO_DISABLE": "turns torch.compile off",
    "NCCL_P2P_DISABLE": "sends what cards exchange through the host's memory",
    "NVIDIA_TF32_OVERRIDE": "turns tf32 off for every library: precision=tf32 has no effect",
}
"""Variables that cost speed when they are set and not 0, the last one when it is 0."""


class OptionalLibrary(NamedTuple):
    """A library that tightfit makes use of where it is installed. capability: the least of a card that it serves."""

    name: str
    gives: str
    capability: tuple[int, int] = (0, 0)


OPTIONAL = (
    OptionalLibrary("nvidia-ml-py", "power, temperature, processes and links in this check-up, and the CUDA context's "
                    "share of memory"),
    OptionalLibrary("flash-attn", "attention=flash-attn; it is built against the installed PyTorch, which takes nvcc "
                    "and minutes to hours", (8, 0)),
    OptionalLibrary("triton", "compile=per-block and compile=whole on the GPU", (7, 0)),
    OptionalLibrary("accelerate", "trackers of a run (report_to), and Hugging Face's own loop with tightfit.apply"),
    OptionalLibrary("tensorboard", "curves of a run with report_to=[tensorboard]"),
    OptionalLibrary("pillow", "folders of images as data"),
)


def check_presence(driver: Driver, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """A machine without a card."""
    if not (readings.gpus or driver.pci_cards or driver.module):
        yield Finding(
            topic=say.topic, severity="info", field="gpus", value=0,
            sentence="no NVIDIA GPU here: training runs on the processor; `tightfit plan --gpu NAME` needs none",
            action=f"if the host has one, {IN_CONTAINER}" if _contained(readings) else "",
        )  # fmt: skip


def check_driver(driver: Driver, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """The driver, whether or not it is there."""
    nvml, cards, module = driver.nvml, driver.pci_cards, driver.module
    if nvml == "ok":
        serves = f", serves CUDA up to {driver.cuda}" if driver.cuda else ""
        yield say("ok", "version", f"NVIDIA driver {driver.version or 'of unknown version'}{serves}")
        if cards and not readings.gpus:
            yield say("problem", "pci_cards", f"the driver has none of the machine's {len(cards)} NVIDIA cards",
                      "look for NVRM and Xid lines in `dmesg`; reseat the card and its power cables")
    elif nvml == "mismatch":
        yield say("problem", "nvml", f"the driver's library and the loaded kernel module {module} differ, as after an "
                  "update: no CUDA program starts", "restart the machine")
    elif nvml == "no-permission":
        yield say("problem", "nvml", f"this user may not open the cards: {driver.said}",
                  "look at the rights of /dev/nvidia*; add the user to their group")
    elif nvml == "no-binding":
        if module or cards or readings.gpus:
            yield say("advice", "nvml", "power, temperature, processes and links cannot be read: NVML's Python binding "
                      "is not installed", install_command("nvidia-ml-py"))
    elif readings.software.cuda_devices:
        yield say("info", "nvml", f"NVML does not answer ({driver.said}), PyTorch has the cards all the same")
    elif nvml == "failed":
        yield say("problem", "nvml", f"the driver does not answer: {driver.said}",
                  "restart the machine; look for NVRM lines in `dmesg`")
    elif _contained(readings) and (module or cards):
        yield say("problem", "pci_cards", "the host has an NVIDIA card, and this container was not given it",
                  IN_CONTAINER)
    elif driver.nouveau and cards:
        yield say("problem", "nouveau", "Linux's own driver, nouveau, holds the card, and CUDA needs NVIDIA's", INSTALL)
    elif module:
        yield say("problem", "nvml", f"the kernel module {module} is loaded and the driver's libraries are missing: "
                  f"{driver.said}", "install the rest of the driver, of the same version")
    elif cards:
        yield say("problem", "pci_cards", "there is an NVIDIA card and no driver for it", INSTALL)
    wanted, cuda = readings.software.torch_cuda, driver.cuda
    if _too_old(readings):
        yield say("problem", "version", f"driver {driver.version} is too old: it serves CUDA up to {cuda}, and PyTorch "
                  f"is built for {wanted}", "update the driver, or install a PyTorch built for CUDA "
                  f"{Version(cuda or '0').major}")


def _too_old(readings: Readings) -> bool:
    """Whether the driver is of an older CUDA major version than PyTorch. A card that PyTorch can use is served all the
    same, by the data-center cards' forward compatibility packages."""
    wanted, cuda = readings.software.torch_cuda, readings.driver.cuda
    return bool(wanted and cuda and Version(cuda).major < Version(wanted).major and not readings.software.cuda_devices)


def _contained(readings: Readings) -> bool:
    return readings.host.container not in (None, "wsl")


def check_cuda(software: Software, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """Whether PyTorch, the driver and the cards go together."""
    driver, gpus = readings.driver, [gpu for gpu in readings.gpus if gpu.error is None]
    if software.torch is None or not (gpus or driver.pci_cards):
        return
    if software.torch_cuda is None:
        newest = f" for CUDA {driver.cuda} or older, which is what the driver serves" if driver.cuda else ""
        yield say("problem", "torch_cuda", f"PyTorch {software.torch} is built without CUDA, and there is a GPU",
                  f"pip uninstall torch, then install torch {software.torch.partition('+')[0]} by the command that "
                  f"pytorch.org/get-started/locally gives{newest}")
    elif _too_old(readings):
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
        action = ("install a PyTorch that was built for this card: newer ones leave old cards out"
                  if "no kernel image" in software.cuda_error else
                  "look whether another process has the card, and for Xid errors in `dmesg`")
        yield say("problem", "cuda_error", f"the first kernel failed: {software.cuda_error}", action)
    elif 0 < software.cuda_devices < len(gpus):
        yield say("info", "cuda_devices", f"PyTorch sees {software.cuda_devices} of {len(gpus)} GPUs")


def check_torch(software: Software, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """tightfit, PyTorch and cuDNN."""
    yield say("ok", "python", f"tightfit {software.tightfit} on Python {software.python}")
    if software.torch is None:
        yield say("problem", "torch", f"PyTorch does not load: {software.broken.get('torch', 'it is not installed')}",
                  "install it again by the command that pytorch.org/get-started/locally gives")
        return
    found = Version(software.torch).release[:2]
    built = f"built for CUDA {software.torch_cuda}" if software.torch_cuda else "built without CUDA"
    cudnn = f", cuDNN {software.cudnn // 10000}.{software.cudnn // 100 % 100}" if software.cudnn else ""
    sentence = f"PyTorch {software.torch.partition('+')[0]}, {built}{cudnn}"
    first, last = (".".join(map(str, version)) for version in TESTED)
    if found < TESTED[0]:
        yield say("problem", "torch", f"{sentence}: older than {first}, the oldest that tightfit runs with",
                  f"pip install 'torch>={first}'")
    elif found > TESTED[1]:
        yield say("advice", "torch", f"{sentence}: newer than {last}, the newest that tightfit was tested with",
                  f"take predictions with care, or pip install 'torch=={last}.*'")
    else:
        yield say("ok", "torch", sentence)
    if said := software.broken.get("cudnn"):
        yield say("problem" if readings.gpus else "advice", "broken", f"cuDNN does not load: {said}",
                  "unset LD_LIBRARY_PATH where it names another cuDNN, or install PyTorch again", value=said)


def check_libraries(software: Software, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """Libraries that do not load, those that are there, and those that would be of use."""
    for name, said in software.broken.items():
        if name in ("torch", "cudnn") or (name == "torchao" and software.torch_cuda is None):
            continue  # torchao's wheels hold CUDA kernels, which a PyTorch without CUDA rightly leaves out
        yield say("advice", "broken", f"{name} {software.libraries.get(name, '')} does not load whole: {said}",
                  f"install the {name} that was built for PyTorch {software.torch}: pip install --force-reinstall "
                  f"--no-deps {name}{' --no-build-isolation' if name == 'flash-attn' else ''}", value=said)
    present = [f"{name} {version}" for name, version in software.libraries.items() if name != "torch"]
    if present:
        yield say("ok", "libraries", ", ".join(present), value=len(present))
    capability = max((gpu.capability for gpu in readings.gpus if gpu.capability), default=(0, 0))
    for library in OPTIONAL:
        said_already = library.name == "nvidia-ml-py" and (readings.driver.nvml == "no-binding" or not readings.gpus)
        if library.name not in software.libraries and capability >= library.capability and not said_already:
            yield say("info", "libraries", f"{library.name} is not installed; it gives {library.gives}",
                      install_command(library.name), value=library.name)


def check_environment(software: Software, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """Variables that cost speed."""
    for name, value in software.environment.items():
        is_zero = value in ("", "0")
        if name in SLOWER and is_zero == (name == "NVIDIA_TF32_OVERRIDE"):
            yield say("advice", "environment", f"{name}={value} {SLOWER[name]}", f"unset {name}", value=value)


def check_calibration(software: Software, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """Whether times in plans come from this machine's own measurement."""
    if software.calibrated is not None:
        yield say("ok", "calibrated", "times in plans are calibrated by this machine's measurement of "
                  f"{software.calibrated}")
    elif software.torch is not None:
        yield say("info", "calibrated", "times in plans are not calibrated for this machine with PyTorch "
                  f"{software.torch.partition('+')[0]}", "tightfit doctor --calibrate")
