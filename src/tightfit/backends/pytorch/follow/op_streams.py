"""The ops of a run that is followed, on their streams, with what each waits for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from tightfit.backends.pytorch.follow.memory import TrackedMemory, tensors_in
from tightfit.backends.pytorch.follow.op_classes import COLLECTIVES
from tightfit.backends.pytorch.replaced import replaced
from tightfit.backends.pytorch.techniques.by_block.transfers import WAIT, TransferWatch
from tightfit.trace import Op, OpClass, Phase, Place, Stream

GATHERS = ("c10d._allgather_base_", "fsdp.all_gather_copy_in")
"""Prefixes of the names of what gathers weights, and of what takes a process's own parts to where they are gathered."""
COPIES_OUT = "fsdp.split_with_sizes_copy"
"""Prefix of the name of what takes gathered weights apart, in the stream of what computes with them."""


class OpStreams(TransferWatch, ABC):
    """Ops in the order they were issued. Copies between host and device are reported by
    `by_block/transfers.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = TrackedMemory()
        self.ops: list[Op] = []
        self._paused = False
        self._copy: tuple[str, Stream, tuple[int, ...]] | None = None
        self._last: dict[Stream, int] = {}
        self._waits: dict[Stream, tuple[int, ...]] = {}
        self._arriving: dict[int, int] = {}
        self._awaited = self._calls = 0

    @abstractmethod
    def _place(self) -> tuple[Phase, str]:
        """The phase and the module that the work at hand belongs to."""

    def _add(self, op: Op) -> None:
        """An op runs, after what its stream was to wait for."""
        if self._copy is not None:
            op.name, op.stream, op.after = self._copy
            op.op_class = OpClass.COMMUNICATION
        op.after += tuple(tick for tick in self._waits.pop(op.stream, ()) if tick not in op.after)
        self._last[op.stream] = op.tick
        op.calls, self._calls = self._calls, 0
        self.ops.append(op)

    def repeat(self, start: int, stop: int, ticks: int) -> None:
        """The ops from number `start` up to, not including, `stop` once more, so many ticks later."""
        for op in self.ops[start:stop]:
            again = op_later(op, ticks)
            self._last[op.stream] = again.tick
            self.ops.append(again)

    def _exchange(self, op: Op, namespace: str, args: Sequence[Any], result: Any) -> None:
        """Give an op that exchanges with other processes, before it is added, the network's stream, and any op what it
        waits for there: FSDP's collectives run in streams of their own, and what reads their results waits for them.

        namespace: of the op. args, result: of its call.
        """
        gathers, reduces = op.name.startswith(GATHERS), namespace in COLLECTIVES
        if not (gathers or reduces or self._arriving):
            return
        taken, made = self._allocations(args), self._allocations(result)
        arriving = max((self._arriving.get(number, 0) for number in taken), default=0)
        # What is done with a reduced part at once, such as adding it to the gradient, stays in that stream.
        follows = arriving and op.phase is Phase.BACKWARD and not op.name.startswith(COPIES_OUT)
        if gathers or reduces or follows:
            op.stream = Stream.NETWORK
            compute = self._last.get(Stream.COMPUTE)
            if reduces and not gathers and compute is not None:  # weights are there from the step's beginning on
                op.after = (compute,)
            self._arriving.update(dict.fromkeys([*taken, *made], op.tick))
        elif arriving > self._awaited:
            op.after, self._awaited = (*op.after, arriving), arriving

    def _allocations(self, values: Any) -> list[int]:
        """The allocations that tensors among the values lie in."""
        return [number for tensor in tensors_in(values) if (number := self.memory.find(tensor)) is not None]

    def lies_on_host(self, tensor: Tensor, *, pinned: bool, taken: int | None = None) -> None:
        found = self.memory.of(tensor)
        if found is not None:
            found.place, found.pinned = Place.HOST, pinned
            found.bytes = found.bytes if taken is None else taken

    def is_pinned(self, tensor: Tensor) -> bool:
        found = self.memory.of(tensor)
        return found is not None and found.pinned

    def copying(self, name: str, stream: Stream, after: Sequence[int]) -> AbstractContextManager[None]:
        return replaced(self, "_copy", (name, stream, tuple(dict.fromkeys(after))))

    def last(self, stream: Stream) -> int | None:
        return None if self._paused else self._last.get(stream)

    def waits(self, stream: Stream, moment: int) -> None:
        if self._paused:
            return
        self._waits[stream] = (*self._waits.get(stream, ()), moment)
        if stream is Stream.HOST:
            phase, module = self._place()
            self._add(Op(name=WAIT, tick=self.memory.next(), phase=phase, op_class=OpClass.COMMUNICATION,
                         module=module, kernels=0, stream=stream))


def op_later(op: Op, ticks: int) -> Op:
    """An op so many ticks later."""
    return Op(op.name, op.tick + ticks, op.phase, op.op_class, op.module, op.shapes, op.dtype, op.flops, op.bytes_read,
              op.bytes_written, op.kernels, op.calls, op.seconds, op.stream, op.after, op.leading, op.layout)
