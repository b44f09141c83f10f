"""Allocations and frees of the code that Inductor would generate. Private to torch, as all of `inductor_schedule` is.

The wrapper around the kernels is planned by Inductor itself, reuse of freed buffers included. What generating the
kernels would decide on top is decided here by Inductor's own rules: which results are written over an argument, and
which never reach memory, because the kernel that makes them is the only one to read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen import wrapper as wrapper_lines
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from tightfit.backends.pytorch.simulate.compiled.region_schedule import Output, Storage

Place = Storage | str
"""Place of a buffer: memory that the graph allocates, or an argument, by name."""


@dataclass(frozen=True)
class _Step:
    """A mark between the lines of the wrapper: here kernels run. made: buffers that a library's kernel allocates."""

    made: tuple[Any, ...] = ()


class Memory:
    """A scheduled graph's memory.

    steps: of each node of the schedule, the step that it runs in. storages: every piece of memory, in order of birth.
    last_uses: of each argument, by name, the step after which it is freed. Raises TypeError for a dynamic size.
    """

    def __init__(self, graph: Any, *, grouped: bool, inference: bool) -> None:
        """grouped: generated kernels that follow each other are one call, which allocates for all and frees after all,
        as in C++."""
        self._graph, self._scheduler, self._wrapper = graph, graph.scheduler, graph.wrapper_code
        self.steps = list(self._write(grouped))
        self._wrapper.run_wrapper_ir_passes(inference)
        self.storages: list[Storage] = []
        last = max(self.steps, default=-1)
        self.last_uses = dict.fromkeys(graph.graph_input_names, last)
        self._places: dict[str, Place] = {name: name for name in graph.graph_input_names}
        self._follow(self._wrapper.lines)
        self.outputs = [self._output(value) for value in graph.graph_outputs]
        returned = {output.index for output in self.outputs if output.kind == "storage"}
        for number, storage in enumerate(self.storages):
            if number in returned:
                storage.dies = None
            elif storage.dies is None:  # the function's end frees it
                storage.dies = max(last, storage.born)

    def _write(self, grouped: bool) -> Iterator[int]:
        """Have the wrapper write what it allocates and frees, with marks where kernels run; the step of each node."""
        scheduler, lines, step, waiting = self._scheduler, self._wrapper.lines, 0, False
        for node in scheduler.nodes:
            extern = node.is_extern()
            generated = all(isinstance(part, SchedulerNode) for part in node.get_nodes())
            if extern:
                if waiting:
                    lines.append(_Step())
                    step, waiting = step + 1, False
                scheduler.free_buffers()
            scheduler.current_node = node
            scheduler.buffer_names_to_free.update(node.last_usage)
            self._allocate(node, generated)
            yield step
            if extern or (generated and not grouped):
                taken_apart = isinstance(node.node, ir.MultiOutput)  # one of the results of a kernel that ran before
                lines.append(_Step(tuple(_made(node)) if extern and not taken_apart else ()))
                scheduler.free_buffers()
                step += 1
            waiting = waiting or (generated and grouped)
            scheduler.completed_operations.update(node.get_operation_names())
        if waiting:
            lines.append(_Step())
        scheduler.free_buffers()

    def _allocate(self, node: BaseSchedulerNode, generated: bool) -> None:
        inplace: set[str] = set()
        kernel = SimpleNamespace(
            args=SimpleNamespace(make_inplace=lambda *names: inplace.update(names)), inplace_update_buffers={}
        )
        with V.set_kernel_handler(kernel):
            for part in node.get_nodes():
                part.decide_inplace_update()
                part.mark_run()
        if generated:
            names = node.get_operation_names()
            self._graph.removed_buffers.update(
                name for name in node.get_buffer_names()
                if name not in inplace and self._scheduler.can_buffer_be_removed_through_fusion(name, names)
            )

    def _follow(self, lines: Sequence[Any]) -> None:
        """Follow the memory through the wrapper's lines."""
        step = -1
        for line in lines:
            if isinstance(line, _Step):
                step += 1
                for made in line.made:
                    if sources := made.get_aliases():
                        self._places[made.get_name()] = self._places[sources[0]]
                    else:
                        self._allocated(made.node, step, dies=None if made.users else step)
            elif isinstance(line, wrapper_lines.AllocateLine):
                self._allocated(line.node, step + 1)
            elif isinstance(line, wrapper_lines.ReuseLine | wrapper_lines.ReinterpretLine):
                self._places[line.reused_as.get_name()] = self._places[line.node.get_name()]
            elif _frees(line):
                place = self._places.get(line.node.get_name())
                if isinstance(place, Storage):
                    place.dies = step
                elif place is not None:
                    self.last_uses[place] = step

    def _allocated(self, buffer: Any, step: int, dies: int | None = None) -> None:
        layout = buffer.get_output_spec()
        made = Storage(size=numbers(layout.size), stride=numbers(layout.stride), dtype=layout.dtype,
                       device=layout.device, born=step, dies=dies)
        self._places[buffer.get_name()] = made
        self.storages.append(made)

    def _output(self, value: Any) -> Output:
        if value is None or isinstance(value, ir.NoneAsConstantBuffer):
            return Output(kind="value")
        if isinstance(value, ir.ShapeAsConstantBuffer):
            value = value.expr
        if not isinstance(value, ir.IRNode):
            return Output(kind="value", value=int(value))
        name, layout = value.get_name(), value.get_layout()
        place = self._places[self._scheduler.mutation_real_name.get(name, name)]
        inside = isinstance(place, Storage)
        return Output(
            kind="storage" if inside else "input",
            index=list(self.storages if inside else self.last_uses).index(place),
            size=numbers(layout.size), stride=numbers(layout.stride), offset=int(layout.offset), dtype=layout.dtype,
        )


def numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Inductor's sizes as numbers. Raises TypeError for a dynamic one."""
    return tuple(map(int, sizes))


def _frees(line: Any) -> bool:
    if isinstance(line, wrapper_lines.FreeIfNotReusedLine):
        return not line.is_reused and not line.node.get_inputs_that_alias_output()
    return isinstance(line, wrapper_lines.FreeLine)


def _made(node: Any) -> Iterator[Any]:
    """The results that a library's kernel allocates itself, or takes from its arguments."""
    for buffer in node.get_outputs():
        if isinstance(buffer.node.get_output_spec(), ir.MultiOutputLayout):
            for user in buffer.users:
                if isinstance(getattr(user.node, "node", None), ir.MultiOutput):
                    yield from _made(user.node)
        elif isinstance(node.node, ir.ExternKernelAlloc | ir.MultiOutput) and not buffer.node.should_allocate():
            yield buffer
