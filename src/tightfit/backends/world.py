"""The processes that train one model together, as code without a framework sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tightfit.errors import Refused

T = TypeVar("T")

LAUNCHER = "TIGHTFIT_LAUNCHER"
"""Environment variable that holds the id of the process of ours that started this one."""
ERROR_SAID, PROCESS_LOST, OUT_OF_MEMORY = 2, 3, 4
"""Exit statuses of a process whose error was said, of one that lost the others, and of one that is to be started anew
with what takes less memory."""


class World:
    """The processes of a run, and this one's place among them: here one alone. Every method is called by all of them,
    in one order.

    rank: this process's number; 0 is the one that writes and speaks. size: the number of processes. restarts: whether
    our own launcher started them, and does so again where one ends with OUT_OF_MEMORY.
    """

    rank, size = 0, 1
    restarts = False

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over the processes."""
        return list(numbers)

    def all_reduce_max(self, number: float) -> float:
        """The largest of the processes' numbers."""
        return number

    def broadcast_from_rank0(self, work: Callable[[], T]) -> T:
        """The result of `work` in the first process, or our error that it raises there; it runs nowhere else."""
        return work()


ALONE = World()


@dataclass(frozen=True, kw_only=True)
class LaunchedProcess:
    """A place among processes that a launcher started.

    local_rank: this process's number on its machine, and its GPU's. rendezvous: variables that say where the first
    process is, where the launcher left them out.
    """

    rank: int
    size: int
    local_rank: int
    rendezvous: Mapping[str, str] = field(default_factory=dict)


def launched_process(environment: Mapping[str, str] = os.environ) -> LaunchedProcess | None:
    """This process's place, by the variables of torchrun and `accelerate launch`, or of Slurm's srun; None where no
    launcher started it. Raises Refused for variables that name no place."""

    def number(name: str, default: str = "") -> int:
        text = environment.get(name, default)
        if not re.fullmatch(r"\d+", text, re.ASCII):
            raise Refused(f"parallel: the launcher's variable {name} is {text!r}, which is no number; start the "
                          "processes by torchrun, accelerate launch or srun, or unset it")
        return int(text)

    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = number("RANK"), number("WORLD_SIZE")
        if rank >= size:
            raise Refused(f"parallel: the launcher's RANK is {rank}, and of WORLD_SIZE={size} processes the last is "
                          f"{size - 1}; start the processes by torchrun, accelerate launch or srun, or unset both")
        return LaunchedProcess(rank=rank, size=size, local_rank=number("LOCAL_RANK", str(rank)))
    if number("SLURM_STEP_NUM_TASKS", "1") > 1:
        port = 20_000 + number("SLURM_JOB_ID", "0") % 20_000  # one that all tasks of a job agree on
        given = {"MASTER_ADDR": _first_host(environment["SLURM_STEP_NODELIST"]), "MASTER_PORT": str(port)}
        return LaunchedProcess(
            rank=number("SLURM_PROCID"), size=number("SLURM_STEP_NUM_TASKS"), local_rank=number("SLURM_LOCALID"),
            rendezvous={name: value for name, value in given.items() if name not in environment},
        )
    return None


def _first_host(hosts: str) -> str:
    """The first of Slurm's list, such as `node07` of `node[07-09,12],login1`."""
    return re.sub(r"\[(\w+).*", r"\1", hosts) if "[" in hosts.partition(",")[0] else hosts.partition(",")[0]
