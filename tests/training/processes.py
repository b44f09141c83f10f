"""Several processes of one run, forked: each as a launcher would start it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import final_weights, logged
from tightfit.training.trainer import Trainer

FORK = multiprocessing.get_context("fork")
RAGGED = {"data": {"source": "dummy", "samples": 37}, "micro_batch_size": 3, "max_steps": 10, "max_grad_norm": 0.3,
          "save_steps": 5, "eval_steps": 5, "sample_prompt": None}  # fmt: skip
"""Ragged global batches and micro-batches, clipping that acts, evaluation on the way."""
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


def recorded(folder: Path, name: str) -> list[float]:
    return [line[name] for line in logged(folder) if name in line]


def assert_same(one: Path, other: Path) -> None:
    """Two runs learned the same, up to rounding."""
    for name, within in (("loss", 1e-6), ("grad_norm", 1e-6), ("eval_loss", 1e-6), ("eval_accuracy", 1e-9)):
        assert recorded(other, name) == pytest.approx(recorded(one, name), abs=within)
    assert_near(one, other)


def assert_near(one: Path, other: Path) -> None:
    """The weights of two runs are the same, up to rounding."""
    a, b = final_weights(one), final_weights(other)
    assert a.keys() == b.keys()
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-5


def assert_sizes_learn_alike(
    run: dict[str, Any], folder: Path, parallel: str | dict[str, Any], several: int = 2
) -> None:
    """So many processes learn what one learns."""
    for size in (1, several):
        train_in(size, {**run, "output_dir": str(folder / str(size))}, parallel)
    assert_same(folder / "1", folder / str(several))


def assert_learns_without_samples(run: dict[str, Any], folder: Path, parallel: str | dict[str, Any]) -> None:
    """Global batches of two, the last of an epoch of one, for three processes."""
    few = {"data": {"source": "dummy", "samples": 5}, "batch_size": 2, "micro_batch_size": 1}
    assert_sizes_learn_alike({**run, **few}, folder, parallel, 3)


def assert_goes_on(run: dict[str, Any], folder: Path, ways: Sequence[tuple[int, str | dict[str, Any]]]) -> None:
    """A run that goes on in each of these ways learns what one process learns. ways: numbers of processes, and how
    they share the model."""
    run = {**run, "eval_steps": None}
    train_in(1, {**run, "output_dir": str(folder / "one")})
    for number, (size, parallel) in enumerate(ways):
        steps = run["max_steps"] - 2 * (len(ways) - 1 - number)
        train_in(size, {**run, "max_steps": steps, "output_dir": str(folder / "several")}, parallel)
    assert recorded(folder / "several", "loss") == pytest.approx(recorded(folder / "one", "loss"), abs=2e-6)
    assert_near(folder / "one", folder / "several")


def assert_goes_on_exactly(run: dict[str, Any], folder: Path, parallel: str | dict[str, Any]) -> None:
    """Two processes with dropout that are stopped go on bit for bit."""
    run = {**run, "model_overrides": {**run["model_overrides"], "resid_pdrop": 0.1, "embd_pdrop": 0.1},
           "eval_steps": None}  # fmt: skip
    train_in(2, {**run, "output_dir": str(folder / "whole")}, parallel)
    for steps in (5, 10):
        train_in(2, {**run, "max_steps": steps, "output_dir": str(folder / "parts")}, parallel)
    assert recorded(folder / "parts", "loss") == recorded(folder / "whole", "loss")
