"""How the processes of a rung on two devices are started and end: one for DataParallel, two under torchrun for DDP."""

from __future__ import annotations

import os
import sys

from tightfit.ladder.rungs import Launch

DEVICES = 2
"""Devices of a rung that is not on a single one."""


def command(launch: Launch, worker: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that starts a job's processes, and variables for their environment. worker: the module and its
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


def writes_outcome(*, failed: bool) -> bool:
    """Whether this process writes a job's outcome: of several the first, and any that something went wrong in, which
    the others need not know of."""
    return failed or os.environ.get("RANK", "0") == "0"


def end_others(*, failed: bool) -> None:
    """Where something went wrong in one of several processes, end it so that torchrun ends the others, which wait for
    it; where nothing did, or they were not joined yet and each ends without the others, return."""
    if "RANK" not in os.environ or not failed:
        return
    from torch import distributed

    if distributed.is_initialized():
        os._exit(1)


def own_words(said: str) -> tuple[str, bool]:
    """The output of a job's processes without torchrun's report of them, and whether that reports one killed."""
    before, found, report = said.partition("torch/distributed/elastic/")
    return before.rpartition("\n")[0] if found else said, "(exitcode: -9)" in report
