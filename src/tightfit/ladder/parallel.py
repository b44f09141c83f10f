"""Rungs on two devices, by torch's own means: DataParallel in one process, DistributedDataParallel under torchrun."""

from __future__ import annotations

import os
import sys

from tightfit.backends.base import Timings
from tightfit.devices import Device
from tightfit.ladder.jobs import Outcome
from tightfit.ladder.rungs import DEVICES, Launch
from tightfit.recipe import Recipe


def command(launch: Launch, worker: list[str]) -> tuple[list[str], dict[str, str]]:
    """How a job's processes are started, and what their environment has besides. worker: the module and its
    arguments."""
    environment = {"NCCL_P2P_DISABLE": "1"} if launch == "ddp-no-p2p" else {}
    if launch == "dp":  # which would take all GPUs there are
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:DEVICES]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(first)}
    if launch in ("single", "dp"):
        return [sys.executable, "-m", *worker], environment
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={DEVICES}",
                "--module"]
    return [*torchrun, *worker], environment


def writes_outcome(outcome: Outcome) -> bool:
    """Whether this process says what came of a job: of several the first, and any that something went wrong in, which
    the others need not know of."""
    return os.environ.get("RANK", "0") == "0" or outcome.status != "done"


def end_others(outcome: Outcome) -> None:
    """Where something went wrong in one of several processes, end it so that torchrun ends the others, which wait for
    it; where nothing did, or they were not joined yet and each ends by itself, return."""
    if "RANK" not in os.environ or outcome.status == "done":
        return
    from torch import distributed

    if distributed.is_initialized():
        os._exit(1)


def own_words(said: str) -> tuple[str, bool]:
    """What a job's processes said themselves, without torchrun's report of them, and whether it reports one killed."""
    before, found, report = said.partition("torch/distributed/elastic/")
    return before.rpartition("\n")[0] if found else said, "(exitcode: -9)" in report


def run_parallel(launch: Launch, recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """A rung on two devices. Raises Refused where they are missing, and OutOfMemory."""
    from tightfit.ladder import two_devices

    if launch == "dp":
        return two_devices.data_parallel(recipe, device, warm_up, steps)
    return two_devices.distributed(recipe, device, warm_up, steps, direct=launch == "ddp")
