"""tightfit's techniques in a plain PyTorch loop of your own.

`global_batches` is any iterable of global batches; each is a list of (input_ids, labels) micro-batches, labels aligned
with the logits and -100 where nothing counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit

RECIPE = {
    "precision": "fp32", "attention": "sdpa", "checkpointing": "every-block", "compile": "off", "optimizer": "adamw",
    "batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
}


def train(
    model: nn.Module, recipe: dict[str, object], global_batches: Iterable[list[tuple[Tensor, Tensor]]]
) -> list[float]:
    """Train on every global batch; return each one's mean loss."""
    applied = tightfit.apply(model, recipe)
    losses = []
    with applied.settings():
        for global_batch in global_batches:
            count = sum((labels != -100).sum() for _, labels in global_batch)
            total = 0.0
            for input_ids, labels in global_batch:
                logits = applied.model(input_ids=input_ids).logits
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
                loss.backward()
                total += loss.item()
                del logits, loss
            nn.utils.clip_grad_norm_(applied.model.parameters(), 1.0)
            applied.optimizer.step()
            applied.optimizer.zero_grad()
            losses.append(total)
    return losses


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=256, n_positions=64))
    ids = torch.randint(0, 256, (2, 65))
    global_batch = [(ids[:, :-1], ids[:, 1:])] * 4
    print(train(model, RECIPE, [global_batch] * 10))


if __name__ == "__main__":
    main()
