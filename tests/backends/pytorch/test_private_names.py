"""Names that torchao does not promise to keep, and a log level of the profiler's that is put back."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tightfit.backends.pytorch.inspection import op_names
from tightfit.backends.pytorch.techniques import optimizer
from tightfit.backends.pytorch.techniques.attention.functions import kernel_names
from tightfit.errors import ModelError
from tightfit.techniques.optimizer import AdamW8bit


@pytest.mark.parametrize("level", [None, "3"])
def test_the_profilers_log_level_is_put_back(monkeypatch, level):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("KINETO_LOG_LEVEL", level)
    model = nn.Linear(4, 4)
    with op_names() as names:
        assert os.environ.get("KINETO_LOG_LEVEL") == level
        model(torch.ones(2, 4)).softmax(-1)
    assert tuple(kernel_names(names())) == ("eager (matrix products and a softmax)",)
    assert os.environ.get("KINETO_LOG_LEVEL") == level


def test_a_torchao_without_its_inner_parts_is_a_sentence(monkeypatch):
    from torchao.optim import adam

    from tightfit.backends.pytorch.techniques.optimizer.apply import quantized

    monkeypatch.delitem(sys.modules, "tightfit.backends.pytorch.techniques.optimizer.quantized_adamw", raising=False)
    monkeypatch.delattr(optimizer, "quantized_adamw", raising=False)
    monkeypatch.delattr(adam, "single_param_adam")
    with pytest.raises(ModelError, match=r"torchao lacks what.*single_param_adam.*write optimizer=adamw"):
        quantized(AdamW8bit(), SimpleNamespace())
