"""A run that runs out of the device's memory goes on with less, from the step that it was at."""

from __future__ import annotations

import json
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from tests import failing
from tests.training.runs import Said, logged_losses
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques import compile as compile_technique
from tightfit.backends.pytorch.techniques.loss import of_logits
from tightfit.devices import find_device
from tightfit.errors import OutOfMemory
from tightfit.recipe import Recipe
from tightfit.techniques.offload import STREAMED
from tightfit.trace import Phase
from tightfit.training.recovery import less_memory
from tightfit.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("few_objects")

WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "by block": {"accumulation": "by-block", "update": "with-forward"},
    "in backward": {"accumulation": "by-block", "update": "in-backward", "max_grad_norm": 0},
}


@pytest.fixture
def run(tiny):
    return {**tiny, "data": {"source": "dummy", "samples": 40}, "batch_size": 8, "micro_batch_size": 4, "max_steps": 6,
            "save_steps": 2, "eval_steps": 3, "loading": {"workers": 0}, "compile": "off", "precision": "fp32"}


def trained(values):
    torch.set_num_threads(1)
    said = Said()
    return Trainer(recipe=values, listener=said).train(), [text for text in said.texts if "out of memory" in text]


def no_room(monkeypatch, phase: Phase | str, at: int, times: int = 1) -> None:
    """Let the allocator fail in a phase of the step after so many others, so often; so may evaluation, saving
    and export."""
    failures, enter, loss_sum = iter(range(times)), Step.enter, Step.evaluate
    save, export = Step.save, Step.export

    def fail(step) -> None:
        if step.steps >= at and next(failures, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes. GPU 0 has no more")

    def entering(step, entered, doing):
        enter(step, entered, doing)
        if entered is phase:
            fail(step)

    def evaluating(step, global_batches):
        with step._running("evaluation"):
            fail(step)
        return loss_sum(step, global_batches)

    def saving(step, folder):
        with monkeypatch.context() as patch:
            kept = step.update.save
            patch.setattr(step.update, "save", lambda folder: (fail(step), kept(folder))[1])
            return save(step, folder)

    def exporting(step, *arguments):
        write = step.build.save_model
        step.build = replace(step.build, save_model=lambda *given, **named: (fail(step), write(*given, **named)))
        export(step, *arguments)

    if phase == "evaluation":
        monkeypatch.setattr(Step, "evaluate", evaluating)
    elif phase == "saving":
        monkeypatch.setattr(Step, "save", saving)
    elif phase == "export":
        monkeypatch.setattr(Step, "export", exporting)
    else:
        monkeypatch.setattr(Step, "enter", entering)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, "evaluation", "saving", "export"],
                         ids=str)
def test_a_run_goes_on_with_half_the_micro_batch(run, tmp_path, monkeypatch, phase, way):
    plain, _ = trained({**run, **WAYS[way], "output_dir": str(tmp_path / "plain")})
    no_room(monkeypatch, phase, 3)
    summary, (said,) = trained({**run, **WAYS[way]})
    assert "Tried to allocate 9 bytes" in said
    halfway = (phase, way) == (Phase.OPTIMIZER, "in backward")  # whose weights are all updated by then
    step = {"saving": 4, "export": 6}.get(phase, 3)
    start = "the newest checkpoint, or from the start" if halfway else f"step {step}"
    assert f"Going on from {start} with micro_batch_size=2 (the same global batch, more accumulation)" in said
    assert summary.steps == len(logged_losses(Path(run["output_dir"]))) == 6
    assert summary.losses == pytest.approx(plain.losses[2 if halfway else 0 :], abs=1e-5)
    assert summary.eval_loss == pytest.approx(plain.eval_loss, abs=1e-5)
    assert "micro_batch_size: 2" in (Path(run["output_dir"]) / "recipe.yaml").read_text()
    assert same_files(tmp_path / "plain", Path(run["output_dir"]))


def same_files(one: Path, other: Path) -> bool:
    """Whether two runs left the same, but for the bytes in it."""
    first, second = ({path.relative_to(run) for path in run.rglob("*")} for run in (one, other))
    return first == second


KINDS: dict[str, dict[str, Any]] = {
    "packed": {"tokenizer": "train", "vocab_size": 300, "max_grad_norm": 0.05},
    "packed by block": {"tokenizer": "train", "vocab_size": 300, **WAYS["by block"]},
    "lora": {"trainable": "lora"},
    "dora beside nf4": {"trainable": {"name": "dora", "rank": 4}, "base": "nf4"},
    "lora beside nf4 by block": {"trainable": "lora", "base": "nf4", **WAYS["by block"]},
    "fp16": {"precision": "fp16"},
    "experts": {"model": "moe-tiny", "model_overrides": {"num_hidden_layers": 1}},
    "classes": {"model": "bert-base", "task": "sequence-classification", "batch_size": 7, "data": {
        "source": "dummy", "samples": 18}, "model_overrides": {
        "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.OPTIMIZER, "evaluation", "export"], ids=str)
def test_what_is_trained_otherwise_goes_on_too(run, tmp_path, monkeypatch, phase, kind):
    values = {**run, **KINDS[kind], "max_steps": 3, "eval_steps": 2}
    if kind.startswith("packed"):
        lines = [json.dumps({"text": f"{number} is a number, " * (1 + number % 3)}) for number in range(200)]
        (tmp_path / "documents.jsonl").write_text("\n".join(lines))
        values["data"] = str(tmp_path / "documents.jsonl")
    plain, _ = trained({**values, "output_dir": str(tmp_path / "plain")})
    no_room(monkeypatch, phase, 1)
    summary, (said,) = trained(values)
    assert "with micro_batch_size=2" in said
    close = 1e-3 if kind == "fp16" else 1e-5
    assert summary.losses == pytest.approx(plain.losses, abs=close)
    assert summary.eval_loss == pytest.approx(plain.eval_loss, abs=close)
    assert same_files(tmp_path / "plain", Path(run["output_dir"]))


def test_evaluation_that_finds_no_room_for_its_first_sum_is_recovered_from(run, monkeypatch):
    monkeypatch.setattr(of_logits.Tally, "__init__", failing.no_room(of_logits.Tally.__init__, times=1))
    _, (said,) = trained(run)
    assert said.startswith("out of memory in evaluation: Tried to allocate 9 bytes. Going on from step 3 with")


@pytest.mark.parametrize("times", [2, 100])
def test_what_cannot_be_saved_is_trained_again_from_what_could(run, monkeypatch, times):
    no_room(monkeypatch, "saving", 3, times)
    if times == 100:
        with pytest.raises(OutOfMemory, match=r"in saving a checkpoint: .*Try: "):
            trained(run)
        assert [path.name for path in (Path(run["output_dir"]) / "checkpoints").iterdir()] == ["step-00000002"]
        return
    summary, (said,) = trained(run)
    assert "Going on from the newest checkpoint" in said
    assert (summary.steps, summary.first_step) == (6, 2)
    assert len(logged_losses(Path(run["output_dir"]))) == 6


@pytest.mark.parametrize("save_steps", [2, None])
def test_weights_that_are_half_updated_are_not_gone_on_with(run, tmp_path, monkeypatch, save_steps):
    """The run goes back to the newest checkpoint, or to its start."""
    run |= {"save_steps": save_steps, "micro_batch_size": 2}
    plain, _ = trained({**run, "output_dir": str(tmp_path / "plain")})
    halfway = failing.no_room(torch.optim.AdamW._init_group, at=3 * 2 + 1, times=1)
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", halfway)  # the fourth step's second of two groups
    summary, (said,) = trained(run)
    assert "Going on from the newest checkpoint, or from the start with micro_batch_size=1" in said
    assert (summary.steps, summary.first_step) == (6, 2 if save_steps else 0)
    assert summary.losses[-1] == pytest.approx(plain.losses[-1], abs=1e-5)


def test_a_run_that_needs_more_than_a_smaller_micro_batch_recomputes(run, monkeypatch):
    no_room(monkeypatch, Phase.BACKWARD, 1, times=3)
    _, said = trained({**run, "attention": "sdpa", "checkpointing": "none"})
    assert [text.partition("with ")[2].partition(" (")[0] for text in said] == [
        "micro_batch_size=2", "micro_batch_size=1", "checkpointing=selective"]


@pytest.fixture
def models(monkeypatch):
    """References to the models that were built, each after the memory of the one before was given back."""
    made, build = [], PytorchBackend.build

    def building(backend, *args):
        assert not any(model() is not None for model in made)
        built = build(backend, *args)
        made.append(weakref.ref(built.model))
        return built

    monkeypatch.setattr(PytorchBackend, "build", building)
    return made


def test_the_memory_of_the_step_that_failed_is_given_back_first(run, models, monkeypatch):
    no_room(monkeypatch, Phase.BACKWARD, 1)
    trained(run)
    assert len(models) == 2


@pytest.fixture
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("name", "number"), [("per-block", 0), ("per-block", 1), ("per-block", 2), ("whole", 0)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_that_finds_no_room_compiles_anew_at_half_the_micro_batch(run, models, monkeypatch, name, number):
    """In compiling the first forward or backward pass, or a forward pass without gradients."""
    run |= {"compile": name, "max_steps": 3, "eval_steps": 2}
    rows, fail = set[str](), failing.no_room(times=1)

    def compiler(of: int):
        def compiled(graph, inputs):
            given = [x for x in inputs if isinstance(x, Tensor) and (x.dim() == 3 or x.dtype == torch.int64)]
            rows.update(str(x.shape[0]) for x in given)
            if of == number:
                fail()
            return make_boxed_func(graph)

        return compiled

    backend = aot_autograd(fw_compiler=compiler(0), bw_compiler=compiler(1), inference_compiler=compiler(2))
    monkeypatch.setattr(compile_technique, "_arguments", lambda *_: {"backend": backend})
    plain, _ = trained({**run, "compile": "off", "output_dir": run["output_dir"] + "-plain"})
    del models[:]
    summary, (said,) = trained(run)
    assert len(models) == 2
    assert "Tried to allocate 9 bytes. Going on from" in said
    assert "with micro_batch_size=2" in said
    assert summary.losses == pytest.approx(plain.losses, abs=1e-5)
    assert {"4", "2"} <= rows  # and not for any number of rows


def test_a_run_that_is_asked_to_stop_in_the_step_that_fails_stops(run, tmp_path, monkeypatch):
    plain, _ = trained({**run, "output_dir": str(tmp_path / "plain")})
    no_room(monkeypatch, Phase.BACKWARD, 3)
    fail = Step.enter

    def entering(step, phase, doing):
        if phase is Phase.BACKWARD and step.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        fail(step, phase, doing)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "enter", entering)
        summary, said = trained(run)
    assert (summary.stopped_by, summary.steps, said) == ("SIGTERM", 3, [])
    assert trained(run)[0].losses == plain.losses[3:]


def test_a_run_whose_weights_are_the_callers_own_goes_on(run, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from tightfit.models import read_config

    def module():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(read_config(Recipe.from_dict(run)))

    plain = Trainer(module(), {**run, "output_dir": str(tmp_path / "plain")}).train()
    no_room(monkeypatch, Phase.FORWARD, 3)
    assert Trainer(module(), run).train().losses == pytest.approx(plain.losses, abs=1e-5)


def test_where_nothing_is_left_or_it_is_not_wanted_the_run_ends_with_what_may_help(run, monkeypatch):
    no_room(monkeypatch, Phase.FORWARD, 1, times=1000)
    with pytest.raises(OutOfMemory, match=r"in the forward pass of micro-batch 1 of 8.*Try: "):
        trained(run)
    with pytest.raises(OutOfMemory, match=r"micro-batch 1 of 2: .*Try: micro_batch_size=2"):
        trained({**run, "recover": False, "output_dir": run["output_dir"] + "-ended"})


def test_a_run_resumed_with_another_micro_batch_has_the_same_data(run, tmp_path):
    plain, _ = trained({**run, "max_steps": 3, "output_dir": str(tmp_path / "plain")})
    trained({**run, "max_steps": 1})
    summary, _ = trained({**run, "max_steps": 3, "micro_batch_size": 2})
    assert summary.first_step == 1
    assert summary.losses == pytest.approx(plain.losses[1:], abs=1e-5)


def test_blocks_in_host_memory_come_last():
    card = find_device("rtx-4090")
    recipe = Recipe.from_dict({"model": "gpt2", "micro_batch_size": 1, "attention": "sdpa", "precision": "bf16",
                               "checkpointing": "every-block", "compile": "off", "optimizer": "adamw", "loss": "plain",
                               "accumulation": "loop"})  # fmt: skip
    *change, streamed = less_memory(recipe, card)
    assert change == ["offload=host accumulation=by-block update=with-forward", "blocks in host memory"]
    assert streamed == recipe.override(**STREAMED)
    assert less_memory(streamed, card) is None
