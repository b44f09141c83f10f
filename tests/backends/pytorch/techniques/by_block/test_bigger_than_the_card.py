"""A model that does not fit a card trains on it with its blocks in host memory.

A processor's memory stands for both places, and what exceeds the device's share of it is refused as CUDA refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.pytorch.techniques.by_block.streaming_cases import EVERYTHING, HOST, weights
from tests.backends.pytorch.techniques.by_block.test_predicted import A100, recipe_of
from tightfit.backends.base import StepResult
from tightfit.backends.pytorch.assembly import apply_techniques, bare_build
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.follow.tracker import Tracker
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.by_block import block_calls
from tightfit.backends.pytorch.techniques.by_block.transfers import Transfers, active_watch
from tightfit.errors import OutOfMemory
from tightfit.recipe import Recipe
from tightfit.trace import Place

LAYERS = 6


class Card(Tracker):
    """A device of `limit` bytes: the op that allocates one more raises as on CUDA."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit, self._known = limit, 0
        self._on_host = False

    @contextmanager
    def allocating_on_host(self) -> Iterator[None]:
        self._on_host = True
        try:
            yield
        finally:
            self._on_host = False

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        super()._note(func, args, kwargs, result)
        if self._on_host or len(self.allocations) == self._known:
            return
        self._known = len(self.allocations)
        live = (self.allocations[index] for _, index in self.memory._live.values())
        if sum(allocation.bytes for allocation in live if allocation.place is Place.DEVICE) > self._limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.allocations[-1].bytes} bytes")


class OnHost(Transfers):
    """Memory of the host is no card's."""

    def host_memory(self, count: int) -> Tensor:
        card = active_watch()
        with card.allocating_on_host() if isinstance(card, Card) else nullcontext():
            return super().host_memory(count)


def trained(recipe: Recipe, limit: int | None = None) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Three steps on a card of `limit` bytes, and the weights behind them."""
    build = apply_techniques(bare_build(recipe, A100, torch.device("cpu")))
    with build.process_settings():
        step = Step(build, inspect=False)
        card = Card(limit or 1 << 40)
        card.follow(build.model)
        if recipe.offloaded.keeps_weights:
            parts = step.blocks.parts
            for number in parts.first(recipe.offload.weights, embeddings=recipe.offload.embeddings):
                for parameter in parts.parameters[number]:
                    card.lies_on_host(parameter, pinned=True)
        generator, results = torch.Generator().manual_seed(0), []
        with nullcontext() if limit is None else card:
            for _ in range(3):
                ids = [torch.randint(0, 512, (2, recipe.seq_len), generator=generator) for _ in range(3)]
                batches = tuple(TensorBatch(inputs={"input_ids": each}, labels=each) for each in ids)
                tokens = 6 * recipe.seq_len
                results.append(step(TensorGlobalBatch(micro_batches=batches, count=tokens, samples=6, tokens=tokens,
                                                      origin="test"), 1e-3).read())
            step.update.flush()
        card.unfollow()
    return results, weights(step)


def test_what_the_card_cannot_hold_trains_on_it_streamed_bit_for_bit(monkeypatch):
    monkeypatch.setattr(block_calls, "Transfers", OnHost)
    resident = recipe_of(LAYERS)
    results, wanted = trained(resident)
    needed = predict(resident, A100, whole=True).peak()[1]
    for fields in HOST, EVERYTHING:
        streamed = recipe_of(LAYERS, **fields)
        least = predict(streamed, A100, whole=True).peak()[1]
        assert least < 0.6 * needed  # the plans' own word
        with pytest.raises(OutOfMemory, match="Tried to allocate"):
            trained(resident, round(1.02 * least))
        with pytest.raises(OutOfMemory):  # so does a little less than the plan says
            trained(streamed, round(0.95 * least))

        found, got = trained(streamed, round(1.02 * least))
        assert found == results
        assert all(torch.equal(got[name], weight) for name, weight in wanted.items())
