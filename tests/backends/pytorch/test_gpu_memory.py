"""Memory in use on a card, the context's share apart."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import tightfit
from tightfit import nvml
from tightfit.errors import Refused
from tightfit.training.summary import Summary

GIB = 1 << 30


@pytest.fixture
def card(monkeypatch):
    """A card of 24 GiB, of which 10 are in use and PyTorch's allocator holds 6."""
    answers = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1,
        "get_device_properties": lambda index: SimpleNamespace(name="NVIDIA L4", uuid="1-2"),
        "mem_get_info": lambda index: (14 * GIB, 24 * GIB), "memory_reserved": lambda index: 6 * GIB,
        "memory_allocated": lambda index: 5 * GIB,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


@pytest.mark.parametrize(("said", "context", "others"), [
    ((7 * GIB, 2 * GIB), GIB, 2 * GIB), ((7 * GIB, None), GIB, None), ((None, None), None, None),
    ((5 * GIB, 0), None, 0),  # less than the allocator has: not this process's figure
])
def test_the_contexts_share_is_what_the_allocator_does_not_have(card, monkeypatch, said, context, others):
    asked = []
    monkeypatch.setattr(nvml, "process_bytes", lambda uuid: asked.append(uuid) or said)
    found = tightfit.gpu_memory()
    assert asked == ["GPU-1-2"]
    assert (found.device, found.total, found.in_use) == ("NVIDIA L4", 24 * GIB, 10 * GIB)
    assert (found.allocated, found.reserved) == (5 * GIB, 6 * GIB)
    assert (found.context, found.others) == (context, others)


@pytest.mark.parametrize("device", ["cpu", "cuda:3", 2, "gpu"])
def test_other_devices_are_refused(card, device):
    with pytest.raises(Refused, match=r"write cuda"):
        tightfit.gpu_memory(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_cuda_it_is_refused_in_one_sentence():
    with pytest.raises(Refused, match="tightfit doctor"):
        tightfit.gpu_memory()


@pytest.mark.gpu
def test_a_context_takes_memory_of_its_own():
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    found = tightfit.gpu_memory()
    assert held.numel() <= found.allocated <= found.reserved <= found.in_use <= found.total
    if found.context is not None:
        assert 64 << 20 < found.context < 4 * GIB
        assert found.reserved + found.context <= found.in_use


def test_the_summary_shows_the_context_where_it_is_known(tmp_path):
    values = {"steps": 1, "seconds": 1.0, "training_seconds": 1.0, "compile_seconds": 0.0, "data_wait_seconds": 0.0,
              "samples_per_second": 1.0, "tokens_per_second": 1.0, "peak_memory": 3 * GIB, "device": "L4"}
    assert "CUDA context" not in dict(Summary(**values).rows())
    known = Summary(**values, context_memory=GIB // 2)
    assert dict(known.rows())["CUDA context"].startswith("512 MiB")
    for made, context in ((values, None), (known.to_dict(), GIB // 2)):
        (tmp_path / "summary.json").write_text(json.dumps(made))
        assert Summary.read(tmp_path / "summary.json").context_memory == context
