from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.backends.pytorch.techniques.optimizer.optimizer_cases import CASES, Case, Tiny, load_state, tiny, train
from tightfit.backends.pytorch.techniques.optimizer.state import set_learning_rate, state_tensors
from tightfit.errors import CheckpointError
from tightfit.techniques.optimizer import Adafactor, AdamW, AdamW8bit, Sgd
from tightfit.techniques.precision import Bf16Pure, Fp32

ADAMW = Case(AdamW(), Fp32())


def written(optimizer: Optimizer, model: nn.Module, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state after a round through the file formats of a checkpoint."""
    tensors, meta = state_tensors(optimizer, model)
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "meta.json").write_text(json.dumps(meta))
    return load_file(folder / "optimizer.safetensors"), json.loads((folder / "meta.json").read_text())


def saved(case: Case, steps: int, folder: Path) -> tuple[Tiny, Optimizer, dict[str, Tensor], dict[str, Any]]:
    """A model after so many steps, its optimizer, and the state that a checkpoint keeps."""
    model = tiny()
    optimizer = case.optimizer(model)
    train(model, optimizer, range(steps))
    return model, optimizer, *written(optimizer, model, folder)


def identical(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def restored(
    case: Case, weights: dict[str, Tensor], tensors: dict[str, Tensor], meta: dict[str, Any]
) -> tuple[Tiny, Optimizer]:
    """What a fresh process has: a new model and optimizer, given the saved state and then the saved weights."""
    torch.manual_seed(99)
    model = Tiny()
    optimizer = case.optimizer(model)
    load_state(optimizer, model, tensors, meta)
    model.load_state_dict(weights)
    return model, optimizer


@pytest.mark.parametrize("before", [4, 0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_continues_bit_for_bit(case: Case, before: int, tmp_path: Path) -> None:
    model = tiny()
    optimizer = case.optimizer(model)
    train(model, optimizer, range(before))
    set_learning_rate(optimizer, case.learning_rate / 3)
    weights = copy.deepcopy(model.state_dict())
    tensors, meta = written(optimizer, model, tmp_path)
    other, other_optimizer = restored(case, weights, tensors, meta)
    set_learning_rate(other_optimizer, case.learning_rate / 3)
    losses = train(model, optimizer, range(before, before + 3))
    assert train(other, other_optimizer, range(before, before + 3)) == losses
    assert identical(model, other)
    again, _ = state_tensors(optimizer, model)
    mine, _ = state_tensors(other_optimizer, other)
    assert again.keys() == mine.keys()
    assert all(torch.equal(again[name], mine[name]) for name in again)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loading_leaves_no_other_trace(case: Case, tmp_path: Path) -> None:
    *_, tensors, meta = saved(case, 2, tmp_path)
    other = tiny()
    other_optimizer = case.optimizer(other)
    before, random_state = copy.deepcopy(other), torch.get_rng_state()
    load_state(other_optimizer, other, tensors, meta)
    assert identical(before, other)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in other.parameters())
    rates = [torch.as_tensor(group["lr"]).item() for group in other_optimizer.param_groups]
    assert rates == pytest.approx([case.learning_rate] * len(rates))


def test_names_are_the_models_own() -> None:
    model = tiny()
    optimizer = Case(AdamW8bit(), Fp32()).optimizer(model)
    train(model, optimizer, range(1))
    tensors, _ = state_tensors(optimizer, model)
    assert {name for name in tensors if name.startswith("hidden.weight/")} == {
        "hidden.weight/step",
        *(f"hidden.weight/{key}/{part}" for key in ("exp_avg", "exp_avg_sq") for part in ("codes", "scale", "qmap")),
    }
    assert "embedding.weight/exp_avg" in tensors


def test_parameters_never_reached_stay_without_state(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = ADAMW.optimizer(model)
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    tensors, meta = written(optimizer, model, tmp_path)
    other = copy.deepcopy(model)
    other_optimizer = ADAMW.optimizer(other)
    load_state(other_optimizer, other, tensors, meta)
    assert set(other_optimizer.state) == set(other[0].parameters())


def test_loads_into_an_optimizer_that_has_stepped(tmp_path: Path) -> None:
    """As after falling back from a broken checkpoint to the one before."""
    model, optimizer, tensors, meta = saved(ADAMW, 2, tmp_path)
    train(model, optimizer, range(2, 5))
    load_state(optimizer, model, tensors, meta)
    now, _ = state_tensors(optimizer, model)
    assert all(torch.equal(now[name], tensors[name]) for name in tensors)


def test_implementation_may_change(tmp_path: Path) -> None:
    model, _, tensors, meta = saved(ADAMW, 2, tmp_path)
    loop = Case(AdamW(implementation="loop"), Fp32()).optimizer(model)
    load_state(loop, model, tensors, meta)
    assert loop.param_groups[0]["foreach"] is False


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(AdamW8bit(), Fp32()), "holds the state of AdamW, and this is AdamW8bit"),
        (Case(AdamW(), Bf16Pure(rounding="nearest")), "is float32 .* in the checkpoint and bfloat16 .* here"),
        (Case(Adafactor(), Fp32()), "holds the state of AdamW, and this is Adafactor"),
    ],
    ids=["kind", "dtype", "adafactor"],
)
def test_another_optimizer_is_refused(case: Case, message: str, tmp_path: Path) -> None:
    *_, tensors, meta = saved(ADAMW, 1, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_state(case.optimizer(other := tiny()), other, tensors, meta)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    model, optimizer, tensors, meta = saved(ADAMW, 1, tmp_path)

    lost = {name: tensor for name, tensor in tensors.items() if name != "out.bias/exp_avg"}
    with pytest.raises(CheckpointError, match=r"differ in out\.bias/exp_avg; write "):
        load_state(optimizer, model, lost, meta)
    with pytest.raises(CheckpointError, match=r"differ in out\.bias/more; write "):
        load_state(optimizer, model, {**tensors, "out.bias/more": torch.zeros(1)}, meta)
    with pytest.raises(CheckpointError, match=r"out\.bias/exp_avg is float32 \(3,\) in the checkpoint and float32 "):
        load_state(optimizer, model, {**tensors, "out.bias/exp_avg": torch.zeros(3)}, meta)


def test_another_models_parameters_are_named(tmp_path: Path) -> None:
    *_, tensors, meta = saved(ADAMW, 1, tmp_path)
    other = nn.ModuleDict({"hidden": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match=r"differ in embedding\.weight/exp_avg,"):
        load_state(ADAMW.optimizer(other), other, tensors, meta)


def test_block_size_is_part_of_the_state(tmp_path: Path) -> None:
    model, _, tensors, meta = saved(Case(AdamW8bit(block_size=256), Fp32()), 1, tmp_path)
    smaller = Case(AdamW8bit(block_size=128), Fp32()).optimizer(model)
    with pytest.raises(CheckpointError, match=r"hidden\.weight/exp_avg/scale is"):
        load_state(smaller, model, tensors, meta)


def test_kahan_state_is_refused_without_kahan(tmp_path: Path) -> None:
    *_, tensors, meta = saved(Case(Sgd(), Bf16Pure(rounding="kahan")), 1, tmp_path)
    other = tiny()
    with pytest.raises(CheckpointError, match="optimizer"):
        load_state(Case(Sgd(), Bf16Pure(rounding="nearest")).optimizer(other), other, tensors, meta)
