"""torch.compile over blocks or the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.techniques.checkpointing.recomputation import compile_module
from tightfit.errors import OutOfMemory
from tightfit.techniques.compile import PerBlock, WholeModel

RECOMPILE_LIMIT = 64
"""Compiled variants of a function that are kept. Torch's own 8 are soon used up where all blocks of a model share one
function (first and later ones, of two stacks, in training and in evaluation, with a smaller last micro-batch), and what
comes after them runs op by op, in silence."""


def per_block(technique: PerBlock, build: Build) -> Build:
    checkpointing = build.recipe.checkpointing
    in_parts = checkpointing != "auto" and checkpointing.tiles
    for block in build.blocks:
        for module in _parts(block) if in_parts else [block]:
            compile_module(module, **_arguments(technique, build))
    return _with_loss(technique, build)


def _parts(block: nn.Module) -> Iterator[nn.Module]:
    """A block's own modules, without torch's, which are one kernel each as they are."""
    for part in block.children():
        if isinstance(part, nn.ModuleList):
            yield from part
        elif not type(part).__module__.startswith("torch.nn"):
            yield part


def whole_model(technique: WholeModel, build: Build) -> Build:
    compile_module(build.model, **_arguments(technique, build))
    return _with_loss(technique, build)


def _with_loss(technique: PerBlock | WholeModel, build: Build) -> Build:
    """The build with its loss over a vocabulary compiled by Inductor too, without CUDA graphs: its result outlives the
    next micro-batch."""
    loss = build.loss
    if technique.backend == "inductor" and build.task.predicts != "class":
        loss = loss.compiled(partial(torch.compile, **_arguments(replace(technique, mode="default"), build)))
    return replace(build, loss=loss, settings=(*build.settings, _compiling))


@contextmanager
def _compiling() -> Iterator[None]:
    """Many variants are kept, but none after an OutOfMemory: CUDA graphs would keep their memory, and a second size of
    micro-batch would be compiled for any size."""
    import torch._dynamo.config  # the compiler takes seconds to import

    try:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            yield
    except OutOfMemory:
        torch._dynamo.reset()
        raise


def _arguments(technique: PerBlock | WholeModel, build: Build) -> dict[str, Any]:
    if build.compile_backend is not None:
        return {"backend": build.compile_backend(technique.backend, technique.mode)}
    # `mode` is Inductor's; the other backends refuse it.
    mode = {"mode": technique.mode} if technique.backend == "inductor" and technique.mode != "default" else {}
    return {"backend": technique.backend, **mode}
