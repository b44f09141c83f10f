"""A bare loop, as a careful person writes it in PyTorch alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightfit.backends.base import Timings
from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.errors import memory_guard
from tightfit.backends.pytorch.measure.meter import Meter
from tightfit.backends.pytorch.models import logits_of
from tightfit.backends.pytorch.techniques.loading import loading
from tightfit.devices import Device
from tightfit.ladder.peers.bare import (
    bare,
    checkpoint_blocks,
    compile_model,
    loss_sum,
    model_arguments,
    settings,
    training_data,
)
from tightfit.ladder.peers.optimizers import make_optimizer
from tightfit.recipe import Recipe

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def run(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """Take the recipe's steps in a loop of its own. Raises Refused, MissingLibrary, OutOfMemory."""
    meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed)
    with memory_guard(lambda: "the plain loop"), settings(recipe, device):
        return _train(recipe, device, meter)


def _train(recipe: Recipe, device: Device, meter: Meter) -> Timings:
    data, build = training_data(recipe), bare(recipe, device)
    checkpoint_blocks(build)
    model = compile_model(build)
    optimizer = make_optimizer(recipe, build.model)
    assert recipe.precision != "auto"
    dtype = AUTOCAST.get(recipe.precision.name)
    scaler = torch.amp.GradScaler(device.kind, enabled=dtype == torch.float16)
    windows = loading(recipe.loading, build).windows
    assert windows is not None
    meter.start()
    for step, window in enumerate(windows(data, 0, meter.total), 1):
        total = torch.zeros((), device=build.torch_device)
        for batch in window.micro_batches:
            with torch.autocast(device.kind, dtype, enabled=dtype is not None):
                loss = _loss_sum(model, batch.to(build.torch_device)) / window.count
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        if recipe.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if recipe.empty_cache_steps and step % recipe.empty_cache_steps == 0:
            torch.cuda.empty_cache()
        meter.end(total.item())
    return meter.read()


def _loss_sum(model: nn.Module, batch: TensorBatch) -> Tensor:
    """A micro-batch's summed loss; the logits are let go on return, where the loop would hold them until the next."""
    weights = next(model.parameters()).dtype
    return loss_sum(logits_of(model(**model_arguments(batch, weights))), batch.labels)
