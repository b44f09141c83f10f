"""AOTAutograd's forward and backward graphs, made and partitioned as Inductor has them made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch._functorch.config
import torch._inductor
from torch import fx
from torch._dynamo.backends.common import aot_autograd

Make = Callable[..., Callable[..., Any]]
"""Compiles one graph, given it and its example values, and by keyword `is_backward` and `is_inference`."""


def compile_graphs(make: Make, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A torch.compile backend that leaves each graph to `make`: Inductor's own passes before and between, its
    decompositions, its partition of forward and backward, the memory budget included.

    Where this torch's Inductor takes no compiler of graphs, AOTAutograd is asked by its own interface, with the same
    decompositions and partition, but without Inductor's passes.
    """
    compile_fx = _inductor()
    # A cache of code that was generated before would take its place.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        if compile_fx is not None:
            compiled: Callable[..., Any] = compile_fx(module, inputs, inner_compile=make)
        else:
            compiled = _by_aot_autograd(make, module, inputs)
    return compiled


def _inductor() -> Callable[..., Any] | None:
    """Inductor's backend, where it can be given a compiler of graphs. A private interface."""
    from torch._inductor import compile_fx

    backend: Any = getattr(compile_fx, "compile_fx", None)
    return backend if backend is not None and "inner_compile" in inspect.signature(backend).parameters else None


def _by_aot_autograd(make: Make, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=partial(make, is_inference=False), bw_compiler=partial(make, is_backward=True),
        inference_compiler=partial(make, is_inference=True), partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(), keep_inference_input_mutations=True,
    )(module, inputs)
    return compiled
