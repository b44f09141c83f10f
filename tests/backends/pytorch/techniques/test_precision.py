"""Precision: the process settings are put back exactly, and half weights are built in half."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.architectures import tiny_model
from tests.built import built
from tightfit.backends.pytorch.models import build_model
from tightfit.backends.pytorch.techniques.precision import fp32_products
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

BACKENDS: Any = torch.backends
MATMUL, CONV, RNN, CUDNN = BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.cudnn
OPERATORS = (MATMUL, CONV, RNN)


def state() -> list[Any]:
    """What operators compute in, and the older flags, with errors where they disagree."""

    def flag(read: Any) -> Any:
        try:
            return read()
        except RuntimeError:
            return "disagree"

    return [
        *(place.fp32_precision for place in OPERATORS),
        flag(torch.get_float32_matmul_precision),
        flag(lambda: BACKENDS.cudnn.allow_tf32),
        flag(lambda: MATMUL.allow_tf32),
    ]


@pytest.fixture(autouse=True)
def _restored():
    _put_back()  # what another test's compiler may have left
    before = state()
    yield
    _put_back()
    assert state() == before


def _put_back() -> None:
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    BACKENDS.fp32_precision = CUDNN.fp32_precision = "none"
    MATMUL.fp32_precision = BACKENDS.mkldnn.matmul.fp32_precision = "none"


def nothing() -> None:
    pass


def older_high() -> None:
    torch.set_float32_matmul_precision("high")


def older_no_cudnn() -> None:
    BACKENDS.cudnn.allow_tf32 = False


def newer() -> None:
    MATMUL.fp32_precision = "tf32"
    CONV.fp32_precision = "ieee"


@pytest.mark.parametrize("before", [nothing, older_high, older_no_cudnn, newer])
@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_products_are_set_and_put_back(before, tf32):
    before()
    was = state()
    with fp32_products(tf32):
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert BACKENDS.cudnn.allow_tf32 is MATMUL.allow_tf32 is tf32
        assert {p.fp32_precision for p in (MATMUL, CONV, RNN)} == {"tf32" if tf32 else "ieee"}
    assert state()[: len(OPERATORS)] == was[: len(OPERATORS)]
    assert before is newer or state() == was


@pytest.mark.parametrize(("model", "overrides"), [
    ("llama-3.2-1b", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "num_key_value_heads": 2, "head_dim": 8}),
    ("gpt2", {"n_layer": 2, "n_head": 2, "n_embd": 32}),
    ("transformer-156m", {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "max_seq_len": 32}),
    ("torch.nn:Linear", {"in_features": 32, "out_features": 48}),
], ids=lambda value: value if isinstance(value, str) else "")
def test_built_in_bf16_is_the_fp32_build_rounded(model, overrides):
    recipe = Recipe.from_dict({"model": model, "model_overrides": overrides, "task": "causal-lm"})
    wide = build_model(recipe, get_task("causal-lm")).model
    half = build_model(recipe, get_task("causal-lm"), dtype=torch.bfloat16).model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(wide.parameters(), half.parameters(), strict=True))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(wide.buffers(), half.buffers(), strict=True))
    assert torch.get_default_dtype() is torch.float32


def test_weights_are_never_wider_on_the_device(tiny, monkeypatch):
    """What the backend asks the model to be built in, for a build of its own and for a module that it is given."""
    values, asked = {**tiny, "precision": "bf16-pure"}, []

    def seen(recipe, task, device, dtype, *others):
        asked.append(dtype)
        return build_model(recipe, task, device, dtype, *others)

    monkeypatch.setattr("tightfit.backends.pytorch.assembly.build_model", seen)
    built(values)
    assert asked == [torch.bfloat16]

    moved = []
    given = tiny_model("llama")
    move = nn.Module.to

    def to(self, *args, **kwargs):
        moved.append({p.dtype for p in self.parameters()})
        return move(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", to)
    assert built(values, given).model is given
    assert moved[0] == {torch.bfloat16}
    assert {b.dtype for b in given.buffers()} == {torch.float32}
