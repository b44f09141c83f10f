"""Arguments that a recipe cannot hold, and files and values that are none: errors that say what to write."""

from __future__ import annotations

import pytest

from tests.training_arguments_cases import SETTLED
from tightfit.errors import RecipeError
from tightfit.recipe import Recipe
from tightfit.recipe.hf_arguments import training_arguments
from tightfit.recipe.lookup import load_recipe


def test_all_that_is_refused_is_said_at_once():
    with pytest.raises(RecipeError) as caught:
        Recipe.from_training_arguments(
            {"deepspeed": "/path/to/ds_config.json", "optim": "adamw_hf", "use_liger_kernel": True, "learning_rte": 1,
             "lr_scheduler_type": "reduce_lr_on_plateau"}
        )
    for name in ("deepspeed: '/path/to/ds_config.json'", "optim: 'adamw_hf'", "use_liger_kernel: True", "learning_rte",
                 "lr_scheduler_type"):
        assert name in str(caught.value)


@pytest.mark.parametrize(("given", "words"), [
    ({"learning_rte": 1.0}, ["learning_rte", "'learning_rate'"]),
    ({"quite_unlike_any": 1}, ["quite_unlike_any", "leave it out"]),
    ({"evaluation_strategy": "steps", "eval_strategy": "epoch"}, ["evaluation_strategy", "eval_strategy"]),
    ({"eval_strategy": "steps", "metric_for_best_model": "rouge"}, ["metric_for_best_model: 'rouge'", "accuracy"]),
    ({"eval_strategy": "steps", "metric_for_best_model": "perplexity"}, ["greater_is_better: True", "write False"]),
    ({"bf16": True, "fp16": True}, ["fp16", "bf16", "keep one"]),
    ({"fsdp": "full_shard"}, ["fsdp: 'full_shard'", "write parallel=ddp or parallel=fsdp"]),
    ({"bf16_full_eval": True}, ["bf16_full_eval", "bf16=True"]),
    ({"bf16": "yes"}, ["bf16", "'yes'", "a valid boolean"]),
    ({"max_steps": 1.5}, ["max_steps", "1.5", "a valid integer"]),
    ({"learning_rate": "fast"}, ["learning_rate", "'fast'", "a valid number"]),
    ({"learning_rate": -1.0}, ["learning_rate", "-1.0", "greater than 0"]),
    ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size", "0", "greater than 0"]),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type", "choose from", "cosine"]),
    ({"optim": "galore_adamw"}, ["optim", "'galore_adamw'"]),
    ({"optim": "adamw_torch_8bit", "adam_epsilon": 1e-6}, ["adam_epsilon", "1e-08"]),
    ({"optim": "adamw_torch_8bit", "optim_args": "block_size=128"}, ["optim_args", "block_size=128"]),
    ({"optim": "adamw_anyprecision", "optim_args": "use_kahan_summation=True"}, ["optim_args", "use_kahan_summation"]),
    ({"optim": "adamw_anyprecision", "adam_beta2": 0.95}, ["adam_beta2", "0.999"]),
    ({"optim": "sgd", "optim_args": "momentum"}, ["optim_args", "momentum", "name=value"]),
    ({"optim": "sgd", "optim_args": "momentum=high"}, ["optim_args", "high", "a number"]),
    ({"optim_args": "x=1"}, ["optim_args", "x=1", "adamw"]),
    ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
     ["gradient_checkpointing_kwargs", "use_reentrant", "write False"]),
    ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
     ["gradient_checkpointing_kwargs", "offload"]),
    ({"gradient_checkpointing_kwargs": "{"}, ["gradient_checkpointing_kwargs", "'{'", "dictionary"]),
    ({"torch_compile_backend": "tvm"}, ["torch_compile_backend", "'tvm'"]),
    ({"torch_compile_mode": "fast"}, ["torch_compile_mode", "'fast'"]),
    ({"report_to": "all"}, ["report_to", "'all'", "name the trackers"]),
    ({"eval_strategy": "steps", "eval_steps": 2.5}, ["eval_steps", "2.5"]),
    ({"eval_strategy": "step"}, ["eval_strategy", "'steps'"]),
    ({"logging_steps": 0}, ["logging_steps", "0"]),
    ({"warmup_steps": -1}, ["warmup_steps", "0"]),
    ({"dataloader_prefetch_factor": 2}, ["dataloader_prefetch_factor", "dataloader_num_workers"]),
    (7, ["7", "a file's path"]),
    ({"attn_implementation": "sdpa"}, ["attn_implementation", "leave it out, and write attention="]),
])  # fmt: skip
def test_errors_name_the_argument_and_what_to_write(given, words):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_training_arguments(given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(("name", "text", "reason"), [
    ("args.json", None, "No such file or directory"), ("args.json", "not json", "Expecting value"),
    ("args.json", "[1]", "no object"), ("args.yaml", "[1]", "such as `learning_rate"), ("args.yml", "", "is empty"),
    ("args.yaml", "{a", "not YAML"),
])
def test_a_file_that_is_no_arguments_is_refused(tmp_path, name, text, reason):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(RecipeError, match=rf"{name}: .+ \(.*{reason}.*\); write args\.to_json_string\(\) into it"):
        Recipe.from_training_arguments(file)


def test_arguments_are_read_from_yaml_and_named_where_they_are_given_as_a_recipe(tmp_path):
    file = tmp_path / "args.yaml"
    file.write_text("learning_rate: 2e-5\nbf16: true\nper_device_train_batch_size: 4\nreport_to: none\n")
    recipe = Recipe.from_training_arguments(file)
    assert (recipe.learning_rate, recipe.precision.name, recipe.batch_size) == (2e-5, "bf16", 4)
    with pytest.raises(RecipeError, match=r"^bf16, per_device_train_batch_size: arguments of Hugging Face; tightfit "
                                          r"plan MODEL --training-args .*; bf16: not a field; write precision"):
        load_recipe(str(file))
    with pytest.raises(RecipeError, match=r"^bf16: not a field; write precision$"):
        Recipe.from_dict({"bf16": True})


@pytest.mark.parametrize(("value", "words"), [
    ({"bf16": True}, ["bf16", "write precision"]),
    ({"deepspeed": "x"}, ["deepspeed", "leave it out"]),
    ({"log_levl": "error"}, ["log_levl", "'log_level'"]),
    (["log_level"], ["hugging_face", "dictionary"]),
])  # fmt: skip
def test_hugging_face_holds_only_what_the_recipe_does_not_say(value, words):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict({"hugging_face": value})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("changes", [{"save_steps": "epoch"}, {"eval_steps": "epoch", "save_steps": 3},
                                     {"save_steps": 150}])
def test_checkpoints_without_an_evaluation_have_no_best_one(changes):
    with pytest.raises(RecipeError, match=r"save_steps: .* is no multiple of eval_steps .*save_steps=null"):
        training_arguments(Recipe.from_dict({**SETTLED, "load_best_model_at_end": True, **changes}))


def test_saving_by_time_is_left_to_the_trainer():
    given = training_arguments(Recipe.from_dict({**SETTLED, "save_steps": "auto"}))
    assert not given.keys() & {"save_strategy", "save_steps"}
    best = training_arguments(Recipe.from_dict({**SETTLED, "save_steps": "auto", "load_best_model_at_end": True}))
    assert best["save_strategy"] == "best"


def test_a_batch_of_unequal_micro_batches_is_refused():
    with pytest.raises(RecipeError, match=r"batch_size: 30 is no multiple of micro_batch_size 8.*write batch_size=24"):
        training_arguments(Recipe.from_dict({**SETTLED, "batch_size": 30}))
