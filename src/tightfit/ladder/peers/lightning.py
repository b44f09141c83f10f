"""Lightning's Trainer over a module such as its users write."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tightfit.backends.base import Timings
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.errors import memory_guard
from tightfit.backends.pytorch.measure.meter import Meter
from tightfit.backends.pytorch.models import logits_of
from tightfit.backends.pytorch.techniques.loading import loading
from tightfit.data.loading import GlobalBatchLoader
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, Refused
from tightfit.ladder.peers.plain import (
    bare,
    checkpoint_blocks,
    compile_model,
    loss_sum,
    make_optimizer,
    model_arguments,
    settings,
    training_data,
    whole_steps,
)
from tightfit.recipe import Recipe
from tightfit.techniques.precision import Fp16

MicroBatch = tuple[dict[str, Tensor], Tensor, int]
"""The model's arguments, the labels, and the number of labels in the whole step."""

PRECISION = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "bf16-pure": "bf16-true"}


def run(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """Take the recipe's steps with Lightning's Trainer. Raises Refused, MissingLibrary, OutOfMemory."""
    if importlib.util.find_spec("lightning") is None:
        raise MissingLibrary("lightning", "the peer lightning", "lightning")
    if isinstance(recipe.precision, Fp16) and device.kind == "cpu":
        raise Refused("precision: Lightning has no fp16 on a processor; write precision=bf16")
    meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed)
    with (
        memory_guard(lambda: "Lightning's Trainer"), settings(recipe, device),
        tempfile.TemporaryDirectory(prefix="tightfit-lightning-") as folder,
    ):  # fmt: skip
        _train(recipe, device, meter, folder)
    return meter.read()


def _train(recipe: Recipe, device: Device, meter: Meter, folder: str) -> None:
    data, build = training_data(recipe), bare(recipe, device)
    checkpoint_blocks(build)
    micro = recipe.micro_batch_size
    assert micro != "auto"
    assert recipe.precision != "auto"
    each = -(-recipe.batch_size // micro)
    whole_steps(data, recipe, meter.total, "Lightning")
    pl: Any = import_module("lightning.pytorch")
    module, clock = _module(pl, build, each, meter)
    trainer = pl.Trainer(
        accelerator="gpu" if device.kind == "cuda" else "cpu", devices=1, precision=PRECISION[recipe.precision.name],
        max_steps=meter.total, accumulate_grad_batches=each, gradient_clip_val=recipe.max_grad_norm or None,
        callbacks=[clock], default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, _MicroBatches(build, data, meter.total, each))


class _MicroBatches:
    """Each micro-batch of the first `steps` steps."""

    def __init__(self, build: Build, data: GlobalBatchLoader, steps: int, each: int) -> None:
        self._build, self._data, self._steps, self._each = build, data, steps, each

    def __len__(self) -> int:
        return self._steps * self._each

    def __iter__(self) -> Iterator[MicroBatch]:
        global_batches = loading(self._build.recipe.loading, self._build).global_batches
        weights = next(self._build.model.parameters()).dtype
        assert global_batches is not None
        for global_batch in global_batches(self._data, 0, self._steps):
            for batch in global_batch.micro_batches:
                yield model_arguments(batch, weights), batch.labels, global_batch.count


def _module(pl: Any, build: Build, each: int, meter: Meter) -> tuple[Any, Any]:
    """The model as a module of Lightning's, and the callback that times its steps. each: micro-batches a step."""
    parts: list[Tensor] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = compile_model(build)

        def training_step(self, batch: MicroBatch, number: int) -> Tensor:
            arguments, labels, count = batch
            loss = loss_sum(logits_of(self.model(**arguments)), labels) / count
            parts.append(loss.detach())
            return loss * each  # which Lightning divides by: it takes micro-batches to be of one size

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(build.recipe, build.model)

    class Clock(pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number == 0:
                meter.start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if len(parts) < each:
                return
            every = build.recipe.empty_cache_steps
            if every and (number + 1) // each % every == 0:
                torch.cuda.empty_cache()
            loss = torch.stack(parts).sum().item()
            parts.clear()
            meter.end(loss)

    return Module(), Clock()
