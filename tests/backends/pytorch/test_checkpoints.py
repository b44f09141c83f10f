"""Files of a checkpoint, which the safetensors library reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tightfit.backends.pytorch.checkpoints import FORMAT_NAMES, write_tensors
from tightfit.errors import ModelError
from tightfit.training.trainer import Trainer


def test_every_format_is_read_back(tmp_path):
    tensors = {f"of {name}": torch.randint(0, 2, (3, 5)).to(dtype) for dtype, name in FORMAT_NAMES.items()}
    tensors |= {"scalar": torch.tensor(7.5), "none": torch.empty(0, 4), "transposed": torch.rand(4, 6).t(),
                "of a larger one": torch.rand(10)[3:6], "a name: \u00e9 \"quoted\"": torch.ones(1)}
    write_tensors(tensors, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")

    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def test_the_file_is_the_librarys_own(tmp_path):
    tensors = {"b": torch.rand(3), "a": torch.rand(2, 2), "bytes": torch.ones(3, dtype=torch.uint8)}
    write_tensors(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")

    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size
    assert header(tmp_path / "ours") == header(tmp_path / "theirs")


def test_a_format_without_a_name_is_no_file(tmp_path):
    with pytest.raises(KeyError):
        write_tensors({"x": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_model_that_no_checkpoint_could_hold_is_named_before_the_first_step(tiny):
    model = nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 128))
    model[1].register_buffer("phases", torch.zeros(4, dtype=torch.complex128))
    values = {name: value for name, value in tiny.items() if name not in ("model", "model_overrides")}
    with pytest.raises(ModelError, match=r"^model: '1\.phases' is complex128, which safetensors.*, complex64$"):
        Trainer(model, values).train()
    assert not (Path(tiny["output_dir"]) / "metrics.jsonl").exists()


def header(path):
    """Formats, shapes and places by name."""
    whole = path.read_bytes()
    return json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
