"""Steps of tiny models, plain and with blocks streamed, over the same ragged global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.architectures import TASK_OF, tiny_model
from tests.backends.test_exactness import LONGEST, SHORTEST, micro_batches
from tests.plain import CPU, PLAIN
from tightfit.backends.base import StepResult
from tightfit.backends.pytorch.assembly import apply_techniques, bare_build
from tightfit.backends.pytorch.batch import TensorGlobalBatch, tensor_global_batch
from tightfit.backends.pytorch.step import Step
from tightfit.recipe import Recipe
from tightfit.tasks import global_batch_of

SPLITS = ((2, 2, 2), (1, 3, 2), (6,), (2, 1, 1, 2))
"""Rows of each micro-batch, step by step."""
DEPTH = {"gpt2": "n_layer", "distilbert": "n_layers", "t5": "num_layers", "bart": "decoder_layers"}

BY_BLOCK = {"accumulation": "by-block", "update": "with-forward"}
HOST = {**BY_BLOCK, "offload": "host"}
SWEEPS = {**HOST, "accumulation": {"name": "by-block", "sweep": 2}}
HALF = {**SWEEPS, "offload": {"name": "host", "weights": 0.5, "gradients": 0.75, "optimizer": 0.25}}
STATES = {"offload": {"name": "host", "weights": 0, "gradients": 0}}
ALL = {**SWEEPS, "offload": {"name": "host", "activations": 1}}
EVERYTHING = {**SWEEPS, "offload": {"name": "host", "activations": 1, "embeddings": True}}
UPWARD = {**BY_BLOCK, "offload": {"name": "host", "gradients": 0, "optimizer": 0}}
"""Weights alone: where they are frozen, nothing goes back."""
LOOPED = {"offload": {"name": "host", "weights": 0, "gradients": 0, "optimizer": 0, "activations": 0.75}}
STREAMED = {"by-block": {"accumulation": "by-block"}, "with-forward": {"update": "with-forward"}, "both": BY_BLOCK,
            "host": HOST, "sweeps": SWEEPS, "half": HALF, "states": STATES,
            "all": ALL, "everything": EVERYTHING, "activations in a loop": LOOPED}

FROZEN: dict[str, dict[str, Any]] = {
    "lora": {"trainable": {"name": "lora", "rank": 4}}, "dora": {"trainable": {"name": "dora", "rank": 4}},
    "layers": {"trainable": {"name": "layers", "names": ["lm_head", "layers.2", "norm"]}},
}
TILED = {"checkpointing": {"name": "tiled-mlp", "tokens": 6}}
COMPILED = {"compile": {"name": "per-block", "backend": "aot_eager"}}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"}, "bf16 weights": {"precision": "bf16-pure"},
    "kahan": {"precision": {"name": "bf16-pure", "rounding": "kahan"}},
    **{name: {"optimizer": name}
       for name in ("sgd", "adafactor", "lion", "muon", "adamw-8bit", "adamw-4bit", "adamw-anyprecision")},
    "muon in bf16": {"optimizer": "muon", "precision": "bf16-pure"},
    "adafactor of the Trainer": {"optimizer": {"name": "adafactor", "scale_parameter": False}},
    **{f"recomputed {name}": {"checkpointing": name}
       for name in ("every-block", "every-nth", "mlp", "attention", "selective")},
    "recomputed by tiles": TILED, "recomputed in bf16": {"precision": "bf16", "checkpointing": "every-block"},
    "chunked": {"loss": "chunked"}, "sdpa": {"attention": "sdpa"}, "unclipped": {"max_grad_norm": 0},
    "compiled": COMPILED, "compiled and recomputed": {**COMPILED, "checkpointing": "every-block"},
    "compiled and recomputed by tiles": {**COMPILED, **TILED},
}


class Run(NamedTuple):
    """What a run left: each step's result, the weights, and the optimizer's states."""

    results: list[StepResult]
    weights: dict[str, Tensor]
    step: Step


def step_of(architecture: str, blocks: int = 4, **fields: Any) -> Step:
    """A step of a tiny model. Techniques are applied as on a card, whose memory is the processor's."""
    task = TASK_OF[architecture]
    model = tiny_model(architecture, **{DEPTH.get(architecture, "num_hidden_layers"): blocks})
    recipe = Recipe.from_dict({
        **PLAIN, "task": task, "batch_size": 6, "micro_batch_size": 2, "seq_len": 24, "max_grad_norm": 0.05,
        "attention": "eager", **fields,
    })
    return Step(apply_techniques(bare_build(recipe, CPU, torch.device("cpu"), model)), inspect=False)


def global_batches(architecture: str, steps: int = len(SPLITS), alike: bool = False) -> Iterator[TensorGlobalBatch]:
    """Ragged global batches: rows of unequal length, in micro-batches of unequal size. alike: of one shape instead,
    which is compiled once."""
    for number in range(steps):
        split, longest = (SPLITS[0], SHORTEST) if alike else (SPLITS[number % len(SPLITS)], LONGEST)
        yield tensor_global_batch(global_batch_of(micro_batches(TASK_OF[architecture], split, number, longest)))


def run(
    architecture: str, steps: int = len(SPLITS), before: Callable[[Step, int], None] | None = None, *,
    alike: bool = False, **fields: Any,
) -> Run:  # fmt: skip
    """A run from the first weights, with a learning rate that changes from step to step. before: what is done before
    each step. alike: as of `global_batches`."""
    step, results = step_of(architecture, **fields), []
    with step.build.process_settings():
        for number, batch in enumerate(global_batches(architecture, steps, alike)):
            if before is not None:
                before(step, number)
            results.append(step(batch, 3e-3 / (number + 1)).read())
        step.update.flush()
    return Run(results, weights(step), step)


def leave_a_block_out(step: Step, number: int) -> None:
    """Every second step calls all but the last of four blocks."""
    step.build.model.config.num_hidden_layers = 4 - number % 2


def learn_late(step: Step, number: int) -> None:
    """The first step goes past what the later ones learn in as well."""
    for block in step.build.model.model.layers:
        block.mlp.forward = (lambda hidden: hidden) if number == 0 else partial(type(block.mlp).forward, block.mlp)


def weights(step: Step) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in step.build.model.named_parameters()}


def same(one: Run, other: Run) -> bool:
    """Whether losses, norms and weights are the same to the last bit."""
    return one.results == other.results and all(torch.equal(one.weights[n], other.weights[n]) for n in one.weights)


def goes_on(first: Step, second: Step, folder: Path) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Results and weights of a run's second half by a step that loads what another one saved after the first half."""
    batches = [*global_batches("llama")]
    for number, batch in enumerate(batches[:2]):
        first(batch, 3e-3 / (number + 1))
    meta = first.save(folder)
    for parameter in second.build.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.zeros_(parameter)
    second.load(folder, meta)
    results = [second(batch, 3e-3 / (number + 3)).read() for number, batch in enumerate(batches[2:])]
    second.update.flush()
    return results, weights(second)
