"""TrainingArguments to a recipe and back, against the installed class: each argument round-trips or is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import warnings
from enum import Enum

import pytest
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from tests.training_arguments_cases import EXAMPLES, NEEDS, OTHER, SETTLED, SPELLINGS, VARIANTS
from tightfit.errors import RecipeError
from tightfit.recipe import Recipe
from tightfit.recipe.hf_arguments import training_arguments
from tightfit.recipe.hf_arguments.reading import RENAMED
from tightfit.recipe.hf_arguments.table import (
    ASIDE,
    CARRIED,
    DEFAULTS,
    FIELDS,
    MAPPED,
    REFUSED,
    SPELLED,
    arguments_of,
    without_effect,
)
from tightfit.recipe.yaml_text import read_yaml, to_yaml

BESIDE = [field for field in Recipe.model_fields if not arguments_of(field)]
"""Fields of a recipe that no argument holds: model, data, and what tightfit alone has."""

INSTALLED = [field for field in dataclasses.fields(TrainingArguments) if field.init]


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    """TrainingArguments as a machine with an Ampere GPU makes them: bf16 and tf32 are refused elsewhere."""
    home = transformers.training_args
    monkeypatch.setattr(home, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(home, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(home, "enable_tf32", lambda on: None)


@pytest.fixture(autouse=True)
def log_level():
    """transformers' own, from which TrainingArguments derives whether to show progress."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(before)


def default_of(field):
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def another(field):
    """A value of the field that is not its default. Fails for a new field that suggests none."""
    default = default_of(field)
    if field.name in OTHER:
        return OTHER[field.name]
    if isinstance(default, bool):
        return not default
    assert isinstance(default, int | float), f"{field.name}: give OTHER a value for it"
    return default * 2 if default > 0 else default + 0.5 if isinstance(default, float) else default + 3


def plain(arguments: TrainingArguments) -> dict:
    values = {field.name: getattr(arguments, field.name) for field in INSTALLED}
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def built(arguments: dict) -> dict:
    """Every argument as the real class makes it of `arguments`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain(TrainingArguments(**{RENAMED.get(name, name): value for name, value in arguments.items()}))


def round_trip(arguments, **fields) -> dict:
    return training_arguments(Recipe.from_training_arguments(arguments, attention="sdpa", **fields))


def test_the_table_is_the_installed_class():
    assert {field.name: default_of(field) for field in INSTALLED} == DEFAULTS


def test_every_argument_stands_in_one_table():
    assert len(MAPPED) + len(CARRIED) + len(REFUSED) == len(DEFAULTS)
    assert set(MAPPED) >= SPELLED
    assert set(FIELDS) <= set(Recipe.model_fields)
    held = {name for field in Recipe.model_fields for name in arguments_of(field)}
    assert set(MAPPED) <= held <= set(MAPPED) | set(REFUSED)


@pytest.mark.parametrize("field", INSTALLED, ids=lambda field: field.name)
def test_each_argument_round_trips_or_is_refused_by_name(field):
    given = {**NEEDS.get(field.name, {}), field.name: another(field)}
    assert given[field.name] != default_of(field)
    if field.name in REFUSED:
        with pytest.raises(RecipeError, match=rf"(^|; ){field.name}: .+; .+") as caught:
            Recipe.from_training_arguments(given)
        assert "secret" not in str(caught.value)
        return
    recipe = Recipe.from_training_arguments(given, attention="sdpa")
    back = training_arguments(recipe)
    assert back[field.name] == given[field.name]
    assert built(back) == built(given)
    assert Recipe.from_training_arguments(back, attention="sdpa") == recipe
    assert Recipe.from_dict(read_yaml(to_yaml(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("seed", range(80))
def test_arguments_round_trip_together(seed):
    chance = random.Random(seed)
    alone = {"bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "optim_args", "dataloader_prefetch_factor",
             "dataloader_persistent_workers", "load_best_model_at_end", "adam_epsilon", "lr_scheduler_kwargs",
             *REFUSED}  # fmt: skip
    fields = [field for field in INSTALLED if field.name not in alone]
    given = {
        field.name: chance.choice(SPELLINGS[field.name]) if field.name in SPELLINGS else another(field)
        for field in chance.sample(fields, 12)
    }
    recipe = Recipe.from_training_arguments(given, attention="sdpa")
    back = training_arguments(recipe)
    assert built(back) == built(given)
    assert Recipe.from_training_arguments(back, attention="sdpa") == recipe


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_guides_examples_round_trip(name, tmp_path):
    given = EXAMPLES[name]
    back = round_trip(given)
    assert back.items() >= {RENAMED.get(name, name): value for name, value in given.items()}.items()
    assert built(back) == built(given)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = TrainingArguments(**{RENAMED.get(name, name): value for name, value in given.items()})
    assert built(round_trip(real)) == plain(real)

    file = tmp_path / "args.json"
    file.write_text(real.to_json_string())
    assert round_trip(file) == round_trip(str(file)) == round_trip(real)


def test_what_the_largest_example_means():
    recipe = Recipe.from_training_arguments(EXAMPLES["compile"], model="bert-base-uncased", seq_len=512)
    assert recipe.to_dict() | {
        "model": "bert-base-uncased",
        "seq_len": 512,
        "batch_size": 64,
        "micro_batch_size": 4,
        "precision": "bf16",
        "checkpointing": "every-block",
        "optimizer": {"name": "adamw-8bit", "weight_decay": 0.0},
        "compile": "whole",
        "loading": {"workers": 4},
        "empty_cache_steps": 4,
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "attention": "auto",
    } == recipe.to_dict()


def test_tf32_beside_bf16_is_a_knob_of_precision():
    recipe = Recipe.from_training_arguments(EXAMPLES["recomputed bf16 with tf32"])
    assert recipe.to_dict()["precision"] == {"name": "bf16", "tf32": True}
    assert recipe.to_dict()["optimizer"] == {"name": "adamw", "weight_decay": 0.0}


@pytest.mark.filterwarnings("ignore:trainable=")
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_recipe_comes_back_whole_or_is_refused(changes):
    recipe = Recipe.from_dict({**SETTLED, **changes})
    try:
        given = training_arguments(recipe)
    except RecipeError as error:
        named = str(error).partition(": TrainingArguments cannot say it")[0].split(", ")
        assert {name.partition("=")[0] for name in named} <= set(changes)
        return
    built(given)
    beside = {name: getattr(recipe, name) for name in BESIDE if name != "hugging_face"}
    back = Recipe.from_training_arguments(given, **beside)
    was, now = recipe.to_dict(), back.to_dict()
    if was["optimizer"] == {"name": "adamw", "implementation": "fused"}:
        was["optimizer"] = "adamw"  # which is fused
    differing = {name for name in was if was[name] != now[name]} - {"hugging_face"}
    assert differing <= ({"compile"} if recipe.compile.name == "per-block" else set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = Recipe.from_training_arguments(TrainingArguments(**given), **beside)
    assert again == back


@pytest.mark.parametrize("changes", [
    {"checkpointing": "segments"}, {"precision": "bf16-pure"}, {"optimizer": {"name": "adamw-4bit", "block_size": 128}},
    {"optimizer": "adafactor"}, {"optimizer": "muon"},
    {"offload": "host"},
])  # fmt: skip
def test_a_technique_without_an_argument_is_refused(changes):
    (slot,) = changes
    with pytest.raises(RecipeError, match=rf"{slot}=\S+: .* tightfit\.apply\(model, recipe\)"):
        training_arguments(Recipe.from_dict({**SETTLED, **changes}))


def test_the_named_variable_makes_accelerate_compile_blocks(monkeypatch):
    from accelerate.utils import TorchDynamoPlugin

    assert not TorchDynamoPlugin(backend="inductor").use_regional_compilation
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    assert TorchDynamoPlugin(backend="inductor").use_regional_compilation


@pytest.mark.parametrize(("optimizer", "name", "options"), [
    ("adamw", "AdamW", {"fused": True, "betas": (0.9, 0.999), "eps": 1e-8}),
    ({"name": "adamw", "implementation": "foreach"}, "AdamW", {"betas": (0.9, 0.999), "eps": 1e-8}),
    ({"name": "sgd", "momentum": 0.7}, "SGD", {"momentum": 0.7}),
    ({"name": "sgd", "momentum": 0.0}, "SGD", {}),
    ({"name": "adafactor", "scale_parameter": False}, "Adafactor", {"scale_parameter": False, "relative_step": False}),
    ("adamw-8bit", "AdamW8bit", {"block_size": 256, "betas": (0.9, 0.999)}),
    ({"name": "adamw-4bit", "block_size": 256}, "AdamW4bit", {"block_size": 256}),
])  # fmt: skip
def test_the_trainer_makes_the_optimizer_that_the_recipe_names(optimizer, name, options):
    given = training_arguments(Recipe.from_dict({**SETTLED, "optimizer": optimizer}))
    made, kwargs = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(**given))
    assert made.__name__ == name
    assert kwargs.items() >= {"lr": 3e-4, **options}.items()
    assert ("fused" in kwargs) == ("fused" in options)


def test_every_nth_recomputes_the_blocks_that_transformers_does():
    given = training_arguments(Recipe.from_dict({**SETTLED, "checkpointing": {"name": "every-nth", "n": 2}}))
    model = GPT2LMHeadModel(GPT2Config(n_layer=5, n_head=1, n_embd=8, vocab_size=8, n_positions=8))
    model.gradient_checkpointing_enable(**given["gradient_checkpointing_kwargs"])
    blocks = model.transformer.h
    assert [block for block in blocks if block.gradient_checkpointing] == list(blocks[::2])


@pytest.mark.parametrize(("warmup", "steps"), [(0.1, 250), (0.0301, 333), (12, 250), (0, 250)])
def test_shares_of_all_steps_are_those_of_the_trainer(warmup, steps):
    given = {"warmup_steps": warmup, "max_steps": steps}
    recipe = Recipe.from_training_arguments(given, attention="sdpa")
    assert recipe.warmup == TrainingArguments(**given).get_warmup_steps(steps)
    assert training_arguments(recipe)["warmup_steps"] == warmup
    assert training_arguments(recipe.override(warmup_steps=5))["warmup_steps"] == 5


def test_epochs_stay_epochs_until_steps_are_written():
    recipe = Recipe.from_training_arguments({"num_train_epochs": 2}, attention="sdpa")
    assert recipe.num_train_epochs == 2
    assert "num_train_epochs" not in recipe.hugging_face
    assert training_arguments(recipe)["max_steps"] == -1
    assert training_arguments(recipe.override(max_steps=50))["max_steps"] == 50
    assert round_trip({"num_train_epochs": 2}, max_steps=300)["max_steps"] == 300


def test_a_strategy_that_an_earlier_version_kept_aside_does_not_stand_against_the_recipe():
    recipe = Recipe.from_dict({**SETTLED, "hugging_face": {"eval_strategy": "epoch"}})
    assert training_arguments(recipe)["eval_strategy"] == "steps"


def test_a_spelling_stands_only_while_the_recipe_says_the_same():
    recipe = Recipe.from_training_arguments({"optim": "adamw_bnb_8bit", "log_level": "error"}, attention="sdpa")
    assert training_arguments(recipe)["optim"] == "adamw_bnb_8bit"
    changed = recipe.override(optimizer="lion")
    assert training_arguments(changed)["optim"] == "lion_32bit"
    assert training_arguments(changed)["log_level"] == "error"


def test_fields_stand_in_for_arguments_even_for_refused_ones():
    given = {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"patience": 2}, "optim": "lomo",
             "weight_decay": 0.3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}  # fmt: skip
    with pytest.raises(RecipeError) as caught:
        Recipe.from_training_arguments(given, optimizer="adamw")
    assert "lr_scheduler_type: 'greedy' is not known" in str(caught.value)
    recipe = Recipe.from_training_arguments(
        given, lr_scheduler_type="cosine", optimizer="auto", micro_batch_size="auto", checkpointing="segments",
        precision="auto", device="cpu",
    )  # fmt: skip
    assert (recipe.batch_size, recipe.micro_batch_size, recipe.optimizer) == (16, "auto", "auto")
    assert not {"optim", "weight_decay", "lr_scheduler_type", "lr_scheduler_kwargs"} & set(recipe.hugging_face)
    with pytest.raises(RecipeError, match="micro_batch_size, precision, optimizer, attention: still auto"):
        training_arguments(recipe)


def test_a_subclass_is_read_while_its_own_arguments_have_their_defaults():
    recipe = Recipe.from_training_arguments(Seq2SeqTrainingArguments(seed=3))
    assert recipe.seed == 3
    with pytest.raises(RecipeError, match="predict_with_generate"):
        Recipe.from_training_arguments(Seq2SeqTrainingArguments(predict_with_generate=True))


def test_a_default_object_keeps_only_what_a_recipe_has_no_value_for():
    recipe = Recipe.from_training_arguments(TrainingArguments())
    assert recipe.num_train_epochs == 3.0
    assert recipe.hugging_face == {}


@pytest.mark.parametrize("limit", [None, 1, 5])
def test_as_many_checkpoints_are_kept_as_the_trainer_keeps(limit):
    recipe = Recipe.from_training_arguments({"save_total_limit": limit}, attention="sdpa")
    assert (recipe.save_total_limit, recipe.hugging_face) == (limit, {})
    assert training_arguments(recipe).get("save_total_limit") == limit


def test_mappings_are_read_without_a_framework():
    code = (
        "import sys\n"
        "from tightfit.recipe import Recipe\n"
        "from tightfit.recipe.hf_arguments import training_arguments\n"
        f"recipe = Recipe.from_training_arguments({json.dumps(EXAMPLES['batch of 64'])}, attention='sdpa')\n"
        "assert training_arguments(recipe)['gradient_accumulation_steps'] == 16\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FULL_DUMP = {
    "output_dir": "out", "overwrite_output_dir": False, "do_eval": True, "evaluation_strategy": None,
    "eval_strategy": "no", "per_device_train_batch_size": 8, "per_gpu_train_batch_size": None,
    "gradient_accumulation_steps": 2, "learning_rate": 5e-05, "num_train_epochs": 3.0, "max_steps": -1,
    "lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "warmup_ratio": 0.1, "warmup_steps": 0,
    "logging_dir": "out/runs", "save_safetensors": True, "no_cuda": False, "use_cpu": False, "use_mps_device": False,
    "jit_mode_eval": False, "use_ipex": False, "bf16": True, "fp16": False, "fp16_opt_level": "O1",
    "half_precision_backend": "auto", "local_rank": 0, "tpu_num_cores": None, "tpu_metrics_debug": False, "debug": [],
    "fsdp": [], "fsdp_min_num_params": 0, "fsdp_config": {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False,
                                                          "xla_fsdp_grad_ckpt": False},
    "fsdp_transformer_layer_cls_to_wrap": None, "group_by_length": False, "adafactor": False, "past_index": -1,
    "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>", "include_inputs_for_metrics": False, "mp_parameters": "",
    "include_num_input_tokens_seen": False, "average_tokens_across_devices": False, "torchdynamo": None, "_n_gpu": 1,
    "ray_scope": "last", "dispatch_batches": None, "split_batches": None, "optim": "adamw_torch",
    "accelerator_config": {"split_batches": False, "dispatch_batches": None, "even_batches": True,
                           "use_seedable_sampler": True, "non_blocking": False, "gradient_accumulation_kwargs": None},
}
"""Fields that transformers 4.41 to 4.57 write and today's does not, or writes otherwise."""


def test_what_transformers_4_wrote_is_read(tmp_path):
    file = tmp_path / "args.json"
    file.write_text(json.dumps(FULL_DUMP))
    recipe = Recipe.from_training_arguments(file)
    assert (recipe.batch_size, recipe.num_train_epochs, recipe.warmup_steps) == (16, 3.0, 0.1)
    assert (recipe.precision.name, recipe.optimizer.name) == ("bf16", "adamw")
    aside = {name: value for name, value in recipe.hugging_face.items() if name in ASIDE}
    assert aside == {"logging_dir": "out/runs"}
    resolved = recipe.override(attention="sdpa", micro_batch_size=8, loading={"workers": 0})
    built(training_arguments(resolved))  # today's class takes what it gives back
    assert read_yaml(to_yaml(recipe.to_dict()))["hugging_face"]["logging_dir"] == "out/runs"


@pytest.mark.parametrize(("old", "today"), [
    ({"evaluation_strategy": "steps", "eval_strategy": "no"}, {"eval_strategy": "steps"}),
    ({"no_cuda": True, "use_cpu": False}, {"use_cpu": True}), ({"warmup_ratio": 0.2}, {"warmup_steps": 0.2}),
    ({"warmup_ratio": 0.2, "warmup_steps": 7}, {"warmup_steps": 7}), ({"adafactor": True}, {"optim": "adafactor"}),
    ({"per_gpu_train_batch_size": 3}, {"per_device_train_batch_size": 3}),
])
def test_older_names_mean_what_todays_do(old, today):
    assert Recipe.from_training_arguments(old) == Recipe.from_training_arguments(today)


def test_what_one_process_does_not_read_is_kept_and_said_to_be_without_effect():
    given = {"ddp_find_unused_parameters": False, "ddp_timeout": 7200, "group_by_length": True}
    recipe = Recipe.from_training_arguments(given, attention="sdpa")
    assert without_effect(recipe.hugging_face).endswith(
        "without effect here: ddp_find_unused_parameters, ddp_timeout, train_sampling_strategy")
    assert training_arguments(recipe)["ddp_find_unused_parameters"] is False
    with pytest.raises(RecipeError, match="'sequential' keeps the data's order"):
        Recipe.from_training_arguments({"train_sampling_strategy": "sequential"})
