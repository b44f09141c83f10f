"""Offloading, as a technique."""

from __future__ import annotations

from dataclasses import replace

import torch

from tightfit.backends.pytorch.build import Build, HostShare
from tightfit.techniques.offload import Host


def host(technique: Host, build: Build) -> Build:
    if technique.weights:
        move_to_device(build, technique.weights)
        if build.evaluation_dtype is not None:
            note = "evaluation runs in the weights' own format: a narrower copy of weights in host memory is not kept"
            build = replace(build, evaluation_dtype=None, notes=(*build.notes, note))
    share = HostShare(weights=technique.weights, gradients=technique.gradients, optimizer=technique.optimizer,
                      activations=technique.activations)
    return replace(build, host_share=share, calls_blocks=True)


def move_to_device(build: Build, share: float) -> None:
    """Move what does not wait in host memory to the device: the model was built on the host, for it may be larger."""
    blocks = list(dict.fromkeys(block for stack in build.stacks for block in stack))
    # Only whoever offloads pays for it.
    from tightfit.backends.pytorch.techniques.by_block.residence import own_parameters

    own = own_parameters(build.model, blocks)[: round(share * len(blocks))]
    waiting: set[torch.Tensor] = {parameter for parameters in own for parameter in parameters}
    with torch.no_grad():
        for tensor in (*build.model.parameters(), *build.model.buffers()):
            if tensor not in waiting:  # in place: techniques that came before may hold on to it
                tensor.data = tensor.data.to(build.torch_device)
