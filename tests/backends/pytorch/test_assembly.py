"""A module of the caller's own, made ready for a build."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, CpmAntConfig, CpmAntForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.own_models import Scores
from tests.plain import CPU
from tightfit.backends.pytorch.assembly import apply_techniques, bare_build
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.errors import ModelError, Refused
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe


class OwnLoss(Scores):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(input_ids)
        return logits if labels is None else (logits, logits.sum())


def gpt() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=64, n_positions=16))


def built(model: Any, **values: Any) -> Build:
    recipe = Recipe.from_dict({"seq_len": 16, "precision": "fp32", **values})
    return bare_build(recipe, CPU, torch.device("cpu"), model)


def test_a_loss_of_a_modules_own_is_noted():
    with_loss = gpt()
    with_loss.loss_function = lambda logits, labels, **more: logits.sum()
    for model, name in ((with_loss, "GPT2LMHeadModel"), (OwnLoss(64), "OwnLoss")):
        (note,) = built(model, vocab_size=64).notes
        assert note.startswith(f"model: a loss of {name}'s own is not used")
    assert built(gpt()).notes == ()


def test_what_compiles_a_module_is_left_off():
    plain = gpt()
    build = built(torch.compile(plain))
    assert build.model is plain
    assert "compile=per-block compiles it" in build.notes[0]


class Lazy(Scores):
    def __init__(self) -> None:
        super().__init__(64)
        self.out = torch.nn.LazyLinear(64)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(("make", "told"), [
    (lambda: torch.jit.script(Scores(64)), "TorchScript module, .* give the module that it was made from"),
    (Lazy, r"out\.weight of Lazy has no shape yet.* call the module once"),
])  # fmt: skip
def test_a_module_that_nothing_can_be_applied_to(make: Any, told: str):
    with pytest.raises(ModelError, match=told):
        built(make(), vocab_size=64)
    recipe = resolve(Recipe.from_dict({"data": "dummy", "vocab_size": 64, "seq_len": 8, "batch_size": 2}), CPU)
    with pytest.raises(ModelError, match=told):
        predict(recipe, CPU, make())


def test_a_module_without_values_is_told_where_they_are_wanted():
    with pytest.raises(ModelError, match=r"embed\.weight of Scores is on the meta device.* to_empty"):
        built(Scores(64).to("meta"), vocab_size=64)


def test_an_adapter_of_pefts_gets_no_other():
    wrapped = peft.get_peft_model(gpt(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    assert built(wrapped).notes == ()
    with pytest.raises(Refused, match=r"trainable: lora is for a model without an adapter.*; write trainable=all"):
        apply_techniques(built(wrapped, trainable="lora"))


def test_a_build_has_the_notes_of_its_techniques():
    build = apply_techniques(built(gpt(), optimizer="adafactor", learning_rate=1e-3))
    assert any("0.01 is usual, and learning_rate is 0.001" in note for note in build.notes)


@pytest.mark.parametrize("causal", [True, False])
def test_a_module_that_sees_what_it_is_to_predict_is_told(causal):
    config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8, vocab_size=64,
                        is_decoder=causal)
    build = built(BertLMHeadModel(config))
    assert build.model.training
    assert [note for note in build.notes if "sees the tokens that it is to predict" in note] == list(build.notes)
    assert bool(build.notes) is not causal
    assert built(BertLMHeadModel(config), task="masked-lm").notes == ()


def test_what_a_module_sees_is_asked_with_tokens_that_pad_nothing():
    torch.manual_seed(0)  # of some draws, attention sees one token alone
    config = CpmAntConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, dim_head=8, dim_ff=16,
                          vocab_size=64)
    assert any("sees the tokens that it is to predict" in note for note in built(CpmAntForCausalLM(config)).notes)
