"""A sample of text from a model in training: no cache, and one compilation for every length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from tightfit.backends.jax.build import Build
from tightfit.backends.jax.forward import logits
from tightfit.backends.jax.network import Params

Predict = Callable[[Params, jax.Array, jax.Array], jax.Array]
"""(params, token ids (1, seq_len), the place of the last real one) -> what it predicts, (outputs,)."""


def next_logits(build: Build, params: Params) -> Predict:
    """The model's prediction of the next token, compiled."""

    def found(params: Params, ids: jax.Array, place: jax.Array) -> jax.Array:
        return logits(build, params, {"input_ids": ids})[0, place]

    def struct(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=build.replicated)

    ids = struct("int32", 1, build.recipe.seq_len)
    lowered = jax.jit(found, out_shardings=build.replicated).lower(params, ids, struct("int32"))
    predict: Predict = lowered.compile(compiler_options=build.compiler_options)
    return predict


def generate(
    build: Build, params: Params, prompt: Sequence[int], new_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Token ids sampled one by one after `prompt`, each from the last `seq_len` tokens.

    temperature: divides the logits; 0 takes the likeliest. seed: of this sample alone.
    """
    random, tokens, context = np.random.default_rng(seed), list(prompt), build.recipe.seq_len
    predict, place = next_logits(build, params), build.replicated
    for _ in range(new_tokens):
        seen = tokens[-context:]
        ids = np.zeros((1, context), np.int32)  # what follows the last real token is not seen by it
        ids[0, : len(seen)] = seen
        found = predict(params, jax.device_put(ids, place), jax.device_put(np.int32(len(seen) - 1), place))
        scores = np.asarray(found, np.float64)
        if temperature:
            likely = np.exp((scores - scores.max()) / temperature)
            tokens.append(int(random.choice(len(likely), p=likely / likely.sum())))
        else:
            tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]
