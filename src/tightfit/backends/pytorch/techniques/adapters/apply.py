"""Adapters applied to a model: weights frozen, quantized, and added to by low-rank factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.experts import has_experts
from tightfit.backends.pytorch.saved_model import is_wrapped_by_peft
from tightfit.backends.pytorch.techniques.adapters.folder import classifier_head, save_adapter
from tightfit.backends.pytorch.techniques.adapters.layers import (
    LINEAR,
    FrozenLayer,
    call_layers,
    frozen_layer,
    frozen_layers,
    magnitudes,
    quantize,
)
from tightfit.backends.pytorch.techniques.precision import weight_dtype
from tightfit.errors import ModelError, Refused, nearest
from tightfit.techniques.base import Base
from tightfit.techniques.trainable import Layers, LowRank, Trainable

EXPERTS_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of layers that peft 0.21 takes for the experts' own, as they were called once, in many a mixture of experts."""
NOTED_SHARE = 0.05
"""Share of the blocks' weights outside of linear layers from which a note says that they are not quantized."""


def apply_base(technique: Base, build: Build) -> Build:
    """Frozen weights in the base's format, on the device; those of the blocks' linear layers quantized. Where some wait
    in host memory, all are left there: the device may not hold them."""
    device = torch.device("cpu") if build.recipe.offloaded.keeps_weights else build.torch_device
    trains = (lambda name: False) if build.recipe.mode == "inference" else build.recipe.trainable.trains
    dtype, notes = getattr(torch, technique.format(build.recipe)), build.notes
    if technique.quantizes:
        call_layers(build.model)
        names = {module: name for name, module in build.model.named_modules()}
        for block in build.blocks:
            for layer in [*block.modules()]:
                if not trains(f"{names[layer]}.weight") and (found := frozen_layer(layer)) is not None:
                    quantize(found, technique.name, build.torch_device, device)
        left = sum(p.numel() for block in build.blocks for p in block.parameters())
        whole = left + sum(layer.quantized_weights for block in build.blocks for _, layer in frozen_layers(block))
        if left > NOTED_SHARE * whole:
            notes = (*notes, f"base: {left / whole:.0%} of the blocks' weights are in no linear layer, and are held in "
                     f"{technique.format(build.recipe)}")
    with torch.no_grad():
        for name, parameter in build.model.named_parameters():
            if parameter.is_floating_point() and not trains(name):
                parameter.data = parameter.data.to(device, dtype)
        for tensor in (*build.model.parameters(), *build.model.buffers()):
            tensor.data = tensor.data.to(device)
    return replace(build, notes=notes)


def _check_plain(technique: Trainable, build: Build) -> None:
    """Raise Refused for a module that peft wrapped: what it trains is peft's to say, and alone is saved."""
    if is_wrapped_by_peft(build.model):
        raise Refused(f"trainable: {technique.name} is for a model without an adapter, and this module has one of "
                      "peft's; write trainable=all, which trains that one, or give the base model")


def layers(technique: Layers, build: Build) -> Build:
    """Freeze all but the named parts."""
    _check_plain(technique, build)
    names = [name for name, _ in build.model.named_parameters(remove_duplicate=False)]
    for part in technique.names:
        if not any(Layers(names=(part,)).trains(name) for name in names):
            known = {name.rpartition(".")[0] for name in names} | {name.rpartition(".")[2] for name in names}
            raise Refused(f"trainable.names: {part!r} is no part of {type(build.model).__name__}; "
                          f"{nearest(part, sorted(known))}")
    trained = {p for name, p in build.model.named_parameters(remove_duplicate=False) if technique.trains(name)}
    for parameter in build.model.parameters():
        parameter.requires_grad_(parameter in trained)
    for parameter in trained:  # which were built in the format of what is frozen, where that is quantized
        parameter.data = parameter.data.to(weight_dtype(build.recipe.precision))
    return build


def low_rank(technique: LowRank, build: Build) -> Build:
    """Freeze all, and add factors to the target layers; of a classifier, train the head in full."""
    _check_plain(technique, build)
    model, dtype = build.model, weight_dtype(build.recipe.precision)
    head = dict(classifier_head(build))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in head.values():
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)
    draws = torch.Generator().manual_seed(build.recipe.seed)
    targets = list(_targets(technique, build, set(head)))
    call_layers(model)
    for _, layer in targets:
        _add(technique, layer, dtype, draws)
    notes, shared = build.notes, sorted({name.rpartition(".")[2] for name, _ in targets} & EXPERTS_NAMES)
    if shared and has_experts(model):
        notes = (*notes, f"trainable: of a mixture of experts peft may read {', '.join(shared)} as names of its "
                 "experts, and leave out what is learned beside other layers of these names; take the model that "
                 "tightfit export --merge writes, or name other layers with trainable.targets")
    return replace(build, save_model=save_adapter, notes=notes)


def _targets(technique: LowRank, build: Build, head: set[str]) -> Iterator[tuple[str, FrozenLayer]]:
    """The layers that get factors, by name. Raises Refused for a name that no layer has, and ModelError where there is
    no layer."""
    inside = {module for block in build.blocks for module in block.modules()}
    found: dict[str, FrozenLayer] = {}
    named = dict(build.model.named_modules())
    for name, module in named.items():
        wanted = module in inside if technique.targets == "all-linear" else technique.adds_to(name)
        if wanted and name not in head and (layer := frozen_layer(module)) is not None:
            found[name] = layer
    if technique.targets == "all-linear" and not found:
        raise ModelError(f"trainable: the blocks of {type(build.model).__name__} have no linear layers; name some with "
                         "trainable.targets, or write trainable=all")
    for target in technique.targets if technique.targets != "all-linear" else ():
        if not any(f".{name}".endswith(f".{target}") for name in found):
            linear = sorted({name.rpartition(".")[2] for name, module in named.items() if isinstance(module, LINEAR)})
            raise Refused(f"trainable.targets: {target!r} is no linear layer of {type(build.model).__name__}; "
                          f"{nearest(target, linear)}")
    yield from found.items()


def _add(technique: LowRank, layer: FrozenLayer, dtype: torch.dtype, draws: torch.Generator) -> None:
    """Factors whose product is zero: the first drawn evenly from within 1 / sqrt(in), the second zero."""
    out, into = layer.sides
    device = next(t.device for t in (*layer.parameters(), *layer.buffers()))
    first = torch.empty(technique.rank, into, device="cpu").uniform_(-(into**-0.5), into**-0.5, generator=draws)
    layer.lora_a = nn.Parameter(first.to(device, dtype))
    layer.lora_b = nn.Parameter(torch.zeros(out, technique.rank, device=device, dtype=dtype))
    if technique.learns_magnitude:
        layer.lora_magnitude = nn.Parameter(magnitudes(layer).to(dtype))
    layer.added = technique
