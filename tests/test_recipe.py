"""Recipes: values in, values out, and errors that say what to write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel
from transformers import TrainingArguments
from typer.testing import CliRunner

from tightfit.bundled import BUNDLED, bundled_recipes
from tightfit.cli import app
from tightfit.devices import Device
from tightfit.errors import RecipeError, UnknownRecipe, closest
from tightfit.planning.defaults import resolve
from tightfit.recipe import CHOICES, Recipe
from tightfit.recipe.lookup import as_recipe, load_recipe
from tightfit.recipe.sections import NameOrPath
from tightfit.recipe.yaml import TEXT_FIELDS, apply_overrides
from tightfit.recipe.yaml_text import read_yaml, to_yaml
from tightfit.techniques import SLOTS, VARIANTS

CPU = Device(kind="cpu", name="CPU", memory_bytes=1 << 34)
T4 = Device(kind="cuda", name="T4", memory_bytes=1 << 34, capability=(7, 5))
A100 = Device(kind="cuda", name="A100", memory_bytes=1 << 36, capability=(8, 0))


RUNGS = [(slot, rung) for slot, variants in VARIANTS.items() for variant in variants
         for rung in variant.representative_settings()]


@pytest.mark.parametrize(("slot", "technique"), RUNGS)
def test_every_rung_survives_yaml(slot, technique, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(Recipe.from_dict({slot: technique}).to_dict()))
    assert getattr(load_recipe(str(file)), slot) == technique


@pytest.mark.parametrize(("values", "words"), [
    ({"modle": "gpt2"}, ["modle", "did you mean 'model'"]),
    ({"optimizer": "adam"}, ["optimizer", "'adam'", "'adamw'"]),
    ({"optimizer": {"name": "lion", "beta": 1}}, ["optimizer.beta", "lion", "'betas'"]),
    ({"optimizer": {"betas": [0.9, 0.99]}}, ["optimizer", "name"]),
    ({"optimizer": {"name": "adamw", "betas": 1}}, ["optimizer.betas: 1 should be a list such as [0.9, 0.999]"]),
    ({"optimizer": {"name": "adamw", "betas": [0.9]}}, ["betas: [0.9] should be a list such as [0.9, 0.999]"]),
    ({"output_dir": 7}, ["output_dir: 7 should be a text, in quotes"]),
    ({"tokenizer": None}, ["tokenizer: None should be a text"]),
    ({"learning_rate": 1e39}, ["learning_rate: 1e+39 should be less than or equal to 1000000"]),
    ({"optimizer": {"name": "sgd", "weight_decay": 1e39}},
     ["optimizer.weight_decay: 1e+39 should be less than or equal to 1000000000000000000"]),
    ({"max_steps": 1e30}, ["max_steps: 1e+30 should be a smaller integer"]),
    ({"report_to": 5}, ["report_to: 5 should be a list"]),
    ({"optimizer": None}, ["optimizer: 'null' is not known", "adamw"]),
    ({"checkpointing": {"name": "every-nth", "n": 0}}, ["checkpointing.n", "0", "greater than or equal to 1"]),
    ({"batch_size": 0}, ["batch_size", "0", "greater than or equal to 1"]),
    ({"micro_batch_size": "many"}, ["micro_batch_size", "'many'", "integer", "'auto'"]),
    ({"task": "causallm"}, ["task", "'causallm'", "'causal-lm'"]),
    ({"data": {"sorce": "x"}}, ["data.sorce", "'source'"]),
    ({"learning_rate": -1.0}, ["learning_rate", "-1.0", "greater than 0"]),
    ({"lr_scheduler_type": "cosin"}, ["lr_scheduler_type", "'cosin'", "'cosine'"]),
    ({"attention": {"name": "sdpa", "kernel": "flsh"}}, ["attention.kernel", "'flsh'", "'flash'"]),
    ({"compile": {"name": "off", "mode": "default"}}, ["compile.mode", "no knobs"]),
    ({"per_device_train_batch_size": 8}, ["per_device_train_batch_size", "micro_batch_size"]),
    ({"epochs": 3}, ["epochs", "write num_train_epochs"]),
    ({"lr": 1e-3}, ["lr", "write learning_rate"]),
    ({"eval_strategy": "epoch"}, ["eval_strategy", "write eval_steps=epoch"]),
    ({"save_strategy": "epoch"}, ["save_strategy", "write save_steps=epoch"]),
    ({"precision": "float16"}, ["'float16'", "did you mean 'fp16'"]),
    ({"task": "text-classification"}, ["'text-classification'", "did you mean 'sequence-classification'"]),
    ({"num_train_epochs": 0}, ["num_train_epochs", "greater than 0"]),
    ({"warmup_steps": 2.5}, ["warmup_steps", "2.5", "below 1 a share"]),
    ({"gradient_checkpointing": True}, ["gradient_checkpointing", "write checkpointing"]),
    ({"precision": True}, ["precision", "True", "choose from"]),
    ({"backend": "tensorflow"}, ["backend", "'tensorflow'", "pytorch"]),
    ({"backend": "auto"}, ["backend", "'auto'", "pytorch"]),
    ({"backend": {"name": "pytorch", "layers": "scanned"}}, ["backend.layers", "pytorch", "no knobs"]),
    ({"backend": {"name": "jax", "layers": "rolled"}}, ["backend.layers", "'rolled'", "'unrolled'"]),
    ({"weight_decay": 0.1}, ["weight_decay", "write optimizer"]),
    ({"learning_rate": float("inf")}, ["learning_rate", "inf", "finite"]),
    ({"max_grad_norm": float("nan")}, ["max_grad_norm", "nan", "finite"]),
    ({"optimizer": {"name": "adamw", "betas": [float("nan"), 0.9]}}, ["optimizer.betas", "nan", "finite"]),
    ({"learning_rate": True}, ["learning_rate", "True", "a number"]),
    ({"seq_len": True}, ["seq_len", "True", "a number"]),
    ({"micro_batch_size": True}, ["micro_batch_size", "True", "a number", "'auto'"]),
    ({"loading": {"workers": 1025}}, ["loading.workers", "1025", "at most 1024"]),
    ({"seed": 2**63}, ["seed", "at most 9223372036854775807"]),
    ({"vocab_size": 2**31}, ["vocab_size", "at most 2147483647"]),
    ({"max_steps": 10**30}, ["max_steps", "at most"]),
    ({"optimizer": {"name": ["x"]}}, ["optimizer", "['x']", "adamw"]),
    ({"optimizer": {"name": {"a": 1}}}, ["optimizer", "{'a': 1}", "adamw"]),
    ({"precision": {"name": "fp32", 3: 4}}, ["precision", "3", "knob"]),
    ({"data": {1: 2}}, ["data", "1", "not the name of a field"]),
    ({"mode": "infer"}, ["mode", "'infer'", "'inference'"]),
    ({"inference": 0}, ["inference.new_tokens", "0", "greater than or equal to 1"]),
    ({"inference": {"beam": 4}}, ["inference.beam", "'beams'"]),
    ({"batch_size": 8, "micro_batch_size": 16}, ["micro_batch_size: 16", "batch_size=8", "micro_batch_size=8 or less"]),
])
def test_a_wrong_field_names_itself_its_value_and_the_right_one(values, words):
    with pytest.raises(RecipeError) as error:
        Recipe.from_dict(values)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("raw", "prompt"), [
    ("def f():\n", "def f():\n"), (" so: it goes\n\n", " so: it goes\n\n"), ("[", "["), ("7", "7"), ("null", None),
    ("", None), ('"a\\n"', "a\n"),
])  # fmt: skip
def test_a_prompt_is_taken_as_it_stands(raw, prompt):
    assert Recipe.from_dict(apply_overrides({}, [f"sample_prompt={raw}"])).sample_prompt == prompt


@pytest.mark.parametrize("text", ["007", "1e3", "1.10", "true", "run #3", "a: b", "é漢 x", "[1]", "*a", "0x1F", "- a"])
def test_texts_of_a_command_line_are_taken_as_they_stand(text):
    recipe = Recipe.from_dict(apply_overrides({}, [f"{field}={text}" for field in TEXT_FIELDS]))
    found = recipe.to_dict()
    for field in TEXT_FIELDS:
        section, _, key = field.rpartition(".")
        assert (found[section] if section else found)[key] == text
    if text[0] not in "[{":  # which `data` is a mapping by
        assert Recipe.from_dict(apply_overrides({}, [f"data={text}"])).data.source == text
    assert Recipe.from_dict(apply_overrides({}, [f"output_dir='{text}'"])).output_dir == text
    assert Recipe.from_dict(apply_overrides({"output_dir": "a"}, ["output_dir=~"])).output_dir is None


def test_texts_are_the_fields_that_the_schema_says_are_texts():
    def texts(model, section=""):
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from texts(kind, f"{name}.")
            elif kind in (str, str | None, NameOrPath | None):
                yield section + name

    assert set(texts(Recipe)) == set(TEXT_FIELDS)


@pytest.mark.parametrize(("typed", "meant"), [
    ("qwen3-30b", "qwen3-30b-a3b"), ("gpt2-lagre", "gpt2-large"), ("qwen3-4", "qwen3-4b"), ("nothing like it", None),
])
def test_the_closest_name_begins_with_what_was_typed(typed, meant):
    assert closest(typed, BUNDLED) == meant


def test_overrides_reach_into_short_forms_in_order():
    values = apply_overrides({"optimizer": "adamw"}, [
        "optimizer=adamw-8bit", "optimizer.block_size=128", "compile=off", "data=dummy", "data.samples=8",
        "learning_rate=1e-3", "model_overrides.n_layer=3",
    ])
    recipe = Recipe.from_dict(values)
    assert recipe.optimizer.name == "adamw-8bit"
    named = apply_overrides({"model": "gpt2"}, ["offload.name=host", "offload.activations=1"])
    assert named["offload"] == {"name": "host", "activations": 1}
    assert recipe.optimizer.block_size == 128
    assert recipe.compile.name == "off"
    assert (recipe.data.source, recipe.data.samples) == ("dummy", 8)
    assert recipe.learning_rate == 1e-3
    assert recipe.model_overrides == {"n_layer": 3}


def test_a_number_stands_for_the_tokens_to_generate():
    def inference(*overrides, **values):
        return Recipe.from_dict(apply_overrides(values, overrides)).inference.model_dump()

    assert inference("inference=64", "inference.beams=4") == {"new_tokens": 64, "beams": 4}
    assert inference("inference.beams=2", inference=32) == {"new_tokens": 32, "beams": 2}
    assert inference("inference.beams=2") == {"new_tokens": 128, "beams": 2}


@pytest.mark.parametrize(("override", "word"), [
    ("max_steps", "key=value"), ("precision.full_eval=true", "name it first"), ("seed.x=1", "has no fields$"),
    ("model.n_layer=2", r"has no fields; write model_overrides\.n_layer=2$"),
    ("attention.kernel=flash", "attention=sdpa"), ("backend.layers=scanned", "backend=jax"),
    ("--seed=3", "write seed=3"), ("--seed", "write seed=VALUE"), ("data={source: a, source: b}", "'source'.*twice"),
    ("model_overrides=" + "[" * 3000, "model_overrides: .*too deeply"),
])
def test_a_wrong_override_says_so(override, word):
    with pytest.raises(RecipeError, match=word):
        apply_overrides({"model": "gpt2", "seed": 1}, [override])


def test_a_backend_is_a_name_or_a_mapping_of_its_knobs():
    short = Recipe.from_dict(apply_overrides({}, ["backend=jax", "backend.layers=scanned", "backend.unroll=2"]))
    assert short == Recipe.from_dict({"backend": {"name": "jax", "layers": "scanned", "unroll": 2}})
    assert Recipe.from_dict({"backend": "jax"}).to_dict()["backend"] == "jax"
    assert resolve(Recipe.from_dict({"backend": "jax"}), CPU).backend.layers == "unrolled"
    assert resolve(short, CPU) == resolve(resolve(short, CPU), CPU)


def test_tf32_is_short_for_fp32_with_the_knob():
    recipe = Recipe.from_dict({"precision": "tf32"})
    assert (recipe.precision.name, recipe.precision.tf32) == ("fp32", True)
    assert recipe.refusals(T4)
    assert recipe.refusals(CPU)
    assert not recipe.refusals(A100)


@pytest.mark.parametrize(("values", "device", "word"), [
    ({"precision": "bf16"}, T4, "fp16"),
    ({"attention": "flex"}, CPU, "sdpa"),
    ({"attention": {"name": "sdpa", "kernel": "cudnn"}}, CPU, "kernel=auto"),
    ({"attention": {"name": "sdpa", "kernel": "flash"}, "precision": "fp32"}, A100, "precision=bf16"),
    ({"compile": {"name": "whole", "backend": "nvfuser"}}, A100, "inductor"),
    ({"compile": {"name": "whole", "backend": "aot_cudagraphs"}}, A100, "cudagraphs"),
    ({"backend": {"name": "jax", "unroll": 2}}, A100, "backend.layers=scanned"),
    ({"checkpointing": "memory-budget"}, A100, "compile=per-block"),
    ({"precision": {"name": "bf16-pure", "rounding": "stochastic"}, "optimizer": "lion"}, A100, "kahan"),
])
def test_what_a_device_cannot_do_is_refused_with_what_to_write(values, device, word):
    (reason, *_) = Recipe.from_dict(values).refusals(device)
    assert word in reason


def test_auto_is_resolved_and_pins_stay():
    open_recipe = Recipe.from_dict({"seq_len": 1024, "batch_size": 64, "checkpointing": "every-block"})
    on_cpu, on_t4, on_a100 = (resolve(open_recipe, device) for device in (CPU, T4, A100))
    assert [r.precision.name for r in (on_cpu, on_t4, on_a100)] == ["fp32", "fp16", "bf16"]
    assert [r.micro_batch_size for r in (on_cpu, on_a100)] == [4, 16]
    assert on_cpu.checkpointing.name == "every-block"
    assert "auto" not in {getattr(on_cpu, slot) for slot in SLOTS}
    assert on_cpu.loading.workers == 0
    assert resolve(Recipe(micro_batch_size=7), CPU).micro_batch_size == 7


def test_what_a_search_decides_is_open_until_it_is_written():
    assert Recipe().open_choices() == CHOICES
    assert Recipe(micro_batch_size=4, optimizer="lion", compile="off").open_choices() == (
        "precision", "loss", "checkpointing", "attention")


@pytest.mark.parametrize("values", [
    {"x" * 3000: 1}, {"data": {"x" * 3000: 1}}, {"parallel": ["x" * 3000]}, {"optimizer": "x" * 3000},
    {"seed": "x" * 3000}, {"report_to": {"x" * 3000: 3}},
], ids=repr)
def test_a_message_is_short_whatever_is_written(values):
    with pytest.raises(RecipeError) as error:
        Recipe.from_dict(values)
    assert len(str(error.value)) < 1000


def test_aliases_stand_for_what_they_name(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("model: gpt2\nvocab_size: &size 512\nseq_len: *size\n")
    assert load_recipe(str(tmp_path / "mine.yaml")).seq_len == 512


def test_every_bundled_name_is_a_recipe():
    for name in (*bundled_recipes(), *BUNDLED):
        assert load_recipe(name)


def test_a_recipe_file_is_found_or_the_nearest_is_named(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("model: gpt2\nif_cuda: {seq_len: 2048}\nseq_len: 64\n")
    assert load_recipe(str(tmp_path / "mine.yaml")).seq_len == 64
    assert load_recipe(str(tmp_path / "mine.yaml"), cuda=True).seq_len == 2048
    assert load_recipe(str(tmp_path / "mine.yaml"), ["seq_len=8"], cuda=True).seq_len == 8
    with pytest.raises(RecipeError, match=r"mine\.yaml"):
        load_recipe(str(tmp_path / "mime.yaml"))
    with pytest.raises(RecipeError, match="quickstart"):
        load_recipe("quikstart")


LAUGHS = "\n".join(["a0: &a0 [ha, ha]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
"""A few lines that stand for billions of values."""


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "model: [", "model: gpt2\n  x: 1\n", "1: 2\n",
                                  "seed: " + "9" * 5000, "seed: 1\nseed: 2\n", "model_overrides: " + "[" * 3000,
                                  "model_overrides: &a {x: *a}\n", LAUGHS])
def test_a_file_that_is_no_recipe_says_so(tmp_path: Path, text: str):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"bad\.yaml"):
        load_recipe(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize("value", ["x" * 5000, "a/" * 3000, "~nobody_of_that_name/x", '"a\\0b"'])
@pytest.mark.parametrize("field", ["model", "data", "output_dir"])
def test_what_no_file_can_be_named_says_so(field: str, value: str):
    with pytest.raises(RecipeError, match=rf"{field}.*should be a name or path") as error:
        load_recipe("gpt2", [f"{field}={value}"])
    assert len(str(error.value)) < 400


def test_fields_for_cuda_are_fields_wherever_the_recipe_is_read(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("model: gpt2\nif_cuda: {seq_length: 2048}\n")
    with pytest.raises(RecipeError, match=r"if_cuda.seq_length: not a field; did you mean 'seq_len'"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_a_mistaken_option_is_told_with_its_value():
    with pytest.raises(RecipeError, match="write learning_rate=1e-4"):
        apply_overrides({}, ["--learning-rate", "1e-4"])
    with pytest.raises(RecipeError, match="write seed=VALUE"):
        apply_overrides({}, ["--seed", "max_steps=3"])


def test_the_command_line_lists_recipes_and_models_and_takes_no_options_for_fields():
    listed = CliRunner().invoke(app, ["recipes"]).output
    assert listed.index("recipes\n  classify\n  finetune\n  quickstart\nmodels") < listed.index("bert-base")
    assert "masked-lm" in listed
    assert "docs/recipe.md" in CliRunner().invoke(app, ["train", "--help"]).output
    mistaken = CliRunner().invoke(app, ["train", "quickstart", "--learning_rate", "1e-4"])
    assert str(mistaken.exception) == ("--learning_rate: no such option, which --help lists; for a field of the "
                                        "recipe, write learning_rate=1e-4")


def test_steps_on_the_command_line_take_the_place_of_a_files_epochs(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: gpt2\nnum_train_epochs: 3\n")
    assert load_recipe(str(path)).num_train_epochs == 3
    short = load_recipe(str(path), ["max_steps=2"])
    assert (short.max_steps, short.num_train_epochs) == (2, None)
    assert load_recipe(str(path), ["num_train_epochs=1"]).num_train_epochs == 1
    assert load_recipe(str(path), ["max_steps=2", "num_train_epochs=null"]).num_train_epochs is None
    with pytest.raises(RecipeError, match="max_steps: 2 steps and num_train_epochs=1 are two lengths of one run"):
        load_recipe(str(path), ["max_steps=2", "num_train_epochs=1"])


def test_one_tracker_may_be_written_as_a_string():
    assert Recipe.from_dict(apply_overrides({}, ["report_to=tensorboard"])).report_to == ("tensorboard",)


@pytest.mark.parametrize(("text", "value"), [
    ("010", 10), ("-08", -8), ("1_000", 1000), ("0x1F", 31), ("0o17", 15), ("2E+1", 20.0), ("-1e-6", -1e-6),
    ("1.5e3", 1500.0), (".5", 0.5), ("5.", 5.0), ("-.inf", float("-inf")), ("1:30", "1:30"), ("1:30.5", "1:30.5"),
    ("2026-01-01", "2026-01-01"), ("2026-99-99", "2026-99-99"), ("0b11", "0b11"), ("1_", "1_"), ("off", False),
])  # fmt: skip
def test_numbers_are_read_as_people_write_them(text, value):
    ((_, found),) = apply_overrides({}, [f"model_overrides.eps={text}"])["model_overrides"].items()
    assert (found, type(found)) == (value, type(value))
    assert read_yaml(f"eps: {text}") == {"eps": value}
    assert read_yaml(to_yaml({"eps": value, "text": text})) == {"eps": value, "text": text}


@pytest.mark.parametrize("text", ["a\x85b", "\x85", "'\x85\n", "a\u2028b\x85", "\ud800", "\x00\r\n ", "a\x85 b " * 40])
def test_texts_of_odd_line_breaks_are_written_and_read(text):
    for values in ({"name": text}, {"data": {"path": text}}, {"names": [text, 1]}):
        assert read_yaml(to_yaml(values)) == values


def test_a_colon_without_its_space_is_told():
    for field in ("model_overrides", "data"):
        with pytest.raises(RecipeError, match=f"{field}: 'n_layer:2' has no space behind the colon; write n_layer: 2"):
            apply_overrides({}, [f"{field}={{n_layer:2}}"])
    assert apply_overrides({}, ["data={'a:b', c:, d:e: 1, f:g: []}"]) == {
        "data": {"a:b": None, "c": None, "d:e": 1, "f:g": []}}


def test_a_merged_yaml_key_may_be_written_over(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("model_overrides: {<<: {n_layer: 1, n_head: 2}, n_layer: 3}\n")
    assert load_recipe(str(tmp_path / "a.yaml")).model_overrides == {"n_layer": 3, "n_head": 2}


def test_a_model_is_a_recipe_by_its_hugging_face_id_or_its_folder(tmp_path: Path):
    recipe = load_recipe("facebook/opt-125m")
    assert recipe == Recipe(model="facebook/opt-125m", task="causal-lm", learning_rate=2e-5)
    folder = tmp_path / "runs" / "model"
    folder.mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"\.yaml"):
        load_recipe(str(folder))
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_positions": 128, "vocab_size": 300}')
    recipe = load_recipe(str(folder), ["max_steps=3"])
    assert (recipe.model, recipe.seq_len, recipe.max_steps) == (str(folder), 128, 3)


def test_training_arguments_of_a_module_mean_the_positions_that_it_can_use():
    config = SimpleNamespace(model_type="roberta", max_position_embeddings=514, pad_token_id=1)
    module = SimpleNamespace(named_parameters=list, config=config)
    assert as_recipe(TrainingArguments(), module).seq_len == 512
    assert as_recipe(TrainingArguments(), module, ["seq_len=600"]).seq_len == 600
    assert as_recipe(TrainingArguments(), "bert-base").seq_len == 512


def test_training_arguments_are_no_recipe_and_where_they_go_is_said(tmp_path: Path):
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"plan MODEL --training-args \S+args.json, which with --save mine.yaml"):
        load_recipe(str(tmp_path / "args.json"))


def test_a_folder_without_a_model_is_told_so(tmp_path: Path):
    (tmp_path / "a.yaml").mkdir()
    for name, told in ((".", "a model's folder holds config.json, which is not there"), ("a.yaml", "it is a folder")):
        with pytest.raises(RecipeError, match=told):
            load_recipe(str(tmp_path / name))


def test_a_name_too_long_for_a_file_is_no_recipe():
    with pytest.raises(RecipeError, match="is not a recipe"):
        load_recipe("a" * 5000)


@pytest.mark.parametrize(("name", "advice"), [
    ("gpt2-mediun", "did you mean 'gpt2-medium'?"),
    ("whisper-small", "model: 'whisper-small' reads sound, and no task here does"),
    ("nosuch", "write a YAML file, a bundled recipe or model,"),
])
def test_a_name_that_no_recipe_has_says_what_to_write(name, advice):
    with pytest.raises(UnknownRecipe) as raised:
        load_recipe(name)
    assert advice in str(raised.value)


@pytest.mark.parametrize(("word", "advice"), [
    ("weight_decay=0.1", "write optimizer=adamw optimizer.weight_decay=..."),
    ("remat=full", "write checkpointing=..."),
    ("scan_layers=true", "write backend=jax backend.layers=scanned"),
    ("eval_fraction=0.1", "write data.eval_fraction=..."),
    ("split=validation", "write data.split=..."),
    ("text=body", "write data.text=..."),
    ("messages=chat", "write data.messages=..."),
    ("new_tokens=3", "write inference.new_tokens=..."),
    ("neftune_noise_alpha=5", "it adds noise to the embeddings, which a recipe cannot say; leave it out"),
    ("auto_find_batch_size=true",
     "it changes the global batch where memory runs out; leave it out: recover=true halves micro-batches alone"),
])
def test_a_field_that_lies_elsewhere_or_nowhere_says_so(word: str, advice: str) -> None:
    with pytest.raises(RecipeError) as raised:
        as_recipe("quickstart", None, [word])
    assert str(raised.value) == f"{word.partition('=')[0]}: not a field; {advice}"


@pytest.mark.parametrize("words", [
    ["optimizer=adamw", "optimizer.weight_decay=0.1"], ["backend=jax", "backend.layers=scanned"],
])
def test_what_is_advised_in_place_of_other_tools_fields_is_a_recipe(words: list[str]) -> None:
    assert as_recipe("quickstart", None, words)
