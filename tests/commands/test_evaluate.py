"""`tightfit evaluate`: a run's model has the metrics that its run wrote down, and those of whatever data is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.own_models import Scores
from tightfit.errors import CheckpointError, RecipeError
from tightfit.training.trainer import Trainer

WORDS = "the quick brown fox jumps over the lazy dog and runs home again\n"
CLASSES = {"task": "sequence-classification", "model": "bert-base", "vocab_size": 300, "model_overrides": {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}}  # fmt: skip
OURS = {"model": "transformer-156m", "model_overrides": {
    "num_layers": 1, "hidden_size": 32, "head_dim": 16, "num_heads": 2}, "vocab_size": 300}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("\n".join(f"{WORDS}{number}\n" for number in range(60)))
    for name, rows in (("classes", 80), ("test", 30)):
        lines = [f"a {'good' if row % 3 else 'bad'} thing {row},{'pos' if row % 3 else 'neg'}" for row in range(rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    return tmp_path


@pytest.mark.parametrize(("fields", "source"), [
    ({"vocab_size": 300}, "notes.txt"),
    ({"vocab_size": 300, "loss": "chunked", "pad_vocab_to": 64, "label_smoothing_factor": 0.2}, "notes.txt"),
    (OURS, "notes.txt"),
    (CLASSES, "classes.csv"),
])  # fmt: skip
def test_a_runs_model_has_the_metrics_of_its_run(tiny, data, run, fields, source):
    summary = Trainer(recipe={**tiny, **fields, "data": str(data / source)}).train()
    status, out, error = run("evaluate", summary.output_dir, "--json")
    assert status == 0, error
    found = json.loads(out)
    assert found["eval_loss"] == pytest.approx(summary.eval_loss, rel=1e-6)
    assert found["eval_accuracy"] == summary.eval_accuracy
    assert found["model"] == str(Path(summary.output_dir) / "model")


def test_all_of_the_data_that_is_named_is_evaluated_by_the_runs_own_classes(tiny, data, run):
    (data / "held.csv").write_text("text,mood\n" + "\n".join(f"a bad thing {row},neg" for row in range(7)))
    (data / "moods.csv").write_text((data / "classes.csv").read_text().replace("text,label", "text,mood"))
    recipe = {**tiny, **CLASSES, "data": {
        "source": str(data / "moods.csv"), "eval_source": str(data / "held.csv"), "label": "mood"},
              "max_steps": 30, "learning_rate": 1e-2}
    folder = Trainer(recipe=recipe).train().output_dir
    (data / "test.csv").write_text("text,mood\n" + "\n".join(f"a good thing {row},pos" for row in range(30)))
    said = [run("evaluate", name, f"data={data / 'test.csv'}", *more)[1] for name, more in (
        (folder, ()), (Path(folder) / "model", ("seq_len=16", "data.label=mood")), (folder, ("eval_samples=10",)))]
    assert said[0] == said[1]  # and not what the run was evaluated on, as here:
    assert "(7 samples, seq_len=16)" in run("evaluate", folder)[1]
    assert "accuracy 100.0%" in said[0]  # though a class is missing, by which another would be number 0
    assert "(30 samples, seq_len=16)" in said[0]
    assert "(10 samples, seq_len=16)" in said[2]
    assert "only what was trained can be evaluated" in run("evaluate", folder, "num_labels=4")[2]
    assert "there is no such folder" in run("evaluate", f"{folder}-2", f"data={data / 'test.csv'}")[2]


@pytest.mark.parametrize("fields", [
    {"trainable": "lora"},
    {"trainable": "lora", "base": "int8"},
    {"model": "mine:built", "model_overrides": {}},
])  # fmt: skip
def test_what_is_no_whole_model_is_evaluated_by_its_checkpoints(tiny, data, run, tmp_path, monkeypatch, fields):
    code = "from tests.own_models import Scores\n\n\ndef built():\n    return Scores(300)\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (data / "notes.jsonl").write_text("".join(json.dumps({"text": f"{WORDS}{row}"}) + "\n" for row in range(60)))
    recipe = {**tiny, "vocab_size": 300, **fields, "data": {"source": str(data / "notes.jsonl"), "packing": False},
              "learning_rate": 1e-2, "eval_steps": 2, "save_steps": 2}
    folder = Path(Trainer(recipe=recipe).train().output_dir)
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["eval_loss"] for line in written if "eval_loss" in line}
    for name, step in ((folder, 4), (folder / "checkpoints" / "step-00000002", 2)):
        status, out, error = run("evaluate", name, "--json")
        assert status == 0, error
        assert json.loads(out)["eval_loss"] == pytest.approx(by_step[step], rel=1e-6)
        assert f"evaluating step {step} of 4, by {folder}/checkpoints/step-0000000{step}" in error
    if fields.get("trainable"):  # an adapter's own folder is its run's
        assert run("evaluate", folder / "model") == run("evaluate", folder)
    (data / "other.jsonl").write_text((json.dumps({"text": "over the lazy dog"}) + "\n") * 6)
    status, out, error = run("evaluate", folder, f"data.source={data / 'other.jsonl'}")
    assert (status, "(6 samples" in out) == (0, True), (out, error)


def test_a_run_that_did_not_end_is_evaluated_by_its_newest_checkpoint(tiny, data, run):
    recipe = {**tiny, "vocab_size": 300, "data": str(data / "notes.txt"), "eval_steps": 2, "save_steps": 2}
    folder = Path(Trainer(recipe=recipe).train().output_dir)
    whole = json.loads(run("evaluate", folder, "--json")[1])
    (folder / "checkpoints" / "step-00000006").mkdir()  # of a run that goes on, and has not saved it whole
    assert run("evaluate", folder)[1].startswith(f"{folder}/checkpoints/step-00000004: ")
    (folder / "checkpoints" / "step-00000006").rmdir()
    assert run("evaluate", folder)[1].startswith(f"{folder}/model: ")
    other = ("evaluate", folder, f"data={data / 'other.txt'}", "seq_len=8", "--json")
    (data / "other.txt").write_text(WORDS * 9)
    (data / "short.txt").write_text(WORDS)
    assert "(1 sample, 18 tokens" in run("evaluate", folder / "model", f"data={data / 'short.txt'}")[1]
    by_model = json.loads(run(*other)[1])
    shutil.rmtree(folder / "model")
    assert json.loads(run("evaluate", folder, "--json")[1])["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)
    found = json.loads(run(*other)[1])  # with the tokenizer of all that was learned from, made again
    assert (found["eval_loss"], found["labels"]) == (pytest.approx(by_model["eval_loss"], rel=1e-6), by_model["labels"])
    (folder / "checkpoints" / "step-00000004" / "weights.safetensors").write_bytes(b"")
    status, out, error = run("evaluate", folder)
    assert (status, "step-00000002:" in out) == (0, True), error
    named = run("evaluate", folder / "checkpoints" / "step-00000004")
    assert named[0] == 2
    assert "not as it was written" in named[2]
    (data / "notes.txt").write_text("other words that make another tokenizer\n" * 50)
    assert "data: it is not what it was" in run("evaluate", folder)[2]


def test_a_trainer_evaluates_a_module_as_it_is_and_a_named_model_as_its_run_has_it(tiny, data):
    rows = [{"input_ids": [(row + token) % 50 for token in range(16)]} for row in range(40)]
    recipe = {**tiny, "learning_rate": 1e-2}
    for model, fields in ((None, {}), (Scores(128), {"model_overrides": {}}), (None, {"trainable": "lora"})):
        name = {"output_dir": f"{tiny['output_dir']}-{len(fields)}{model is None}{'trainable' in fields}"}
        trainer = Trainer(model, {**recipe, **fields, **name}, rows, rows[:8])
        before, summary = trainer.evaluate(), trainer.train()
        after = trainer.evaluate()
        assert before["eval_loss"] > after["eval_loss"] == pytest.approx(summary.eval_loss, rel=1e-6)
        assert trainer.evaluate(rows[8:])["eval_loss"] != after["eval_loss"]
    with pytest.raises(RecipeError, match="eval_dataset: nothing of the rows is held out"):
        Trainer(Scores(128), {**recipe, "model_overrides": {}, "data": {"eval_fraction": 0}}, rows).evaluate()
    shutil.rmtree(Path(summary.output_dir) / "checkpoints")
    with pytest.raises(CheckpointError, match="the checkpoints of its run are gone"):
        trainer.evaluate()


def test_what_was_not_trained_is_refused(tiny, data, run):
    folder = Path(Trainer(recipe={**tiny, "trainable": "lora"}).train().output_dir)
    shutil.rmtree(folder / "checkpoints")
    assert "neither a whole model in model/ nor a checkpoint" in run("evaluate", folder)[2]
    assert "random weights" in run("evaluate", "gpt2", f"data={data / 'notes.txt'}")[2]
    assert run("evaluate", data / "nowhere")[0] == 2
