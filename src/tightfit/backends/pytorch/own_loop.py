"""`tightfit.apply`: a recipe's techniques for people who keep their own loop."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build, no_mask
from tightfit.backends.pytorch.techniques.loss.of_logits import LOSS_OF_LOGITS
from tightfit.errors import RecipeError, Refused
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import as_recipe

ACCELERATE = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}
"""Accelerate's names of what autocast casts to."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Applied:
    """A model and its optimizer with a recipe's techniques applied, and what the recipe asks of the loop itself.

    accelerator_kwargs: for `accelerate.Accelerator(**kwargs)`: mixed precision and accumulation, so that they are
        done there and nowhere twice.
    left_to_you: the same and the rest, as sentences, for a loop without Accelerate.
    """

    model: nn.Module
    optimizer: Optimizer
    accelerator_kwargs: dict[str, Any]
    left_to_you: tuple[str, ...]
    build: Build

    def __repr__(self) -> str:
        left = ", ".join(sentence.partition(":")[0] for sentence in self.left_to_you)
        return f"<Applied: {type(self.model).__name__}, {type(self.optimizer).__name__}; left to you: {left or 'none'}>"

    def loss_sum(self, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        """The recipe's loss of a micro-batch: the summed cross-entropy of the labels that are not -100, a scalar.

        inputs: the model's arguments by name, without labels. labels: int64, (B, T) aligned with the logits. Autocast
        is the caller's.
        """
        build = replace(self.build, model=self.model, forward_contexts=(), mask_arguments=no_mask)
        return build.loss_sum(TensorBatch(inputs=inputs, labels=labels))

    def settings(self) -> AbstractContextManager[None]:
        """Hold the process settings that the recipe asks for (tf32, SDPA kernels, a memory budget) around a loop."""
        return self.build.process_settings()


def apply(model: nn.Module, recipe: Recipe | dict[str, Any]) -> Applied:
    """Apply a recipe's techniques to `model` (in place) and make its optimizer; the loop stays the caller's.

    Autocast, loss scaling, accumulation, clipping and the learning-rate schedule are not applied: they are listed in
    `left_to_you`, and `accelerator_kwargs` hands the first three to Accelerate.

    A micro-batch that is `auto` is the global batch: how a loop splits it is its own matter.

    Raises RecipeError where a technique is still `auto`, and Refused where one cannot serve here.
    """
    recipe = as_recipe(recipe, model)
    if recipe.micro_batch_size == "auto":
        recipe = recipe.override(micro_batch_size=recipe.batch_size)
    if not recipe.backend.runs_torch:
        raise RecipeError(f"backend: {recipe.backend.name!r} has nothing to apply to a torch module; "
                          "write backend=pytorch")
    backend = PytorchBackend()
    device = backend.device(recipe)
    if open_fields := [field for field in recipe.open_choices() if field != "loss"]:  # the loop has one of its own
        gpu = ", gpu='cpu'" if device.kind == "cpu" else ""
        raise RecipeError(f"{', '.join(open_fields)}: still auto; write a value for each, or apply "
                          f"tightfit.plan(model, recipe{gpu}).recipe, which has one for each")
    if not recipe.parallel.one_device:
        raise Refused(f"parallel: {recipe.parallel.name} is a matter of the loop, such as Accelerate's, which prepares "
                      "the model for it; write parallel=none")
    build = backend.build(recipe, device, model)
    if build.calls_blocks:
        raise Refused("accumulation, update, offload: what works block by block needs tightfit's own step; write "
                      "accumulation=loop update=after-backward offload=none, or train with tightfit.Trainer")
    assert recipe.precision != "auto"
    accumulation = math.ceil(recipe.batch_size / recipe.resolved_micro_batch)
    dtype = recipe.precision.activations_in if recipe.precision.autocast else "float32"
    return Applied(
        model=build.model,
        optimizer=build.optimizer(),
        accelerator_kwargs={
            "mixed_precision": ACCELERATE[dtype],
            "gradient_accumulation_steps": accumulation,
            "cpu": build.torch_device.type == "cpu",
        },
        left_to_you=_left_to_you(recipe, build, dtype, accumulation),
        build=build,
    )


def _left_to_you(recipe: Recipe, build: Build, dtype: str, accumulation: int) -> tuple[str, ...]:
    kind = build.torch_device.type
    arguments = f" with {recipe.lr_scheduler_kwargs}" if recipe.lr_scheduler_kwargs else ""
    sentences = {
        f"autocast: with torch.autocast({kind!r}, dtype=torch.{dtype}) around the forward pass": dtype != "float32",
        f"loss scaling: torch.amp.GradScaler({kind!r})": build.loss_scaling,
        "loss: applied.loss_sum(inputs, labels), in chunks or compiled as the recipe says, over the number of labels "
        "that are not -100": build.loss is not LOSS_OF_LOGITS,
        f"accumulation: {accumulation} micro-batches of {recipe.micro_batch_size} a step, each one's summed loss "
        "divided by the number of labels in all of them": accumulation > 1,
        f"clipping: torch.nn.utils.clip_grad_norm_(model.parameters(), {recipe.max_grad_norm})": recipe.max_grad_norm,
        f"label smoothing: label_smoothing={recipe.label_smoothing_factor} of a cross-entropy of your own; "
        "applied.loss_sum has it": recipe.label_smoothing_factor,
        f"schedule: {recipe.lr_scheduler_type}{arguments}, {recipe.warmup} warm-up steps":
            recipe.lr_scheduler_type != "constant" or recipe.warmup,
        f"vocabulary: logits[..., :{build.facts.vocab_size}] before the loss; the rest is padding": recipe.pad_vocab_to,
        f"torch.cuda.empty_cache() every {recipe.empty_cache_steps} steps": recipe.empty_cache_steps,
        "process settings: with applied.settings() around the loop": build.settings,
    }
    return tuple(sentence for sentence, holds in sentences.items() if holds)
