"""`tightfit export`, and the folder that a run with an adapter leaves: `peft` reads it, and its merge is its model."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures import tiny_model
from tests.training.runs import Said
from tightfit.training.trainer import Trainer

WORDS = "the quick brown fox jumps over the lazy dog and runs home again\n" * 40


@pytest.fixture
def folder(tmp_path, tiny):
    """A model's folder, and recipe values that fine-tune it."""
    tiny_model("llama", vocab_size=300).save_pretrained(tmp_path / "base")
    (tmp_path / "notes.txt").write_text(WORDS)
    return {**{k: v for k, v in tiny.items() if k not in ("model_overrides", "vocab_size")}, "learning_rate": 2e-2,
            "model": str(tmp_path / "base"), "data": {"source": "dummy", "samples": 32}, "seq_len": 16}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(16).view(2, 8)).logits


@pytest.mark.parametrize("trainable", ["lora", {"name": "dora", "rank": 4}], ids=str)
def test_an_adapter_is_pefts_and_merges_into_the_model_that_was_trained(trainable, folder, run):
    Trainer(recipe={**folder, "trainable": trainable}).train()
    path = Path(folder["output_dir"])
    written = json.loads((path / "model" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == folder["model"]
    assert not (path / "model" / "base").exists()

    base = transformers.AutoModelForCausalLM.from_pretrained(folder["model"])
    before = logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = logits(peft.PeftModel.from_pretrained(base, path / "model"))
    assert not torch.allclose(theirs, before, atol=1e-2)

    status, said, error = run("export", path, "--merge")
    assert status == 0, error
    assert f"{path / 'merged'}, in float32" in said
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(path / "merged"))
    torch.testing.assert_close(merged, theirs, rtol=1e-4, atol=1e-5)
    assert "--output: " in run("export", path, "--merge")[2]


def test_a_quantized_base_is_merged_as_it_was_trained_beside(folder, run):
    recipe = {**folder, "trainable": "lora", "base": "nf4"}
    trainer = Trainer(recipe=recipe)
    trainer.train()
    path = Path(folder["output_dir"])
    status, said, _ = run("export", path, "--merge", "--output", path / "whole")
    assert status == 0
    assert "held in nf4" in said
    stored = load_file(Path(folder["model"]) / "model.safetensors")
    merged = load_file(path / "whole" / "model.safetensors")
    assert merged.keys() == stored.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((merged[name] - stored[name]).norm() / stored[name].norm()) > 0.01
    assert torch.equal(merged["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("stored", ["bundled", "a folder's configuration"])
def test_a_base_that_is_stored_nowhere_else_is_written_beside_the_adapter(stored, tiny, folder, run):
    if stored != "bundled":
        for weights in Path(folder["model"]).glob("*.safetensors"):
            weights.unlink()
        tiny = folder
    Trainer(recipe={**tiny, "trainable": "lora", "base": "int8"}).train()
    path = Path(tiny["output_dir"])
    base = path / "model" / "base"
    assert json.loads((path / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), path / "model")
    assert run("export", path, "--merge")[0] == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)
    shutil.rmtree(path / "model" / "base")
    shutil.rmtree(path / "merged")
    assert "stored nowhere else" in run("export", path, "--merge")[2]


def test_a_base_with_overrides_is_no_stored_one(folder):
    for overrides, beside in (({"attention_dropout": 0.1}, False), ({"rms_norm_eps": 0.5}, True)):
        path = Path(f"{folder['output_dir']}-{beside}")
        Trainer(recipe={**folder, "trainable": "lora", "model_overrides": overrides, "output_dir": str(path)}).train()
        assert (path / "model" / "base").exists() == beside
    named = json.loads((path / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert transformers.AutoConfig.from_pretrained(named).rms_norm_eps == 0.5


def test_a_classifiers_head_and_the_names_of_its_classes_are_in_the_adapter(tmp_path, folder, run):
    rows = [{"text": f"word {number}", "label": ("no", "yes")[number % 2]} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Trainer(recipe={**folder, "task": "sequence-classification", "data": str(tmp_path / "rows.jsonl"),
                    "tokenizer": "train", "trainable": "lora", "batch_size": 4}).train()
    path = Path(folder["output_dir"])
    assert "base_model.model.score.weight" in load_file(path / "model" / "adapter_model.safetensors")
    assert run("export", path, "--merge")[0] == 0
    assert transformers.AutoConfig.from_pretrained(path / "merged").id2label == {0: "no", 1: "yes"}
    assert (path / "merged" / "tokenizer.json").is_file()


def test_a_base_that_lacks_more_than_the_head_is_written_whole(tmp_path, folder, run):
    tiny_model("bert", vocab_size=300).save_pretrained(tmp_path / "base")  # a masked-lm's, which has no pooler
    rows = [{"text": f"word {number}", "label": "abc"[number % 3]} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = Said()
    Trainer(recipe={**folder, "task": "sequence-classification", "data": str(tmp_path / "rows.jsonl"), "num_labels": 3,
                    "tokenizer": "train", "trainable": "lora", "batch_size": 4}, listener=said).train()
    path = Path(folder["output_dir"])
    assert any("AutoPeftModelForSequenceClassification.from_pretrained(" in text and text.endswith(", num_labels=3)")
               for text in said.texts)
    theirs = logits(peft.AutoPeftModelForSequenceClassification.from_pretrained(path / "model", num_labels=3))
    assert run("export", path, "--merge")[0] == 0
    merged = logits(transformers.AutoModelForSequenceClassification.from_pretrained(path / "merged"))
    torch.testing.assert_close(merged, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("words", "said"), [
    ([], "write --merge"), (["--merge"], "trainable=all trained the model's own weights"),
])
def test_what_cannot_be_exported_says_why(words, said, tiny, run):
    Trainer(recipe={**tiny, "trainable": "all" if words else "lora", "max_steps": 1}).train()
    status, _, error = run("export", tiny["output_dir"], *words)
    assert status == 2
    assert said in error


def test_an_empty_folder_takes_the_model_where_none_is_replaced(tiny, run, tmp_path, monkeypatch):
    """On Windows a folder takes the place of no other."""
    replaced = Path.replace

    def replace(path, target):
        if path.is_dir() and Path(target).exists():
            raise PermissionError(13, "Access is denied", str(target))
        return replaced(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    Trainer(recipe={**tiny, "trainable": "lora", "max_steps": 1}).train()
    (tmp_path / "empty").mkdir()
    status, _, error = run("export", tiny["output_dir"], "--merge", "--output", tmp_path / "empty")
    assert status == 0, error
    assert (tmp_path / "empty" / "config.json").is_file()


def test_what_cannot_be_written_or_is_not_finished_says_why(tiny, run, tmp_path, monkeypatch):
    Trainer(recipe={**tiny, "trainable": "lora", "max_steps": 1}).train()
    path = Path(tiny["output_dir"])
    file = tmp_path / "file"
    file.write_text("")
    for target in (file, file / "folder"):
        status, _, error = run("export", path, "--merge", "--output", target)
        assert (status, "--output" in error) == (2, True), error
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "--output: . is the folder that you are in; write" in run("export", path, "--merge", "--output", ".")[2]
    recipe = (path / "recipe.yaml").read_text()
    (path / "recipe.yaml").write_text(recipe.replace("trainable: lora", "trainable: {name: lora, rank: 8}"))
    status, _, error = run("export", path, "--merge")
    assert (status, "of another rank" in error) == (2, True), error
    (path / "recipe.yaml").write_text(recipe.replace("max_steps: 1", "max_steps: 5"))
    status, _, error = run("export", path, "--merge")
    assert (status, "to take 5 steps, and its adapter is of 1" in error) == (2, True), error
    assert not [*path.glob("*merged*"), *path.glob(".merged*")]


@pytest.mark.parametrize(("damage", "said"), [
    (lambda text: text[:-9], "Expecting"), (lambda text: "", "Expecting value"),
    (lambda text: "[]", "peft_type is None, r is None"),
    (lambda text: text.replace('"r": 8', '"r": "eight"'), "r is 'eight'"),
    (lambda text: text.replace("lora_alpha", "alpha"), "lora_alpha is None"),
    (lambda text: text.replace('"use_dora": false', '"use_dora": true'), "use_dora is True"),
])  # fmt: skip
def test_a_damaged_configuration_of_an_adapter_is_named(damage, said, tiny, run):
    Trainer(recipe={**tiny, "trainable": {"name": "lora", "rank": 8}, "max_steps": 1}).train()
    config = Path(tiny["output_dir"]) / "model" / "adapter_config.json"
    config.write_text(damage(config.read_text()))
    status, _, error = run("export", tiny["output_dir"], "--merge")
    assert status == 2
    assert f"tightfit: {config}: not as the run wrote it ({said}" in error.splitlines()[-1]
    assert '"r": 8, "lora_alpha": ' in error.splitlines()[-1]


@pytest.mark.parametrize("damage", ["no file", "one tensor less", "an adapter that is not finite"])
def test_weights_that_are_gone_or_damaged_are_never_merged(damage, tiny, run):
    Trainer(recipe={**tiny, "trainable": "lora"}).train()
    model = Path(tiny["output_dir"]) / "model"
    base, adapter = model / "base" / "model.safetensors", model / "adapter_model.safetensors"
    if damage == "no file":
        base.unlink()
    elif damage == "one tensor less":
        save_file(dict([*load_file(base).items()][1:]), base, metadata={"format": "pt"})
    else:
        save_file({name: tensor.fill_(torch.nan) for name, tensor in load_file(adapter).items()}, adapter)

    status, _, error = run("export", tiny["output_dir"], "--merge")
    assert status == 2
    assert str(adapter if "adapter" in damage else base.parent) in error
    assert not (Path(tiny["output_dir"]) / "merged").exists()


def test_a_head_that_is_tied_to_embeddings_is_its_own_once_an_adapter_changed_it(tiny, run):
    Trainer(recipe={**tiny, "trainable": {"name": "lora", "targets": ["lm_head"]}, "max_steps": 1}).train()
    path = Path(tiny["output_dir"])
    assert run("export", path, "--merge")[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "merged")
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)


def test_a_folder_without_a_run_is_refused(tmp_path, run):
    status, _, error = run("export", tmp_path, "--merge")
    assert status == 2
    assert "no finished run" in error


def test_an_adapters_folder_is_no_model(folder, run):
    Trainer(recipe={**folder, "trainable": "lora", "max_steps": 1}).train()
    status, _, error = run("train", "gpt2", f"model={folder['output_dir']}/model", "data=dummy")
    assert status == 2
    assert "holds an adapter" in error
