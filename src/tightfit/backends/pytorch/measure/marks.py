"""Marks in a profile: which op, which phase, and which tensors each piece of a real step belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.follow.memory import plain_parts, tensors_in
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.trace import Allocation, Category, Op, Phase

MARK = "tightfit-mark:"
"""Prefix of the names of marks, and of no op's (ours are `tightfit::...`): `tightfit-mark:op:17` around an op,
`tightfit-mark:phase:3` around a phase, `tightfit-mark:grad:5` where a parameter's gradient is there."""


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@dataclass
class Call:
    """An op that was dispatched. tick: the tracker's, at its start. op: None for one that runs no kernel. made: what it
    made, by address."""

    tick: int
    module: str
    name: str
    op: Op | None = None
    made: dict[int, Allocation] = field(default_factory=dict)


class Marks(Tracker):
    """Follows a real step, and marks each op and phase in the profile that is being taken.

    calls, phases, gradients (their addresses and modules): by the numbers of their marks. held: what was alive before,
    by address. held_elsewhere: bytes that were given out before, and lie in no tensor that is known. failure: why an op
    could not be noted; None while all were. The step goes on without: it is worth more than its profile.
    """

    def __init__(self, build: Build, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.phases: list[Phase] = []
        self.gradients: list[tuple[int, str]] = []
        self.held: dict[int, Allocation] = {}
        self.held_elsewhere = 0
        self.failure: str | None = None
        self._optimizer = optimizer
        self._build = build
        self._mark = ExitStack()

    @contextmanager
    def following(self, model: nn.Module, held: int | None) -> Iterator[None]:
        """Follow what runs inside. held: bytes that the allocator has given out before, where it says so."""
        self.follow(model)
        try:
            for parameter, states in self._optimizer.state.items():
                for value in states.values():
                    if isinstance(value, Tensor) and value.device.type == self._build.torch_device.type:
                        self.mark(value, Category.OPTIMIZER, module=self.owner(parameter), from_birth=True)
                        self._hold(value)
            for tensor in [*model.parameters(), *model.buffers()]:
                self._hold(tensor)
            if held is not None:
                self.held_elsewhere = max(held - sum(a.bytes for a in self.held.values()), 0)
            with self:
                yield
        finally:
            self.unfollow()
            self.memory.finalize_categories(self.backwards)

    def enter(self, phase: Phase) -> None:
        self.close()
        self._mark.enter_context(record_function(f"{MARK}phase:{len(self.phases)}"))
        self.phases.append(phase)
        self.phase = phase

    @contextmanager
    def working_on(self, module: nn.Module, phase: Phase | None = None) -> Iterator[None]:
        outer = self.phase
        with super().working_on(module, phase):
            if phase is not None:  # what no op says is of the phase at hand, such as a compiled update's kernels
                self.enter(phase)
            yield
        if phase is not None:
            self.enter(outer)

    def close(self) -> None:
        """The phase ends."""
        self._mark.close()

    def _hold(self, tensor: Tensor) -> None:
        for part in plain_parts(tensor):
            found = self.memory.of(part)
            if found is not None:
                self.held[part.untyped_storage().data_ptr()] = found

    def _mark_gradient(self, owner: str, parameter: Tensor) -> None:
        super()._mark_gradient(owner, parameter)
        assert parameter.grad is not None
        with record_function(f"{MARK}grad:{len(self.gradients)}"):
            self.gradients.append((parameter.grad.untyped_storage().data_ptr(), owner))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.calls.append(Call(tick=self.memory.tick + 1, module=self._place()[1], name=str(func)))
        with record_function(f"{MARK}op:{len(self.calls) - 1}"):
            return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if self.failure is not None:
            return
        ops, first, call = len(self.ops), len(self.allocations), self.calls[-1]
        try:
            super()._note(func, args, kwargs, result)
            for tensor in tensors_in(result) if len(self.allocations) > first else ():
                number = self.memory.find(tensor)
                if number is not None and number >= first:
                    call.made[tensor.untyped_storage().data_ptr()] = self.allocations[number]
        except Exception as error:
            self.failure = f"{func}: {said(error)}"
        if len(self.ops) > ops:
            call.op = self.ops[-1]
