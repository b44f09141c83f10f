"""Inductor's own schedule of a graph, with no code generated.

Inductor lowers the graph to loops, fuses them, and orders them for memory; kernels and memory are read from what it
made. All of it is private to torch: this file and `inductor_memory` are the one place that names it, and whoever calls
runs the graph's ops one by one when it fails. Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config, dependencies, ir
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from tightfit.backends.pytorch.follow.op_classes import class_of
from tightfit.backends.pytorch.follow.tracker import Scratch
from tightfit.backends.pytorch.simulate.compiled.inductor_memory import Memory, numbers
from tightfit.backends.pytorch.simulate.compiled.region_schedule import Kernel, Schedule, called
from tightfit.trace import FUSED_PREFIX, Op, OpClass, Phase

Traffic = dict[str, tuple[Any, Any]]
"""Buffers that a kernel touches, by name: each one's layout, and elements touched."""

THRESHOLDS = ("realize_opcount_threshold", "realize_acc_reads_threshold")
"""Length to which a chain of element-wise ops may grow before its result is written to memory: apart by device where
torch has a default of that name for GPUs."""

SEARCHES = {
    "max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False, "benchmark_fusion": False,
    "freezing": False, "cpp_wrapper": False,
}
"""Settings that run kernels to choose among them, or end in another wrapper: off, for nothing can run."""


def inductor_schedule(
    module: fx.GraphModule, inputs: Sequence[Any], *, inference: bool, backward: bool, gpu: bool, scratch: Scratch,
) -> Schedule:  # fmt: skip
    """Schedule a graph of AOTAutograd's as Inductor does. Changes the graph.

    inputs: the graph's example values. gpu: fuse as for Triton, else as for the CPU's C++.
    Raises whatever a torch with other insides raises, and for sizes that are not known before the graph runs.
    """
    with config.patch({**SEARCHES, **(_as_on_gpu() if gpu else {})}), torch.no_grad(), DebugContext():
        passes: Any = inductor
        passes.view_to_reshape(module)
        mode = passes.fake_tensor_prop(module, inputs)
        passes.record_original_output_strides(module)
        with V.set_fake_mode(mode):
            passes._recursive_post_grad_passes(module, is_inference=inference)
            shapes = getattr(module, "shape_env", None) or passes.shape_env_from_inputs(inputs)
            graph = GraphLowering(
                module, example_inputs=inputs, shape_env=shapes, is_inference=inference, is_backward=backward
            )
            graph.freeze_runtime_asserts()
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                memory = Memory(graph, grouped=not gpu, inference=inference)
                kernels = [Kernel(step, *kernel) for node, step in zip(graph.scheduler.nodes, memory.steps, strict=True)
                           if (kernel := _read_kernel(graph, node, scratch)) is not None]
    return Schedule(
        kernels=tuple(kernels),
        steps=max(memory.steps, default=-1) + 1,
        storages=tuple(memory.storages),
        last_uses=tuple(memory.last_uses.values()),
        outputs=tuple(memory.outputs),
        sure="Inductor's own schedule of fused kernels" + (", as it makes it for a GPU" if gpu else ""),
    )


def _as_on_gpu() -> dict[str, Any]:
    """Settings that have Inductor fuse for a GPU on CPU tensors: most of its rules go by who generates the code.

    Against the same graphs lowered for tensors on a CUDA device (torch 2.11, blocks of GPT-2, Llama and BERT, no code
    run): the same memory within 0.1 %, but 7 % more in one backward pass, eager attention's. Kernels are up to a
    quarter fewer in a backward pass, since reductions are not split in two, and concatenations are kernels of their
    own.
    """
    own = {name: getattr(config, f"_{name}_default", None) for name in THRESHOLDS}
    return {"cpu_backend": "triton", **{name: value for name, value in own.items() if value is not None}}


def _read_kernel(graph: Any, node: BaseSchedulerNode, scratch: Scratch) -> tuple[Op, int] | None:
    """The kernel that a node of the schedule launches, and the memory that it takes while it runs; None where it
    launches none."""
    if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return None
    origins = [o for part in node.get_nodes() if part.node is not None for o in part.node.get_origins()]
    if node.is_extern() and node.node is not None:
        target = getattr(node.node, "op_overload", None)
        for origin in (node.node.get_origin_node(), *(o for o in origins if o.target is target)):
            if origin is not None and origin.op == "call_function":
                return called(origin, scratch)
    targets = dict.fromkeys(o.target for o in sorted(origins) if isinstance(o.target, torch._ops.OpOverload))
    names = list(dict.fromkeys(target.overloadpacket.__name__ for target in targets if not target.is_view))
    moves = names and all(class_of(name, None) is OpClass.MOVEMENT for name in names)
    op_class = OpClass.MOVEMENT if moves else OpClass.ELEMENTWISE
    op_class = OpClass.NORMALIZATION if node.is_reduction() else op_class
    reads, writes = _traffic(graph, node)
    made = [layout for layout, _ in writes.values()]
    return Op(
        name=FUSED_PREFIX + " ".join(names), tick=0, phase=Phase.FORWARD, op_class=op_class, bytes_read=_bytes(reads),
        bytes_written=_bytes(writes), dtype=str(made[0].dtype).removeprefix("torch.") if made else "",
        shapes=tuple(numbers(layout.size) for layout in made),
    ), 0


def _bytes(traffic: Traffic) -> int:
    """Bytes touched, no more than each buffer has."""
    return sum(min(int(touched), math.prod(numbers(layout.size))) * layout.dtype.itemsize
               for layout, touched in traffic.values())


def _traffic(graph: Any, node: BaseSchedulerNode) -> tuple[Traffic, Traffic]:
    """Reads and writes of a generated kernel: each buffer once, with the elements that its loops touch."""
    found: tuple[Traffic, Traffic] = ({}, {})
    for part in node.get_nodes():
        loops = part.get_ranges() if isinstance(part, SchedulerNode) else None
        for kind, deps in zip(found, (part.read_writes.reads, part.read_writes.writes), strict=True):
            for dep in deps:
                value = graph.name_to_buffer.get(dep.name, graph.graph_inputs.get(dep.name))
                layout = value.get_output_spec() if isinstance(value, ir.IRNode) else None
                counted = not isinstance(dep, dependencies.WeakDep) and dep.name not in graph.removed_buffers
                if isinstance(layout, ir.Layout) and counted:
                    touched = math.prod([size for group in loops or (layout.size,) for size in group])
                    kind[dep.name] = (layout, kind.get(dep.name, (layout, 0))[1] + touched)
    return found
