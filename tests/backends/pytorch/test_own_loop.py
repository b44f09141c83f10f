"""People's own loops: the documented examples give the built-in loop's losses at the built-in loop's peak memory."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

import tightfit
from tests.allocations import allocated
from tests.architectures import tiny_model
from tests.built import built, global_batches_of
from tightfit import Recipe, apply
from tightfit.backends.pytorch.batch import TensorGlobalBatch, tensor_global_batch
from tightfit.backends.pytorch.build import Build
from tightfit.backends.pytorch.step import Step
from tightfit.errors import RecipeError, Refused

pytestmark = pytest.mark.usefixtures("few_objects")

EXAMPLES = Path(__file__).parents[3] / "examples"
CLOSED = {
    "attention": "sdpa", "checkpointing": "none", "compile": "off", "optimizer": "adamw", "precision": "fp32",
    "batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "seq_len": 32,
    "data": {"source": "dummy", "samples": 40}, "device": "cpu",
}


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its settings for the life of a process; a test wants its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def example(name: str) -> Callable[..., list[float]]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def make_model() -> nn.Module:
    """Two layers wide enough that activations, not the optimizer, make the peak."""
    return tiny_model("gpt2", n_embd=64, n_inner=512)


def global_batches(build: Build) -> list[TensorGlobalBatch]:
    return [tensor_global_batch(global_batches_of(build).global_batch(index)) for index in range(4)]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes allocated at once during `work`, by torch.profiler's own allocation events."""
    gc.collect()
    return max(allocated(work))


def built_in(recipe: Recipe) -> tuple[list[float], int]:
    build = built(recipe, make_model())
    step, made = Step(build), global_batches(build)
    losses: list[float] = []

    def work() -> None:
        losses.extend(step(global_batch, recipe.learning_rate).read().loss.mean for global_batch in made)

    with build.process_settings():
        return losses, peak_bytes(work)


@pytest.mark.parametrize("checkpointing", ["none", "every-block"])
@pytest.mark.parametrize(("name", "precision"), [
    ("plain_pytorch", "fp32"), ("with_accelerate", "fp32"), ("with_accelerate", "bf16"),
])
def test_an_example_gives_the_built_in_losses_and_peak(name, precision, checkpointing):
    recipe = Recipe.from_dict({**CLOSED, "precision": precision, "checkpointing": checkpointing})
    expected, expected_peak = built_in(recipe)
    made = global_batches(built(recipe, make_model()))
    pairs = [[(batch.inputs["input_ids"], batch.labels) for batch in whole.micro_batches] for whole in made]
    model, losses, train = make_model(), [], example(name)
    peak = peak_bytes(lambda: losses.extend(train(model, recipe.to_dict(), pairs)))
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)
    assert losses[-1] != losses[0]
    assert peak == pytest.approx(expected_peak, rel=0.02 if precision == "fp32" else 0.1)


@pytest.mark.parametrize("name", ["plain_pytorch", "with_accelerate"])
def test_an_example_runs_as_it_stands(name, capsys):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    losses = [float(x) for x in capsys.readouterr().out.strip("[]\n").split(",")]
    assert losses[-1] < losses[0]


def test_an_open_choice_is_refused_by_name_with_what_chooses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, recipe = tiny_model("gpt2"), {**CLOSED, "precision": "auto", "checkpointing": "auto", "device": "auto"}
    with pytest.raises(RecipeError, match=r"^precision, checkpointing: still auto; .* or apply (.*), which ") as caught:
        apply(model, recipe)
    advice = str(caught.value).partition("or apply ")[2].partition(", which ")[0]
    chosen = eval(advice, {"tightfit": tightfit, "model": model, "recipe": recipe})
    assert isinstance(apply(model, chosen), tightfit.Applied)


def test_a_loop_that_names_no_micro_batch_takes_the_global_batch_whole():
    applied = apply(tiny_model("gpt2"), {**CLOSED, "micro_batch_size": "auto"})
    assert applied.accelerator_kwargs["gradient_accumulation_steps"] == 1
    assert not any(sentence.startswith("accumulation:") for sentence in applied.left_to_you)


def test_a_choice_that_cannot_serve_is_refused():
    with pytest.raises(Refused, match="attention"):
        apply(tiny_model("gpt2"), {**CLOSED, "attention": "flex"})


def test_what_is_left_is_listed():
    applied = apply(tiny_model("gpt2"), {
        **CLOSED, "optimizer": "lion", "micro_batch_size": 4, "batch_size": 16, "precision": "fp16",
        "checkpointing": "every-block", "warmup_steps": 5,
    })
    assert applied.accelerator_kwargs == {"mixed_precision": "fp16", "gradient_accumulation_steps": 4, "cpu": True}
    text = "\n".join(applied.left_to_you)
    for word in ("torch.float16", "GradScaler", "4 micro-batches of 4", "clip_grad_norm_", "5 warm-up steps"):
        assert word in text
    assert repr(applied).startswith("<Applied: GPT2LMHeadModel, ")
    assert len(repr(applied)) < 300


@pytest.mark.parametrize("fields", [{"accumulation": "by-block"}, {"update": "with-forward"}])
def test_what_needs_our_own_step_is_refused(fields):
    with pytest.raises(Refused, match="tightfit's own step"):
        apply(tiny_model("gpt2"), {**CLOSED, **fields})
