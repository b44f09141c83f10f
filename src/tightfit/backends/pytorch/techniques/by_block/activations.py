"""Activation offloading: what blocks save for the backward pass waits in host memory, under any checkpointing. Casts
of weights do not: the backward pass casts again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tightfit.backends.pytorch.techniques.by_block.transfers import Copy, Transfers, active_watch
from tightfit.trace import Category

SMALLEST_COPY = 1 << 20
"""Bytes of a tensor that is worth a copy."""


class _Offloaded:
    """A tensor that a block's call keeps. out: its copy into host memory. back: the copy to the device again, once it
    was begun."""

    def __init__(self, call: int, out: Copy) -> None:
        self.call, self.out = call, out
        self.back: Copy | None = None
        self.arrived = False

    def __del__(self) -> None:
        if self.back is not None and not self.arrived:  # brought for nothing: its memory is free when it has arrived
            self.back.wait()


@dataclass(frozen=True)
class _WeightCast:
    """A cast of a weight, or a view of one, that the backward pass makes again: the weight is on the device then.

    view: its sizes, strides and offset.
    """

    weight: Tensor
    dtype: torch.dtype
    view: tuple[torch.Size, tuple[int, ...], int]

    @classmethod
    def of(cls, tensor: Tensor) -> _WeightCast | None:
        """The cast that a tensor is, as autocast makes them; None for other tensors."""
        made = tensor if tensor._base is None else tensor._base
        node = made.grad_fn
        source = node.next_functions[0][0] if node is not None and node.name() == "ToCopyBackward0" else None
        weight = getattr(source, "variable", None)
        if weight is None or weight.stride() != made.stride():
            return None
        return cls(weight, tensor.dtype, (tensor.shape, tensor.stride(), int(tensor.storage_offset())))

    def recast(self) -> Tensor:
        return self.weight.detach().to(self.dtype).as_strided(*self.view)


class HostActivations:
    """The tensors that the first blocks' calls keep. blocks: all of the model's. count: of them, the first so many.

    calls: of blocks so far, by which each of them is numbered.
    """

    def __init__(self, transfers: Transfers, blocks: Sequence[nn.Module], count: int) -> None:
        self.calls = 0
        self._transfers, self._blocks, self._count = transfers, blocks, count
        self._offloaded: dict[int, list[weakref.ref[_Offloaded]]] = {}
        self._following: dict[int, int] = {}
        self._latest: list[Copy] = []
        self._current: int | None = None

    def run(self, block: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's call, whose saved tensors go to host memory."""
        number = self.calls
        self.calls += 1
        if block >= self._count or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        module = self._blocks[block]
        shared = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not t.requires_grad]
        stay = {_storage_id(tensor) for tensor in (*module.parameters(), *module.buffers(), *shared)}
        kept: dict[tuple[Any, ...], _Offloaded] = {}
        with saved_tensors_hooks(partial(self._pack, number, module, stay, kept), self._unpack):
            output = call(*args, **kwargs)
        self._wait_for_offloads()
        self._latest = [found.out for found in kept.values()]
        self._offloaded[number] = [weakref.ref(found) for found in kept.values()]
        return output

    def expect(self, calls: Sequence[int]) -> None:
        """The order in which backward passes will come to calls; without it the last call comes first."""
        self._offloaded = {call: self._offloaded[call] for call in calls if call in self._offloaded}
        self._following = dict(pairwise(calls))
        self._fetch(calls[0])

    def _wait_for_offloads(self) -> None:
        """Wait for the copies of the last call's tensors, whose memory on the device is free then."""
        for copy in self._latest:
            copy.wait()
        self._latest = []

    def _pack(
        self, number: int, module: nn.Module, stay: set[int], kept: dict[tuple[Any, ...], _Offloaded], tensor: Tensor
    ) -> Tensor | _Offloaded | _WeightCast:
        # A copy of what has gaps would have other strides than its own, which compiled code relies on.
        small = tensor.numel() * tensor.element_size() < SMALLEST_COPY
        elsewhere = tensor.device.type != self._transfers.device.type
        if small or elsewhere or _storage_id(tensor) in stay or not is_non_overlapping_and_dense_or_false(tensor):
            return tensor
        if (cast := _WeightCast.of(tensor)) is not None and _storage_id(cast.weight) in stay:
            return cast
        key = _storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in kept:
            kept[key] = _Offloaded(number, self._transfers.to_host(tensor.detach()))
            active_watch().holds(kept[key].out.target, Category.ACTIVATIONS, module)
        return kept[key]

    def _unpack(self, kept: Tensor | _Offloaded | _WeightCast) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, _WeightCast):
            return kept.recast()
        if kept.call != self._current:
            self._wait_for_offloads()
            self._current = kept.call
            self._offloaded.pop(kept.call, None)
            self._fetch(self._following.pop(kept.call, kept.call - 1))
        if kept.back is None:
            self._begin_copy_back(kept)
        assert kept.back is not None
        kept.arrived = True
        return kept.back.wait()

    def _fetch(self, number: int) -> None:
        """Begin to bring what a call kept."""
        for reference in self._offloaded.pop(number, []):
            kept = reference()  # None where its backward pass was never asked for
            if kept is not None and kept.back is None:
                self._begin_copy_back(kept)

    def _begin_copy_back(self, kept: _Offloaded) -> None:
        kept.back = self._transfers.to_device(kept.out.target, after=[kept.out], keep=False)
        active_watch().holds(kept.back.target, Category.ACTIVATIONS, None)


def _storage_id(tensor: Tensor) -> int:
    """A number for the memory that a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)
