"""The memory of a run that is followed: every storage, from the op that makes it to its release."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.backends.pytorch.follow.dispatch_mode import never_compiled
from tightfit.trace import Allocation, Category, Op, Phase
from tightfit.trace.events import TICK_STEP

Arguments = Sequence[Sequence[int]]
"""An op's arguments, in order: of each, the allocations that its tensors lie in."""


class TrackedMemory:
    """The clock of a run that is followed, and its allocations.

    Work outside of modules belongs to the module whose tensor it is done on. An optimizer's state is only known to be
    one when the step is over, so who owns what such work is done on is asked in the end, in `finalize_categories`.
    """

    def __init__(self) -> None:
        never_compiled(TrackedMemory._release)  # called wherever a tensor goes
        self.tick = 0
        self.allocations: list[Allocation] = []
        self._born_in: list[Phase] = []
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._fixed: set[int] = set()
        self._unowned: list[tuple[Allocation | Op, Arguments]] = []

    def next(self) -> int:
        self.tick += TICK_STEP
        return self.tick

    def find(self, tensor: Any) -> int | None:
        """The allocation that a tensor lies in; None for one not seen before, or for what is no tensor."""
        found = self._live.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
        return None if found is None else found[1]

    def of(self, tensor: Any) -> Allocation | None:
        """The allocation itself, as `find` finds it."""
        index = self.find(tensor)
        return None if index is None else self.allocations[index]

    def allocate(self, tensor: Tensor, op: str, phase: Phase, module: str = "") -> int:
        """A tensor's storage is born now; the number of its allocation."""
        storage = tensor.untyped_storage()
        key, index = storage._cdata, len(self.allocations)
        self.allocations.append(Allocation(
            born=self.next(), died=None, bytes=storage.nbytes(), module=module, op=op, shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
        ))
        self._born_in.append(phase)
        self._live[key] = (weakref.ref(storage, partial(self._release, key)), index)
        return index

    def resize(self, storage: UntypedStorage, size: int) -> None:
        """A storage gives its memory back, or takes some again, as FSDP's do: no op does that. Call it before."""
        found = self._live.get(storage._cdata)
        if found is None:
            return
        reference, index = found
        before = self.allocations[index]
        if before.died is None and storage.nbytes() == size:
            return
        before.died = before.died or self.next()
        if size:
            self._live[storage._cdata] = (reference, len(self.allocations))
            if index in self._fixed:
                self._fixed.add(len(self.allocations))
            self._born_in.append(self._born_in[index])
            self.allocations.append(replace(before, born=self.next(), died=None, bytes=size))

    def transient(self, size: int, op: str, module: str, phase: Phase, born: int) -> Allocation:
        """Memory of `size` bytes that a kernel gives back before it ends."""
        made = Allocation(born=born, died=self.next() + 1, bytes=size, module=module, op=op, shape=(size,),
                          dtype="uint8")
        self._fixed.add(len(self.allocations))
        self.allocations.append(made)
        self._born_in.append(phase)
        return made

    def mark(self, tensor: Tensor, category: Category, phase: Phase, module: str | None, from_birth: bool) -> None:
        """Category of a tensor's memory, from now on or `from_birth`. Memory that is not known yet is born now."""
        for index in self._numbers(tensor, phase):
            allocation = self.allocations[index]
            if allocation.category is not category:
                allocation.category = category
                allocation.category_since = allocation.born if from_birth else self.tick
            if module is not None:
                allocation.module = module
            self.fix(index)

    def ignore(self, tensor: Tensor, phase: Phase) -> None:
        """Count nothing for a tensor's memory."""
        for index in self._numbers(tensor, phase):
            self.allocations[index].bytes = 0
            self.fix(index)

    def _numbers(self, tensor: Tensor, phase: Phase) -> Iterator[int]:
        """The allocations that a tensor lies in; one that is not known yet is born now."""
        for part in plain_parts(tensor):
            index = self.find(part)
            yield self.allocate(part, "", phase) if index is None else index

    def fix(self, index: int) -> None:
        """An allocation's category stands."""
        self._fixed.add(index)

    def alive(self) -> frozenset[int]:
        return frozenset(index for _, index in self._live.values())

    def repeat(self, start: int, stop: int, ticks: int) -> None:
        """The allocations from `start` up to, not including, `stop` once more, so many ticks later."""
        for index in range(start, stop):
            if index in self._fixed:
                self.fix(len(self.allocations))
            self._born_in.append(self._born_in[index])
            self.allocations.append(later(self.allocations[index], ticks))

    def arguments(self, args: Iterable[Any]) -> Arguments:
        """The allocations that an op works on."""
        found = ([self.find(tensor) for tensor in tensors_in(arg)] for arg in args)
        return [[index for index in each if index is not None] for each in found]

    def owned_by(self, made: Allocation | Op, arguments: Arguments) -> None:
        """Find in the end which module an op, or its result, belongs to."""
        self._unowned.append((made, arguments))

    def finalize_categories(self, backwards: Sequence[int]) -> None:
        """The end: name the owners of work outside of modules, and find the activations, memory made in a forward
        pass or a recomputation that outlives it. backwards: the ticks of the backward passes' ops, in order."""
        for made, arguments in self._unowned:
            made.module = made.module or self._owner_of(arguments)
        self._unowned.clear()
        self._live.clear()
        limits = [*backwards, self.tick + 1]
        at = 0
        for index, (allocation, phase) in enumerate(zip(self.allocations, self._born_in, strict=True)):
            if index in self._fixed:
                continue
            if phase in (Phase.PREFILL, Phase.DECODE) and allocation.module:  # no backward pass: what modules make
                allocation.category, allocation.category_since = Category.ACTIVATIONS, allocation.born
            if phase not in (Phase.FORWARD, Phase.RECOMPUTE):
                continue
            while limits[at] < allocation.born:
                at += 1
            if allocation.died is None or allocation.died > limits[at]:
                allocation.category, allocation.category_since = Category.ACTIVATIONS, allocation.born

    def _owner_of(self, arguments: Arguments) -> str:
        """The innermost of the arguments' modules; of several as deep the last, for what is summed up over blocks lies
        in the first one's memory. A list's tensors have the module that they all lie in."""
        owners = []
        for indices in arguments:
            paths = [self.allocations[index].module.split(".") for index in indices]
            alike = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
            owners.append([names[0] for names in alike])
        return ".".join(max(reversed(owners), key=lambda path: sum(map(bool, path)), default=[]))

    def _release(self, key: int, reference: weakref.ref[Any]) -> None:
        found = self._live.pop(key, None)
        if found is not None and self.allocations[found[1]].died is None:
            self.allocations[found[1]].died = self.next()


def later(a: Allocation, ticks: int) -> Allocation:
    """An allocation that is given back again, so many ticks later."""
    since = a.category_since + ticks if a.category_since >= a.born else a.category_since
    return Allocation(a.born + ticks, a.died and a.died + ticks, a.bytes, a.category, since, a.module, a.op, a.shape,
                      a.dtype, a.place, a.pinned)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an op's arguments or result, in order."""
    if isinstance(value, Tensor):
        yield from plain_parts(value)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a wrapper such as a quantized state consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # and no mesh of processes
                yield from plain_parts(part)
    else:
        yield tensor
