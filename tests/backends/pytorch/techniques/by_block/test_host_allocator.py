"""Host memory for copies: what is taken, what is locked, and a run whose driver locks no more."""

from __future__ import annotations

import gc
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.backends.pytorch.techniques.by_block.streaming_cases import ALL, HOST, run, same
from tests.failing import failing
from tightfit.backends.pytorch.techniques.by_block import host_allocator, transfers
from tightfit.backends.pytorch.techniques.by_block.host_allocator import HostAllocator
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers
from tightfit.errors import Refused
from tightfit.system import whole_pages

pytestmark = pytest.mark.usefixtures("few_objects")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SAID = "operation not permitted (800)"


def mapped() -> Iterator[list[int]]:
    """Where this process has memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        yield [int(end, 16) for end in line.split()[0].split("-")]


class Driver:
    """Stands for CUDA's: locks so many pieces of memory. locked: bytes of each, by address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self.asked = self.freed = 0
        self._most = most
        monkeypatch.setattr(host_allocator, "register", self._register)
        monkeypatch.setattr(host_allocator, "unregister", self._unregister)
        monkeypatch.setattr(host_allocator, "_pinned_like", self._pinned_like)
        monkeypatch.setattr(transfers, "HostAllocator", lambda device, locked: HostAllocator(CUDA, locked=True))

    def _grants(self) -> bool:
        self.asked += 1
        return self.asked <= self._most

    def _register(self, address: int, count: int, device: torch.device) -> str:
        if not self._grants():
            return SAID
        self.locked[address] = count
        return ""

    def _unregister(self, address: int, device: torch.device) -> None:
        count = self.locked.pop(address)
        assert any(start <= address < stop for start, stop in mapped())
        self.freed += count

    def _pinned_like(self, like: torch.Tensor) -> torch.Tensor:
        if not self._grants():
            raise RuntimeError(f"CUDA error: {SAID}")
        return torch.empty_like(like, device="cpu")


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    """Makes the driver of a test, which lasts as long as what is locked."""
    yield partial(Driver, monkeypatch)
    gc.collect()


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("count", [1, 4096, 3 * mmap.PAGESIZE + 1, 0])
def test_what_lasts_takes_whole_pages(count, device, drivers):
    drivers()
    memory = HostAllocator(device, locked=True).persistent(count)

    assert (memory.dtype, memory.shape) == (torch.uint8, (count,))
    assert memory.untyped_storage().nbytes() == whole_pages(count)
    memory.fill_(7)


def test_memory_lasts_where_python_maps_no_private_pages(drivers, monkeypatch):
    drivers()
    monkeypatch.delattr(mmap, "MAP_PRIVATE")
    memory = HostAllocator(CUDA, locked=True).persistent(5)

    assert (memory.dtype, memory.shape) == (torch.uint8, (5,))
    memory.fill_(7)


def test_locked_memory_is_given_back_when_its_last_tensor_goes(drivers):
    driver = drivers()
    memory = HostAllocator(CUDA, locked=True).persistent(10_000)
    assert list(driver.locked.values()) == [whole_pages(10_000)]
    part = memory[:8].view(torch.float32)
    del memory
    part.fill_(3)
    assert driver.locked
    del part
    assert not driver.locked
    assert driver.freed == whole_pages(10_000)


def test_a_forked_process_copies_nothing_and_unlocks_nothing(drivers):
    driver = drivers()
    memory = HostAllocator(CUDA, locked=True).persistent(100).fill_(7)
    child = os.fork()
    if not child:
        wiped = int(memory.sum())
        del memory
        os._exit(wiped + len(driver.locked) - 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memory.sum() == 700


@pytest.mark.parametrize("fields", [HOST, ALL], ids=["host", "all"])
def test_a_run_with_locked_memory_changes_no_bit_and_gives_it_back(fields, drivers):
    plain, driver = run("llama"), drivers()
    streamed = run("llama", **fields)

    assert same(plain, streamed)
    kept = streamed.step.update._offloaded
    homes = [home.memory for kind in (kept._weights, kept._gradients, kept._states)
             for home in kind._host_copies.values()]
    assert {memory.data_ptr(): whole_pages(memory.numel()) for memory in homes} == driver.locked
    del streamed, kept, homes
    gc.collect()
    assert not driver.locked


@pytest.mark.parametrize("granted", [0, 3, 9, 30])
def test_a_driver_that_locks_no_more_is_said_once_and_the_run_goes_on(granted, drivers):
    plain, driver = run("llama"), drivers(most=granted)
    with pytest.warns(UserWarning, match=r"host memory: page-locking more than .* was refused \(.*operation not "
                      r"permitted.*\); training goes on with ordinary memory, .*ulimit -l unlimited") as said:
        streamed = run("llama", **ALL)

    assert len(said) == 1
    assert driver.asked == granted + 1  # it is not asked again
    assert same(plain, streamed)


def test_a_driver_that_refuses_is_not_asked_for_what_passes(drivers):
    driver = drivers(most=0)
    allocator = HostAllocator(CUDA, locked=True)
    like = torch.empty(3, 2).T
    with pytest.warns(UserWarning, match="page-locking"):
        made = allocator.temporary(like)
    with warnings.catch_warnings(action="error"):
        allocator.temporary(like)
        allocator.persistent(10)

    assert (made.shape, made.stride(), driver.asked, allocator.locked) == (like.shape, like.stride(), 1, False)


def test_a_host_without_memory_is_said(monkeypatch):
    monkeypatch.setattr(host_allocator.mmap, "mmap", failing(OSError(12, "Cannot allocate memory")))
    with pytest.raises(Refused, match=r"allocating 1\.0 GiB more failed; .* are free: .* shares in "):
        HostAllocator(CUDA, locked=True).persistent(1 << 30)


@pytest.mark.gpu
def test_on_a_gpu_whole_pages_are_locked_and_unlocked():
    allocator = HostAllocator(CUDA, locked=True)
    memory = allocator.persistent(3_000_000)
    assert memory.is_pinned()
    assert memory[5:].is_pinned()
    address = memory.data_ptr()
    on_device = torch.arange(3_000_000, device=CUDA).to(torch.uint8)
    memory.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory, on_device.cpu())
    assert host_allocator.register(address, whole_pages(3_000_000), CUDA)  # it is locked already
    torch.zeros(8, device=CUDA).add_(1)  # which the next kernel does not pay for
    del memory
    again = allocator.persistent(3_000_000)
    assert again.is_pinned()
    assert allocator.locked


@pytest.mark.gpu
def test_on_a_gpu_copies_are_right_without_locks(monkeypatch):
    monkeypatch.setattr(host_allocator, "register", lambda address, count, device: SAID)
    copies = Transfers(CUDA)
    x = torch.rand(1 << 20, device=CUDA)
    with pytest.warns(UserWarning, match="page-locking"):
        home = copies.host_memory(x.nbytes).view(x.dtype)
    assert not home.is_pinned()
    for _ in range(3):
        copies.to_host(x, home)
        back = copies.to_device(home, after=[copies.latest_out]).wait()
        assert torch.equal(back, x)
        x = back + 1
    assert not copies.to_host(x).target.is_pinned()
