"""The function that computes a mixture of experts, and the name of the one that ran.

It takes the place of transformers' `grouped_mm`: tokens are sorted by expert, and each expert's are one group of one
product. That one multiplies in the format of the weights whatever autocast says, writes into tensors that selective
checkpointing has kept, and copies what it has made twice, for a division of experts among devices; its gradients are
summed in no fixed order on a GPU. Ours casts as autocast casts for linear layers, and sums a token's experts in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tightfit.recipe import Recipe

HF_GROUPED_MM = "grouped_mm"
"""transformers' name of the function that sorts tokens by expert and multiplies each expert's in one group."""
OUR_GROUPED_MM = "tightfit_grouped_mm"
FUNCTION_BY_OP = {"aten::_grouped_mm": HF_GROUPED_MM, "transformers::grouped_mm_fallback": "a loop over experts"}
"""Names of the functions, by an op that only that function runs."""


def use_ours(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """Let our function compute the model's experts where transformers' `grouped_mm` would. Returns notes on how it runs
    by this recipe."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(OUR_GROUPED_MM, grouped_experts)
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) and part.config._experts_implementation == HF_GROUPED_MM:
            part.config._experts_implementation = OUR_GROUPED_MM
    if not recipe.compiled or recipe.precision == "auto" or recipe.precision.activations_in == "bfloat16":
        return ()
    return ("compile: torch compiles grouped products in bf16 alone; blocks with experts run in part or whole "
            "uncompiled, so write precision=bf16, or compile=off",)


def grouped_experts(experts: Any, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """The experts' output for each token, (tokens, width). hidden: (tokens, width). indices, scores: (tokens, k)."""
    kind, given = hidden.device.type, hidden.dtype
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else experts.down_proj.dtype
    with torch.autocast(kind, enabled=False):
        expert, order = indices.reshape(-1).sort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        counts = torch.zeros(experts.num_experts, dtype=torch.int32, device=order.device)
        ends = counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        rows = _Spread.apply(hidden.to(dtype), order, back, indices.shape[-1])  # type: ignore[no-untyped-call]
        inner = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, expert, ends)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        made = _product(experts, "down_proj", inner, expert, ends)
        made = made * scores.to(dtype).reshape(-1)[order].unsqueeze(-1)
        output: Tensor = _Gather.apply(made, order, back, indices.shape[-1])  # type: ignore[no-untyped-call]
    return output if torch.is_autocast_enabled(kind) else output.to(given)


def _product(experts: Any, name: str, rows: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """Rows times their experts' weights of that name. expert: (rows,), rising. ends: where each expert's rows end."""
    weight = getattr(experts, name).to(rows.dtype)
    weight = weight if experts.is_transposed else weight.transpose(-2, -1)
    product: Tensor
    if _has_grouped_product(weight):
        product = F.grouped_mm(rows, weight, offs=ends)
    else:
        product = torch.ops.transformers.grouped_mm_fallback(rows, weight, offs=ends)
    if not experts.has_bias:
        return product
    bias: Tensor = getattr(experts, f"{name}_bias").to(rows.dtype)
    return product + bias[expert]


def _has_grouped_product(weight: Tensor) -> bool:
    """Whether torch has a grouped product for it: on GPUs from Ampere on; compiled, in bf16 alone; of rows, its own and
    the results', that begin at multiples of 16 bytes."""
    if torch.compiler.is_compiling() and weight.dtype != torch.bfloat16:
        return False
    if any(side * weight.element_size() % 16 for side in weight.shape[-2:]):
        return False
    return weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) >= (8, 0)


class _Spread(torch.autograd.Function):
    """Each token's row k times, in the order of experts: (tokens, width) to (tokens * k, width)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return tokens[order // k]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return gradients[0][back].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Gather(torch.autograd.Function):
    """The sum of each token's k rows: (tokens * k, width), in the order of experts, to (tokens, width)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        summed: Tensor = rows[back].unflatten(0, (-1, k)).sum(1)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradients[0][order // ctx.k], None, None, None


def function_names(model: nn.Module, ops: Iterable[str]) -> tuple[str, ...]:
    """Names of the functions that computed a model's experts in a forward pass that ran these ops."""
    kinds = {str(part.config._experts_implementation).replace(OUR_GROUPED_MM, HF_GROUPED_MM) for part in model.modules()
             if isinstance(part, transformers.PreTrainedModel)}
    found = dict.fromkeys(FUNCTION_BY_OP[op] for op in ops if op in FUNCTION_BY_OP)
    return tuple(found) if HF_GROUPED_MM in kinds else tuple(sorted(kinds - {"None"}))
