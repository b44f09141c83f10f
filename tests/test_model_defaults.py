"""What a recipe's model says where it says nothing: its task, and how weights that were trained before are trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from torch import nn
from transformers import TrainingArguments

from tightfit.backends.pytorch.own_loop import apply
from tightfit.errors import RecipeError
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import as_recipe, load_recipe
from tightfit.recipe.model_defaults import FINE_TUNING_RATE, task_of
from tightfit.training.trainer import Trainer


@pytest.mark.parametrize("classes", [True, "GPT2LMHeadModel", {"a": 1}, None])
def test_a_configuration_whose_classes_are_no_list_names_no_task(tmp_path: Path, classes):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": classes}))
    assert task_of(str(tmp_path)) is None


@pytest.mark.parametrize(("architecture", "more", "task"), [
    ("BertForMaskedLM", {}, "masked-lm"), ("GPT2LMHeadModel", {}, "causal-lm"),
    ("LlamaForSequenceClassification", {}, "sequence-classification"),
    ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "seq2seq"),
    ("Gemma3ForConditionalGeneration", {}, "causal-lm"),  # of which text is the part that a recipe trains
])
def test_the_task_is_that_of_the_saved_model(architecture, more, task, tmp_path: Path, monkeypatch):
    kind = architecture.partition("For")[0].partition("LM")[0].lower()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture], **more}))
    assert load_recipe(str(tmp_path)).task == task
    assert load_recipe("quickstart", [f"model={tmp_path}"]).task == task
    other = "sequence-classification"
    assert load_recipe(str(tmp_path), [f"task={other}"]).task == other
    assert as_recipe({"seq_len": 8}, str(tmp_path)).task == task
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert load_recipe("owner/model").task == task


@pytest.mark.parametrize(("name", "task", "source"), [
    ("bert-base", "masked-lm", "stdlib"), ("t5-base", "seq2seq", "dummy"),
    ("vit-base", "image-classification", "dummy"),
])
def test_the_task_of_a_bundled_model_is_its_own_wherever_it_is_named(name, task, source, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(f"model: {name}\n")
    for found in (load_recipe(name), load_recipe(str(tmp_path / "mine.yaml")), as_recipe({"batch_size": 8}, name),
                  as_recipe({"model": name}), as_recipe(Recipe(batch_size=8), name), as_recipe(Recipe(model=name)),
                  load_recipe("quickstart", [f"model={name}", "data={packing: false}"])):
        assert (found.model, found.task, found.data.source) == (name, task, source)
    assert as_recipe({"data": "mine.jsonl"}, name).data.source == "mine.jsonl"
    for named in (as_recipe({"task": "causal-lm"}, name), as_recipe(Recipe(task="causal-lm"), name)):
        assert (named.task, named.data.source) == ("causal-lm", "stdlib")


@pytest.mark.parametrize(("model", "data", "task"), [
    ("gpt2", {"source": "x.jsonl", "label": "label"}, "sequence-classification"),
    ("t5-small", {"label": "label"}, "sequence-classification"),
    ("t5-small", {"target": "label"}, "seq2seq"), ("gpt2", {"target": "label"}, "seq2seq"),
    ("vit-base", {"label": "label"}, "image-classification"),
    ("package.module:factory", {"label": "label"}, "sequence-classification"),
])  # fmt: skip
def test_a_field_that_one_task_reads_names_it(model: str, data: dict[str, str], task: str):
    assert as_recipe({"model": model, "data": data}).task == task
    assert as_recipe({"model": model, "data": data, "task": "causal-lm"}).task == "causal-lm"


def test_a_modules_head_is_its_own_whatever_fields_the_data_has():
    fields = {"data": {"label": "label"}, "vocab_size": 64}
    module = type("GPT2LMHeadModel", (), {"named_parameters": list, "config": SimpleNamespace()})()
    assert as_recipe(fields, module).task == "causal-lm"
    assert as_recipe(fields, nn.Linear(2, 2)).task == "sequence-classification"


def test_a_saved_head_of_no_task_is_refused_unless_a_task_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForTokenClassification"]}')
    with pytest.raises(RecipeError, match=r"saved as BertForTokenCl.* write task=causal-lm or masked-lm or"):
        load_recipe(str(tmp_path))
    assert load_recipe(str(tmp_path), ["task=masked-lm"]).task == "masked-lm"


@pytest.mark.parametrize(("name", "encoder_decoder", "task"), [
    ("BertForSequenceClassification", False, "sequence-classification"),
    ("T5ForConditionalGeneration", True, "seq2seq"),
    ("LlavaForConditionalGeneration", False, "causal-lm"), ("Tiny", None, "causal-lm"),
])
def test_the_task_is_that_of_a_modules_class(name, encoder_decoder, task):
    module = type(name, (), {"named_parameters": lambda self: []})()
    if encoder_decoder is not None:
        module.config = SimpleNamespace(is_encoder_decoder=encoder_decoder)
    assert as_recipe({"seq_len": 8}, module).task == task
    assert as_recipe({"task": "masked-lm"}, module).task == "masked-lm"
    assert as_recipe(TrainingArguments(), module).task == as_recipe(None, module).task == task
    assert as_recipe(Recipe(seq_len=8), module).task == as_recipe("quickstart", module).task == task


def test_a_modules_task_is_read_through_what_is_made_from_its_class_or_put_around_it():
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    named = type("MyModel", (transformers.BertForMaskedLM,), {})(config)
    with_adapter = type("Adapted", (), {"named_parameters": list, "get_base_model": lambda self: named})()
    for module in (named, SimpleNamespace(named_parameters=list, _orig_mod=named), with_adapter):
        assert as_recipe({}, module).task == "masked-lm"
    own = type("MyTagger", (transformers.BertPreTrainedModel,), {})(config)
    assert as_recipe({}, own).task == "causal-lm"
    tagger = type("MyTagger", (transformers.BertForTokenClassification,), {})(config)
    for recipe in ({}, None, Recipe(), "quickstart", TrainingArguments()):
        with pytest.raises(RecipeError, match=r"the head of BertForTokenClassification is of no task here; .*task="):
            as_recipe(recipe, tagger)
    assert as_recipe({"task": "causal-lm"}, tagger).task == "causal-lm"
    with pytest.raises(RecipeError, match="of no task here"):
        apply(tagger, {})


def test_weights_that_were_trained_before_are_trained_further_at_a_lower_rate(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    saved, usual = str(tmp_path), Recipe().learning_rate
    module = type("Loaded", (), {"named_parameters": list, "config": SimpleNamespace(_name_or_path="owner/model")})()
    for further in (load_recipe(saved), load_recipe("owner/model"), as_recipe({"seq_len": 8}, saved),
                    as_recipe(Recipe(model=saved)), as_recipe({}, module), as_recipe(None, module)):
        assert further.learning_rate == FINE_TUNING_RATE < usual
    for other in (load_recipe(saved, ["trainable=lora"]), load_recipe(saved, ["pretrained=false"]),
                  load_recipe("gpt2"), as_recipe({}, SimpleNamespace(named_parameters=list))):
        assert other.learning_rate == usual
    assert load_recipe(saved, ["learning_rate=0.1"]).learning_rate == 0.1
    assert as_recipe(TrainingArguments(learning_rate=0.1), saved).learning_rate == 0.1


def test_weights_that_were_trained_before_learn_from_named_data_alone(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    for recipe in (None, {"seq_len": 8}, Recipe(seq_len=8), Recipe(data={"packing": False}), TrainingArguments()):
        with pytest.raises(RecipeError, match=r"^data: none is named, and '.*' was trained before; write data=<a file"):
            Trainer(str(tmp_path), recipe)
    assert Trainer(str(tmp_path), {"data": "stdlib"}).recipe.data.source == "stdlib"
    assert Trainer(str(tmp_path), {}, dataset=[{"input_ids": [1, 2]}]).recipe.model == str(tmp_path)
    assert Trainer("gpt2").recipe.data.source == "stdlib"
