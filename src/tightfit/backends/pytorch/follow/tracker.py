"""Following a step: every op that is dispatched, and every storage from the op that makes it to its release.

Works on fake tensors, where nothing is computed, and on real ones alike. It listens below autograd, so it sees what
kernels are asked for, forward and backward, and changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from tightfit.backends.pytorch.follow.dispatch_mode import DispatchMode
from tightfit.backends.pytorch.follow.gradient_sums import SUMS, counts_of_a_gradient, without_a_mode
from tightfit.backends.pytorch.follow.memory import Arguments, plain_parts, tensors_in
from tightfit.backends.pytorch.follow.op_costs import cost
from tightfit.backends.pytorch.follow.op_streams import OpStreams
from tightfit.backends.pytorch.replaced import replaced
from tightfit.trace import Allocation, Category, Op, Phase, Span, Trace

Scratch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
"""Bytes that a kernel asks for and gives back while it runs, by op, arguments and result."""

Answer = Callable[[Any, tuple[Any, ...], Callable[[Tensor], str]], Any]
"""Answer to a read of a tensor's value, by op, arguments and what names a tensor's op; NotImplemented for other ops."""

DEVICE = torch.ops.prim.device.default

_RUNNING: ContextVar[tuple[str, ...]] = ContextVar("modules that run, the innermost last", default=("",))
"""Modules that run, of each forward pass: several may be under way, suspended at a block, each in its own context."""

LAST_FIRST = ("aten.native_dropout.default",)
"""Ops that ask for their last result first, on CUDA: the mask, then the values (cuda/Dropout.cu)."""

OUTSIDE_MODULES = (Phase.OPTIMIZER, Phase.SAVE, Phase.RESUME)
"""Phases in which no module runs: work belongs to the module whose tensor it is done on."""


class Tracker(OpStreams, DispatchMode):
    """A dispatch mode that writes a Trace. Enter it around a run; `trace` gives what was seen.

    scratch: a kernel's own passing memory, where it is known.
    answer: values for reads that fake tensors cannot serve.
    """

    def __init__(self, scratch: Scratch | None = None, answer: Answer | None = None) -> None:
        super().__init__()
        self.phase = Phase.SETUP
        self.spans: list[Span] = []
        self._scratch = scratch
        self._answer = answer
        self._alone = counts_of_a_gradient()
        self.backwards: list[int] = []
        self._module_of_node: dict[int, str] = {}
        self._hooks: list[Any] = []
        self._names: dict[nn.Module, str] = {}
        self._wrapped: list[tuple[nn.Module, Any]] = []
        self._region: tuple[str, Arguments] = ("", ())
        self._failure: tuple[int, str, str] | None = None

    @property
    def allocations(self) -> list[Allocation]:
        """Allocations so far."""
        return self.memory.allocations

    # Called by the run

    def follow(self, model: nn.Module, compiled: Iterable[nn.Module] = ()) -> None:
        """Name the model's modules and weights in what follows. Undone by `unfollow`.

        compiled: modules that run as one: those inside them go unnamed, and a hook would become part of the graph.
        """
        _RUNNING.set(("",))  # a module that left by SystemExit or the like never ended
        self._names = {module: name for name, module in model.named_modules()}
        whole = set(compiled)
        hidden = {inner for module in whole for inner in module.modules() if inner is not module}
        for name, module in model.named_modules():
            if module in whole:
                self._wrap_compiled(name, module)
            elif name and module not in hidden:
                self._hook(name, module)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                owner = name.rpartition(".")[0]
                hook = partial(self._mark_gradient, owner)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.mark(tensor, Category.WEIGHTS, module=name.rpartition(".")[0], from_birth=True)

    def unfollow(self) -> None:
        """Take the hooks off the model again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, call in self._wrapped:
            module._compiled_call_impl = call
        self._wrapped.clear()

    def _hook(self, name: str, module: nn.Module) -> None:
        """Name a module while it runs, and while other hooks, entered later, gather its weights."""
        self._hooks.append(module.register_forward_pre_hook(partial(self._enter_module, name), prepend=True))
        self._hooks.append(module.register_forward_hook(self._leave_module, always_call=True))

    def _wrap_compiled(self, name: str, module: nn.Module) -> None:
        """Name a compiled module while it runs, from outside of what is compiled."""
        call = module._compiled_call_impl
        if call is None:  # its forward is compiled instead, inside a region of several
            self._hook(name, module)
            return

        def named(*args: Any, **kwargs: Any) -> Any:
            first = _newest_node() + 1
            before = _RUNNING.set((*_RUNNING.get(), name))
            try:
                return call(*args, **kwargs)
            finally:
                _RUNNING.reset(before)
                for node in range(first, _newest_node() + 1):  # a compiled graph's node is made behind its work
                    self._module_of_node.setdefault(node, name)

        self._wrapped.append((module, call))
        module._compiled_call_impl = named

    def mark(self, tensor: Tensor, category: Category, *, module: str | None = None, from_birth: bool = False) -> None:
        """Say what a tensor's memory holds, from now on or `from_birth`. Memory that is not known yet is born now."""
        self.memory.mark(tensor, category, self.phase, module, from_birth)

    def ignore(self, tensor: Tensor) -> None:
        """Count nothing for memory that is not the device's."""
        self.memory.ignore(tensor, self.phase)

    def holds(self, tensor: Tensor, category: Category, module: nn.Module | None) -> None:
        self.mark(tensor, category, module=self._names.get(module, "") if module else "", from_birth=True)

    @contextmanager
    def working_on(self, module: nn.Module, phase: Phase | None = None) -> Iterator[None]:
        before, self.phase = self.phase, phase or self.phase
        running = _RUNNING.set((*_RUNNING.get(), self._names.get(module, "")))
        try:
            yield
        finally:
            _RUNNING.reset(running)
            self.phase = before

    @contextmanager
    def span(self, name: str, *, step: int = 0, times: int = 1) -> Iterator[None]:
        """A named stretch of the trace."""
        start = self.memory.next()
        yield
        self.spans.append(Span(name=name, start=start, stop=self.memory.next(), step=step, times=times))

    def paused(self) -> AbstractContextManager[None]:
        """Count nothing meanwhile: work of another device, such as the host's."""
        return replaced(self, "_paused", True)

    def region(self, name: str, args: Sequence[object] = ()) -> AbstractContextManager[None]:
        self._calls += 1
        return replaced(self, "_region", (name, self.memory.arguments(args)))

    def launch(self, op: Op, scratch: int) -> None:
        """A region's kernel runs now. scratch: bytes that it takes meanwhile."""
        phase, module = self._place()
        op.tick, op.phase, op.module = self.memory.next(), phase, module
        if phase is Phase.BACKWARD:
            self.backwards.append(op.tick)
        if scratch:
            self.memory.transient(scratch, self._region[0], module, phase, self.memory.next())
        self._add(op)
        if phase in OUTSIDE_MODULES:
            self.memory.owned_by(op, self._region[1])

    def place_of(self, error: BaseException) -> tuple[str, str] | None:
        """The module and the op that raised it; no op where the module's own code did, None where neither."""
        if self._failure is None or self._failure[0] != id(error):
            return None
        return self._failure[1:]

    def trace(self, origin: Any) -> Trace:
        """Trace of the run, with every allocation's category final. It ends here: later releases are not followed."""
        self.memory.finalize_categories(self.backwards)
        return Trace(origin=origin, ops=self.ops, allocations=self.memory.allocations, spans=self.spans)

    # Called by torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE:  # three calls in four: a fake tensor is asked for its device through the dispatcher
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if any(kind is not FakeTensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper, such as a quantized state, comes back with the ops on what it holds
        if self._answer is not None:
            value = self._answer(func, args, self._maker)
            if value is not NotImplemented:
                return value
        if func in SUMS and not torch.is_grad_enabled() and torch._C._current_autograd_node() is not None:
            func = without_a_mode(func, args, self._maker(args[0]), self._alone)
        try:
            result = self._run(func, args, kwargs)
        except Exception as error:
            self._failure = (id(error), self._place()[1], str(func))  # not the error, which would hold tensors
            raise
        if not self._paused:
            self._note(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)  # where a measurement puts its marks

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        phase, module = self._place()  # of a view too: its backward pass is done there
        if getattr(func, "is_view", False) and self.memory.find(result) is not None:
            return
        start = self.memory.next()
        if phase is Phase.BACKWARD:
            self.backwards.append(start)
        name, memory = self._region[0] or str(func), self.memory
        outside = phase in OUTSIDE_MODULES
        worked_on = (self._region[1] or memory.arguments(args)) if outside else ()
        by_tensor = isinstance(result, list | tuple) and args and isinstance(args[0], list | tuple)
        sources = args[0] if by_tensor else ()  # an op over a list of tensors, whose results are each one's
        results = list(tensors_in(result))
        for number, tensor in enumerate(results[::-1] if name in LAST_FIRST else results):
            if memory.find(tensor) is not None:
                continue
            source = memory.find(sources[number]) if number < len(sources) else None
            owner = module if outside or source is None else memory.allocations[source].module or module
            made = memory.allocate(tensor, name, phase, owner)
            if outside:
                memory.owned_by(memory.allocations[made], [*worked_on, [] if source is None else [source]])
            if phase is not Phase.OPTIMIZER and name.startswith("aten._to_copy") and self._holds_weight(args[0]):
                memory.fix(made)  # autocast's copy of a weight is temporary, however long it lives
        scratch = self._scratch(func, args, kwargs, result) if self._scratch is not None else 0
        if scratch:  # on top of the results, which kernels ask for first
            passing = memory.transient(scratch, name, module, phase, memory.next())
            if outside:
                memory.owned_by(passing, worked_on)
        costs = cost(func, args, kwargs, result)
        if costs.kernels:
            op = Op(name=name, tick=start, phase=phase, module=module, **costs._asdict())
            self._exchange(op, getattr(func, "namespace", ""), args, result)
            self._add(op)
            if outside:
                memory.owned_by(op, worked_on)

    def _place(self) -> tuple[Phase, str]:
        """The phase and the module that the work at hand belongs to."""
        node = torch._C._current_autograd_node()
        inside = _RUNNING.get()[-1]
        if node is None:
            self._module_of_node.setdefault(_newest_node(), inside)  # an autograd function's own ops need no gradient
            return self.phase, inside
        if torch.is_grad_enabled():  # a backward pass runs without, a recomputation inside it with gradients
            module = inside or self._module_of_node.get(node._sequence_nr(), "")
            self._module_of_node.setdefault(_newest_node(), module)
            return Phase.RECOMPUTE, module
        variable = getattr(node, "variable", None)
        if variable is not None:
            return Phase.BACKWARD, self.owner(variable)
        return Phase.BACKWARD, self._module_of_node.get(node._sequence_nr(), "")

    def owner(self, tensor: Any) -> str:
        """The module that a tensor's memory belongs to, or that of the part of it that is here; empty for none."""
        return next((found.module for found in map(self.memory.of, plain_parts(tensor)) if found is not None), "")

    def _maker(self, tensor: Tensor) -> str:
        found = self.memory.of(tensor)
        return "" if found is None else found.op

    def _holds_weight(self, tensor: Tensor) -> bool:
        found = self.memory.of(tensor)
        return found is not None and found.category is Category.WEIGHTS

    def _enter_module(self, name: str, module: nn.Module, args: Any) -> None:
        _RUNNING.set((*_RUNNING.get(), name))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        (*outer, name), error = _RUNNING.get(), sys.exception()
        _RUNNING.set(tuple(outer))
        if error is not None and (self._failure is None or self._failure[0] != id(error)):
            self._failure = (id(error), name, "")

    def _mark_gradient(self, owner: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.mark(parameter.grad, Category.GRADIENTS, module=owner)


def _newest_node() -> int:
    """Number of the autograd node made last, which is that of the op at hand where it makes one. Private to torch."""
    return int(torch._C._autograd._get_sequence_nr()) - 1
