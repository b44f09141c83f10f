"""From a recipe to a build: the model, then every technique in the fixed order of the slots."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel

from tightfit.backends.base import absences
from tightfit.backends.pytorch.apply import ABSENT, APPLY
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.checkpoints import require_formats
from tightfit.backends.pytorch.experts import has_experts
from tightfit.backends.pytorch.models import build_model, cast_weights, logits_of, ready_to_train
from tightfit.backends.pytorch.padding import pad_vocab
from tightfit.backends.pytorch.saved_model import is_wrapped_by_peft
from tightfit.backends.pytorch.techniques.precision import weight_dtype
from tightfit.devices import Device
from tightfit.errors import ModelError, Refused
from tightfit.model_facts import model_facts, module_facts
from tightfit.models import read_config
from tightfit.recipe import Recipe
from tightfit.recipe.model_defaults import inner_module
from tightfit.tasks import get_task
from tightfit.techniques import SLOTS, default_for_slot

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def assemble(
    recipe: Recipe, device: Device, torch_device: torch.device, model: nn.Module | None = None,
    change: Callable[[Build], Build] | None = None, config: Any = None,
) -> Build:
    """The model with every technique of a resolved recipe applied.

    device: what the techniques are chosen for. torch_device: where tensors are made: the device itself, or the CPU
        where the step is to run on fake tensors.
    model: a module of the caller's own, instead of what `recipe.model` names.
    change: what to do to the build before the techniques are applied.
    config: the recipe's model's configuration, where it was read before.
    Raises Refused with all reasons where a technique cannot serve.
    """
    reasons = [*recipe.refusals(device), *absences(recipe, ABSENT)]
    if reasons:
        raise Refused("; ".join(reasons))
    build = bare_build(recipe, device, torch_device, model, config)
    return apply_techniques(build if change is None else change(build))


def bare_build(
    recipe: Recipe, device: Device, torch_device: torch.device, model: nn.Module | None = None, config: Any = None
) -> Build:
    """The model on its device, with no technique applied yet but the format of its weights."""
    task, dtype = get_task(recipe.task), weight_dtype(recipe.precision)
    if recipe.trainable.adapts or recipe.frozen_base.quantizes:
        dtype = getattr(torch, recipe.frozen_base.format(recipe))
    where = torch.device("cpu") if made_on_host(recipe) else torch_device
    notes: tuple[str, ...] = ()
    own_model = model is not None
    if model is None:
        config = read_config(recipe) if config is None else config
        facts = model_facts(recipe, config)
        model, notes = build_model(recipe, task, where, dtype, config, torch_device)
    else:
        require_changeable(model)
        model, notes = _plain_module(model)
        facts = module_facts(model, recipe)
        if dtype != torch.float32 or any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
            cast_weights(model, dtype)  # before it moves, so that the device never holds it wider
        if not any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):  # those are there already
            _require_weights(model)
            model = model.to(where)
            if task.predicts == "next" and recipe.mode == "train" and _sees_later_tokens(model):
                notes = (*notes, f"model: {type(model).__name__} sees the tokens that it is to predict, so that its "
                                 f"loss says nothing; make it causal, or write another task than {task.name}")
        model = ready_to_train(model, recipe)
    require_formats(model)
    if recipe.mode == "train" and has_experts(model):
        # Only whoever has experts pays for it.
        from tightfit.backends.pytorch.experts.functions import use_ours

        notes = (*notes, *use_ours(model, recipe))
    norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    if recipe.mode == "train" and norms and recipe.micro_batch_size != recipe.batch_size:
        of_one = (f"accumulation: {norms[0]} normalises over each micro-batch by itself, so that results follow "
                  f"micro_batch_size; write micro_batch_size={recipe.batch_size} for those of the global batch")
        notes = (*notes, of_one)
    if recipe.pad_vocab_to:
        pad_vocab(model, recipe.pad_vocab_to, facts.vocab_size)
    build = Build(recipe=recipe, device=device, torch_device=torch_device, task=task, facts=facts, model=model,
                  stacks=find_stacks(model), own_model=own_model, notes=notes)  # fmt: skip
    if recipe.mode == "train" and has_experts(model):
        from tightfit.backends.pytorch.experts.routing import balance_note  # for these alone

        build = replace(build, notes=(*build.notes, *balance_note(build)))
    if not recipe.deterministic:
        return build
    from tightfit.backends.pytorch.determinism import deterministic_ops  # for these alone

    return replace(build, settings=(deterministic_ops,))


def require_changeable(model: nn.Module) -> None:
    """Raise ModelError for a module of the caller's own that no technique can be applied to."""
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(f"model: {name} is a TorchScript module, which nothing can be changed in; give the module "
                         "that it was made from")
    if lazy := next((path for path, each in model.named_parameters() if is_lazy(each)), None):
        raise ModelError(f"model: {lazy} of {name} has no shape yet, as in torch.nn.LazyLinear; call the module once, "
                         "on one batch, before you give it")


def _require_weights(model: nn.Module) -> None:
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(f"model: {path} of {type(model).__name__} is on the meta device, which holds no values; "
                             "build the module on the CPU, or call its to_empty(device='cpu') and load its weights")


def _plain_module(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The caller's module, without what torch.compile put around it, and what is to be known of it, as sentences."""
    notes: list[str] = []
    if (plain := getattr(model, "_orig_mod", model)) is not model:
        model = plain
        notes.append("compile: what torch.compile put around the module is left off; compile=per-block compiles it")
    inner = inner_module(model)
    if is_wrapped_by_peft(model):
        from tightfit.backends.pytorch.techniques.adapters.layers import call_layers  # for these alone

        call_layers(model)
    forward = type(inner).forward
    own_code = inspect.isfunction(forward) and not forward.__module__.startswith("transformers")
    if "_loss_function" in vars(inner) or (own_code and "labels" in inspect.signature(forward).parameters):
        notes.append(f"model: a loss of {type(inner).__name__}'s own is not used, nor is it given labels; the loss is "
                     "the cross-entropy of its logits")
    return model, tuple(notes)


def _sees_later_tokens(model: nn.Module) -> bool:
    """Whether a position's logits change with a later token; False where the model cannot be asked, as one that is not
    transformers' cannot: a forward pass may be more to it than its result."""
    if not isinstance(inner_module(model), PreTrainedModel):
        return False
    device = next(model.parameters(), torch.empty(0)).device
    padding = (0, getattr(inner_module(model).config, "pad_token_id", None))  # CpmAnt's is 0, without a name
    one, other = [token for token in (1, 2, 3) if token not in padding][:2]
    tokens, trains = torch.full((1, 4), one, device=device), model.training
    changed = tokens.clone()
    changed[0, -1] = other
    model.eval()
    try:
        with torch.no_grad():
            before, after = (logits_of(model(input_ids=ids))[:, :-1].float() for ids in (tokens, changed))
    except Exception:  # of a subclass's own code: the first step says what is wrong
        return False
    finally:
        model.train(trains)
    return before.shape == after.shape and not torch.allclose(before, after, rtol=1e-5, atol=1e-5)


def made_on_host(recipe: Recipe) -> bool:
    """Whether weights wait in host memory, the device gets a part of them, or they become smaller on their way to it:
    it may not hold them all."""
    return bool(recipe.parallel.shards or recipe.offloaded.keeps_weights or recipe.frozen_base.quantizes)


def apply_techniques(build: Build) -> Build:
    """Every technique of the recipe, applied in the fixed order of the slots."""
    named = {slot: getattr(build.recipe, slot) for slot in SLOTS}
    techniques = [default_for_slot(build.recipe, build.device, slot) if technique == "auto" else technique
                  for slot, technique in named.items()]
    build = reduce(lambda sofar, technique: APPLY[type(technique)](technique, sofar), techniques, build)
    notes = (note for technique in techniques for note in technique.notes(build.recipe, build.device))
    return replace(build, notes=(*build.notes, *notes))
