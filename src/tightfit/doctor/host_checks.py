"""Judging the machine around the cards: the paths between them, with the interconnect matrix; processor,
memory, disk, container."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tightfit.devices import GIB
from tightfit.doctor.findings import Finding, FindingBuilder, Severity
from tightfit.doctor.readings import Disk, Host, Link, Readings
from tightfit.text import size

CHECKPOINT_BYTES = 12
"""Bytes a parameter of a checkpoint: fp32 weights and AdamW's two states."""
ADAMW_STATES = 8
"""Bytes a parameter of AdamW's two states in fp32."""
SLOW_DISK = 150e6
"""Bytes a second of writing below which checkpoints are worth a word: a billion parameters take 80 s or more."""
OFFLOAD_DISK = 2e9
"""Bytes a second from which optimizer states can live on a disk; each step reads and writes them whole."""
FULL_DISK, TIGHT_DISK = 256 << 20, 10 * GIB
SHARED_MEMORY = 1 * GIB
"""Docker gives 64 MiB, which a few prefetched batches overflow; a worker then dies of a bus error."""
IMAGE = "docker run --gpus all --ipc=host -it --rm -v \"$PWD\":/work -w /work nvcr.io/nvidia/pytorch:YY.MM-py3"
"""NVIDIA's image with PyTorch, compiler and the libraries that want building; YY.MM: the newest month whose release
notes serve the driver."""


class LinkKind(NamedTuple):
    """A kind of path between two cards: what `nvidia-smi topo -m` means by it, how it is to be taken, what it means for
    a parallel run, and what to do."""

    legend: str
    severity: Severity
    meaning: str
    action: str = ""


NEAR = ("parallel=ddp suits, which exchanges once a step; parallel=fsdp and zero, which do at every block or "
        "micro-batch, wait at large ones")
FAR = ("every exchange passes the processor: parallel=ddp suits, with gradient accumulation; parallel=fsdp and zero "
       "are slowed")
ONE_CARD = ("write parallel=ddp where the model fits one card; parallel=fsdp and zero exchange less with larger "
            "micro-batches")
PATHS = {
    "NV#": LinkKind("that many NVLinks, bonded", "ok",
                    "parallel=ddp hides its exchange; parallel=fsdp and zero run well too"),
    "PIX": LinkKind("at most one PCIe bridge", "ok", NEAR),
    "PXB": LinkKind("several PCIe bridges, without the processor's", "ok", NEAR),
    "PHB": LinkKind("through the processor's PCIe host bridge", "info", FAR, ONE_CARD),
    "NODE": LinkKind("between host bridges of one processor's memory (NUMA node)", "info", FAR, ONE_CARD),
    "SYS": LinkKind("between processors, over their own link", "advice", "the slowest way: parallel=ddp wants much "
                    "gradient accumulation; parallel=fsdp and zero are slow", "use cards of one processor where that "
                    "is enough (CUDA_VISIBLE_DEVICES), or raise gradient accumulation"),
}
"""Nearest first."""


def label(link: Link, count: str = "") -> str | None:
    """The matrix's entry: NV4, PHB; None where neither was read. count: in place of the number of NVLinks."""
    return f"NV{count or link.nvlinks}" if link.nvlinks else link.path


def matrix(readings: Readings) -> list[list[str]]:
    """The interconnect matrix with its headings, empty for fewer than two cards."""
    if len(readings.gpus) < 2 or not readings.links:
        return []
    names = {frozenset((link.first, link.second)): label(link) or "?" for link in readings.links}
    indices = [gpu.index for gpu in readings.gpus]
    rows = [[f"GPU{a}", *("X" if a == b else names.get(frozenset((a, b)), "?") for b in indices)] for a in indices]
    return [["", *(f"GPU{index}" for index in indices)], *rows]


def check_links(links: tuple[Link, ...], say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """The paths between each two cards; pairs that are alike are said once."""
    groups: dict[tuple[str | None, bool | None], list[int]] = {}
    for place, link in enumerate(links):
        groups.setdefault((label(link), link.peer), []).append(place)
    for (name, peer), places in groups.items():
        first = links[places[0]]
        one = FindingBuilder(say.topic, f"links[{places[0]}]", first)
        pairs = ("every two GPUs" if len(places) == len(links) > 1 else
                 ", ".join(f"GPU {links[n].first} and {links[n].second}" for n in places))
        if name is not None:
            path = PATHS[label(first, "#") or "SYS"]
            yield one(path.severity, "nvlinks" if first.nvlinks else "path", f"{name} between {pairs}: {path.meaning}",
                      path.action, value=name)
        if peer is False:
            yield one("advice", "peer", f"no peer access between {pairs}: what they exchange is copied through the "
                      "host's memory", "GeForce cards have none over PCIe; with others, look at the IOMMU and ACS in "
                      "the firmware")


def check_host(host: Host, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """Processor and memory."""
    cores = f"{host.cores} cores" if host.cores == host.cores_all else f"{host.cores} of {host.cores_all} cores"
    yield say("ok", "cores", f"{host.system}, {host.processor}, {cores}")
    gpus = sum(gpu.error is None for gpu in readings.gpus)
    if gpus and host.cores < 2 * gpus:
        yield say("advice", "cores", f"{host.cores} cores for {gpus} GPUs: data workers, and Python that issues "
                  "kernels, want two a card at least", "give the machine or the container more cores")
    sentence = (f"{size(host.memory_available)} of {size(host.memory_total)} memory free: room for AdamW's "
                f"states of {_count(host.memory_available / ADAMW_STATES)} parameters (offload=host, "
                f"{ADAMW_STATES} bytes each)")
    card = max((gpu.memory_total or 0 for gpu in readings.gpus), default=0)
    if host.memory_available < 2 * GIB:
        yield say("advice", "memory_available", sentence,
                  "end what else runs: loading a model and its data takes more than 2 GiB")
    elif host.memory_total < card:
        yield say("advice", "memory_total", f"{sentence}; less than the card's {size(card)}", "resuming from a "
                  "checkpoint reads it into host memory first: look at the plan's host bytes")
    else:
        yield say("ok", "memory_available", sentence)


def check_disk(disk: Disk, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """The disk that runs are written to."""
    if disk.error is not None or disk.free is None:
        yield say("problem", "error", f"{disk.folder} cannot be written: {disk.error}",
                  "runs write checkpoints here: start tightfit in another folder, or set output_dir")
        return
    severity: Severity = "problem" if disk.free < FULL_DISK else "advice" if disk.free < TIGHT_DISK else "ok"
    yield say(severity, "free", f"{size(disk.free)} free in {disk.folder}: checkpoints of "
              f"{_count(disk.free / CHECKPOINT_BYTES)} parameters in all, {CHECKPOINT_BYTES} bytes each with AdamW",
              "" if severity == "ok" else
              "make room, set output_dir to another disk, or keep fewer with save_total_limit")
    if disk.write is None or disk.measured is None:
        return
    read = "" if disk.read is None else f", reads {disk.read / 1e6:,.0f}"
    offload = "fast enough" if min(disk.write, disk.read or 0) >= OFFLOAD_DISK else "too slow"
    slow = disk.write < SLOW_DISK
    yield say("advice" if slow else "ok", "write", f"writes {disk.write / 1e6:,.0f} MB/s{read} (measured with "
              f"{size(disk.measured)}): a checkpoint of a billion parameters takes "
              f"{CHECKPOINT_BYTES * 1e9 / disk.write:,.0f} s; {offload} to offload optimizer states to",
              "set output_dir to a faster disk, or save less often with save_steps" if slow else "")


def check_container(host: Host, say: FindingBuilder, readings: Readings) -> Iterator[Finding]:
    """The container around this process, or the one in which nothing need be built."""
    if host.container is not None:
        name = {"wsl": "Windows' Linux (WSL)", "other": "a container"}.get(host.container, host.container)
        yield say("info", "container", f"this runs inside {name}: other processes' names, and power cables and supply, "
                  "are the host's affair")
    if host.shared_memory is not None and host.shared_memory < SHARED_MEMORY:
        yield say("advice", "shared_memory", f"/dev/shm holds {size(host.shared_memory)}: data workers hand over "
                  "batches through it, and die of a bus error when it is full",
                  "start the container with --ipc=host or --shm-size=8g" if host.container else
                  "sudo mount -o remount,size=8G /dev/shm")
    if not readings.gpus:
        return
    wanted = readings.software.torch_cuda
    built = "flash-attn, Apex or DeepSpeed's kernels"
    if host.nvcc is None:
        yield say("info", "nvcc", "the CUDA toolkit (nvcc) is not here: training and torch.compile need none of it; "
                  f"building {built} does", f"install the toolkit, or take NVIDIA's image, which has them: {IMAGE}")
    elif wanted and host.nvcc.split(".")[0] != wanted.split(".")[0]:
        yield say("advice", "nvcc", f"nvcc is of CUDA {host.nvcc} and PyTorch is built for {wanted}: building {built} "
                  "fails", f"set CUDA_HOME to a toolkit of CUDA {wanted}, or take NVIDIA's image: {IMAGE}")
    if host.container is None and "docker" in host.tools and "nvidia-ctk" not in host.tools:
        yield say("info", "tools", "docker is here without the NVIDIA Container Toolkit: containers get no GPU",
                  "install nvidia-container-toolkit, then sudo nvidia-ctk runtime configure --runtime=docker and "
                  "restart docker")


def _count(parameters: float) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:,.1f} billion"
    return f"{parameters / 1e6:,.0f} million"
