"""The size of a recipe's model: parameters and floating-point operations, from its modules on the meta device.

No weight is allocated and nothing is computed: the model's own forward pass runs on shapes. Techniques are not applied:
what they replace would no longer be counted.
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

from tightfit.backends.base import ModelSize
from tightfit.backends.pytorch.models import build_model, parameter_count
from tightfit.models import model_facts
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

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
    flops = values = 0
    with suppress(Exception):  # a model's own code raises anything where it meets a tensor without values
        flops, values = _passed(
            model, {name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="meta")
                    for name, s in inputs.items()}
        )  # fmt: skip
    return ModelSize(parameters=parameter_count(model), flops=flops, values=values)


def _passed(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, int]:
    """FLOPs of training, and values made, of one forward pass."""
    made = _Made()
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter, made:
        model(**inputs)
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
