"""What to say of the machine around the cards: processor, memory, disk, container."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.devices import GIB
from tightfit.doctor.findings import Finding, Severity
from tightfit.doctor.readings import Readings
from tightfit.planning.offload import HOST_BUFFERS, STATES
from tightfit.planning.wording import size

CHECKPOINT = 12
"""Bytes a parameter of a checkpoint: fp32 weights and AdamW's two states."""
SLOW_DISK = 150e6
"""Bytes a second of writing below which checkpoints are worth a word: a billion parameters take 80 s or more."""
OFFLOAD_DISK = 2e9
"""Bytes a second from which optimizer states can live on a disk; each step reads and writes them whole."""
FULL_DISK, TIGHT_DISK = 256 << 20, 10 * GIB
SHARED_MEMORY = 1 * GIB
"""Docker gives 64 MiB, which a few prefetched batches overflow; a worker then dies of a bus error."""
IMAGE = "docker run --gpus all --ipc=host -it --rm -v \"$PWD\":/work -w /work nvcr.io/nvidia/pytorch:YY.MM-py3"
"""NVIDIA's image with PyTorch, compiler and the libraries that want building, one a month."""


def host_checks(readings: Readings) -> Iterator[Finding]:
    """Processor and memory."""
    host = readings.host
    formats = f", {', '.join(host.number_formats)}" if host.number_formats else ""
    cores = f"{host.cores} cores" if host.cores == host.cores_all else f"{host.cores} of {host.cores_all} cores"
    yield _say("host", "ok", "host.cores", f"{host.system}, {host.processor}, {cores}{formats}", host.cores)
    gpus = sum(gpu.error is None for gpu in readings.gpus)
    if gpus and host.cores < 2 * gpus:
        yield _say("host", "advice", "host.cores", f"{host.cores} cores for {gpus} GPUs: data workers, and Python "
                   "that issues kernels, want two a card at least", host.cores, "give the machine or the container "
                   "more cores")
    parameters = host.memory_available / (STATES * HOST_BUFFERS)
    sentence = (f"{size(host.memory_available)} of {size(host.memory_total)} memory free: room to offload the "
                f"optimizer of {_count(parameters)} parameters (ZeRO, {STATES} bytes each and half as much for "
                "buffers)")
    card = max((gpu.memory_total or 0 for gpu in readings.gpus), default=0)
    if host.memory_available < 2 * GIB:
        yield _say("host", "advice", "host.memory_available", sentence, host.memory_available,
                   "end what else runs: loading a model and its data takes more than 2 GiB")
    elif host.memory_total < card:
        yield _say("host", "advice", "host.memory_total", f"{sentence}; less than the card's {size(card)}",
                   host.memory_total, "going on from a checkpoint reads it into host memory first: look at the plan's "
                   "host bytes")
    else:
        yield _say("host", "ok", "host.memory_available", sentence, host.memory_available)


def disk_checks(readings: Readings) -> Iterator[Finding]:
    """Where runs are written."""
    disk = readings.disk
    if disk is None:
        return
    if disk.error is not None or disk.free is None:
        yield _say("disk", "problem", "disk.error", f"{disk.folder} cannot be written: {disk.error}", disk.error,
                   "runs write checkpoints here: start tightfit in another folder, or set output_dir")
        return
    room = f"{size(disk.free)} free in {disk.folder}"
    holds = f"checkpoints of {_count(disk.free / CHECKPOINT)} parameters in all, {CHECKPOINT} bytes each with AdamW"
    if disk.free < FULL_DISK:
        yield _say("disk", "problem", "disk.free", f"{room}: no checkpoint can be written", disk.free,
                   "make room, or set output_dir to another disk")
    elif disk.free < TIGHT_DISK:
        yield _say("disk", "advice", "disk.free", f"{room}: {holds}", disk.free, "make room, set output_dir to another "
                   "disk, or keep fewer with save_total_limit")
    else:
        yield _say("disk", "ok", "disk.free", f"{room}: {holds}", disk.free)
    if disk.write is None or disk.measured is None:
        return
    read = "" if disk.read is None else f", reads {disk.read / 1e6:,.0f}"
    seconds = CHECKPOINT * 1e9 / disk.write
    offload = "fast enough" if min(disk.write, disk.read or 0) >= OFFLOAD_DISK else "too slow"
    sentence = (f"writes {disk.write / 1e6:,.0f} MB/s{read} (measured with {size(disk.measured)}): a checkpoint of a "
                f"billion parameters takes {seconds:,.0f} s; {offload} to offload optimizer states to")
    slow = disk.write < SLOW_DISK
    yield _say("disk", "advice" if slow else "ok", "disk.write", sentence, round(disk.write),
               "set output_dir to a faster disk, or save less often with save_steps" if slow else "")


def container_checks(readings: Readings) -> Iterator[Finding]:
    """The container around this process, or the one that would spare building things."""
    host, driver = readings.host, readings.driver
    if host.container is not None:
        name = {"wsl": "Windows' Linux (WSL)", "other": "a container"}.get(host.container, host.container)
        yield _say("container", "info", "host.container", f"this runs inside {name}: other processes' names, and power "
                   "leads and supply, are the host's affair", host.container)
    if host.shared_memory is not None and host.shared_memory < SHARED_MEMORY:
        yield _say("container", "advice", "host.shared_memory", f"/dev/shm holds {size(host.shared_memory)}: data "
                   "workers hand over batches through it, and die of a bus error when it is full", host.shared_memory,
                   "start the container with --ipc=host or --shm-size=8g" if host.container else
                   "sudo mount -o remount,size=8G /dev/shm")
    if not readings.gpus:
        return
    wanted = readings.software.torch_cuda
    if host.nvcc is None:
        yield _say("container", "info", "host.nvcc", "the CUDA toolkit (nvcc) is not here: training and torch.compile "
                   "need none of it; building flash-attn, Apex or DeepSpeed's kernels does", None,
                   f"install the toolkit{f' {wanted}' if wanted else ''}, or take NVIDIA's image, which has all of "
                   f"them built: {IMAGE} (YY.MM: the newest month whose release notes serve driver "
                   f"{driver.version or 'this machine has'})")
    elif wanted and host.nvcc.split(".")[0] != wanted.split(".")[0]:
        yield _say("container", "advice", "host.nvcc", f"nvcc is of CUDA {host.nvcc} and PyTorch is built for {wanted}"
                   ": building flash-attn, Apex or DeepSpeed's kernels fails", host.nvcc,
                   f"set CUDA_HOME to a toolkit of CUDA {wanted}, or take NVIDIA's image: {IMAGE}")
    if host.container is None and "docker" in host.tools and "nvidia-ctk" not in host.tools:
        yield _say("container", "info", "host.tools", "docker is here without the NVIDIA Container Toolkit: containers "
                   "get no GPU", ",".join(host.tools), "install nvidia-container-toolkit, then sudo nvidia-ctk runtime "
                   "configure --runtime=docker and restart docker")


def _count(parameters: float) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:,.1f} billion"
    return f"{parameters / 1e6:,.0f} million"


def _say(topic: str, severity: Severity, field: str, sentence: str, value: object, action: str = "") -> Finding:
    return Finding(topic=topic, severity=severity, sentence=sentence, field=field, value=value, action=action)
