"""Judging the machine around the cards: processor, memory, disk, container."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.devices import GIB
from tightfit.doctor.findings import Finding, Say
from tightfit.doctor.readings import Disk, Host, Readings
from tightfit.planning.offload import HOST_BUFFERS, STATES
from tightfit.text import size

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


def check_host(host: Host, say: Say, readings: Readings) -> Iterator[Finding]:
    """Processor and memory."""
    formats = f", {', '.join(host.number_formats)}" if host.number_formats else ""
    cores = f"{host.cores} cores" if host.cores == host.cores_all else f"{host.cores} of {host.cores_all} cores"
    yield say("ok", "cores", f"{host.system}, {host.processor}, {cores}{formats}")
    gpus = sum(gpu.error is None for gpu in readings.gpus)
    if gpus and host.cores < 2 * gpus:
        yield say("advice", "cores", f"{host.cores} cores for {gpus} GPUs: data workers, and Python that issues "
                  "kernels, want two a card at least", "give the machine or the container more cores")
    parameters = host.memory_available / (STATES * HOST_BUFFERS)
    sentence = (f"{size(host.memory_available)} of {size(host.memory_total)} memory free: room to offload the "
                f"optimizer of {_count(parameters)} parameters (ZeRO, {STATES} bytes each and half as much for "
                "buffers)")
    card = max((gpu.memory_total or 0 for gpu in readings.gpus), default=0)
    if host.memory_available < 2 * GIB:
        yield say("advice", "memory_available", sentence,
                  "end what else runs: loading a model and its data takes more than 2 GiB")
    elif host.memory_total < card:
        yield say("advice", "memory_total", f"{sentence}; less than the card's {size(card)}", "going on from a "
                  "checkpoint reads it into host memory first: look at the plan's host bytes")
    else:
        yield say("ok", "memory_available", sentence)


def check_disk(disk: Disk, say: Say, readings: Readings) -> Iterator[Finding]:
    """Where runs are written."""
    if disk.error is not None or disk.free is None:
        yield say("problem", "error", f"{disk.folder} cannot be written: {disk.error}",
                  "runs write checkpoints here: start tightfit in another folder, or set output_dir")
        return
    room = f"{size(disk.free)} free in {disk.folder}"
    holds = f"checkpoints of {_count(disk.free / CHECKPOINT)} parameters in all, {CHECKPOINT} bytes each with AdamW"
    if disk.free < FULL_DISK:
        yield say("problem", "free", f"{room}: no checkpoint can be written",
                  "make room, or set output_dir to another disk")
    elif disk.free < TIGHT_DISK:
        yield say("advice", "free", f"{room}: {holds}",
                  "make room, set output_dir to another disk, or keep fewer with save_total_limit")
    else:
        yield say("ok", "free", f"{room}: {holds}")
    if disk.write is None or disk.measured is None:
        return
    read = "" if disk.read is None else f", reads {disk.read / 1e6:,.0f}"
    offload = "fast enough" if min(disk.write, disk.read or 0) >= OFFLOAD_DISK else "too slow"
    slow = disk.write < SLOW_DISK
    yield say("advice" if slow else "ok", "write", f"writes {disk.write / 1e6:,.0f} MB/s{read} (measured with "
              f"{size(disk.measured)}): a checkpoint of a billion parameters takes "
              f"{CHECKPOINT * 1e9 / disk.write:,.0f} s; {offload} to offload optimizer states to",
              "set output_dir to a faster disk, or save less often with save_steps" if slow else "",
              value=round(disk.write))


def check_container(host: Host, say: Say, readings: Readings) -> Iterator[Finding]:
    """The container around this process, or the one in which nothing need be built."""
    if host.container is not None:
        name = {"wsl": "Windows' Linux (WSL)", "other": "a container"}.get(host.container, host.container)
        yield say("info", "container", f"this runs inside {name}: other processes' names, and power leads and supply, "
                  "are the host's affair")
    if host.shared_memory is not None and host.shared_memory < SHARED_MEMORY:
        yield say("advice", "shared_memory", f"/dev/shm holds {size(host.shared_memory)}: data workers hand over "
                  "batches through it, and die of a bus error when it is full",
                  "start the container with --ipc=host or --shm-size=8g" if host.container else
                  "sudo mount -o remount,size=8G /dev/shm")
    if not readings.gpus:
        return
    wanted = readings.software.torch_cuda
    if host.nvcc is None:
        yield say("info", "nvcc", "the CUDA toolkit (nvcc) is not here: training and torch.compile need none of it; "
                  "building flash-attn, Apex or DeepSpeed's kernels does",
                  f"install the toolkit{f' {wanted}' if wanted else ''}, or take NVIDIA's image, which has all of "
                  f"them built: {IMAGE} (YY.MM: the newest month whose release notes serve driver "
                  f"{readings.driver.version or 'this machine has'})")
    elif wanted and host.nvcc.split(".")[0] != wanted.split(".")[0]:
        yield say("advice", "nvcc", f"nvcc is of CUDA {host.nvcc} and PyTorch is built for {wanted}: building "
                  "flash-attn, Apex or DeepSpeed's kernels fails",
                  f"set CUDA_HOME to a toolkit of CUDA {wanted}, or take NVIDIA's image: {IMAGE}")
    if host.container is None and "docker" in host.tools and "nvidia-ctk" not in host.tools:
        yield say("info", "tools", "docker is here without the NVIDIA Container Toolkit: containers get no GPU",
                  "install nvidia-container-toolkit, then sudo nvidia-ctk runtime configure --runtime=docker and "
                  "restart docker", value=",".join(host.tools))


def _count(parameters: float) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:,.1f} billion"
    return f"{parameters / 1e6:,.0f} million"
