"""Models that are made on the host by a device's arithmetic: a device that stands apart from the host's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.architectures import CAUSAL, IMAGES, MASKED, SEQ2SEQ, tiny_model
from tightfit.backends.pytorch.computed_on import ComputedOn
from tightfit.backends.pytorch.models import build_model
from tightfit.recipe import Recipe
from tightfit.tasks import get_task

CPU = torch.device("cpu")


class Apart(ComputedOn):
    """A processor whose memory is not the host's: what is not copied back is lost."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.drawn = self.largest = 0

    def _copy(self, tensor: Tensor, overwritten: bool) -> Tensor:
        self.drawn += overwritten * tensor.numel()
        self.largest = max(self.largest, tensor.numel())
        return torch.full_like(tensor, torch.nan) if overwritten else tensor.clone()


def of_every_draw() -> nn.Module:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    nn.init.trunc_normal_(first.weight, std=0.1)
    nn.init.orthogonal_(second.weight)
    nn.init.uniform_(second.weight[1:5, ::2])
    model = nn.ModuleList([nn.LSTM(8, 8), nn.Embedding(9, 8, padding_idx=2), first, second])
    model.register_buffer("table", torch.rand(4).add(1).div(torch.arange(1, 5, device="cpu")))
    return model


@pytest.mark.parametrize("make", [of_every_draw, *(
    lambda name=name: tiny_model(name) for name in (*CAUSAL, *MASKED, *SEQ2SEQ, *IMAGES))])
def test_a_model_is_the_one_that_the_device_would_make(make):
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    with Apart() as elsewhere, CPU:
        model = make()

    assert elsewhere.drawn
    wanted = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device == CPU
        assert torch.equal(tensor, wanted[name]), name


def test_the_device_holds_one_tensor_at_a_time_and_stored_weights_are_not_drawn_there(monkeypatch, tmp_path):
    made: list[Apart] = []
    monkeypatch.setattr("tightfit.backends.pytorch.computed_on.ComputedOn", lambda _: made.append(Apart()) or made[-1])
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
    recipe = Recipe.from_dict({"model": "gpt2", "model_overrides": sizes, "vocab_size": 64})
    task = get_task("causal-lm")
    model = build_model(recipe, task, drawn_on=torch.device("cuda")).model
    largest = max(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path)

    assert made[0].largest == largest
    build_model(Recipe.from_dict({"model": str(tmp_path)}), task, drawn_on=torch.device("cuda"))
    assert not made[1].drawn
    build_model(recipe, task, drawn_on=CPU)
    assert len(made) == 2
