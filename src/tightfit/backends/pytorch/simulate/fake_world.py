"""One process of several that are not there: torch's collectives on fake tensors, by its own fake process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.replaced import replaced
from tightfit.backends.pytorch.world import TensorWorld
from tightfit.errors import Refused


class FakeWorld(TensorWorld):
    """The first process among `size`, the others of which do nothing."""

    simulated = True

    def __init__(self, size: int, mesh: DeviceMesh) -> None:
        self.size = size
        self._mesh = mesh

    def mesh(self, device: str) -> DeviceMesh:
        return self._mesh


@contextmanager
def fake_world(size: int) -> Iterator[FakeWorld]:
    """A world of processes that need not be there. Enter it outside of a fake mode: a mesh reads its values. On
    leaving, DTensor forgets what it has cached: the first process's parts, which it would take for this process's own
    in a real world of as many. Raises Refused in a process of a real one."""
    if dist.is_initialized():
        raise Refused("parallel: what processes take is predicted before they start; run tightfit plan by itself")
    with replaced(sys, "excepthook", sys.excepthook):  # which each group wraps in a prefix of its own, for good
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            yield FakeWorld(size, init_device_mesh("cpu", (size,)))
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()


@contextmanager
def following_parts(tracker: Tracker) -> Iterator[None]:
    """Context in which the tracker follows storages that are resized, which no dispatch mode sees, and leaves out the
    shapes of whole tensors that torch runs an op on parts with, to know what comes of it."""
    resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

    def followed(storage: torch.UntypedStorage, size: int) -> None:
        tracker.memory.resize(storage, size)
        resize(storage, size)

    def left_out(propagator: ShardingPropagator, schema: Any) -> Any:
        with tracker.paused():
            return propagate(propagator, schema)

    with replaced(torch.UntypedStorage, "resize_", followed), \
            replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", left_out):
        yield
