"""Chains of modules recomputed together: what they survive, and what they refuse."""

from __future__ import annotations

import copy
import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import (
    LAYERS,
    Plain,
    Recorder,
    assert_equal,
    build,
    loss,
    make,
    measure,
    saved_bytes,
    step,
)
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.techniques.checkpointing.recomputation import compile_module, recompute
from tightfit.errors import ModelError
from tightfit.techniques.checkpointing import (
    AttentionOnly,
    Checkpointing,
    EveryBlock,
    MlpOnly,
    NoCheckpointing,
    Segments,
    Selective,
)

pytestmark = pytest.mark.usefixtures("few_objects")

TOGETHER = Segments(count=1)


class Scaling(Plain):
    """Works on the blocks' outputs between the blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x).mul(0.5)
        return x


class Skipping(Plain):
    """Leaves out the blocks named, as layerdrop does, and draws a random number at each."""

    def __init__(self, *skipped: int) -> None:
        super().__init__()
        self.skipped = skipped

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if torch.rand([]) >= 0 and index not in self.skipped:
                x = block(x)
        return x


class Faulty(nn.Module):
    """Passes its input on, and fails when told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("asked to fail")
        return x * 1.5


def seeded(kind: type[nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args).train()


def without(kind: type[nn.Module], *args: Any) -> dict[str, Tensor]:
    return step(seeded(kind, *args), "plain")


def hooks_are_gone() -> bool:
    """Whether saved tensors are saved as they are: an open region would take them."""
    x = torch.ones(1, requires_grad=True)
    saved: Tensor = x.exp().grad_fn._saved_result
    return saved.item() == pytest.approx(2.71828)


def test_work_between_modules_is_an_error() -> None:
    model = build(seeded(Scaling), TOGETHER).model
    for _ in range(2):
        with pytest.raises(ModelError, match=r"^Scaling does work before its Block.* write checkpointing=every-block"):
            loss(model, "plain")
        assert hooks_are_gone()


def test_work_between_modules_is_no_matter_to_single_ones() -> None:
    assert_equal(step(build(seeded(Scaling), EveryBlock()).model, "plain"), without(Scaling))


@pytest.mark.parametrize("skipped", [(), (0,), (1,), (1, 2)])
def test_modules_left_out_and_random_numbers_between(skipped: tuple[int, ...]) -> None:
    assert_equal(step(build(seeded(Skipping, *skipped), TOGETHER).model, "plain"), without(Skipping, *skipped))


def test_the_last_module_left_out_is_an_error() -> None:
    model = build(seeded(Skipping, LAYERS - 1), TOGETHER).model
    with pytest.raises(ModelError, match=r"Skipping ended without calling its Block.* write checkpointing=every-block"):
        loss(model, "plain")
    assert hooks_are_gone()


@pytest.mark.parametrize("position", range(LAYERS))
@pytest.mark.parametrize("technique", [EveryBlock(), TOGETHER, Segments(), Selective()], ids=str)
def test_a_failure_in_the_forward_pass_leaves_nothing_behind(technique: Checkpointing, position: int) -> None:
    model = seeded(Plain)
    fault = Faulty()
    model.get_submodule(f"blocks.{position}.mlp").append(fault)  # type: ignore[operator]
    expected = step(copy.deepcopy(model), "plain")
    model = build(model, technique).model
    fault.fails = True
    with pytest.raises(ArithmeticError, match="asked to fail"):
        loss(model, "plain")
    assert hooks_are_gone()
    fault.fails = False
    assert_equal(step(model, "plain"), expected)


def test_a_failure_between_modules_leaves_nothing_behind() -> None:
    model = build(seeded(Plain), TOGETHER).model
    blocks = model.get_submodule("blocks")
    taken = blocks._modules["2"]
    blocks._modules["2"] = None
    with pytest.raises(TypeError):
        loss(model, "plain")
    assert hooks_are_gone()
    blocks._modules["2"] = taken
    assert_equal(step(model, "plain"), without(Plain))


def test_a_failure_in_a_part_called_alone_leaves_nothing_behind() -> None:
    part = seeded(Plain)
    fault = Faulty()
    mlp = part.get_submodule("blocks.1.mlp")
    assert isinstance(mlp, nn.Sequential)
    mlp.append(fault)
    recompute(nn.Sequential(part), [find_stacks(part)[0]])
    fault.fails = True
    with pytest.raises(ArithmeticError, match="asked to fail"):
        loss(part, "plain")
    assert hooks_are_gone()


def test_an_input_given_by_keyword_shows_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`checkpoint` restores the random states of the devices of its positional tensors alone."""
    given: list[tuple[Any, ...]] = []
    original = checkpoint.checkpoint

    def spy(function: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(args)
        return original(function, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "checkpoint", spy)
    loss(build(make("plain-by-keyword"), EveryBlock()).model, "plain-by-keyword")
    assert [[type(value) for value in args] for args in given] == [[Tensor]] * LAYERS


@pytest.mark.parametrize("technique", [EveryBlock(), TOGETHER], ids=str)
def test_nothing_changes_in_evaluation_and_without_gradients(technique: Checkpointing) -> None:
    plain, model = make("gpt2").eval(), build(make("gpt2"), technique).model.eval()
    assert measure(model, "gpt2") == measure(plain, "gpt2")
    model.zero_grad(set_to_none=True)
    model.train()
    with torch.no_grad(), Recorder() as recorder:
        loss(model, "gpt2")
    assert recorder.ops["aten::addmm"] == 4 * LAYERS
    assert_equal(step(model, "gpt2"), step(make("gpt2"), "gpt2"))


@pytest.mark.parametrize("technique", [EveryBlock(), Segments(), MlpOnly(), Selective()], ids=str)
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_a_forward_pass_without_backward_frees_what_it_kept(name: str, technique: Checkpointing) -> None:
    """T5's first block makes the position bias that the others read: it must not keep its own region alive."""
    model = build(make(name), technique).model
    with Recorder() as recorder:
        total = loss(model, name)
        del total
        gc.collect()
    assert recorder.bytes == 0


@pytest.mark.parametrize("technique", [EveryBlock(), TOGETHER], ids=str)
def test_a_copy_has_regions_of_its_own(technique: Checkpointing) -> None:
    model = build(make("gpt2"), technique).model
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(step(copied, "gpt2"), step(make("gpt2"), "gpt2"))
    assert measure(copied, "gpt2").kept < measure(make("gpt2"), "gpt2").kept / 2


def test_a_chain_that_names_a_module_twice_is_an_error() -> None:
    model = seeded(Plain)
    block = model.get_submodule("blocks.0")
    with pytest.raises(ModelError, match="Plain calls the same Block several times"):
        recompute(model, [[block, block]])


def compiled(technique: Checkpointing) -> nn.Module:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(make("gpt2", n_layer=3), technique).model
    for block in find_stacks(model)[0]:
        compile_module(block, backend="aot_eager")
    return model


@cache
def compiled_plainly() -> tuple[dict[str, Tensor], int]:
    model = compiled(NoCheckpointing())
    return step(model, "gpt2"), saved_bytes(model, "gpt2")


@pytest.mark.parametrize(
    "technique", [EveryBlock(), Segments(count=2), MlpOnly(), Selective(keep="every-other-matmul")], ids=str
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_blocks_recompute_inside(technique: Checkpointing) -> None:
    expected, saved = compiled_plainly()
    model = compiled(technique)
    assert_equal(step(model, "gpt2"), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    # Of a region of several modules only what lies outside is seen.
    assert saved_bytes(model, "gpt2") < 0.9 * saved


@pytest.mark.parametrize("technique", [AttentionOnly(), EveryBlock(), Selective()], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_blocks_share_one_compilation(technique: Checkpointing) -> None:
    step(compiled(technique), "gpt2")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("technique", [NoCheckpointing(), EveryBlock()], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_blocks_of_torchs_own_classes_are_compiled_once_and_compute_the_same(technique: Checkpointing) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    x = torch.randn(2, 4, 16, requires_grad=True)

    def gradients() -> list[Tensor]:
        hidden = x
        for block in blocks:
            hidden = block(hidden)
        return list(torch.autograd.grad(hidden.square().sum(), parameters))

    expected = gradients()
    for block in blocks:
        if isinstance(technique, EveryBlock):
            recompute(nn.Sequential(block), [[block]])
        compile_module(block, backend="aot_eager")
    for computed, eager in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(computed, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():  # where such a layer runs as one kernel
        assert blocks[0].eval()(x).shape == x.shape


def test_the_compiler_is_kept_from_regions_it_cannot_follow() -> None:
    whole = build(make("gpt2"), Segments()).model
    with pytest.raises(ModelError, match=r"^GPT2LMHeadModel cannot be compiled: transformer.h.0 .* compile=off$"):
        compile_module(whole, backend="aot_eager")
    bert = build(make("bert"), MlpOnly()).model
    with pytest.raises(ModelError, match=r"^BertLayer cannot be compiled: intermediate is recomputed together"):
        compile_module(find_stacks(bert)[0][0], backend="aot_eager")
