"""Launcher of a run's processes on this machine, by torch.distributed.elastic; under torchrun, `accelerate launch` or
srun they are started already."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tightfit.backends.world import ERROR_SAID, LAUNCHER, OUT_OF_MEMORY, PROCESS_LOST
from tightfit.devices import Device
from tightfit.errors import Refused
from tightfit.system import KILLED_STATUS, SIGNALS, cores
from tightfit.techniques.parallel import ManyProcesses
from tightfit.text import counted

PROCESSES_A_CORE = 4
"""Processes that a processor's core runs in turns, at most: more wait so long for each other that they get lost."""
STOPPED = 128
"""Exit statuses above it are of a process that a signal stopped, after it had saved."""
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
"""Name of the network interface that never leaves the machine."""


def process_count(technique: ManyProcesses, device: Device) -> int:
    """The number of processes to start on this machine. Raises Refused where there is no telling, and for more than it
    can run; MissingLibrary where the technique's own library is not installed."""
    if technique.engine_steps:
        # DeepSpeed's alone.
        from tightfit.backends.pytorch.techniques.zero.library import require_deepspeed

        require_deepspeed()
    cuda, wanted = device.kind == "cuda", technique.processes
    most = torch.cuda.device_count() if cuda else PROCESSES_A_CORE * cores()
    if wanted == "auto" and not cuda:
        raise Refused("parallel.processes: on a processor nothing says how many processes are meant; write "
                      "parallel.processes=2")
    if wanted != "auto" and wanted > most:
        there = counted(most, "GPU") if cuda else counted(cores(), "processor core")
        raise Refused(f"parallel.processes: {wanted:,} are more than this machine can run, for it has {there}; write "
                      f"parallel.processes={most} or less")
    return most if wanted == "auto" else wanted


def launch(module: Sequence[str], processes: int) -> int:
    """Run a Python module, with its arguments, in so many processes that find each other; the exit status to end with.

    Signals are passed on to them. Where one ends badly, the others are ended: those that wait for it at once, all
    within half a minute.
    """
    # Its lines on processes and their ends are not for the person who runs this.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ |= {
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(cores() // processes, 1))),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK.get(sys.platform, "lo")),
    }
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="tightfit", max_restarts=0,
                          rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1")
    failed: list[ChildFailedError] = []

    def run() -> None:
        try:
            elastic_launch(config, sys.executable)("-m", *module)
        except ChildFailedError as error:
            failed.append(error)

    passed_on: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.append(number)
        for process in psutil.Process().children():
            process.send_signal(number)

    # In a thread of its own the launcher leaves signals alone: it would give processes half a minute to save.
    thread = threading.Thread(target=run)
    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        thread.start()
        thread.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = {rank: found.exitcode for error in failed for rank, found in error.failures.items()}
    if codes and passed_on and not any(code > STOPPED for code in codes.values()):
        return STOPPED + passed_on[-1]  # it came before the first step, with nothing to save
    return _status(codes, processes)


def _status(codes: dict[int, int], processes: int) -> int:
    """The exit status of processes that ended badly, said where none of them could. codes: exit statuses by rank."""
    if not codes:
        return 0
    for named in (OUT_OF_MEMORY, ERROR_SAID, *sorted(code for code in codes.values() if code > STOPPED)):
        if named in codes.values():
            return named
    goes_on = "the same command goes on from the newest checkpoint"
    ended = {rank: code for rank, code in codes.items() if code not in (PROCESS_LOST, -signal.SIGTERM)}
    if not ended:
        print(f"tightfit: parallel: the {processes} processes of this run lost each other: one did not answer within "
              f"parallel.timeout; {goes_on}", file=sys.stderr)
        return 1
    rank, code = next(iter(ended.items()))
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    memory = ", perhaps by the system for lack of memory" if code == KILLED_STATUS else ""
    print(f"tightfit: parallel: process {rank} of {processes} {how}{memory}; {goes_on}", file=sys.stderr)
    return 1
