"""CUDA's order of streams, kept beside a step that a processor runs: whoever touches memory must come after whoever
wrote it, and device memory outlives the copies that use it.

Every stream, and the host, has a clock: of each stream, how many of its ops have surely ended. An op begins after what
the host did before, an event carries a stream's clock to who waits for it, and whatever comes in no such order may come
in any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tightfit.backends.pytorch.techniques.by_block import block_calls, transfers
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers
from tightfit.trace import COPIES, Stream

MOVES = ("copy_", "_to_copy")
"""Ops that may touch both memories."""


class _Clock(Counter[Stream]):
    """Of each stream, the number of its last op that has surely ended."""

    def join(self, other: _Clock) -> None:
        for stream, number in other.items():
            self[stream] = max(self[stream], number)


class _Event:
    def __init__(self, order: StreamOrder, clock: _Clock) -> None:
        self._order, self.clock = order, _Clock(clock)

    def synchronize(self) -> None:
        self._order.clocks[Stream.HOST].join(self.clock)


class _Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, order: StreamOrder, stream: Stream) -> None:
        self._order, self.stream = order, stream

    def record_event(self) -> _Event:
        self._order.clocks[self.stream].join(self._order.clocks[Stream.HOST])
        return _Event(self._order, self._order.clocks[self.stream])

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def wait_event(self, event: _Event) -> None:
        self._order.clocks[self.stream].join(event.clock)


class _Memory:
    """A storage. last: of each stream, range of bytes, and whether it is written, the number of the last op there."""

    def __init__(self, order: StreamOrder, *, on_host: bool) -> None:
        self._order, self.on_host = order, on_host
        self.last: dict[tuple[Stream, int, int, bool], int] = {}

    def touch(self, stream: Stream, start: int, stop: int, writes: bool) -> bool:
        """Whether everyone before, that an access must come after, has surely ended."""
        clock = self._order.clocks[stream]
        ordered = all(number <= clock[other] for (other, begin, end, wrote), number in self.last.items()
                      if (writes or wrote) and begin < stop and start < end)
        self.last[stream, start, stop, writes] = clock[stream]
        return ordered

    def __del__(self) -> None:
        """Who gets the device's memory next computes, and waits for no copy. The host's outlives the copies that use
        it: CUDA waits for them before it is unlocked."""
        clock = _Clock(self._order.clocks[Stream.COMPUTE])
        clock.join(self._order.clocks[Stream.HOST])
        late = any(number > clock[stream] for (stream, *_), number in self.last.items())
        self._order.freed_early |= late and not self.on_host


class Unordered(BaseException):
    """Memory was touched, or given back, that no wait keeps for it. No model's error, which a step would explain."""


class StreamOrder(TorchDispatchMode):
    """Raises Unordered as soon as an op runs that may come too early."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks = {stream: _Clock() for stream in Stream}
        self.copies = 0
        self.freed_early = False
        self._current = Stream.COMPUTE
        self._memory: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def stream(self, stream: Stream) -> _Stream:
        return _Stream(self, stream)

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self._current = self._current, stream.stream
        self.copies += 1
        try:
            yield
        finally:
            self._current = before

    def is_on_host(self, tensor: Tensor) -> bool:
        return self._of(tensor).on_host

    def put_on_host(self, tensor: Tensor) -> Tensor:
        self._memory[tensor.untyped_storage()] = _Memory(self, on_host=True)
        return tensor

    def _of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        if storage not in self._memory:
            self._memory[storage] = _Memory(self, on_host=False)
        found: _Memory = self._memory[storage]
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            name, results = func._overloadpacket.__name__, [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            self._ran(name, [] if "empty" in name else list(_arguments(func, args, kwargs)), results)
        return result

    def _ran(self, name: str, touched: list[tuple[Tensor, bool]], results: list[Tensor]) -> None:
        if self.freed_early:
            raise Unordered("device memory was given back under a copy")
        # What no op has made, such as a file's tensors, may lie in either memory.
        on_host = {self._of(t).on_host for t, _ in touched
                   if t.numel() and (name not in MOVES or t.untyped_storage() in self._memory)}
        stream = Stream.HOST if True in on_host and self._current is Stream.COMPUTE else self._current
        clock = self.clocks[stream]
        clock.join(self.clocks[Stream.HOST])
        if on_host == {True, False} and stream is Stream.HOST:
            clock.join(self.clocks[Stream.COMPUTE])
            if name not in MOVES:
                raise Unordered(f"{name} mixes memory of the host and the device")
        given = {tensor.untyped_storage()._cdata for tensor, _ in touched}
        made = [tensor for tensor in results if tensor.untyped_storage()._cdata not in given]
        for tensor in made:
            self._memory[tensor.untyped_storage()] = _Memory(self, on_host=stream is Stream.HOST)
        clock[stream] += "empty" not in name  # memory alone is no op
        for tensor, writes in (*touched, *((tensor, True) for tensor in made)):
            if not self._of(tensor).touch(stream, *_range(tensor), writes):
                raise Unordered(f"{name} on {stream} {'writes' if writes else 'reads'} too early")


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """An op's tensors, and whether each is written."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        yield from ((tensor, writes) for tensor in tree_leaves(value) if isinstance(tensor, Tensor))


def _range(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in, from the first to the last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last + 1) * size if tensor.numel() else 0


@contextmanager
def stream_order() -> Iterator[StreamOrder]:
    """Inside, transfers believe in streams, whose order is kept; and gradients must lie beside their weights."""
    order, gradient, made = StreamOrder(), torch.Tensor.grad, []

    class Streaming(Transfers):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._streams = {stream: order.stream(stream) for stream in COPIES}  # type: ignore[misc]
            made.append(self)

        def host_memory(self, count: int) -> Tensor:
            return order.put_on_host(super().host_memory(count))

        def _temporary_memory(self, like: Tensor) -> Tensor:
            return order.put_on_host(super()._temporary_memory(like))

    def set_gradient(parameter: Tensor, value: Tensor | None) -> None:
        if value is not None and order.is_on_host(value) != order.is_on_host(parameter):
            raise Unordered("a gradient is bound to weights of another place")
        gradient.__set__(parameter, value)

    with pytest.MonkeyPatch.context() as patch, order:
        for module in (block_calls, transfers):
            patch.setattr(module, "Transfers", Streaming)
        patch.setattr(torch.cuda, "current_stream", lambda device: order.stream(Stream.COMPUTE))
        patch.setattr(torch.cuda, "stream", order.on)
        patch.setattr(torch.nn.Parameter, "grad", property(
            gradient.__get__, set_gradient, gradient.__delete__), raising=False)
        yield order
        if order.freed_early or any(each._begun for each in made):
            raise Unordered("device memory was given back under a copy, or is kept for ever for one")
