"""Tiny mixtures of experts, their steps, and their routers' losses computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.architectures import VOCAB
from tests.backends.test_exactness import collate, rows
from tests.plain import CPU, PLAIN
from tightfit.backends.base import StepResult
from tightfit.backends.pytorch.assembly import apply_techniques, bare_build
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch, tensor_global_batch
from tightfit.backends.pytorch.experts.routing import find_routers
from tightfit.backends.pytorch.step import Step
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, MicroBatch, global_batch_of

_SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCAB,
    "num_key_value_heads": 2, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("OlmoeConfig", {"num_experts": 6}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "every other layer": ("Qwen3MoeConfig", {
        "num_experts": 6, "moe_intermediate_size": 24, "head_dim": 8, "decoder_sparse_step": 2, "norm_topk_prob": True,
    }),
    "shared expert": ("Qwen2MoeConfig", {
        "num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
    }),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8}),
}
COEFFICIENTS = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.05}
RATE = 1e4
"""A learning rate beside which weights are nothing, so that they show the gradient."""
WHOLE, THIRDS, SINGLES = (6,), (2, 2, 2), (1,) * 6
"""Rows of each micro-batch."""


def moe_model(name: str | tuple[str, dict[str, Any]], **changes: Any) -> nn.Module:
    """A tiny mixture of experts with seeded weights: a case, or a configuration's class and numbers."""
    torch.manual_seed(0)
    config, numbers = CONFIGS[name] if isinstance(name, str) else name
    made = getattr(transformers, config)(**{**_SMALL, **numbers, **changes})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for router in find_routers(model):  # which prefer some experts
            router.module.get_parameter("weight").mul_(20.0)
    return model


def moe_step(name: str, model: nn.Module | None = None, **fields: Any) -> Step:
    recipe = Recipe.from_dict({
        **PLAIN, "attention": "eager", "task": "causal-lm", "batch_size": 6, "micro_batch_size": 2, "seq_len": 24,
        "max_grad_norm": 0.0, "optimizer": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}, **COEFFICIENTS,
        **fields,
    })  # fmt: skip
    model = moe_model(name) if model is None else model
    return Step(apply_techniques(bare_build(recipe, CPU, torch.device("cpu"), model)))


def ragged(split: tuple[int, ...], seed: int = 0) -> TensorGlobalBatch:
    """Six rows of unequal length, padded in micro-batches of these sizes."""
    left, parts = rows("causal-lm", seed=seed), []
    for size in split:
        made, lengths = collate(left[:size], "causal-lm"), [len(row["input_ids"]) for row in left[:size]]
        padding = np.arange(made.labels.shape[1]) < np.array(lengths)[:, None]
        parts.append(replace(made, mask="padded", padding=padding))
        left = left[size:]
    return tensor_global_batch(global_batch_of(tuple(parts)))


def packed(seed: int = 0) -> TensorGlobalBatch:
    """The same rows as documents of one row, without padding."""
    found = rows("causal-lm", seed=seed)
    lengths = [len(row["input_ids"]) for row in found]
    inputs = {"input_ids": np.concatenate([row["input_ids"] for row in found])[None],
              "position_ids": np.concatenate([np.arange(length) for length in lengths])[None]}
    made = MicroBatch(inputs=inputs, labels=np.concatenate([row["labels"] for row in found])[None], mask="packed",
                      document_ids=np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32))
    return tensor_global_batch(global_batch_of((made,)))


def gradients(step: Step, batch: TensorGlobalBatch) -> tuple[dict[str, Tensor], StepResult]:
    """The gradients that a step learns from, and its result."""
    before = {name: p.detach().double() for name, p in step.build.model.named_parameters()}
    result = step(batch, RATE).read()
    step.update.flush()
    return {name: (before[name] - p.detach()) / RATE for name, p in step.build.model.named_parameters()}, result


def losses_by_hand(model: Any, batch: TensorBatch, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, balance loss and z-loss of a batch, from the logits that transformers records."""
    found = model(**batch.inputs, output_router_logits=True, use_cache=False)
    cross_entropy = F.cross_entropy(found.logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
    balances, zs = [], []
    for logits in found.router_logits:
        real = logits if batch.padding is None else logits[batch.padding.flatten()]
        probabilities = real.softmax(-1)
        taken = F.one_hot(probabilities.topk(chosen, dim=-1).indices, real.shape[-1]).float()
        balances.append(real.shape[-1] * (taken.mean((0, 1)) * probabilities.mean(0)).sum())
        zs.append(real.logsumexp(-1).square().mean())
    return cross_entropy, torch.stack(balances).mean(), torch.stack(zs).mean()
