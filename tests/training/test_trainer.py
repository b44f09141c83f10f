"""The Trainer at its edges: models that are not what they should be, data that changed, terminals that went away."""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel, TrainingArguments
from typer.testing import CliRunner

from tests.failing import failing
from tests.training.runs import Said
from tightfit import Recipe, Trainer, apply, models, plan
from tightfit.backends.pytorch.models import cast_weights
from tightfit.cli import app
from tightfit.commands.profile import run_profile
from tightfit.commands.report import run_report
from tightfit.errors import CheckpointError, DataError, ModelError, RecipeError, Refused
from tightfit.training import run_folder
from tightfit.training.listeners import LastingConsole, Terminal
from tightfit.training.run_folder import LOCK, folder_name, run_path
from tightfit.training.session import unread

ROWS = [{"input_ids": list(range(i, i + 16))} for i in range(40)]


class Named(nn.Module):
    """A model of one's own: an embedding and a linear layer, giving logits as a bare tensor."""

    def __init__(self, logits: int = 64, positions: int = 0, frozen: bool = False) -> None:
        super().__init__()
        self.words, self.out, self.drop, self.frozen = nn.Embedding(64, 8), nn.Linear(8, logits), positions, frozen

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.words(input_ids))[:, self.drop :]
        return logits.detach() if self.frozen else logits


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, object]:
    return {
        "vocab_size": 64, "seq_len": 16, "batch_size": 8, "micro_batch_size": 4, "max_steps": 3, "learning_rate": 0.1,
        "output_dir": str(tmp_path / "run"), "device": "cpu", "logging_steps": 1,
    }


@pytest.mark.parametrize(("trainable", "said", "trained"), [
    ("all", "1,088 parameters; ", 1_088),
    ({"name": "layers", "names": ["out"]}, "1,088 parameters, of which 576 are trained (53 %); ", 576),
])  # fmt: skip
def test_the_beginning_and_the_summary_say_how_much_of_a_model_is_trained(recipe, trainable, said, trained):
    listener = Said()
    summary = Trainer(Named(), {**recipe, "trainable": trainable}, ROWS, listener=listener).train()
    assert any(text.startswith(f"module given in Python: {said}") for text in listener.texts)
    (how,) = [text for text in listener.texts if text.startswith("with seq_len=16 (padded rows) batch_size=8 ")]
    assert "precision=fp32" in how
    assert "compile=off" in how
    assert ("trainable=layers" in how) == (trainable != "all")
    assert how.endswith("; saved every 15 minutes")
    written = json.loads((Path(summary.output_dir) / "summary.json").read_text())
    assert (written["parameters"], written["trained_parameters"]) == (64 * 8 + 64 * 8 + 64, trained)


def test_a_model_of_ones_own_trains_on_rows(recipe, capsys):
    summary = Trainer(Named(), recipe, ROWS).train()
    assert summary.losses[-1] < summary.losses[0]
    run = Path(summary.output_dir)
    assert (run / "model" / "model.safetensors").exists()

    # What the code gave is in no file, and nothing else takes its place.
    run_report(run)
    assert "no step was profiled: its model or its rows are in your code" in capsys.readouterr().out
    saved, elsewhere = str(run / "recipe.yaml"), f"output_dir={run.with_name('other')}"
    train = Trainer(recipe=saved, overrides=[elsewhere, "max_steps=4"]).train
    for command in (train, lambda: run_profile(saved, [elsewhere]), lambda: plan(saved)):
        with pytest.raises(ModelError, match="model: it was a module given in Python"):
            command()
    with pytest.raises(DataError, match="data: it was rows given in Python"):
        Trainer("transformer-156m", saved, overrides=["model_overrides={num_layers: 1}", elsewhere]).train()


class Mapped(nn.Module):
    """The same, giving its logits in a mapping, as the Hugging Face Trainer takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Named()

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.zeros(()), "logits": self.inner(input_ids)}


def test_logits_in_a_mapping_are_read_as_they_are_alone(recipe, tmp_path):
    torch.manual_seed(0)
    alone = Trainer(Named(), recipe, ROWS).train()
    torch.manual_seed(0)
    mapped = Trainer(Mapped(), {**recipe, "output_dir": str(tmp_path / "mapped")}, ROWS).train()
    assert mapped.losses == alone.losses
    assert mapped.eval_loss == alone.eval_loss


@pytest.mark.parametrize(("model", "words"), [
    (nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)), r"is called with input_ids by name.*; rename"),
    (Named(logits=10), "gives 10 logits, and the data has the label"),
    (Named(positions=1), "gives logits of shape"),
    (Named(frozen=True), "depend on no parameter"),
])
def test_a_model_that_breaks_the_contract_is_named(recipe, model, words):
    with pytest.raises(ModelError, match=words):
        Trainer(model, recipe, ROWS).train()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_trains_as_the_recipe_says(recipe, dtype):
    losses = []
    for of in (torch.float32, dtype):
        torch.manual_seed(0)
        model = Named().to(dtype).to(of)
        trainer = Trainer(model, {**recipe, "precision": "fp32", "output_dir": f"{recipe['output_dir']}-{of}"}, ROWS)
        losses.append(trainer.train().loss)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses[0] == losses[1]


def test_buffers_of_a_model_in_half_precision_are_raised_with_its_weights_and_never_lowered(recipe):
    class Normed(Named):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(self.words(input_ids).transpose(1, 2)).transpose(1, 2))

    model = Normed().to(torch.bfloat16)
    Trainer(model, {**recipe, "precision": "fp32"}, ROWS).train()
    for normed in (model, cast_weights(Normed(), torch.bfloat16)):
        assert {buffer.dtype for buffer in normed.buffers()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("model", [{}, 3, Named, len, Path("gpt2")], ids=str)
def test_what_is_no_model_is_named(recipe, model):
    uses = (lambda: Trainer(model, recipe, ROWS), lambda: plan(model, recipe, gpu="l4"), lambda: apply(model, recipe))
    for use in uses:
        with pytest.raises(RecipeError, match=r"model: .* is neither a torch module nor the name of a model"):
            use()


def test_a_folder_that_cannot_be_written_is_named(recipe):
    (Path(recipe["output_dir"]) / LOCK).mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"output_dir: .*/run cannot be written \(Is a directory: .*; write out"):
        Trainer(Named(), recipe, ROWS).train()
    Path(recipe["output_dir"]).with_name("file").touch()
    with pytest.raises(RecipeError, match=r"output_dir: .*/file cannot be written \(File exists"):
        Trainer(Named(), {**recipe, "output_dir": str(Path(recipe["output_dir"]).with_name("file"))}, ROWS).train()


def test_no_run_leaves_its_lock_and_a_failed_one_no_empty_folder(recipe, tmp_path):
    path = tmp_path / "runs" / "deeper" / "mine"
    with pytest.raises(DataError):
        Trainer(Named(), {**recipe, "output_dir": str(path)}, []).train()
    assert not (tmp_path / "runs").exists()
    Trainer(Named(), {**recipe, "output_dir": str(path)}, ROWS).train()
    assert (path / "summary.json").exists()
    assert not (path / LOCK).exists()


def test_a_folder_takes_one_run_at_a_time_of_one_process_too(tmp_path):
    again = run_folder.locked(tmp_path / "run")
    with run_folder.locked(tmp_path / "run"), pytest.raises(RecipeError, match="output_dir: another run is using"):
        again.__enter__()
    with run_folder.locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path, monkeypatch):
    held = tmp_path / LOCK
    others = [True, False]

    def lock(file):
        if others.pop(0):  # who held it ends between the opening and the locking of its file
            held.unlink()

    monkeypatch.setattr("tightfit.files.lock_file", lock)
    with run_folder.locked(tmp_path):
        assert held.exists()
    assert others == []
    assert not held.exists()


def test_progress_is_shown_where_it_is_wanted(recipe, capsys):
    Trainer(Named(), recipe, ROWS).train()
    assert capsys.readouterr() == ("", "")
    Trainer(Named(), {**recipe, "output_dir": recipe["output_dir"] + "-shown"}, ROWS, progress=True).train()
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 3/3  loss" in err


def test_other_data_is_refused_on_resume(recipe):
    Trainer(Named(), recipe, ROWS).train()
    with pytest.raises(CheckpointError, match="data: it is not what it was"):
        Trainer(Named(), {**recipe, "max_steps": 5}, ROWS[::-1]).train()


def test_a_finished_run_without_its_checkpoints_is_left_alone(recipe):
    Trainer(Named(), recipe, ROWS).train()
    run = Path(str(recipe["output_dir"]))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints are gone"):
        Trainer(Named(), {**recipe, "max_steps": 5}, ROWS).train()
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    (run / "summary.json").write_text("{")  # its model is there all the same
    with pytest.raises(CheckpointError, match="checkpoints are gone"):
        Trainer(Named(), recipe, ROWS).train()


@pytest.mark.parametrize("prompt", ["", "a \ud800 b"])
def test_a_prompt_that_cannot_be_continued_costs_only_the_sample(tiny, tmp_path, prompt):
    (tmp_path / "text.txt").write_text("some words to learn from, over and over\n" * 200)
    listener = Said()
    changes = {"data": str(tmp_path / "text.txt"), "vocab_size": 300, "max_steps": 1, "sample_prompt": prompt}
    summary = Trainer(recipe={**tiny, **changes}, listener=listener).train()
    assert summary.sample is None
    assert any("no sample" in text for text in listener.texts)
    assert (Path(summary.output_dir) / "summary.json").exists()


def test_a_recipe_for_inference_trains_nothing(tiny):
    with pytest.raises(RecipeError, match=r"mode: 'inference' .*write mode=train, or .*plan"):
        Trainer(recipe={**tiny, "mode": "inference"})
    assert not Path(tiny["output_dir"]).exists()


def test_a_terminal_that_went_away_does_not_stop_the_run():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    terminal = Terminal(LastingConsole(file=Gone()), seconds_between_lines=0.0)
    with terminal:
        terminal.preparing("reading", 1, 2)
        terminal.started(0, 2)
        terminal.stepped(1, 1.0, 1.0)
        terminal.message("[/not markup]")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_speed_that_was_not_measured_is_not_shown(is_terminal):
    screen = io.StringIO()
    terminal = Terminal(LastingConsole(file=screen, force_terminal=is_terminal, width=200), seconds_between_lines=0.0)
    with terminal:
        terminal.started(0, 1)
        terminal.stepped(1, 1.5, 0.0)
    assert "loss 1.5000" in screen.getvalue()
    assert "tokens/s" not in screen.getvalue()


@pytest.mark.parametrize(("taken", "left"), [(2.0, "18 s left"), (100.0, "15.0 min left")])
def test_the_time_left_is_said_in_minutes_where_it_is_long(monkeypatch, taken, left):
    screen, clock = io.StringIO(), iter((0.0, 0.0, 1.0 + taken, 0.0 + taken))
    monkeypatch.setattr("tightfit.training.listeners.time.monotonic", lambda: next(clock))
    terminal = Terminal(LastingConsole(file=screen, width=200), seconds_between_lines=0.0)
    terminal.started(0, 10)
    terminal.stepped(1, 1.5, 0.0)
    assert screen.getvalue().endswith(f"{left}\n")


def test_a_module_whose_vocabulary_nothing_states_is_told_as_it_is_given(recipe):
    with pytest.raises(ModelError, match=r"vocab_size: Named has no configuration .*; write vocab_size"):
        Trainer(Named(), {**recipe, "vocab_size": None}, ROWS)


def test_the_models_configuration_is_read_once(tiny, monkeypatch):
    read = []
    made = models._make_config
    monkeypatch.setattr(models, "_make_config", lambda *words: read.append(words) or made(*words))
    Trainer(recipe=tiny).train()
    assert len(read) == 1


def test_refused_data_leaves_no_folder_and_does_not_blame_it(recipe, monkeypatch):
    with pytest.raises(DataError, match=r"has no 'input_ids'"):
        Trainer(Named(), recipe, [{"words": "a"}]).train()
    unreadable = failing(PermissionError(13, "Permission denied", "/proc/1/cwd"))
    monkeypatch.setattr("tightfit.training.session.prepare", unreadable)
    with pytest.raises(DataError, match=r"^data: '/proc' cannot be prepared: .*Permission denied: '/proc/1/cwd'"):
        Trainer(Named(), {**recipe, "data": "/proc"}).train()
    assert not Path(recipe["output_dir"]).exists()


def test_more_loader_processes_than_a_machine_can_hold_are_refused(recipe):
    with pytest.raises(RecipeError, match=r"^loading.workers: 1000 processes are too many for this machine's \d+ core"):
        Trainer(Named(), {**recipe, "loading": {"workers": 1000}}, ROWS).train()


def test_fp16_on_a_processor_is_remarked_on(recipe):
    said = Said()
    Trainer(Named(), {**recipe, "precision": "fp16"}, ROWS, listener=said).train()
    assert any(text.startswith("note: precision: most processors compute fp16 slowly") for text in said.texts)


def test_what_the_run_does_not_read_is_noted_at_its_start(recipe):
    said = Said()
    Trainer(Named(), {**recipe, "eval_steps": 1, "data": {"eval_fraction": 0.0}}, ROWS, listener=said).train()
    assert [text for text in said.texts if "has no effect" in text] == [
        "note: eval_steps: 1 has no effect: nothing is held out to evaluate on; write data.eval_fraction=0.05, or "
        "data.eval_source=<other examples>"]


def test_epochs_are_counted_in_steps_and_go_on_where_more_are_asked_for(recipe):
    """Two passes over the data, of which the run's recipe says how many steps they were; a third one goes on."""
    values = {**recipe, "num_train_epochs": 2, "warmup_steps": 0.5, "max_steps": 1}
    first = Trainer(Named(), values, ROWS).train()
    saved = Recipe.from_dict(yaml.safe_load((Path(first.output_dir) / "recipe.yaml").read_text()))
    steps_an_epoch = first.steps // 2
    assert first.steps == saved.max_steps == 2 * steps_an_epoch > 2
    assert saved.warmup == steps_an_epoch
    assert Trainer(Named(), values, ROWS).train().steps == first.steps  # it is finished
    further = Trainer(Named(), {**values, "num_train_epochs": 3, "save_steps": 3}, ROWS).train()
    assert (further.first_step, further.steps) == (first.steps, 3 * steps_an_epoch)


@pytest.mark.parametrize("changes", [{}, {"load_best_model_at_end": True, "eval_steps": 1, "learning_rate": 3.0},
                                     {"trainable": {"name": "lora", "rank": 2, "targets": ["out"]}}], ids=str)
def test_a_finished_run_gives_its_weights_to_the_module(recipe, changes):
    trained, other, alone = Named(), Named(), Named()
    other.load_state_dict(trained.state_dict() if "trainable" in changes else other.state_dict())  # the base is theirs
    first = Trainer(trained, {**recipe, **changes}, ROWS).train()
    assert Trainer(other, {**recipe, **changes}, ROWS).train().steps == first.steps
    ids = torch.tensor([ROWS[0]["input_ids"]])
    assert torch.equal(other(ids), trained(ids))
    shutil.rmtree(Path(first.output_dir) / "checkpoints")
    before, said = alone(ids), Said()
    Trainer(alone, {**recipe, **changes}, ROWS, listener=said).train()
    assert torch.equal(alone(ids), before)
    assert "your module keeps the weights that it has" in said.texts[-1]


def test_more_steps_on_a_falling_schedule_say_where_the_learning_rate_goes_on(recipe):
    said = Said()
    Trainer(Named(), recipe, ROWS).train()
    Trainer(Named(), {**recipe, "max_steps": 6}, ROWS, listener=said).train()
    resumed = next(text for text in said.texts if text.startswith("resuming from step 3 of 6; its cosine schedule"))
    assert resumed.endswith("at a learning rate of 0.05")


PLANNED = {"micro_batch_size": 8, "precision": "bf16", "loss": "plain", "checkpointing": "none", "optimizer": "adamw",
           "attention": "sdpa", "compile": "off"}  # fmt: skip


@pytest.mark.parametrize(("changes", "fields"), [
    ({}, "precision=auto"), ({"offload": "host", "data": "not-there.txt"}, "precision=auto offload=auto"),
    ({"device": "cpu"}, None), ({"compile": "auto"}, None), ({"precision": "fp32"}, None),
])  # fmt: skip
def test_a_gpus_plan_on_a_processor_says_what_to_leave_open(tiny, changes, fields, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said, written = Said(), {**tiny, "device": "auto", "max_steps": 1, **PLANNED, **changes}
    refused = pytest.raises(Refused, match=r"moves .* write offload=none") if "offload" in changes else None
    with refused or nullcontext():  # before it looks for data
        Trainer(recipe=written, listener=said).train()
    warnings = [text.partition(": write ")[2].partition(" for ")[0] for text in said.texts if "has no GPU" in text]
    assert warnings == ([fields] if fields else [])


def test_a_resumed_run_is_no_gpus_plan(recipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said, values = Said(), {**recipe, "device": "auto", "precision": "bf16", "save_steps": 1, "max_steps": 1}
    for changes in ({}, {"max_steps": 2, "micro_batch_size": 2}):
        Trainer(Named(), {**values, **changes}, ROWS, listener=said).train()
    assert any("resum" in text for text in said.texts)
    assert not any("has no GPU" in text for text in said.texts)


@pytest.mark.parametrize(("name", "folder"), [
    ("./chat", "chat"), ("../x/model", "model"), ("/data/model/", "model"), ("~/model", "model"), (".\\chat", "chat"),
    ("C:\\models\\mine", "mine"), ("owner/model", "owner--model"), ("a.b:make", "a.b-make"), ("./mine.yaml", "mine"),
])  # fmt: skip
def test_a_run_folder_is_called_as_the_model(name, folder):
    assert folder_name(name) == folder


@pytest.mark.parametrize(("recipe", "name"), [(Recipe(output_dir="runs/\udcff"), "gpt2"), (Recipe(), "s\udcff.yaml")])
def test_a_folder_whose_name_tokenizers_cannot_write_is_refused_before_anything_is_trained(recipe, name):
    with pytest.raises(RecipeError, match=r"output_dir: 'runs/s?\\udcff' is not UTF-8 here; write output_dir="):
        run_path(recipe, name)


@pytest.mark.parametrize(("written", "noted"), [({}, []), ({"per_device_eval_batch_size": 16, "do_train": True},
                                                            ["do_train, per_device_eval_batch_size"]),
    ({"optim": "adamw_bnb_8bit"}, []), ({"save_strategy": "epoch"}, []),
    ({"optim": "paged_adamw_32bit"}, ["paging of the optimizer, which is bitsandbytes' own (write offload=auto)"]),
])
def test_arguments_without_effect_are_named_where_they_are_no_defaults(recipe, written, noted):
    own = {field: recipe[field] for field in ("vocab_size", "seq_len", "output_dir", "device")}
    arguments = {"per_device_train_batch_size": 4, "max_steps": 1, **written}
    said = Said()
    Trainer(Named(), Recipe.from_training_arguments(arguments, **own), ROWS, listener=said).train()
    assert [text.rpartition(": ")[2] for text in said.texts if text.startswith("hugging_face: ")] == noted


def test_a_saved_model_knows_where_a_text_ends(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("a few words\n" * 200)
    changes = {"data": str(tmp_path / "text.txt"), "vocab_size": 300, "max_steps": 1}
    path = Path(Trainer(recipe={**tiny, **changes}).train().output_dir) / "model"
    end = AutoTokenizer.from_pretrained(path).eos_token_id
    assert AutoConfig.from_pretrained(path).eos_token_id == GenerationConfig.from_pretrained(path).eos_token_id == end


def test_training_arguments_cut_no_rows_and_leave_none_out(tmp_path: Path) -> None:
    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=64, n_positions=1500))
    rows = [{"input_ids": [i] * (1100 + i)} for i in range(20)]
    given = {"output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_train_epochs": 2, "use_cpu": True,
             "report_to": "none"}
    alone = Trainer(module, TrainingArguments(**given), rows)
    assert (alone.recipe.seq_len, alone.recipe.data.eval_fraction, alone.recipe.eval_samples) == (1119, 0, None)
    watched = TrainingArguments(**given, eval_strategy="steps", eval_steps=0.5, logging_steps=0.25)
    beside = Trainer(module, watched, rows, [{"input_ids": [1] * 1600}, *rows * 20], overrides=["data.packing=false"])
    assert (beside.recipe.seq_len, beside.recipe.data.eval_fraction) == (1500, 0.05)  # for no rows to evaluate on
    assert (beside.recipe.eval_steps, beside.recipe.logging_steps) == (0.5, 0.25)
    assert Trainer(module, watched, rows, overrides=["seq_len=8"]).recipe.seq_len == 8
    assert Trainer(module, watched).recipe.seq_len == 1024
    said = Said()
    summary = Trainer(module, TrainingArguments(**given), rows, overrides=["seq_len=8"], listener=said).train()
    assert (summary.steps, summary.eval_loss) == (6, None)  # of 20 rows, twice
    assert any(text.startswith("note: dataset: 20 of 20 rows are longer than seq_len=8 ") for text in said.texts)


def test_training_arguments_train_as_the_recipe_that_they_say(tmp_path: Path) -> None:
    said = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2, "use_cpu": True,
            "learning_rate": 0.1, "seed": 3}
    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=64, n_positions=16))
    arguments = TrainingArguments(output_dir=str(tmp_path / "object"), report_to="none", **said)
    own = Trainer(module, arguments, ROWS)
    assert (own.recipe.seq_len, own.recipe.batch_size, own.recipe.micro_batch_size, own.recipe.seed) == (16, 8, 4, 3)
    assert own.train().steps == 2
    assert own.recipe.save_total_limit is None
    assert Trainer(Named(), arguments, ROWS, overrides=["vocab_size=64", "max_steps=1"]).recipe.max_steps == 1
    for wrong in ({"training_arguments": tmp_path}, {"overrides": ["max_steps=1"]}):
        with pytest.raises(RecipeError, match=f"^{next(iter(wrong))}: "):
            Trainer(module, {"vocab_size": 64}, ROWS, **wrong)

    file, text = tmp_path / "arguments.json", tmp_path / "notes.txt"
    file.write_text(json.dumps({**said, "output_dir": str(tmp_path / "file")}))
    text.write_text("\n".join(f"note {i} of many" for i in range(200)))
    words = ["gpt2", f"data={text}", "vocab_size=300", "seq_len=16", "max_steps=1", "model_overrides.n_layer=1",
             "model_overrides.n_embd=8", "model_overrides.n_head=1", f"cache_dir={tmp_path}"]
    assert CliRunner().invoke(app, ["train", *words, "--training-args", str(file)]).exit_code == 0
    assert (tmp_path / "file" / "model" / "config.json").is_file()
    missing = CliRunner().invoke(app, ["train", "--training-args", str(file)]).exception
    assert isinstance(missing, RecipeError)
    assert str(missing).startswith("RECIPE is missing")


@pytest.mark.parametrize(("values", "evaluates", "says"), [
    ({"data": {"source": "a.txt", "samples": 9}}, True, "data.samples: 9 has no effect: .* data=dummy alone; leave"),
    ({"task": "masked-lm", "data": {"chat_template": "a.jinja"}}, True,
     "data.chat_template: a.jinja has no effect: task=causal-lm alone learns conversations; leave it out"),
    ({"data": {"target": "summary"}}, True, "data.target: summary has no effect: task=seq2seq alone"),
    ({"data": {"label": "stars"}}, True, "data.label: stars has no effect: task=sequence-classification alone"),
    ({"early_stopping_threshold": 0.1}, True,
     "early_stopping_threshold: 0.1 has no effect: .* write early_stopping_patience="),
    ({"eval_steps": 5, "data": {"eval_fraction": 0.0}}, False,
     "eval_steps: 5 has no effect: nothing is held out to evaluate on; write data.eval_fraction=0.05, or"),
])
def test_what_a_run_does_not_read_is_said(values: dict[str, Any], evaluates: bool, says: str) -> None:
    (note,) = unread(Recipe.from_dict(values), evaluates)
    assert re.match(says, note)
    assert unread(Recipe.from_dict(Recipe.from_dict(values).to_dict()), evaluates) == [note]


@pytest.mark.parametrize("values", [
    {},
    {"data": {"source": "dummy", "samples": 9}},
    {"data": {"chat_template": "a.jinja"}},
    {"task": "seq2seq", "data": {"target": "summary"}},
    {"task": "sequence-classification", "data": {"label": "stars"}},
    {"eval_steps": 5, "early_stopping_patience": 2, "early_stopping_threshold": 0.1},
])
def test_what_a_run_reads_is_not_remarked_on(values: dict[str, Any]) -> None:
    assert unread(Recipe.from_dict(values), True) == []
