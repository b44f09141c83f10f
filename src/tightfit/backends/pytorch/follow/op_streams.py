"""The ops of a run that is followed, on their streams, with what each waits for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tightfit.backends.pytorch.follow.memory import TrackedMemory
from tightfit.backends.pytorch.techniques.by_block.transfers import WAIT, TransferWatch
from tightfit.trace import Op, OpClass, Phase, Place, Stream


class OpStreams(TransferWatch):
    """Ops in the order they were issued. Copies between host and device are reported by `offload`."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = TrackedMemory()
        self.ops: list[Op] = []
        self._paused = False
        self._copy: tuple[str, Stream, tuple[int, ...]] | None = None
        self._last: dict[Stream, int] = {}
        self._waits: dict[Stream, tuple[int, ...]] = {}

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
        self.ops.append(op)

    def lies_on_host(self, tensor: Tensor, *, pinned: bool, taken: int | None = None) -> None:
        found = self.memory.of(tensor)
        if found is not None:
            found.place, found.pinned = Place.HOST, pinned
            found.bytes = found.bytes if taken is None else taken

    def is_pinned(self, tensor: Tensor) -> bool:
        found = self.memory.of(tensor)
        return found is not None and found.pinned

    @contextmanager
    def copying(self, name: str, stream: Stream, after: Sequence[int]) -> Iterator[None]:
        self._copy = (name, stream, tuple(dict.fromkeys(after)))
        try:
            yield
        finally:
            self._copy = None

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
