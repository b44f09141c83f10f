"""Several processes of one run, forked: each as a launcher would start it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tightfit.training.trainer import Trainer

FORK = multiprocessing.get_context("fork")
LIMIT = 60.0
"""Seconds after which processes that have not ended are killed, where a test says no other."""


def in_processes(size: int, work: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[int]:
    """Call `work` in each of `size` processes of one world; their exit codes, by rank."""
    with ExitStack() as ends:
        processes = started(size, work, *arguments)
        for process in processes:
            ends.callback(process.kill)
        deadline = time.monotonic() + limit
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        codes = [process.exitcode for process in processes if process.exitcode is not None]
        assert len(codes) == size, "a process did not end in time"
        return codes


def started(size: int, work: Callable[..., Any], *arguments: Any) -> list[BaseProcess]:
    """The processes, by rank, at work."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[BaseProcess] = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                 "GLOO_SOCKET_IFNAME": "lo"}
        variables = {name: str(value) for name, value in place.items()}
        processes.append(FORK.Process(target=_work, args=(variables, work, *arguments)))
        processes[-1].start()
    return processes


def _work(variables: dict[str, str], work: Callable[..., Any], *arguments: Any) -> None:
    os.environ.update(variables)
    gc.freeze()  # what the parent made is no garbage, and looking through it would copy its memory
    torch.set_num_threads(1)
    work(*arguments)


def train_in(size: int, values: dict[str, Any], parallel: str | dict[str, Any] = "ddp") -> None:
    """Train a recipe in so many processes; in one it is trained alone."""
    if size > 1:
        values = {**values, "parallel": parallel}
    codes = in_processes(size, train, values)
    assert codes == [0] * size


def train(values: dict[str, Any]) -> None:
    Trainer(recipe=values).train()
