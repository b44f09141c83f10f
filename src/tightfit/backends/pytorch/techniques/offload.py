"""Offloading, as a technique."""

from __future__ import annotations

from dataclasses import replace

import torch

from tightfit.backends.pytorch.build import Build
from tightfit.techniques.offload import Host


def host(technique: Host, build: Build) -> Build:
    if technique.shares.keeps_weights:
        move_to_device(build, technique)
        if build.evaluation_dtype is not None:
            note = "evaluation runs in the weights' own format: a narrower copy of weights in host memory is not kept"
            build = replace(build, evaluation_dtype=None, notes=(*build.notes, note))
    return replace(build, host_share=technique.shares, calls_blocks=True)


def move_to_device(build: Build, technique: Host) -> None:
    """Move what does not wait in host memory to the device: the model was built on the host, for it may be larger."""
    # Only whoever offloads pays for it.
    from tightfit.backends.pytorch.techniques.by_block.parts import Parts

    parts = Parts(build.model, build.blocks, frozen=build.recipe.trainable.freezes)
    waiting = {tensor for number in parts.first(technique.shares.weights, embeddings=technique.embeddings)
               for tensor in parts.weights[number]}
    with torch.no_grad():
        for tensor in (*build.model.parameters(), *build.model.buffers()):
            if tensor not in waiting:  # in place: techniques that came before may hold on to it
                tensor.data = tensor.data.to(build.torch_device)
