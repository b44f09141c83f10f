"""The size of a recipe's model: parameters and floating-point operations, from its modules on the meta device.

No weight is allocated and nothing is computed: the model's own forward pass runs on shapes. Techniques are not applied,
for what they replace would no longer be counted, but the one that says what is trained.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tightfit.backends.measurements import ModelSize
from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.experts import parameters_met
from tightfit.backends.pytorch.models import build_model, logits_of, parameter_count
from tightfit.devices import Device
from tightfit.model_facts import ModelFacts, model_facts
from tightfit.recipe import Recipe
from tightfit.tasks import Task, get_task

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


def model_size(recipe: Recipe, config: Any = None) -> ModelSize:
    """The size of the model that a recipe names, for its task. config: the model's, where it was read before; it stays
    as it is. Raises ModelError for a model that cannot be built."""
    task, facts = get_task(recipe.task), model_facts(recipe, config)
    recipe = recipe.model_copy(update={"pretrained": False, "pad_vocab_to": None})
    with torch.random.fork_rng([]):
        model = build_model(recipe, task, "meta", config=deepcopy(config)).model.eval()
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):  # T5's decoder, for one, has a configuration of its own
            part.config._attn_implementation = "eager"
            part.config._experts_implementation = "batched_mm"  # which does not ask where tokens go
    inputs = task.batch_spec(1, recipe.seq_len, facts).inputs
    parameters, flops, values = parameter_count(model), 0, 0
    if recipe.trainable.freezes:
        _freeze(model, recipe, task, facts)
    with suppress(Exception):  # a model's own code raises anything where it meets a tensor without values
        flops, values = _passed(
            model, {name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="meta")
                    for name, s in inputs.items()}
        )  # fmt: skip
    return ModelSize(
        parameters=parameters, active_parameters=parameters_met(model), flops=flops, values=values,
    )


def _freeze(model: nn.Module, recipe: Recipe, task: Task, facts: ModelFacts) -> None:
    """Let the model require those gradients alone that the recipe's step does."""
    build = Build(recipe=recipe, device=Device(kind="cpu", name="", memory_bytes=0), torch_device=torch.device("meta"),
                  task=task, facts=facts, model=model, stacks=find_stacks(model))
    technique = recipe.trainable.counted
    APPLY[type(technique)](technique, build)


def _passed(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, int]:
    """FLOPs of training, and values made, of one forward pass; of a model with frozen weights by its own backward
    pass, which makes no gradients of those."""
    made, frozen = _Made(), not all(parameter.requires_grad for parameter in model.parameters())
    with torch.set_grad_enabled(frozen), torch.device("meta"), FlopCounterMode(display=False) as counter:
        with made:
            output = model(**inputs)
        if frozen:
            logits_of(output).float().sum().backward()
            return counter.get_total_flops(), made.values
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    raw = counts.get(torch.ops.aten.convolution, 0)  # of pixels, whose gradient nobody asks for
    return 3 * counter.get_total_flops() - raw, made.values


class _Made(TorchDispatchMode):
    """Counts the values of every result that is no view. Whoever reads a value is answered as where a check finds
    everything right."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            return True if args[0].dtype == torch.bool else 1
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.values += sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
        return result
