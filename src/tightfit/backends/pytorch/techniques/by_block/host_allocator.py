"""The host's memory for copies from and to a device: page-locked for a GPU's, until its driver refuses.

Memory that lasts, such as blocks' weights, is taken from the system in whole pages, which CUDA locks as they are:
PyTorch's page-locked memory comes in powers of two. Memory that comes and goes, such as kept activations, is PyTorch's,
which hands it out again once no copy uses it.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from tightfit.errors import Refused, one_line
from tightfit.system import host_memory, whole_pages
from tightfit.text import size

WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which Python does not name: a forked process, such as a worker that loads data, finds zeros
there. Locked pages would be copied for it at once, all of them."""


class HostAllocator:
    """The host memory of one device's copies. locked: whether it is page-locked, which a driver's refusal ends."""

    def __init__(self, device: torch.device, *, locked: bool) -> None:
        self.locked = locked
        self._device = device
        self._held = 0

    def persistent(self, count: int) -> Tensor:
        """Memory of `count` bytes in whole pages, without values: uint8, (count,). Raises Refused where the host has
        no more."""
        taken = whole_pages(count)
        if self._device.type != "cuda" or not count:
            return torch.empty(taken, dtype=torch.uint8, device="cpu")[:count]
        if not hasattr(mmap, "MAP_PRIVATE"):  # as on Windows: PyTorch's, which may take more
            return self.temporary(torch.empty(taken, dtype=torch.uint8, device="meta"))[:count]
        try:
            pages = mmap.mmap(-1, taken, flags=mmap.MAP_PRIVATE)
        except OSError:
            raise Refused(f"host memory: allocating {size(taken)} more failed; {size(host_memory().available)} are "
                          "free: end what else runs, write smaller shares in offload, or raise the limit on this "
                          "process") from None
        with suppress(OSError):  # where the system does not know it
            pages.madvise(WIPE_ON_FORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if self.locked:
            self._lock(memory, pages)
        return memory[:count]

    def temporary(self, like: Tensor) -> Tensor:
        """Memory for a tensor of the same shape, strides and dtype, without values."""
        if self.locked and self._device.type == "cuda":
            try:
                return _pinned_like(like)
            except RuntimeError as error:
                self._refused(one_line(error))
        return torch.empty_like(like, device="cpu", pin_memory=False, requires_grad=False)

    def _lock(self, memory: Tensor, pages: mmap.mmap) -> None:
        address = memory.data_ptr()
        said = register(address, len(pages), self._device)
        if said:
            self._refused(said)
            return
        self._held += len(pages)
        # The pages are the system's again when their lock is gone, and not before.
        release = weakref.finalize(memory.untyped_storage(), _unlock, address, pages, self._device, os.getpid())
        release.atexit = False  # the system does it

    def _refused(self, said: str) -> None:
        self.locked = False
        warnings.warn(f"host memory: page-locking more than {size(self._held)} was refused ({said}); training goes on "
                      "with ordinary memory, whose copies take several times as long and make the host wait: raise the "
                      "limit (ulimit -l unlimited, docker run --ulimit memlock=-1), or write smaller shares in offload",
                      stacklevel=2)


def register(address: int, count: int, device: torch.device) -> str:
    """Page-lock memory for CUDA's copies. The driver's words where it refuses, else none."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, count, 0))
    if not code:
        return ""
    with suppress(RuntimeError):  # CUDA keeps the error for whoever asks next, which is whoever launches a kernel
        torch.zeros(1, device=device)
    return str(torch.cuda.CudaError(code))


def unregister(address: int, device: torch.device) -> None:
    """Undo `register`, when no copy is under way any more."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


def _unlock(address: int, pages: mmap.mmap, device: torch.device, owner: int) -> None:
    """Let go of locked pages, which are given back with the last reference to them."""
    if os.getpid() == owner:  # a forked process has neither the lock nor the GPU
        with suppress(RuntimeError):  # a GPU that failed
            unregister(address, device)


def _pinned_like(like: Tensor) -> Tensor:
    """PyTorch's page-locked memory."""
    return torch.empty_like(like, device="cpu", pin_memory=True, requires_grad=False)
