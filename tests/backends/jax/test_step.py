"""The step: one compilation for global batches of every size, padding that weighs nothing, documents apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import torch

from tests.backends.jax.cases import build, quickly, recipe
from tightfit.backends.jax.forward import cross_entropy_sum, logits
from tightfit.backends.jax.loading import global_batches, stack_for, stack_micro_batches
from tightfit.backends.jax.step import Step
from tightfit.backends.jax.update import eval_step
from tightfit.backends.pytorch.techniques.loss.of_logits import cross_entropy_sum as of_torch
from tightfit.data import prepare
from tightfit.data.loading import GlobalBatchLoader
from tightfit.errors import ModelError
from tightfit.model_facts import model_facts
from tightfit.tasks import IGNORE, MicroBatch, global_batch_of

RANDOM = np.random.default_rng(0)


def micro_batch(rows: int, length: int = 8, **more) -> MicroBatch:
    ids = RANDOM.integers(0, 64, (rows, length))
    return MicroBatch(inputs={"input_ids": ids}, labels=np.roll(ids, -1, 1), **more)


@pytest.fixture(scope="module")
def step():
    with pytest.MonkeyPatch.context() as patch:
        from tests.backends.jax.cases import fast_options
        from tightfit.backends.jax import assembly

        patch.setattr(assembly, "compiler_options", lambda flags, devices: fast_options())
        yield Step(build())


def loss(step: Step, global_batch) -> float:
    return float(quickly(partial(eval_step, step.build), step.state["params"], global_batch.arrays)[0])


def test_a_smaller_global_batch_runs_the_same_program(step):
    whole = global_batch_of((micro_batch(2), micro_batch(2)))
    step(stack_micro_batches(whole, 2, 2), 1e-3).read()
    programs, seconds = len(step._compiled), step.compile_seconds
    part = stack_micro_batches(global_batch_of((micro_batch(1),)), 2, 2)
    result = step(part, 1e-3).read()
    assert result.loss.count == 8
    assert (len(step._compiled), step.compile_seconds) == (programs, seconds)


def test_what_is_added_weighs_nothing(step):
    batch = micro_batch(2, length=5)
    global_batch = global_batch_of((batch,))
    alone, padded = stack_micro_batches(global_batch, 1, 2), stack_micro_batches(global_batch, 3, 4)
    assert padded.arrays["labels"].shape == (3, 4, 5)
    assert (padded.arrays["labels"] != IGNORE).sum() == global_batch.count == 10
    assert loss(step, padded) == pytest.approx(loss(step, alone), rel=1e-6)


def test_documents_in_a_row_do_not_see_each_other(step):
    first, second = RANDOM.integers(0, 64, 5), RANDOM.integers(0, 64, 3)
    documents = np.array([[0] * 5 + [1] * 3], np.int32)
    packed = {"input_ids": np.concatenate([first, second])[None], "document_ids": documents,
              "position_ids": np.concatenate([np.arange(5), np.arange(3)])[None]}
    compute = partial(quickly, partial(logits, step.build))
    together = compute(step.state["params"], packed)
    alone = [compute(step.state["params"], {"input_ids": part[None]}) for part in (first, second)]
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), atol=2e-6)
    apart = compute(step.state["params"], {"input_ids": packed["input_ids"]})
    assert np.abs(apart - together)[:, 5:].max() > 1e-2


def test_smoothed_labels_are_torchs():
    logits = RANDOM.normal(size=(2, 5, 7)).astype(np.float32)
    labels = np.array([[0, 1, 2, 3, IGNORE], [6, IGNORE, 5, 5, 4]], np.int32)
    found = quickly(partial(cross_entropy_sum, smoothing=0.3), logits, labels)
    expected = of_torch(torch.tensor(logits), torch.tensor(labels, dtype=torch.int64), smoothing=0.3)
    assert float(found) == pytest.approx(expected.item(), rel=1e-6)


def test_padding_is_not_seen():
    both = Step(build(task="masked-lm"))
    ids = RANDOM.integers(0, 64, (1, 8))
    real = np.arange(8)[None] < 5
    compute = partial(quickly, partial(logits, both.build))
    padded = compute(both.state["params"], {"input_ids": ids, "padding": real})
    np.testing.assert_allclose(padded[:, :5], compute(both.state["params"], {"input_ids": ids[:, :5]}), atol=2e-6)


@pytest.mark.parametrize("lengths", [(8, 5), (5, 8)])
@pytest.mark.parametrize("ragged", [False, True])
def test_padding_of_some_micro_batches_alone_is_not_seen(lengths, ragged):
    """What a full micro-batch gets to be as long as another is padding as well."""
    both = Step(build(task="masked-lm"))
    shorter = {"mask": "padded", "padding": np.arange(5)[None] < [[5], [3]]} if ragged else {}
    parts = tuple(micro_batch(2, length, **(shorter if length == 5 else {})) for length in lengths)
    together = loss(both, stack_for(both.build, global_batch_of(parts)))
    alone = [loss(both, stack_for(both.build, global_batch_of((part,)))) for part in parts]
    assert together == pytest.approx(sum(alone), rel=1e-6)


@pytest.mark.parametrize(("name", "value"), [("labels", 64), ("input_ids", 64), ("input_ids", -1)])
def test_a_token_that_the_model_has_no_row_for_is_an_error(step, name, value):
    global_batch = stack_micro_batches(global_batch_of((micro_batch(2),)), 2, 2)
    global_batch.arrays[name][0, 0, 0] = value
    with pytest.raises(ModelError, match="vocab_size"):
        step(global_batch, 1e-3)


def test_other_inputs_are_an_error():
    batch = micro_batch(2)
    batch.inputs["token_type_ids"] = batch.inputs["input_ids"]
    with pytest.raises(ModelError, match=r"token_type_ids; .*backend=pytorch"):
        stack_micro_batches(global_batch_of((batch,)), 1, 2)


def test_the_state_gives_its_memory_to_the_next(step):
    before = jax.tree.leaves(step.state)
    step(stack_micro_batches(global_batch_of((micro_batch(2), micro_batch(2))), 2, 2), 1e-3).read()
    given = [leaf for leaf in before if leaf.is_deleted()]
    assert sum(leaf.nbytes for leaf in given) > 0.99 * sum(leaf.nbytes for leaf in before)


def test_dropout_differs_by_step_and_stays_out_of_evaluation():
    dropping = Step(build(model_overrides={"dropout_rate": 0.5}))
    global_batch = stack_micro_batches(global_batch_of((micro_batch(2), micro_batch(2))), 2, 2)
    losses = [dropping(global_batch, 1e-30).read().loss.sum for _ in range(2)]
    assert losses[0] != losses[1]
    first, second = dropping.evaluate([global_batch]), dropping.evaluate([global_batch])
    assert first == second
    assert first.loss.count == 32


@pytest.mark.parametrize("workers", [0, 2])
def test_global_batches_come_in_order(workers):
    chosen = recipe(data={"source": "dummy", "samples": 10})
    loader = GlobalBatchLoader(prepare(chosen, model_facts(chosen)).train, chosen)
    made = global_batches(build(loading={"workers": workers, "prefetch": 2}), loader, 1, 8)
    expected = [stack_micro_batches(loader.global_batch(index), 2, 2) for index in range(1, 8)]
    for global_batch, wanted in zip(made, expected, strict=True):
        assert global_batch.origin == wanted.origin
        assert np.array_equal(global_batch.arrays["input_ids"], wanted.arrays["input_ids"])


def test_a_global_batches_error_reaches_the_loop():
    class Broken:
        def __len__(self): return 1
        def global_batch(self, index): raise ModelError("no such global batch")

    globals()["Broken"] = Broken
    Broken.__qualname__, Broken.__module__ = "Broken", __name__
    for workers in (0, 1):
        made = global_batches(build(loading={"workers": workers}), Broken(), 0, 2)
        with pytest.raises(ModelError, match="no such global batch"):
            next(made)


def test_a_sample_is_the_same_at_any_length_of_the_context(step):
    prompt = [1, 2, 3]
    greedy = step.generate(prompt, 4, temperature=0.0, seed=0)
    found = quickly(partial(logits, step.build), step.state["params"], {"input_ids": np.array([prompt + greedy])})
    assert greedy == found[0, 2:-1].argmax(-1).tolist()
    drawn = step.generate(prompt, 12, temperature=1.0, seed=1)
    assert drawn == step.generate(prompt, 12, temperature=1.0, seed=1)
    assert drawn != step.generate(prompt, 12, temperature=1.0, seed=2)


def test_not_finite_weights_are_seen(step):
    assert step.is_finite()
    params = step.state["params"]
    broken = replace(step.build)
    other = Step.__new__(Step)
    other.build, other.state = broken, {"params": {**params, "pos_emb": params["pos_emb"] * np.nan}}
    assert not other.is_finite()
