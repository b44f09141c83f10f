"""torch.compile on fake tensors: regions that are partitioned and scheduled as training's are, and never run.

Dynamo, AOTAutograd, its partitioner and Inductor's passes work as they do in training; only the last part, generating
code and running it, is replaced. A compiled graph then takes its arguments, frees those that nobody else holds, makes
its outputs, and reports what its kernels would have done. Outputs that are arguments, or views of them or of each
other, are so here too. What the compiler leaves out (graph breaks, frames compiled too often) runs op by op.

Under a TorchDispatchMode torch.compile silently does nothing, unless the mode's `ignore_compile_internals` is true:
FakeTensorMode's is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch._subclasses
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.backends.pytorch.build import CompileBackend
from tightfit.backends.pytorch.errors import cause
from tightfit.backends.pytorch.follow.tracker import Scratch, Tracker
from tightfit.backends.pytorch.replaced import replaced
from tightfit.backends.pytorch.simulate.compiled.region_schedule import Kernel, Output, Schedule
from tightfit.devices import Device

Direction = Literal["forward", "backward"]
CompilerBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

SEARCHED = "; max-autotune may choose other kernels than these, which it finds by running them"
LAUNCHED_TOGETHER = "; CUDA graphs keep these and their inputs in memory of their own, which is not counted"


class Regions:
    """The compiled regions of one prediction, which may take several traces: what one compiled serves the next.

    `notes` says how sure their figures are, each sentence once.
    """

    def __init__(self, device: Device, scratch: Scratch) -> None:
        """scratch: what a library's kernel takes beyond its result while it runs."""
        self.notes: list[str] = []
        self.gpu, self.scratch = device.kind == "cuda", scratch
        self._tracker: Tracker | None = None

    def reporting_to(self, tracker: Tracker) -> CompileBackend:
        """Maker of torch.compile's backend, by name and mode; from now on calls are reported to `tracker`."""
        self._tracker = tracker
        return self.backend

    def backend(self, name: str, mode: str) -> str | CompilerBackend:
        """Backend for torch.compile in the place of the one of that name in that mode, when tensors are fake.

        The backends that generate no code run the graph's ops one by one: they serve as they are.
        """
        if name != "inductor":
            return "aot_eager" if name == "cudagraphs" else name
        cuda_graph = self.gpu and mode in ("reduce-overhead", "max-autotune")
        caveats = (SEARCHED if mode.startswith("max-autotune") else "") + (LAUNCHED_TOGETHER if cuda_graph else "")
        return Planned(self, caveats)

    def begin(self, direction: Direction, sure: str, args: Sequence[Any]) -> AbstractContextManager[None]:
        """The context in which a compiled graph runs on its arguments. sure: how sure its figures are, as a sentence.
        """
        assert self._tracker is not None
        note = f"compile: {sure}"
        if note not in self.notes:
            self.notes.append(note)
        return self._tracker.region(f"compiled {direction}", args)

    def launch(self, kernel: Kernel) -> None:
        """A kernel runs now."""
        assert self._tracker is not None
        self._tracker.launch(replace(kernel.op), kernel.scratch)


@dataclass(frozen=True)
class Planned:
    """A backend that plans. Two with the same fields are equal: blocks that are given equal ones share what was
    compiled."""

    regions: Regions
    caveats: str

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Inductor's own passes before and between, its decompositions, its partition of forward and backward, the
        memory budget included; each graph is left to `_compile`."""
        import torch._functorch.config
        from torch._inductor import compile_fx  # takes seconds

        backend: Any = compile_fx.compile_fx
        # A cache of code that was generated before would take its place.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            compiled: Callable[..., Any] = backend(module, inputs, inner_compile=self._compile)
        return compiled

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], **facts: Any) -> Callable[..., Any]:
        direction: Direction = "backward" if facts.get("is_backward") else "forward"
        untouched = fx.Graph()
        untouched.output(untouched.graph_copy(module.graph, {}))
        with _disable_current_modes():  # a backward pass is compiled when it is first needed
            try:
                from tightfit.backends.pytorch.simulate.compiled.inductor_schedule import inductor_schedule

                schedule = inductor_schedule(
                    module, inputs, inference=bool(facts.get("is_inference")), backward=direction == "backward",
                    gpu=self.regions.gpu, scratch=self.regions.scratch,
                )
            except Exception as error:  # private interfaces fail in any way
                return _boxed(partial(self.one_by_one, fx.GraphModule(module, untouched), direction, cause(error)))
        return _boxed(partial(self.run, direction, schedule))

    def one_by_one(self, module: fx.GraphModule, direction: Direction, reason: str, args: list[Any]) -> Any:
        """Fallback where Inductor's schedule cannot be read: the graph's ops, each followed by itself."""
        sure = f"its ops one by one, with none fused: Inductor's schedule could not be read ({reason})"
        with self.regions.begin(direction, sure, args):
            pass  # its ops are seen themselves
        values = list(args)
        args.clear()
        return module(*values)

    def run(self, direction: Direction, schedule: Schedule, args: list[Any]) -> list[Any]:
        """A call of a compiled graph: allocate, launch and free step by step, arguments included, and make the outputs.
        """
        sources = {output.index: args[output.index] for output in schedule.outputs if output.kind == "input"}
        mode = next((value.fake_mode for value in args if isinstance(value, torch._subclasses.FakeTensor)), None)
        read = _by_last_use(args, schedule.last_uses)
        running = self.regions.begin(direction, schedule.sure + self.caveats, args)
        args.clear()
        alive: dict[int, Tensor] = {}
        with running, mode or nullcontext(), torch.no_grad():
            read.pop(-1, None)
            for number, step in enumerate(schedule.by_step):
                alive.update((index, schedule.storages[index].allocate()) for index in step.born)
                for kernel in step.kernels:
                    self.regions.launch(kernel)
                for index in step.dying:
                    del alive[index]
                read.pop(number, None)
            return [_make_output(output, sources if output.kind == "input" else alive) for output in schedule.outputs]


def _boxed(graph: Any) -> Callable[[list[Any]], Any]:
    """A function that takes its arguments in a list, which it empties, as AOTAutograd's graphs do."""
    graph._boxed_call = True
    call: Callable[[list[Any]], Any] = graph
    return call


@contextmanager
def compiling_for(make_mode: Callable[..., Any]) -> Iterator[None]:
    """While this is entered, the compiler traces with the fake modes that `make_mode` makes, given FakeTensorMode's own
    options: those of tensors that stand for a device. Nothing compiled before is used, and nothing kept. Several traces
    made inside share what they compile.

    Each size of a micro-batch is compiled by itself. Training does so for the first, and then once more for all others
    together: the same kernels and the same memory, with sizes that are known when they run.
    """
    import torch._dynamo

    torch._dynamo.reset()
    try:
        with replaced(torch._subclasses, "FakeTensorMode", make_mode), \
                torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            yield
    finally:
        torch._dynamo.reset()


def _by_last_use(args: Sequence[Any], last_uses: Sequence[int]) -> dict[int, list[Tensor]]:
    """The tensors among a graph's arguments, by the last step that reads them."""
    found = defaultdict[int, list[Tensor]](list)
    for value, last in zip(args, last_uses, strict=True):
        if isinstance(value, Tensor):
            found[last].append(value)
    return found


def _make_output(output: Output, bases: dict[int, Tensor]) -> Any:
    if output.kind == "value":
        return output.value
    base = bases[output.index]
    if base.dtype != output.dtype:
        base = base.view(output.dtype)
    place = (tuple(base.shape), base.stride(), base.storage_offset())
    if place == (output.size, output.stride, output.offset):
        return base
    return base.as_strided(output.size, output.stride, output.offset)
