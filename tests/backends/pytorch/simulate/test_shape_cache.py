"""Remembered shapes: the results of fake tensors' own rules, views that share memory, nothing remembered wrongly."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tightfit.backends.pytorch.simulate.shape_cache import MISSING, ShapeCache
from tightfit.backends.pytorch.simulate.target import PlanningMode
from tightfit.devices import find_device

aten = torch.ops.aten


@pytest.fixture
def cached():
    mode = FakeTensorMode()
    cache = ShapeCache(mode)

    def run(func, *args, **kwargs):
        """The op's result the second time it is asked for, and the first."""
        with mode:
            first = func(*args, **kwargs)
        key = cache.key(func, args, kwargs)
        assert key is not None
        cache.remember(key, args, first)
        return cache.result(key, args), first

    with mode:
        run.x, run.w = torch.zeros(4, 8), torch.zeros(16, 8)
    run.cache = cache
    return run


@pytest.mark.parametrize("call", [
    lambda run: run(aten.mm.default, run.x, run.w.t()),
    lambda run: run(aten.add.Tensor, run.x, 1.5),
    lambda run: run(aten._to_copy.default, run.x, dtype=torch.bfloat16),
    lambda run: run(aten.native_layer_norm.default, run.x, [8], None, None, 1e-5),
    lambda run: run(aten.cat.default, [run.x, run.x], 1),
    lambda run: run(aten.zeros.default, [3, 5], dtype=torch.int64),
])
def test_a_new_result_has_the_same_form_and_memory_of_its_own(cached, call):
    again, first = call(cached)
    pairs = zip(again, first, strict=True) if isinstance(again, tuple) else [(again, first)]
    for mine, theirs in pairs:
        assert (mine.shape, mine.stride(), mine.dtype, mine.device) == \
            (theirs.shape, theirs.stride(), theirs.dtype, theirs.device)
        assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        assert mine.untyped_storage()._cdata != theirs.untyped_storage()._cdata


@pytest.mark.parametrize("call", [
    lambda run: run(aten.t.default, run.x),
    lambda run: run(aten.view.default, run.x, [2, 16]),
    lambda run: run(aten.slice.Tensor, run.x, 0, 1, 3),
    lambda run: run(aten.detach.default, run.x),
])
def test_a_view_shares_its_argument_memory(cached, call):
    again, first = call(cached)
    assert (again.shape, again.stride()) == (first.shape, first.stride())
    assert again.storage_offset() == first.storage_offset()
    assert again.untyped_storage()._cdata == cached.x.untyped_storage()._cdata


def test_an_op_with_a_place_for_its_result_gives_that():
    with (mode := PlanningMode(find_device("h100-sxm"))):
        x, w, made = torch.zeros(6, 9), torch.zeros(9, 7), torch.zeros(6, 7)
    for _ in range(2):
        assert mode.__torch_dispatch__(aten.mm.out, (), (x, w), {"out": made}) is made


def test_an_op_in_place_gives_its_argument(cached):
    again, _ = cached(aten.add_.Tensor, cached.x, 1)
    assert again is cached.x


def test_a_transposition_in_place_is_asked_for_each_time():
    with PlanningMode(find_device("rtx-4090")):
        for _ in range(2):
            assert torch.zeros(4, 8).transpose_(0, 1).shape == (8, 4)


def test_one_and_one_point_nought_are_different_arguments(cached):
    with_float, _ = cached(aten.full.default, [2], 1.0)
    with_integer, _ = cached(aten.full.default, [2], 1)
    assert (with_float.dtype, with_integer.dtype) == (torch.float32, torch.int64)


def test_what_is_not_plain_has_no_key(cached):
    assert cached.cache.key(aten.add.Tensor, (torch.zeros(2), 1), {}) is None
    assert cached.cache.key(aten.normal_.default, (cached.x,), {"generator": torch.Generator()}) is None
    assert cached.cache.result((aten.mm.default,), ()) is MISSING


def test_sizes_that_are_still_symbols_have_no_key():
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    cache, x = ShapeCache(mode), mode.from_tensor(torch.zeros(4, 8))
    assert cache.key(aten.relu.default, (x,), {}) is None
    with mode:
        fixed = torch.zeros(4)
        key = cache.key(aten.nonzero.default, (fixed,), {})
        assert key is not None
        cache.remember(key, (fixed,), x)
    assert cache.result(key, (fixed,)) is MISSING


def test_parts_of_one_memory_are_not_remembered_as_several(cached):
    parts = cached.cache.key(aten.split.Tensor, (cached.x, 2), {})
    with cached.cache._mode:
        result = aten.split.Tensor(cached.x, 2)
    cached.cache.remember(parts, (cached.x, 2), tuple(result))
    again = cached.cache.result(parts, (cached.x, 2))
    assert all(part.untyped_storage()._cdata == cached.x.untyped_storage()._cdata for part in again)
