"""trl's SFTConfig to a recipe: what its own arguments make, which are refused, and what stands above them."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from tightfit.errors import RecipeError
from tightfit.recipe import Data, Recipe
from tightfit.recipe.hf_arguments import sft, training_arguments
from tightfit.recipe.hf_arguments.table import ASIDE, without_effect
from tightfit.recipe.lookup import as_recipe, load_recipe
from tightfit.training.session import recipe_for_machine

DUMPED = {
    "learning_rate": 2e-05, "logging_steps": 10, "gradient_checkpointing": True, "bf16": True,
    "model_init_kwargs": None, "router_aux_loss_coef": 0.001, "trust_remote_code": False, "chat_template_path": None,
    "dataset_text_field": "text", "dataset_kwargs": None, "dataset_num_proc": None, "eos_token": "<EOS_TOKEN>",
    "max_length": 1024, "truncation_mode": "keep_start", "shuffle_dataset": False, "packing": False,
    "packing_strategy": "bfd", "padding_free": False, "pad_to_multiple_of": None, "eval_packing": None,
    "completion_only_loss": None, "assistant_only_loss": False, "loss_type": "chunked_nll",
    "activation_offloading": False, "pad_token": "<PAD_TOKEN>",
}  # fmt: skip
"""What trl 1.10 writes of a default SFTConfig beside, or other than, TrainingArguments."""
UNREAD = {"assistant_only_loss": False}


@dataclasses.dataclass
class SFTConfig(TrainingArguments):  # type: ignore[misc]
    """The class with some of its fields."""

    max_length: int | None = 1024
    packing: bool = False
    dataset_text_field: str = "text"
    eos_token: str | None = None
    pad_token: str | None = None


@dataclasses.dataclass
class DPOConfig(TrainingArguments):  # type: ignore[misc]
    """Another of trl's, of which some arguments are called the same."""

    max_length: int | None = 1024


@pytest.fixture(autouse=True)
def any_machine(monkeypatch):
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(transformers.training_args.logger, "level", logging.WARNING)  # above, disable_tqdm is true


def read(given, **fields) -> Recipe:
    return Recipe.from_training_arguments(given, **fields)


def test_every_argument_has_its_default():
    own = {name: value for name, value in DUMPED.items() if name in sft.SFT_ARGUMENTS}
    assert own == {**{name: each.default for name, each in sft.SFT_ARGUMENTS.items()}, "loss_type": "chunked_nll",
                   "eos_token": "<EOS_TOKEN>"}  # fmt: skip
    assert DUMPED.keys() - own.keys() == {*sft.SFT_DEFAULTS, *sft.KEPT_ARGUMENTS, "bf16"}
    assert {name: ASIDE[name] for name in sft.KEPT_ARGUMENTS} == dict.fromkeys(sft.KEPT_ARGUMENTS)
    assert {*sft.ALWAYS_SAID, *sft.SAID_UNLESS_DEFAULT} <= sft.SFT_ARGUMENTS.keys()
    made = {each.field for each in sft.SFT_ARGUMENTS.values()} - {""}
    assert made <= {*Recipe.model_fields, *(f"data.{name}" for name in Data.model_fields)}


def test_a_whole_dump_is_the_class_by_its_defaults(tmp_path):
    file = tmp_path / "args.json"
    file.write_text(json.dumps({**TrainingArguments(use_cpu=True).to_dict(), **DUMPED}))
    recipe = read(file)
    assert (recipe.seq_len, recipe.data.packing, recipe.data.text, recipe.loss.name) == (1024, False, "text", "chunked")
    assert (recipe.precision.name, recipe.checkpointing.name, recipe.learning_rate) == ("bf16", "every-block", 2e-5)
    assert (recipe.logging_steps, recipe.hugging_face) == (10, UNREAD)
    assert read(SFTConfig(use_cpu=True, **{name: DUMPED[name] for name in (*sft.SFT_DEFAULTS, "bf16")})) == recipe
    for partial in ({"packing": False}, {"bf16": None, "loss_type": None}):
        assert read({"use_cpu": True, **partial}) == recipe
    assert read({"dataset_num_proc": 4}).learning_rate == 2e-5
    back = training_arguments(recipe.override(attention="sdpa", loss="plain"))
    assert not back.keys() & sft.SFT_ARGUMENTS.keys()
    assert TrainingArguments(**back).learning_rate == 2e-5


def test_learning_all_of_a_conversation_is_said_to_be_without_effect():
    said = without_effect(read(DUMPED).hugging_face)
    assert said.endswith("assistant_only_loss (of conversations the assistant's turns alone are learned)")
    assert not without_effect(read({**DUMPED, "assistant_only_loss": True}).hugging_face)
    assert not without_effect(read({}).hugging_face)


def test_an_argument_that_is_left_out_is_its_own_class_default():
    assert read({"learning_rate": 1e-3, "max_length": 8}).learning_rate == 1e-3
    assert read({"fp16": True, "max_length": 8}).precision.name == "fp16"
    plain = read({})
    assert (plain.learning_rate, plain.precision.name, plain.loss.name) == (5e-5, "fp32", "plain")
    assert plain.data.packing


@pytest.mark.parametrize(("given", "path", "value"), [
    ({"max_length": 300}, "seq_len", 300),
    ({"packing": True}, "data.packing", True),
    ({"packing": True, "packing_strategy": "bfd_split"}, "data.packing", True),
    ({"packing": True, "padding_free": True, "eval_packing": True}, "data.packing", True),
    ({"packing_strategy": "wrapped", "eval_packing": False}, "data.packing", False),
    ({"dataset_text_field": "body"}, "data.text", "body"),
    ({"chat_template_path": "mine/chat.jinja"}, "data.chat_template", "mine/chat.jinja"),
    ({"pad_to_multiple_of": 64}, "pad_sequence_to", 64),
    ({"trust_remote_code": True}, "trust_remote_code", True),
    ({"router_aux_loss_coef": 0.0}, "router_aux_loss_coef", 0.0),
    ({"router_aux_loss_coef": 0.001}, "router_aux_loss_coef", None),
    ({"loss_type": "nll"}, "loss", "plain"),
    ({"assistant_only_loss": True, "completion_only_loss": True, "shuffle_dataset": True}, "data.messages", None),
    ({"model_init_kwargs": {}, "dataset_kwargs": {"skip_prepare_dataset": False}}, "model_overrides", {}),
    ({"eos_token": "<EOS_TOKEN>"}, "tokenizer", "auto"),
])  # fmt: skip
def test_what_an_argument_makes(given, path, value):
    found = read({**DUMPED, **given}).to_dict()
    for part in path.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("given", "words", "written"), [
    ({"max_length": None}, "write seq_len=<", {"seq_len": 64}),
    ({"truncation_mode": "keep_end"}, "write 'keep_start'", None),
    ({"packing": True, "packing_strategy": "wrapped"}, "data.packing=true", {"data": {"packing": True}}),
    ({"padding_free": True}, "data.packing=true", {"data": {"packing": False}}),
    ({"eval_packing": True}, "leave it out", {"data": Data()}),
    ({"chat_template_path": "owner/model"}, "write data.chat_template=<", {"data": {"chat_template": "x.jinja"}}),
    ({"loss_type": "dft"}, "'nll'", {"loss": "plain"}),
    ({"loss_type": []}, "'nll'", {"loss": "plain"}),
    ({"completion_only_loss": False}, "leave it out", None),
    ({"activation_offloading": True}, "write offload=", {"offload": {"name": "host", "activations": 1}}),
    ({"eos_token": "<|im_end|>"}, "write tokenizer=<", {"tokenizer": "mine"}),
    ({"model_init_kwargs": {"dtype": "bfloat16"}}, "bf16-pure", None),
    ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "leave it out", None),
])  # fmt: skip
def test_what_a_recipe_cannot_say_is_refused_unless_its_field_is_written(given, words, written):
    *_, (name, value) = given.items()
    with pytest.raises(RecipeError) as caught:
        read({**DUMPED, **given})
    assert str(caught.value).startswith(f"{name}: {value!r} ")
    assert words in str(caught.value)
    if written is not None:
        assert isinstance(read({**DUMPED, **given}, **written), Recipe)


@pytest.mark.parametrize("written", ['{"eos_token": "<|im_end|>"}', '{"eos_token": {"content": "<|im_end|>"}}', "{}",
                                     '{"eos_token": "</s>"}', "[", None])
def test_an_eos_token_is_that_of_the_models_own_tokenizer_or_refused(tmp_path, written):
    if written is not None:
        (tmp_path / "tokenizer_config.json").write_text(written)
    given = {**DUMPED, "eos_token": "<|im_end|>"}
    if "im_end" in str(written):
        assert read(given, model=str(tmp_path)).tokenizer == "auto"
    else:
        with pytest.raises(RecipeError, match=r"^eos_token: '<\|im_end\|>' is not found"):
            read(given, model=str(tmp_path))


def test_all_that_is_refused_is_said_at_once():
    with pytest.raises(RecipeError) as caught:
        read({**DUMPED, "max_length": 0, "eos_token": "x", "deepspeed": "y", "max_seq_length": 5})
    for words in ("seq_len: 0", "eos_token: 'x'", "deepspeed: 'y'", "max_seq_length: not an argument", "seq_len=..."):
        assert words in str(caught.value)


@pytest.mark.parametrize(("data", "expected"), [
    ("notes.jsonl", {"source": "notes.jsonl", "text": "body", "packing": False}),
    ({"source": "notes.jsonl", "packing": True}, {"source": "notes.jsonl", "text": "body", "packing": True}),
    ({"text": "other"}, {"source": "stdlib", "text": "other", "packing": False}),
    (Data(source="mine"), {"source": "mine", "text": "text", "packing": True}),
])  # fmt: skip
def test_data_that_is_written_stands_above_the_arguments(data, expected):
    found = read({**DUMPED, "dataset_text_field": "body"}, data=data).data
    assert {name: getattr(found, name) for name in expected} == expected


def test_arguments_stand_between_the_recipe_and_the_overrides(tmp_path):
    arguments, recipe = tmp_path / "args.json", tmp_path / "mine.yaml"
    arguments.write_text(json.dumps({**DUMPED, "max_length": 32}))
    recipe.write_text("{model: gpt2, seq_len: 7, loss: plain, tokenizer: x, data: {source: y, packing: true, text: z}}")
    found = load_recipe(str(recipe), training_arguments=arguments)
    assert (found.seq_len, found.loss.name, found.tokenizer) == (32, "chunked", "x")
    assert (found.data.source, found.data.packing, found.data.text) == ("y", False, "z")  # a default names no field
    found = load_recipe(str(recipe), ["seq_len=9", "data.packing=true"], training_arguments=arguments)
    assert (found.seq_len, found.data.packing) == (9, True)


def test_a_length_is_that_of_the_arguments_and_their_default_what_positions_allow():
    assert as_recipe(SFTConfig(bf16=True), "bert-base").seq_len == 512
    assert as_recipe(SFTConfig(bf16=True, max_length=600), "bert-base").seq_len == 600


def test_rows_are_cut_where_the_arguments_do():
    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=64, n_positions=90))
    for length, seq_len in ((40, 40), (80, 50)):
        given = SFTConfig(use_cpu=True, max_length=length)
        assert recipe_for_machine(given, module, rows={"dataset": [{"input_ids": [1] * 50}]}).seq_len == seq_len
        assert recipe_for_machine(given, module, rows={"dataset": [{"text": "the dog"}]}).seq_len == length


def test_an_object_says_its_tokens_and_other_classes_are_not_taken_for_it():
    with pytest.raises(RecipeError, match=r"^eos_token: 'x' is not found"):
        read(SFTConfig(use_cpu=True, eos_token="x"))
    assert read(SFTConfig(use_cpu=True, pad_token="y")).hugging_face == {"pad_token": "y", **UNREAD}
    assert read({**DUMPED, "dataset_num_proc": 4}).hugging_face == {"dataset_num_proc": 4, **UNREAD}
    with pytest.raises(RecipeError, match=r"^max_length: not an argument of TrainingArguments"):
        read(DPOConfig(max_length=8))


@pytest.mark.parametrize(("value", "words"), [
    ({"hugging_face": {"max_length": 8}}, "hugging_face: max_length: has no effect; write seq_len"),
    ({"hugging_face": {"shuffle_dataset": True}}, "shuffle_dataset: has no effect; leave it out"),
    ({"packing": True}, "packing: not a field; write data.packing"),
])  # fmt: skip
def test_a_recipe_says_these_itself(value, words):
    with pytest.raises(RecipeError, match=words):
        Recipe.from_dict(value)


def test_names_of_trls_other_configuration_are_told_as_the_adapters_own():
    with pytest.raises(RecipeError) as caught:
        Recipe.from_training_arguments({"lora_dropout": 0.1, "lora_target_modules": ["q_proj"], "use_dora": True})
    for field in ("trainable.dropout=...", "trainable.targets=[...]", "trainable=dora"):
        assert field in str(caught.value)
