"""The processes that train one model together, by torch.distributed: NCCL between GPUs, gloo between processors and for
what processes tell each other in host memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tightfit.backends.world import LAUNCHER, PROCESS_LOST, LaunchedProcess, World
from tightfit.errors import LostProcess, Refused, SaidElsewhere, TightfitError, forget_frames, one_line
from tightfit.system import end_with

T = TypeVar("T")

CONNECT = timedelta(seconds=120)
"""Seconds that a process waits for the others to start."""
SPOKEN = "tightfit/spoken"
"""The store's count of processes that had an error to say."""


class TensorWorld(World):
    """The processes of a run, with what they exchange of tensors: here one alone.

    simulated: whether the other processes are not there, as in a prediction.
    """

    simulated = False

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace a tensor of the device by its sum over the processes."""

    def all_gather(self, value: T) -> list[T]:
        """The processes' values, by rank."""
        return [value]

    def mesh(self, device: str) -> DeviceMesh | None:
        """The processes in a row, with a device of that kind each; None for one alone."""
        return None


ALONE = TensorWorld()


class TorchWorld(TensorWorld):
    """The processes of torch's default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.restarts = LAUNCHER in os.environ

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def all_reduce_max(self, number: float) -> float:
        return self._reduced([number], dist.ReduceOp.MAX)[0]

    def broadcast_from_rank0(self, work: Callable[[], T]) -> T:
        made: list[T | TightfitError | None] = [None]
        if self.rank == 0:
            try:
                made = [work()]
            except TightfitError as error:
                made = [error]
        with lost_process_guard():
            dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
        if isinstance(made[0], TightfitError):
            raise made[0]
        return made[0]  # type: ignore[return-value]

    def all_reduce_(self, tensor: Tensor) -> None:
        with lost_process_guard():
            dist.all_reduce(tensor)

    def all_gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.size
        with lost_process_guard():
            # Pickled on the way, through host memory.
            dist.all_gather_object(values, value)
        return values

    def mesh(self, device: str) -> DeviceMesh | None:
        return init_device_mesh(device, (self.size,))

    def _reduced(self, numbers: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        reduced = torch.tensor(numbers, dtype=torch.float64)
        with lost_process_guard():
            dist.all_reduce(reduced, op)
        found: list[float] = reduced.tolist()
        return found


def not_started(name: str) -> Refused:
    """The refusal of a technique that several processes apply, in one alone."""
    return Refused(f"parallel: {name} trains in processes of its own, which `tightfit train` starts, and torchrun, "
                   "accelerate launch and srun as well; run one of these, or write parallel=none")


@contextmanager
def alone() -> Iterator[World]:
    """The world of one process, while this is entered: torch raises the death of a data worker wherever it is."""
    with lost_process_guard():
        yield ALONE


@contextmanager
def joined(place: LaunchedProcess, device: str, timeout: float) -> Iterator[TorchWorld]:
    """The world that a launcher made room for, while this is entered; this process's GPU is then the current one.

    device: `cpu` or `cuda`. timeout: seconds that a process waits for the others. Of an error that several processes
    raise, the first says it, and the others raise SaidElsewhere.
    """
    os.environ.update(place.rendezvous)
    if LAUNCHER in os.environ:
        end_with(int(os.environ[LAUNCHER]))
    limit = timedelta(seconds=timeout)
    _require_backends(device)
    if device == "cuda":
        if place.local_rank >= torch.cuda.device_count():
            raise Refused(f"parallel.processes: process {place.local_rank} of this machine has no GPU of its own, for "
                          f"there are {torch.cuda.device_count()}; write parallel.processes="
                          f"{torch.cuda.device_count()} or less, or device=cpu")
        torch.cuda.set_device(place.local_rank)
    try:
        store, rank, size = next(rendezvous("env://", place.rank, place.size, timeout=CONNECT))
        store.set_timeout(CONNECT)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=PrefixStore("tightfit", store), rank=rank, world_size=size,
                                timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise _not_found(place, error) from None
    try:
        with lost_process_guard():
            yield TorchWorld()
            dist.barrier()  # none leaves before all are done: a launcher ends the others when one has ended badly
    except TightfitError as error:
        lost = isinstance(error, LostProcess)
        if (lost and LAUNCHER in os.environ) or not _first_to_speak(store):
            raise SaidElsewhere(str(error), PROCESS_LOST if lost else error.status) from error
        raise
    finally:  # DistributedDataParallel must not be the last to hold the group: it would wait for gloo's thread with
        forget_frames(sys.exception())  # Python's lock in hand, which that thread may be waiting for
        gc.collect()
        dist.destroy_process_group()


def _require_backends(device: str) -> None:
    """Raise Refused where this build of PyTorch lacks what processes exchange tensors with."""
    needed = {"gloo": dist.is_gloo_available(), **({"NCCL": dist.is_nccl_available()} if device == "cuda" else {})}
    missing = [name for name, there in needed.items() if not there]
    if missing:
        raise Refused(f"parallel: PyTorch {torch.__version__} was built without {' and '.join(missing)}, by which "
                      f"processes{' on GPUs' * (device == 'cuda')} exchange tensors; install a build that has it, or "
                      "write parallel=none")


def _not_found(place: LaunchedProcess, error: Exception) -> TightfitError:
    """The error of processes that do not find each other."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if "EADDRINUSE" in str(error):
        return Refused(f"parallel: port {port}, at which the {place.size} processes of this run are to meet, is taken "
                       "by another program; start them with another one, such as torchrun --master-port 29600, or "
                       "MASTER_PORT=29600")
    if isinstance(error, ValueError):  # of a variable
        return Refused(f"parallel: RANK and WORLD_SIZE are set, as by a launcher, and not all that it sets: "
                       f"{one_line(error)}; start the processes by torchrun, or unset them")
    return LostProcess(f"parallel: the {place.size} processes of this run did not find each other at {address}:{port} "
                       f"within {CONNECT.total_seconds():.0f} s: {one_line(error)}")


def _first_to_speak(store: Store) -> bool:
    """Whether no other process has had an error to say; so, too, where the store is gone with the process it was in."""
    try:
        return bool(store.add(SPOKEN, 1) == 1)
    except RuntimeError:
        return True


@contextmanager
def lost_process_guard() -> Iterator[None]:
    """Turn the errors of collectives whose other end is gone, or silent for too long, into ours, and those of a data
    worker that was killed. Raises LostProcess."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker (pid"):  # which torch raises wherever the process is
            raise LostProcess("loading.workers: a process that prepares data was killed, as the system does where the "
                              "machine's memory is full; the same command goes on from the newest checkpoint, with "
                              "loading.workers=0 in this process alone") from None
        if not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        why = "" if "/gloo/" in str(error) else f" ({one_line(error)})"  # gloo's names lines of its own source
        raise LostProcess("parallel: another process of this run ended, or did not answer within parallel.timeout"
                          f"{why}; the same command goes on from the newest checkpoint") from None
