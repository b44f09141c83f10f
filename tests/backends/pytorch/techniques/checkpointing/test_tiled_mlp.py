"""Tiled feed-forward parts and norms: the gradients of all tokens at once, and no more runs than every-block's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import CPU, build, inputs, make, step
from tightfit import Recipe
from tightfit.backends.pytorch.apply import APPLY
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.techniques.checkpointing import tiled_mlp
from tightfit.devices import find_device
from tightfit.errors import ModelError
from tightfit.planning.search.space import Space
from tightfit.techniques.checkpointing import EveryBlock, NoCheckpointing, TiledMlp
from tightfit.techniques.compile import PerBlock
from tightfit.trace import Place

TILES = 4
TOKENS = 2 * 16 // TILES
QUIET: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "llama": {"attention_dropout": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def plainly(module: nn.Module, run: tiled_mlp.Run, hidden: Tensor, rows: int) -> Tensor:
    """What tiles make in the forward pass, with the backward pass that autograd gives it."""
    return torch.cat([run(tile.contiguous()) for tile in hidden.split(rows, dim=-2)], dim=-2)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= within * max(gradient.abs().max().item(), 1e-3), name


@pytest.mark.parametrize("name", QUIET)
def test_gradients_are_those_of_all_tokens_at_once(name: str) -> None:
    wanted = step(make(name, **QUIET[name]).double(), name)
    tiled = build(make(name, **QUIET[name]).double(), TiledMlp(tokens=TOKENS))
    assert not tiled.notes
    close(step(tiled.model, name), wanted, 1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 6, 30, 31, 32, 1000])
def test_tiles_may_be_of_any_size(tokens: int) -> None:
    wanted = step(make("llama", **QUIET["llama"]).double(), "llama")
    close(step(build(make("llama", **QUIET["llama"]).double(), TiledMlp(tokens=tokens)).model, "llama"), wanted, 1e-12)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    model = build(make("llama", **QUIET["llama"]), TiledMlp(tokens=TOKENS)).model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.up_proj" in name)  # what the first block is given needs none
    assert sorted(step(model, "llama")) == sorted(n for n, p in model.named_parameters() if p.requires_grad)


def test_dropout_draws_the_same_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = step(build(make("gpt2"), TiledMlp(tokens=TOKENS)).model, "gpt2")
    monkeypatch.setattr(tiled_mlp, "_run_tiles", plainly)
    close(found, step(build(make("gpt2"), TiledMlp(tokens=TOKENS)).model, "gpt2"), 1e-6)


def test_autocast_and_its_format_hold_in_the_backward_pass() -> None:
    seen: set[torch.dtype] = set()

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.add(output.dtype)

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**inputs("llama")).logits
        logits.float().square().sum().backward()  # outside of autocast, as a step's backward pass is
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradients(build(make("llama", **QUIET["llama"]), EveryBlock()).model)
    model = build(make("llama", **QUIET["llama"]), TiledMlp(tokens=TOKENS)).model
    for name, module in model.named_modules():
        if name.endswith("up_proj"):
            module.register_forward_hook(note)
    close(gradients(model), wanted, 2e-2)
    assert seen == {torch.bfloat16}


def test_a_feed_forward_part_runs_twice_and_no_more_tokens_than_a_tile_at_once() -> None:
    model = build(make("llama", **QUIET["llama"]), TiledMlp(tokens=TOKENS)).model
    rows: list[int] = []
    down: nn.Module = dict(model.named_modules())["model.layers.1.mlp.down_proj"]
    down.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))
    step(model, "llama")
    assert rows == [TOKENS] * TILES * 2
    rows.clear()
    model.eval()
    with torch.no_grad():
        model(**inputs("llama"))
    assert rows == [TOKENS] * TILES


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_what_is_no_one_module_is_recomputed_whole_and_says_so(name: str) -> None:
    made = build(make(name), TiledMlp(tokens=TOKENS))
    assert "feed-forward parts of 4 of 4 blocks are recomputed whole" in made.notes[0]
    assert step(made.model, name).keys() == step(make(name), name).keys()


def test_parts_whose_tokens_may_meet_take_no_tiles() -> None:
    block: Any = make("llama").model.layers[0]  # type: ignore[index]
    assert tiled_mlp.feed_forward_takes_tiles([block.mlp])
    assert not tiled_mlp.feed_forward_takes_tiles([nn.Sequential(nn.Linear(2, 2))])  # whatever stands around it
    for name, part in (("conv", nn.Conv1d(4, 4, 3)), ("norm", nn.BatchNorm1d(4)), ("experts", nn.Linear(2, 2))):
        setattr(block.mlp, name, part)
        assert not tiled_mlp.feed_forward_takes_tiles([block.mlp])
        delattr(block.mlp, name)


@pytest.mark.parametrize(("norm", "takes"), [
    (nn.LayerNorm(4), True), (nn.RMSNorm(4), True), (nn.LayerNorm((3, 4)), False), (nn.BatchNorm2d(4), False),
    (nn.GroupNorm(1, 4), False), (nn.InstanceNorm1d(4), False),
], ids=str)  # fmt: skip
def test_norms_of_a_token_alone_take_tiles(norm: nn.Module, takes: bool) -> None:
    assert tiled_mlp.norm_takes_tiles(norm) is takes


class Own(nn.Module):
    """Two parameters whose gradients are one tensor, one that a few tokens alone reach, dropout by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(1, 4))
        self.late = nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + (self.one + self.other)
        if bool((late := hidden[..., :1] > 90).any()):
            hidden = torch.where(late, hidden * self.late, hidden)
        return torch.nn.functional.dropout(hidden, 0.5, self.training)


def of_own(tiles: bool, change: Any = lambda module: None) -> dict[str, Tensor]:
    module = Own()
    change(module)
    if tiles:
        tiled_mlp.tile(module, 3)
    torch.manual_seed(0)
    hidden = torch.arange(0, 100, 100 / 36).view(1, 9, 4).requires_grad_()
    module(hidden).sum().backward()
    assert hidden.grad is not None
    return {"hidden": hidden.grad, **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("change", [
    nn.Module.eval, lambda module: module.one.register_hook(lambda gradient: gradient * 0.5).remove,
], ids=["one tensor, and a late one", "hooks"])  # fmt: skip
def test_gradients_may_be_one_tensor_come_late_and_have_hooks(change: Any) -> None:
    def quiet(module: nn.Module) -> None:
        module.eval()
        change(module)

    close(of_own(True, quiet), of_own(False, quiet), 1e-6)


def test_dropout_by_a_function_draws_the_same_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_own(True)
    monkeypatch.setattr(tiled_mlp, "_run_tiles", plainly)
    close(found, of_own(True), 1e-6)


def test_a_part_with_several_results_is_named() -> None:
    class Several(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, hidden

    module = Several()
    tiled_mlp.tile(module, 4)
    with pytest.raises(ModelError, match=r"tiled-mlp cuts .*write checkpointing=every-block"):
        module(torch.ones(1, 9, 2))
    assert len(module(torch.ones(1, 3, 2))) == 2  # all of it is one tile


LLAMA: dict[str, Any] = {
    "model": "llama-3.1-8b", "pretrained": False, "data": "dummy", "batch_size": 1, "micro_batch_size": 1,
    "precision": "bf16-pure", "loss": "chunked", "attention": "sdpa", "compile": "off", "optimizer": "adamw",
    "model_overrides": {"num_hidden_layers": 4},
}


def peak(**fields: Any) -> int:
    recipe = Recipe.from_dict({**LLAMA, **fields})
    trace = PytorchBackend().predict(recipe, find_device("h100-sxm"))
    return int(trace.peak(place=Place.DEVICE)[1])


def test_long_sequences_take_far_less_than_with_every_block() -> None:
    every, tiled = (peak(seq_len=131072, checkpointing=name) - peak(seq_len=1024, checkpointing=name)
                    for name in ("every-block", "tiled-mlp"))
    assert 0 < tiled < 0.6 * every


def test_auto_takes_it_for_long_sequences_alone() -> None:
    gpu = find_device("rtx-4090")
    for length, name in ((4096, "every-block"), (65536, "tiled-mlp")):
        space = Space(Recipe.from_dict({"model": "llama-3.1-8b", "data": "dummy", "seq_len": length}), gpu)
        assert space.least_memory_recipe().checkpointing.name == name
        assert space.least_memory_recipe().compile.name == "off"


def compiled(name: str, backend: Any) -> nn.Module:
    """A tiny model in fp64 whose blocks' parts are compiled, feed-forward parts in tiles."""
    fields = {"checkpointing": TiledMlp(tokens=TOKENS), "compile": PerBlock(backend=backend)}
    start = replace(build(make(name).double(), NoCheckpointing()), recipe=Recipe().model_copy(update=fields))
    for technique in fields.values():
        start = APPLY[type(technique)](technique, start)
    return start.model


@pytest.mark.parametrize(("name", "backend"), [
    ("gpt2", "aot_eager"), ("llama", "aot_eager"), ("t5", "aot_eager"),
    *(pytest.param(name, "inductor", marks=pytest.mark.cold) for name in ("gpt2", "llama")),
])  # fmt: skip
def test_parts_of_compiled_blocks_are_compiled_one_by_one(name: str, backend: str) -> None:
    import torch._inductor.config as inductor

    with inductor.patch(fallback_random=True):  # dropout as it is without a compiler
        found = step(compiled(name, backend), name)
    close(found, step(build(make(name).double(), TiledMlp(tokens=TOKENS)).model, name), 1e-6)  # norms are in fp32


@pytest.mark.cold
def test_compiled_dropout_draws_the_same_numbers_again() -> None:
    torch.manual_seed(0)
    module = Own()
    tiled_mlp.tile(module, 3)
    module.compile(backend="inductor")
    hidden = torch.ones(1, 9, 4, requires_grad=True)
    output = module(hidden)
    output.sum().backward()
    assert hidden.grad is not None
    assert (output == 0).sum() > 0
    assert torch.equal(output == 0, hidden.grad == 0)


@pytest.mark.parametrize("other", [{"name": "whole"}, {"name": "per-block", "mode": "reduce-overhead"}], ids=str)
def test_what_holds_no_graph_of_a_tiles_own_is_refused(other: dict[str, Any]) -> None:
    recipe = Recipe.from_dict({**LLAMA, "checkpointing": "tiled-mlp", "compile": other})
    assert any("write compile=per-block" in reason for reason in recipe.refusals(CPU))
    recipe = Recipe.from_dict({**LLAMA, "checkpointing": "tiled-mlp", "compile": "per-block"})
    assert not recipe.refusals(CPU)
