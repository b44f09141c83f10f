"""What a run leaves behind: how its model is loaded, its MFU, and what trackers were told."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, ViTImageProcessorPil

from tests.training.test_best import Said
from tightfit.backends.measured import ModelSize
from tightfit.backends.world import ALONE
from tightfit.devices import Device, find_device
from tightfit.errors import DataError
from tightfit.recipe import Recipe
from tightfit.training.ending import load_best, utilization
from tightfit.training.run_folder import RunFolder
from tightfit.training.session import Session
from tightfit.training.state import TrainerState
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
    (line,) = told_of({**tiny, "trainable": "lora"})
    assert "the adapter loads with peft: AutoPeftModelForCausalLM.from_pretrained(" in line
    sizes = {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "num_heads": 2, "num_outputs": 128}
    ours = {**tiny, "model": "transformer-156m", "model_overrides": sizes, "output_dir": str(tmp_path / "ours")}
    assert told_of(ours) == []


def test_a_model_of_images_has_its_processor_beside_it(tiny, tmp_path):
    from PIL import Image

    for name, shade in (("black", 0), ("red", 255)):
        (tmp_path / "pics" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (10, 6), (shade, 0, 0)).save(tmp_path / "pics" / name / f"{i}.png")
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 32}
    values = {**tiny, "model": "vit-base", "model_overrides": sizes, "task": "image-classification", "num_labels": 2,
              "vocab_size": None, "data": {"source": str(tmp_path / "pics"), "eval_fraction": 0.25}}
    summary = Trainer(recipe=values).train()
    assert summary.eval_accuracy is not None
    assert summary.eval_f1 is not None
    assert summary.eval_perplexity is None
    assert "macro F1" in dict(summary.rows())["held-out"]
    folder = Path(tiny["output_dir"]) / "model"
    assert ViTImageProcessorPil.from_pretrained(folder).size["height"] == 16
    assert AutoModelForImageClassification.from_pretrained(folder).config.id2label == {0: "black", 1: "red"}


def test_labels_that_are_all_ignored_end_the_run_before_it_begins(tiny):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 20
    with pytest.raises(DataError, match="there is nothing to learn"):
        Trainer("gpt2", tiny, rows).train()


def test_a_best_checkpoint_that_is_gone_is_said(tmp_path):
    state = TrainerState(step=4, best_step=2, evaluation={"eval_loss": 2.0}, best_metrics={"eval_loss": 1.0})
    said, untouched = Said(), cast("Any", None)
    load_best(untouched, state, RunFolder(tmp_path), ALONE, said.message)
    assert "best checkpoint cannot be read" in said.texts[0]
    assert state.evaluation == {"eval_loss": 2.0}


class Sized:
    """A backend that knows a model's size."""

    def model_size(self, recipe: Recipe, config: Any = None) -> ModelSize:
        return ModelSize(active_parameters=1, parameters=1, flops=10**9, values=0)


@pytest.mark.parametrize(("task", "a_sample"), [("causal-lm", 100), ("image-classification", 1)])
def test_mfu_is_model_flops_over_the_cards_peak(task, a_sample):
    recipe = Recipe.from_dict({"precision": "bf16", "seq_len": 100, "batch_size": 8, "task": task, "model": "gpt2"})
    device = Device(kind="cuda", name="NVIDIA GeForce RTX 4090", memory_bytes=2**34)
    backend: Any = Sized()
    mfu = utilization(Session(recipe=recipe, device=device, backend=backend))
    assert mfu is not None
    assert mfu(1000.0) == pytest.approx(1000.0 * 1e9 / a_sample / find_device("rtx-4090").peak("bfloat16"))
    for other in (Device(kind="cuda", name="a card of tomorrow", memory_bytes=2**34),
                  Device(kind="cpu", name="CPU", memory_bytes=2**34)):
        assert utilization(Session(recipe=recipe, device=other, backend=backend)) is None


def test_trackers_are_told_what_the_file_holds(tiny):
    read = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    Trainer(recipe={**tiny, "report_to": "tensorboard"}).train()
    events = (Path(tiny["output_dir"]) / "trackers").rglob("events.out.tfevents*")
    found = {name for file in events for name in read(str(file)).Reload().Tags()["scalars"]}
    assert {"loss", "grad_norm", "learning_rate", "num_input_tokens_seen", "peak_memory", "eval_accuracy",
            "eval_perplexity"} <= found
