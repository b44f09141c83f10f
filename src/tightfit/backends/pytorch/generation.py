"""A sample of text from a model in training: no cache, so that any causal model can give one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from tightfit.backends.pytorch.batch import TensorBatch
from tightfit.backends.pytorch.build import Build


@torch.no_grad()
def generate(build: Build, prompt: Sequence[int], new_tokens: int, temperature: float, seed: int) -> list[int]:
    """Token ids sampled one by one after `prompt`, each from the last `seq_len` tokens.

    temperature: divides the logits; 0 takes the likeliest. seed: of this sample alone; the run's random stream is not
    touched.
    """
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    context = build.recipe.seq_len
    build.model.eval()
    try:
        # Uncompiled, for each new length would be compiled anew.
        with torch.compiler.set_stance("force_eager") if build.recipe.compiled else nullcontext():
            for _ in range(new_tokens):
                ids = torch.tensor([tokens[-context:]], dtype=torch.int64, device=build.torch_device)
                with build.forward_context():
                    logits = build.logits(TensorBatch(inputs={"input_ids": ids}, labels=ids))[0, -1].float().cpu()
                if temperature:
                    likely = torch.softmax(logits / temperature, -1)
                    tokens.append(int(torch.multinomial(likely, 1, generator=random)))
                else:
                    tokens.append(int(logits.argmax()))
    finally:
        build.model.train()
    return tokens[len(prompt) :]
