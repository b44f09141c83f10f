"""The Hugging Face Trainer, with the arguments that say what a recipe says."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from tightfit.backends.measurements import Timings
from tightfit.backends.pytorch.batch import tensor_batch
from tightfit.backends.pytorch.errors import memory_guard
from tightfit.backends.pytorch.measure.meter import Meter
from tightfit.backends.pytorch.models import logits_of
from tightfit.backends.pytorch.techniques.attention.arguments import passes_arguments_on
from tightfit.data.samples import Samples
from tightfit.devices import Device
from tightfit.errors import MissingLibrary, Refused
from tightfit.ladder.peers import plain
from tightfit.recipe import Recipe
from tightfit.recipe.hf_arguments.conversion import plain_arguments, uneven_batch
from tightfit.techniques.compile import PerBlock
from tightfit.techniques.optimizer import Adafactor, AdamWAnyPrecision, Lion
from tightfit.techniques.precision import Fp16
from tightfit.training.session import training_global_batches

ALONE = {
    "lr_scheduler_type": "constant", "warmup_steps": 0, "eval_strategy": "no", "save_strategy": "no",
    "logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False,
    "train_sampling_strategy": "sequential",
}  # fmt: skip
"""Steps and nothing else, over the samples in the order in which they are given."""

Sample = tuple[int, int]
"""The number of a sample, and the epoch that shows it."""


def run(recipe: Recipe, device: Device, warm_up: int, steps: int) -> Timings:
    """Take the recipe's steps with the Trainer.

    Raises Refused for what no argument says, MissingLibrary, OutOfMemory.
    """
    try:
        from accelerate.utils import patch_environment, purge_accelerate_environment
    except ImportError:
        raise MissingLibrary("accelerate", "the Hugging Face Trainer") from None
    if isinstance(recipe.optimizer, Lion) and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingLibrary("bitsandbytes", "the Hugging Face Trainer's Lion")
    if reasons := _unsaid(recipe, device):
        raise Refused("; ".join(reasons))
    meter = Meter(torch.device(device.kind), warm_up=warm_up, steps=steps, seed=recipe.seed)
    with (
        memory_guard(lambda: "the Hugging Face Trainer"), plain.named_kernel(recipe),
        patch_environment(accelerate_dynamo_use_regional_compilation=isinstance(recipe.compile, PerBlock)),
        tempfile.TemporaryDirectory(prefix="tightfit-trainer-") as folder,
    ):  # fmt: skip
        arguments = {**_arguments(recipe, device), "max_steps": meter.total, "output_dir": folder}
        purge_accelerate_environment(_train)(recipe, device, meter, arguments)  # it leaves variables behind
    return meter.read()


def _unsaid(recipe: Recipe, device: Device) -> list[str]:
    """Sentences on what no argument says."""
    assert recipe.precision != "auto"
    reasons = [uneven_batch(recipe), plain.rounding_refused(recipe, "the Trainer's")]
    if isinstance(recipe.precision, Fp16) and device.kind == "cpu":
        reasons.append("precision: fp16 has no effect in the Trainer on a processor; write precision=bf16")
    if isinstance(recipe.optimizer, AdamWAnyPrecision):
        reasons.append("optimizer: the Trainer takes it from torchdistx, which is no longer made; write adamw")
    elif "optim" not in _arguments(recipe, device):
        reasons.append("optimizer: the Trainer has no argument for it with these knobs; write optimizer=adamw, or the "
                       "default implementation and block_size")
    return list(filter(None, reasons))


def _arguments(recipe: Recipe, device: Device) -> dict[str, Any]:
    """The TrainingArguments that say how the recipe's steps are taken."""
    # `adamw_torch` is what torch does by default, foreach on a GPU and one parameter at a time on a processor: the same
    # update, so that a recipe of foreach need not be refused there.
    changes: dict[str, Any] = {"device": "auto"}
    if isinstance(recipe.optimizer, Adafactor):
        changes["optimizer"] = replace(recipe.optimizer, scale_parameter=False)
    written = plain_arguments(recipe.model_copy(update=changes))
    if recipe.weight_rounding == "stochastic":
        written["optim_args"] = "bf16_stochastic_round=True"
    on_cpu = device.kind == "cpu"
    return {**written, **ALONE, "use_cpu": on_cpu, "dataloader_pin_memory": recipe.loading.pin_memory and not on_cpu}


def _train(recipe: Recipe, device: Device, meter: Meter, arguments: dict[str, Any]) -> None:
    data, build = training_global_batches(recipe), plain.bare(recipe, device)
    steps = [data.chosen(step) for step in range(meter.total)]
    model = build.model
    if not isinstance(model, transformers.PreTrainedModel) and arguments.pop("gradient_checkpointing", False):
        arguments.pop("gradient_checkpointing_kwargs", None)
        plain.checkpoint_blocks(build)
    shifts = recipe.task == "causal-lm" and _shifts_labels(model)
    # Many a model takes the mean over its micro-batch, whatever the step's other ones hold, and the Trainer adds those.
    alone = arguments["gradient_accumulation_steps"] == 1
    own = isinstance(model, transformers.PreTrainedModel) and (shifts or alone) and not recipe.label_smoothing_factor

    def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return plain.loss_sum(logits_of(outputs), labels, recipe) / num_items_in_batch

    written = transformers.TrainingArguments(**arguments)
    written._n_gpu = 1  # with two cards it would split each micro-batch over both
    trainer = _Trainer(
        _Clock(meter), model, written,
        train_dataset=[(int(number), epoch) for chosen, epoch in steps for number in chosen],
        data_collator=partial(_collated, data.samples, next(model.parameters()).dtype, shifts),
        compute_loss_func=None if own else mean_loss,
        optimizer_cls_and_kwargs=_adafactor(recipe),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


class _Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Times each step by the meter. parts: each micro-batch's part of the loss of the step under way."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.parts: list[Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # and not where training begins: the data loader's start draws a random number
            self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = torch.stack(self.parts).sum().item()
        self.parts.clear()
        self.meter.end(loss)


class _Trainer(transformers.Trainer):  # type: ignore[misc]
    """The Trainer, with each micro-batch's part of the loss kept for the clock."""

    def __init__(self, clock: _Clock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[clock], **kwargs)
        self.clock = clock

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.clock.parts.append(loss)
        return loss


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the model's own loss takes labels that are shifted already, and the number of the whole step's."""
    return passes_arguments_on(model) and getattr(model, "loss_function", None) is ForCausalLMLoss


def _collated(samples: Samples, weights: torch.dtype, shifted: bool, chosen: Sequence[Sample]) -> dict[str, Tensor]:
    """The micro-batch of these samples, which lie in one epoch."""
    numbers, epochs = zip(*chosen, strict=True)
    batch = tensor_batch(samples.batch(np.array(numbers), epochs[0]))
    labels = {"labels": batch.labels, **({"shift_labels": batch.labels} if shifted else {})}
    return {**plain.model_arguments(batch, weights), **labels}


def _adafactor(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """transformers' Adafactor with steps relative to each matrix's size where the recipe's are, which no `optim`
    says."""
    if not isinstance(recipe.optimizer, Adafactor):
        return None
    options = {"lr": recipe.learning_rate, "scale_parameter": recipe.optimizer.scale_parameter, "relative_step": False}
    return transformers.optimization.Adafactor, options
