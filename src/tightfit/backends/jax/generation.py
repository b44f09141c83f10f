"""A sample of text from a model in training: no cache, and one compilation for every length."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from tightfit.backends.jax.build import Build
from tightfit.backends.jax.forward import logits
from tightfit.backends.jax.network import Params


def generate(
    build: Build, params: Params, prompt: Sequence[int], new_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Token ids sampled one by one after `prompt`, each from the last `seq_len` tokens.

    temperature: divides the logits; 0 takes the likeliest. seed: of this sample alone.
    """

    def next_logits(params: Params, ids: jax.Array, place: jax.Array) -> jax.Array:
        return logits(build, params, {"input_ids": ids})[0, place]

    random, tokens, context = np.random.default_rng(seed), list(prompt), build.recipe.seq_len
    predict = None
    for _ in range(new_tokens):
        seen = tokens[-context:]
        ids = np.zeros((1, context), np.int32)  # what follows the last real token is not seen by it
        ids[0, : len(seen)] = seen
        given = jax.device_put((ids, np.int32(len(seen) - 1)), build.replicated)
        if predict is None:
            lowered = jax.jit(next_logits, out_shardings=build.replicated).lower(params, *given)
            predict = lowered.compile(compiler_options=build.compiler_options)
        scores = np.asarray(predict(params, *given), np.float64)
        if temperature:
            likely = np.exp((scores - scores.max()) / temperature)
            tokens.append(int(random.choice(len(likely), p=likely / likely.sum())))
        else:
            tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]
