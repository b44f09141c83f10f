"""The search over compiled steps, with a toy compiler whose memory and time are closed forms."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.failing import failing
from tests.planning.toy import toy_tools
from tightfit.devices import find_device
from tightfit.errors import ModelError, Refused
from tightfit.planning.costs import FitRank
from tightfit.planning.search.search import search
from tightfit.planning.timing.step_time import StepTime
from tightfit.recipe import Recipe
from tightfit.trace import Allocation, Category, Span, Trace

GPU = find_device("rtx-a5000")
GIB = 1 << 30
MEMORY = {"none": 1.0, "selective": 0.6, "attention": 0.7, "mlp": 0.5, "every-block": 0.2}
SPEED = {"none": 1.0, "selective": 1.05, "attention": 1.1, "mlp": 1.2, "every-block": 1.3}


class Compiler:
    """each: bytes of a sequence in a micro-batch, with nothing recomputed."""

    def __init__(self, each=GIB, failing=()):
        self.each, self.failing, self.compiled = each, failing, []
        self.lock = threading.Lock()

    def predict(self, recipe, device):
        with self.lock:
            self.compiled.append(recipe)
        if recipe.attention.name in self.failing or getattr(recipe.attention, "kernel", "") in self.failing:
            raise Refused(f"attention: no {getattr(recipe.attention, 'kernel', 'eager')} here")
        kind = recipe.checkpointing.name
        scanned = recipe.backend.layers == "scanned"
        inside = MEMORY[kind] * recipe.micro_batch_size * self.each * (1.5 if scanned and kind == "none" else 1)
        trace = Trace(origin="predicted", laid_out=True, notes=[recipe.model_dump_json()])
        trace.allocations = [
            Allocation(born=0, died=None, bytes=GIB, category=Category.WEIGHTS),
            Allocation(born=0, died=None, bytes=2 * GIB, category=Category.OPTIMIZER),
            Allocation(born=1, died=9, bytes=int(inside)),
        ]
        trace.spans = [Span(name="step 1", start=1, stop=9, step=1)]
        return trace

    def tools(self):
        return toy_tools(self.predict, self.seconds,
                         lambda trace, room, settings: pytest.fail("no allocator is asked"))

    def seconds(self, trace, recipe, device):
        slow = SPEED[recipe.checkpointing.name] * (1.4 if recipe.backend.layers == "scanned" else 1.0)
        slow *= 3.0 if recipe.precision.name == "fp32" else 1.0
        slow *= 1.0 if getattr(recipe.attention, "kernel", "") == "cudnn" else 1.2
        return StepTime(seconds=slow * (1 + 0.1 / recipe.micro_batch_size))


def recipe(**changes):
    fields = {"backend": "jax", "model": "transformer-156m", "seq_len": 512, "batch_size": 64}
    return Recipe.from_dict({**fields, **changes})


def test_the_fastest_that_fits_is_chosen_and_few_are_compiled():
    compiler = Compiler()
    told = []
    plan = search(recipe(), GPU, compiler.tools(), progress=lambda *each: told.append(each))
    chosen = plan.recipe
    assert (chosen.backend.layers, chosen.attention.kernel) == ("unrolled", "cudnn")
    # 64 sequences fit with every block recomputed alone, and that is slower than 16 with nothing recomputed
    assert (chosen.checkpointing.name, chosen.micro_batch_size) == ("none", 16)
    assert len(compiler.compiled) <= 8
    assert plan.predictions == len(compiler.compiled)
    assert len({each.model_dump_json() for each in compiler.compiled}) == len(compiler.compiled)
    assert told[-1] == (plan.predictions, plan.predictions, "done")
    assert all(candidate.estimate.fit_rank is FitRank.SAFE for candidate in plan.candidates if candidate is plan.chosen)
    assert plan.answers.would_not_fit
    values = plan.to_json()
    assert values["candidates"][0]["rank"] == 1
    assert values["candidates"][0]["recipe"]["backend"]["layers"] == "unrolled"


def test_what_is_pinned_stays():
    compiler = Compiler()
    plan = search(recipe(backend={"name": "jax", "layers": "scanned"}, checkpointing="every-block", attention="eager",
                         micro_batch_size=8, precision="bf16"), GPU, compiler.tools())
    assert [each.precision.name for each in compiler.compiled] == ["bf16"]
    assert (plan.recipe.backend.layers, plan.recipe.attention.name, plan.recipe.micro_batch_size) == (
        "scanned", "eager", 8)


def test_where_the_first_micro_batch_is_too_large_smaller_ones_are_compiled():
    plan = search(recipe(), GPU, Compiler(each=40 * GIB).tools())
    assert plan.recipe.checkpointing.name == "every-block"
    assert plan.recipe.micro_batch_size == 2


def test_where_nothing_fits_the_plan_says_by_how_much():
    plan = search(recipe(), GPU, Compiler(each=400 * GIB).tools())
    assert plan.chosen is None
    assert plan.candidates
    assert "misses" in plan.nothing_fits()
    assert plan.candidates[0].estimate.missing == min(c.estimate.missing for c in plan.candidates)


def test_a_kernel_that_cannot_be_compiled_is_left_out_and_named():
    compiler = Compiler(failing=("cudnn",))
    plan = search(recipe(), GPU, compiler.tools())
    assert {each.backend.layers for each in compiler.compiled} == {"unrolled"}
    assert plan.recipe.attention.kernel == "auto"
    assert any("left out: attention: no cudnn here" in note for note in plan.notes)


def test_where_nothing_can_be_compiled_the_reason_is_raised():
    with pytest.raises(Refused, match="no auto here"):
        search(recipe(), GPU, Compiler(failing=("cudnn", "auto", "eager")).tools())

    predict = failing(ModelError("model: XLA cannot compile it"))
    with pytest.raises(ModelError, match="XLA cannot"):
        search(recipe(), GPU, replace(Compiler().tools(), predict=predict))


def test_inference_is_refused():
    with pytest.raises(Refused, match="planned for training alone"):
        search(recipe(mode="inference"), GPU, Compiler().tools())
