"""What a model's own code raises, in plans and in real steps: one sentence with the module, the exception, the line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError

from tests.architectures import tiny_model
from tests.benchmark_modules import benchmark
from tests.failing import failing
from tests.plain import CPU
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.errors import cause, is_models_own, memory_guard
from tightfit.backends.pytorch.simulate.inference import predict_inference
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.errors import ModelError, OutOfMemory
from tightfit.planning.defaults import resolve
from tightfit.recipe import Recipe
from tightfit.tasks import global_batch_of

FIELDS = {"data": "dummy", "vocab_size": 16, "seq_len": 8, "batch_size": 4, "micro_batch_size": 2, "device": "cpu"}
AT_LINE = rf" \({Path(__file__)}:\d+\)"


class Backwards(torch.autograd.Function):
    """Fails once gradients come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient\nof this")


class Inner(nn.Module):
    """Fails in the named way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inside":
            raise KeyError("missing")
        if self.how == "leaves":
            sys.exit(0)
        return Backwards.apply(x) if self.how == "backward" else x


class Outer(nn.Module):
    """Embeds, calls `Inner`, and scores."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.inner, self.out = nn.Embedding(16, 4), Inner(how), nn.Linear(4, 16)
        self.how = how

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.how == "outside":
            raise RuntimeError
        return self.out(self.inner(self.embed(input_ids)))


RAISED = {
    "leaves": "its module 'inner' raised SystemExit: 0",
    "inside": "its module 'inner' raised KeyError: 'missing'",
    "outside": "it raised RuntimeError",
    "backward": "it raised ValueError: no gradient of this",
}


@pytest.fixture(params=RAISED)
def how(request: pytest.FixtureRequest) -> str:
    return request.param


def test_in_a_plan(how: str) -> None:
    recipe = resolve(Recipe.from_dict(FIELDS), CPU)
    with pytest.raises(ModelError, match=f"model: Outer cannot be planned for: {RAISED[how]}{AT_LINE}"):
        predict(recipe, CPU, Outer(how))


def test_a_module_that_left_a_prediction_is_in_no_later_ones() -> None:
    recipe = resolve(Recipe.from_dict(FIELDS), CPU)
    with pytest.raises(ModelError):
        predict(recipe, CPU, Outer("leaves"))
    assert {op.module for op in predict(recipe, CPU, Outer("")).ops} == {"", "embed", "out"}


def test_in_a_plan_of_inference() -> None:
    recipe = resolve(Recipe.from_dict({**FIELDS, "mode": "inference"}), CPU)
    with pytest.raises(ModelError, match=f"Outer cannot be planned for: {RAISED['inside']}{AT_LINE}") as found:
        predict_inference(recipe, CPU, Outer("inside"))
    assert "gradients" not in str(found.value)


def test_in_a_step_and_in_its_evaluation(how: str) -> None:
    backend = PytorchBackend()
    build = backend.build(resolve(Recipe.from_dict(FIELDS), CPU), CPU, Outer(how))
    step = backend.step(build)
    global_batch = benchmark("random_global_batches").random_global_batch(build.recipe, build.task, build.facts, 0)
    doing = "backward" if how == "backward" else "forward"
    told = f"model: Outer failed in the {doing} pass of micro-batch 1 of 2: {RAISED[how]}{AT_LINE}$"
    with pytest.raises(ModelError, match=told):
        step(global_batch, 1e-3)
    if how != "backward":
        with pytest.raises(ModelError, match=f"model: Outer failed in evaluation: {RAISED[how]}"):
            step.evaluate([global_batch])


class Odd(Outer):
    """Gives no logits that anything can be learned through."""

    def forward(self, input_ids: Tensor) -> Any:
        if self.how == "loss first":
            return torch.zeros(()), super().forward(input_ids)
        with torch.no_grad():
            return super().forward(input_ids)


@pytest.mark.parametrize(("how", "told"), [("loss first", "Odd gives one number, such as a loss, where its logits"),
                                           ("no gradient", "the logits of Odd depend on no parameter")])
def test_outputs_that_teach_nothing_are_told_in_plans_and_steps(how: str, told: str) -> None:
    recipe, backend = resolve(Recipe.from_dict(FIELDS), CPU), PytorchBackend()
    with pytest.raises(ModelError, match=told):
        predict(recipe, CPU, Odd(how))
    build = backend.build(recipe, CPU, Odd(how))
    with pytest.raises(ModelError, match=told):
        backend.step(build)(
            benchmark("random_global_batches").random_global_batch(build.recipe, build.task, build.facts, 0), 1e-3)


def test_our_own_errors_are_not_the_models() -> None:
    with pytest.raises(TypeError) as found:
        global_batch_of(None)
    assert not is_models_own(found.value, Outer(""))


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
def test_a_compiler_that_fails_is_told_as_the_choice_of_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_fx, "compile_fx", failing(TypeError("no such size\nand more")))
    recipe = resolve(Recipe.from_dict({**FIELDS, "compile": "per-block", "vocab_size": 96}), CPU)
    told = ("compile: per-block cannot be planned for GPT2LMHeadModel: torch.compile raised TypeError: no such size"
            r"( \(.*\))?; write compile=off$")
    with pytest.raises(ModelError, match=told):
        predict(recipe, CPU, tiny_model("gpt2"))


@pytest.mark.parametrize("compiled", ["off", "per-block"])
def test_a_tensor_too_large_to_count_is_told_as_the_length(
    compiled: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {**FIELDS, "model": "gpt2", "model_overrides": {"n_layer": 1, "n_positions": 10**9}, "seq_len": 10**9,
              "vocab_size": None, "micro_batch_size": 1, "attention": "eager", "compile": compiled}
    recipe = resolve(Recipe.from_dict(fields), CPU)
    told = r"seq_len: GPT2LMHeadModel makes a tensor of 12 x 1000000000 x 1000000000 "
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ModelError, match=told):
            predict(recipe, CPU)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record for record in caplog.records if record.name == logger.name] == []


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes. GPU 0 has no more")


def raised_from(cause: Exception) -> Exception:
    error = ValueError("a kernel failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("error", "said"), [
    (NO_ROOM, "Tried to allocate 9 bytes"),
    (BackendCompilerFailed(print, NO_ROOM, None), "Tried to allocate 9 bytes"),
    (BackendCompilerFailed(print, InductorError(NO_ROOM, None), None), "Tried to allocate 9 bytes"),
    (raised_from(raised_from(NO_ROOM)), "Tried to allocate 9 bytes"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "tried to allocate 9"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"), "CUDA error: out of memory"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "ALLOC_FAILED"),
])  # fmt: skip
def test_an_allocators_error_is_found_in_what_was_raised_because_of_it(error: Exception, said: str) -> None:
    with pytest.raises(OutOfMemory, match=rf"^out of memory in a step: .*{said}"), memory_guard(lambda: "a step"):
        raise error


@pytest.mark.parametrize("error", [
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
    raised_from(KeyError("a")),
])  # fmt: skip
def test_what_no_allocator_raised_is_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)) as found, memory_guard(lambda: "a step"):
        raise error
    assert found.value is error


def test_the_cause_of_what_a_compiler_wraps() -> None:
    from torch._inductor.exc import LoweringException

    wrapped = LoweringException(TypeError("no such thing"), "aten.mm", ["an argument"], {})
    assert cause(wrapped) == "TypeError: no such thing"
    assert cause(KeyError("a")) == "KeyError: 'a'"
    assert cause(ValueError()) == "ValueError"
