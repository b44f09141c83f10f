"""The finished model's folder: what is beside its weights, and how others load it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTImageProcessorPil,
)

from tests.failing import failing
from tests.training.runs import Said
from tightfit.commands.export import run_export
from tightfit.errors import CheckpointError, DataError, RecipeError
from tightfit.training import trainer
from tightfit.training.listeners import LastingConsole, Terminal
from tightfit.training.trainer import Trainer


def told_of(recipe: dict[str, Any]) -> list[str]:
    said = Said()
    Trainer(recipe=recipe, listener=said).train()
    return [text for text in said.texts if "loads with" in text]


def test_the_end_says_how_the_model_is_loaded(tiny):
    (line,) = told_of(tiny)
    folder = str(Path(tiny["output_dir"]) / "model")
    assert line == f"the model loads with transformers: AutoModelForCausalLM.from_pretrained({folder!r})"
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 128


def test_an_adapter_loads_with_peft_and_our_own_transformer_with_neither(tiny, tmp_path):
    (line,) = told_of({**tiny, "trainable": "lora", "base": "nf4"})
    assert "the adapter loads with peft: AutoPeftModelForCausalLM.from_pretrained(" in line
    assert line.endswith("; it was trained on weights in nf4, which peft does not quantize by itself")
    model = Path(tiny["output_dir"]) / "model"
    named = json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(named) == (model / "base").resolve()
    assert AutoModelForCausalLM.from_pretrained(named).config.vocab_size == 128
    sizes = {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "num_heads": 2, "num_outputs": 128}
    ours = {**tiny, "model": "transformer-156m", "model_overrides": sizes, "output_dir": str(tmp_path / "ours")}
    assert told_of(ours) == []


def test_the_adapter_of_a_module_that_peft_wrapped_is_saved_as_peft_reads_it(tiny, tmp_path):
    def base() -> GPT2LMHeadModel:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=128, n_positions=32))

    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    recipe = {**tiny, "model_overrides": {}, "precision": "fp32", "save_steps": 1, "learning_rate": 0.1}
    rows, tokens, said = [{"input_ids": list(range(i, i + 8))} for i in range(40)], torch.arange(8)[None], Said()
    for steps in (1, 2):  # and gone on with
        wrapped = peft.get_peft_model(base(), lora)
        folder = Path(Trainer(wrapped, {**recipe, "max_steps": steps}, rows, listener=said).train().output_dir)
        read = peft.PeftModel.from_pretrained(base(), folder / "model").eval()
        assert torch.equal(read(tokens).logits, wrapped.eval()(tokens).logits)
        assert not torch.equal(read(tokens).logits, base().eval()(tokens).logits)
    assert f"PeftModel.from_pretrained(<its base model>, {str(folder / 'model')!r})" in said.texts[-1]
    with pytest.raises(RecipeError, match="load it with peft"):
        run_export(folder, merge=True, output=None)


@pytest.mark.parametrize("changes", [{}, {"trainable": "lora"}, {"backend": "jax"}], ids=["whole", "adapter", "jax"])
def test_others_may_read_what_the_umask_lets_them(tiny, changes, request):
    if changes.get("backend") == "jax":
        request.getfixturevalue("fast_xla")
    before = os.umask(0o027)
    try:
        Trainer(recipe={**tiny, **changes, "save_steps": 1}).train()
    finally:
        os.umask(before)
    tensors = list(Path(tiny["output_dir"]).rglob("*.safetensors"))
    assert tensors
    assert {path.stat().st_mode & 0o777 for path in tensors} == {0o640}


def test_a_model_of_images_has_its_processor_beside_it_and_its_speed_in_samples(tiny, tmp_path):
    from PIL import Image

    for name, shade in (("black", 0), ("red", 255)):
        (tmp_path / "pics" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (10, 6), (shade, 0, 0)).save(tmp_path / "pics" / name / f"{i}.png")
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 32}
    values = {**tiny, "model": "vit-base", "model_overrides": sizes, "task": "image-classification", "num_labels": 2,
              "vocab_size": None, "data": {"source": str(tmp_path / "pics"), "eval_fraction": 0.25}}
    shown = io.StringIO()
    summary = Trainer(recipe=values, listener=Terminal(LastingConsole(file=shown), seconds_between_lines=0.0)).train()
    assert re.search(r"step 4/4  loss [\d.]+  [\d,]+ samples/s", shown.getvalue())
    assert "tokens/s" not in shown.getvalue() + str(summary.rows())
    assert summary.eval_accuracy is not None
    assert summary.eval_f1 is not None
    assert summary.eval_perplexity is None
    assert "macro F1" in dict(summary.rows())["held-out"]
    folder = Path(tiny["output_dir"]) / "model"
    assert ViTImageProcessorPil.from_pretrained(folder).size["height"] == 16
    assert AutoModelForImageClassification.from_pretrained(folder).config.id2label == {0: "black", 1: "red"}


def test_a_class_that_the_data_does_not_name_has_no_other_ones_name(tiny, tmp_path):
    rows = [{"text": word * n, "label": word} for n in range(1, 21) for word in ("eggs ", "ham ")]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
             "id2label": {0: "ham ", 1: "spam", 2: "more"}}
    Trainer(recipe={**tiny, "model": "bert-base", "model_overrides": sizes, "task": "sequence-classification",
                    "num_labels": 3, "vocab_size": 300, "data": str(tmp_path / "two.jsonl")}).train()
    config = json.loads((Path(tiny["output_dir"]) / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "eggs ", "1": "ham ", "2": "LABEL_2"}
    assert config["label2id"] == {"eggs ": 0, "ham ": 1, "LABEL_2": 2}


def test_labels_that_are_all_ignored_end_the_run_before_it_begins(tiny):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 20
    with pytest.raises(DataError, match="there is nothing to learn"):
        Trainer("gpt2", tiny, rows).train()


def test_a_disk_that_fills_up_as_the_model_is_written_leaves_the_one_before(tiny, monkeypatch):
    run = Path(tiny["output_dir"])
    finish = trainer.finish_model
    for steps, before in ((4, None), (6, b"earlier")):
        monkeypatch.setattr(trainer, "finish_model", failing(OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match=r"model.*free some space, or write output_dir="):
            Trainer(recipe={**tiny, "max_steps": steps}).train()
        assert not [*run.glob(".model*")]
        written = run / "model" / "model.safetensors"
        assert (written.read_bytes() if written.exists() else None) == before
        monkeypatch.setattr(trainer, "finish_model", finish)
        Trainer(recipe={**tiny, "max_steps": steps}).train()
        assert written.read_bytes() != before
        written.write_bytes(b"earlier")


@pytest.mark.parametrize("save_steps", [1, 100])
def test_a_folder_that_is_removed_while_the_run_writes_into_it_is_said(tiny, save_steps):
    class Removing(Said):
        def stepped(self, step, loss, per_second):
            if step == 2:
                shutil.rmtree(tiny["output_dir"])

    with pytest.raises(CheckpointError, match=r"output_dir: .*run was removed while the run wrote into it"):
        Trainer(recipe={**tiny, "save_steps": save_steps}, listener=Removing()).train()
    assert not Path(tiny["output_dir"], "model").exists()
