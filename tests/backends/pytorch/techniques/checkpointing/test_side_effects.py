"""Buffers and caches that a model's forward pass changes: recomputation changes them no second time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import (
    LAYERS,
    Plain,
    assert_equal,
    build,
    gradients,
    loss,
    step,
)
from tightfit.backends.pytorch.techniques.checkpointing.recomputation import compile_module
from tightfit.techniques.checkpointing import Checkpointing, EveryBlock, Segments, Selective

TECHNIQUES = [EveryBlock(), Segments(count=2), Selective()]


class Normed(nn.Module):
    """A block with running statistics of every kind: counted, not counted, and replaced instead of changed."""

    ever: Tensor

    def __init__(self, replaces: bool = True) -> None:
        super().__init__()
        self.replaces = replaces
        self.linear, self.batch = nn.Linear(8, 8), nn.BatchNorm1d(16)
        self.instance = nn.InstanceNorm1d(16, track_running_stats=True)
        self.register_buffer("ever", torch.zeros(()))
        self.constant: Tensor
        self.register_buffer("constant", torch.ones(8))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.replaces:
            self.ever = self.ever + x.detach().sum()
            x = self.instance(x)
        output: Tensor = x + self.batch(self.linear(x * self.constant)).sin()
        return output


def normed(replaces: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList(Normed(replaces) for _ in range(LAYERS))
    return model.train()


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    assert_equal(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("technique", TECHNIQUES, ids=str)
def test_buffers_are_updated_once(technique: Checkpointing) -> None:
    expected, model = normed(), build(normed(), technique).model
    for _ in range(2):
        assert_equal(step(model, "plain"), step(expected, "plain"))
    assert_same(model, expected)
    copied = copy.deepcopy(model)
    step(copied, "plain")
    assert_same(model, expected)
    step(expected, "plain")
    assert_same(copied, expected)


def test_buffers_are_updated_once_though_the_graph_is_kept() -> None:
    expected, model = normed(), build(normed(), EveryBlock()).model
    for made in (expected, model):
        total = loss(made, "plain")
        total.backward(retain_graph=True)
        total.backward()
    assert_equal(gradients(model), gradients(expected))
    assert_same(model, expected)


def test_buffers_of_compiled_blocks_are_updated_once() -> None:
    # Without what breaks the compiler's graph: only a batch norm's statistics.
    expected, model = normed(False), build(normed(False), EveryBlock()).model
    for block in model.get_submodule("blocks").children():
        compile_module(block, backend="aot_eager")
    step(expected, "plain")
    step(model, "plain")
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


class Caching(nn.Module):
    """Attention that grows the cache it is given, as XLM's does in training, too."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: EncoderDecoderCache) -> Tensor:
        shape = (x.shape[0], 1, -1, 8)
        keys, values = cache.self_attention_cache.update(
            self.key(x).view(shape), self.value(x).view(shape), self.index
        )
        return x + nn.functional.scaled_dot_product_attention(x.view(shape), keys, values).view_as(x)


class Cached(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching(index) for index in range(LAYERS))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for block in self.blocks:
            x = block(x, cache=self.cache)
        return x


def cached() -> Cached:
    torch.manual_seed(0)
    model = Cached()
    model.train()
    return model


@pytest.mark.parametrize("technique", TECHNIQUES, ids=str)
def test_caches_grow_once(technique: Checkpointing) -> None:
    model = build(cached(), technique).model
    assert_equal(step(model, "plain"), step(cached(), "plain"))
    assert isinstance(model, Cached)
    assert [model.cache.self_attention_cache.get_seq_length(layer) for layer in range(LAYERS)] == [16] * LAYERS
