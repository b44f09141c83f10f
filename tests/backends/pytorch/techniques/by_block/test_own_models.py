"""Modules of one's own block by block: those that call their blocks in unusual ways learn as the plain step does, or
are refused; and steps that fail midway lose no update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.backends.pytorch.techniques.by_block.streaming_cases import BY_BLOCK, HOST
from tests.failing import failing, no_room
from tests.plain import CPU, PLAIN
from tightfit.backends.pytorch.assembly import apply_techniques, bare_build
from tightfit.backends.pytorch.batch import TensorBatch, TensorGlobalBatch
from tightfit.backends.pytorch.step import Step
from tightfit.backends.pytorch.techniques.by_block.streamed_tensors import StreamedTensors
from tightfit.errors import ModelError, OutOfMemory
from tightfit.recipe import Recipe
from tightfit.trace import Category

VOCABULARY, WIDTH, LENGTH = 64, 32, 16
LATE = {"update": "with-forward"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(self.block() for _ in range(4))
        self.back = nn.Linear(VOCABULARY, WIDTH)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def through(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids):
        return self.head(self.through(self.embed(input_ids)))


class NoGradOnce(Model):
    def through(self, x):
        with torch.no_grad():
            shift = self.layers[0](x)
        x = x + shift
        for layer in self.layers[1:]:
            x = layer(x)
        return x


class CastsOff(Model):
    def through(self, x):
        for layer in self.layers:
            with torch.autocast("cpu", enabled=False):
                x = layer(x.float())
        return x


class Strided(Model):
    class block(Block):
        def __init__(self):
            super().__init__()
            self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

        def forward(self, x):
            return super().forward(x) + x @ self.turned


class Deeper(Model):
    calls = -1

    def through(self, x):
        self.calls += 1
        for layer in self.layers[:3] if self.calls % 3 == 0 else self.layers:
            x = layer(x)
        return x


class Direct(Model):
    def through(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x


class InParts(Model):
    def through(self, x):
        for layer in self.layers:
            x = x + layer.down(torch.relu(layer.up(layer.norm(x))))
        return x


class Held:
    def __init__(self, x):
        self.x = x


class Objects(Model):
    class block(Block):
        def forward(self, held):
            return Held(super().forward(held.x))

    def through(self, x):
        held = Held(x)
        for layer in self.layers:
            held = layer(held)
        return held.x


class HeadBetween(Model):
    def through(self, x):
        for number, layer in enumerate(self.layers):
            if number == 2:
                x = x + self.back(self.head(x).softmax(-1))
            x = layer(x)
        return x


class Reentrant(Model):
    def through(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Recomputing(Model):
    def through(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def step_of(model, **fields):
    torch.manual_seed(0)
    recipe = Recipe.from_dict({
        **PLAIN, "task": "causal-lm", "batch_size": 6, "micro_batch_size": 2, "seq_len": LENGTH,
        "vocab_size": VOCABULARY, "max_grad_norm": 0.05, **fields,
    })
    return Step(apply_techniques(bare_build(recipe, CPU, torch.device("cpu"), model())), inspect=False)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(3)]
    return TensorGlobalBatch(micro_batches=tuple(TensorBatch(inputs={"input_ids": each}, labels=each) for each in ids),
                             count=6 * LENGTH, samples=6, tokens=6 * LENGTH, origin="test")


def taken(model, steps=3, **fields):
    """Results of some steps, and the weights behind them."""
    step = step_of(model, **fields)
    with step.build.process_settings():
        results = [step(batch(number), 1e-2).read() for number in range(steps)]
        step.update.flush()
    return results, state(step)


def state(step) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in step.build.model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("model", "fields"), [
    (Model, {}), (NoGradOnce, {}), (CastsOff, {"precision": "bf16"}), (Strided, {}),
])  # fmt: skip
@pytest.mark.parametrize("changes", [BY_BLOCK, HOST], ids=["resident", "host"])
def test_it_learns_as_in_the_plain_step(model, fields, changes):
    (wanted, weights), (got, others) = taken(model, **fields), taken(model, **fields, **changes)
    assert got == wanted
    assert equal(others, weights)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("model", "words"), [
    (Deeper, "different orders"), (Direct, "otherwise than by calling"), (InParts, "otherwise than by calling"),
    (Objects, "block 1 returns Held"), (HeadBetween, "the embeddings or the head otherwise"),
    (Reentrant, "again in the backward pass"), (Recomputing, "again in the backward pass"),
])  # fmt: skip
@pytest.mark.parametrize("changes", [BY_BLOCK, HOST], ids=["resident", "host"])
def test_what_block_by_block_cannot_follow_is_refused(model, words, changes):
    with pytest.raises(ModelError, match=words) as error:
        taken(model, **changes)
    assert "accumulation=loop update=after-backward offload=none" in str(error.value)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("model", [Direct, InParts])
def test_a_block_that_is_never_called_is_not_updated_late(model):
    with pytest.raises(ModelError, match="block 1 otherwise than by calling"):
        taken(model, **LATE)


@pytest.mark.parametrize("category", [Category.OPTIMIZER, Category.GRADIENTS, Category.WEIGHTS])
@pytest.mark.parametrize(("part", "when"), [(2, "before"), (1, "after"), (2, "after")])
def test_a_late_update_that_finds_no_room_is_applied_afterwards(category, part, when, monkeypatch):
    """For a part's tensors of that kind; or for the next part's, which lets go of this one."""
    step, fetch, fail = step_of(Model, **HOST), StreamedTensors.fetch, no_room(times=1)
    for number in range(2):
        step(batch(number), 1e-2)

    def fetched(self, number, next_part=None):
        here = self._category is category and number == part
        if here and when == "before":
            fail()
        fetch(self, number, next_part)
        if here and when == "after":
            fail()

    monkeypatch.setattr(StreamedTensors, "fetch", fetched)
    with pytest.raises(OutOfMemory):
        step(batch(2), 1e-2)

    assert step.intact
    assert equal(state(step), taken(Model, 2)[1])


@pytest.mark.parametrize("fields", [HOST, BY_BLOCK], ids=["host", "resident"])
@pytest.mark.parametrize("what", ["step", "save", "is_finite", "evaluate", "close"])
def test_an_optimizer_that_finds_no_room_is_out_of_memory(fields, what, monkeypatch, tmp_path):
    step = step_of(Model, **fields)
    step(batch(0), 1e-2)
    monkeypatch.setattr(step.optimizer, "step", no_room())
    work = {"step": lambda: step(batch(1), 1e-2), "save": lambda: step.save(tmp_path), "is_finite": step.is_finite,
            "evaluate": lambda: step.evaluate([batch(1)]), "close": step.close}[what]
    with pytest.raises(OutOfMemory):
        work()


def test_a_failed_step_leaves_nothing_with_the_loss_scaler():
    step = step_of(Model, precision="fp16", **BY_BLOCK)
    step.update._scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    last, first = step.build.model.layers[3], step.build.model.layers[0]
    hooks = [last.down.weight.register_hook(lambda gradient: gradient * float("inf")),
             first.register_full_backward_pre_hook(failing(KeyError("x")))]
    with pytest.raises((KeyError, ModelError)):
        step(batch(0), 1e-2)
    for hook in hooks:
        hook.remove()

    assert not step(batch(1), 1e-2).read().skipped
    assert step.update._scaler.get_scale() == 256.0


def test_a_part_of_the_model_has_the_weights_that_its_updates_left():
    step = step_of(Model, **HOST)
    step(batch(0), 1e-2)
    part = {name: weight.clone() for name, weight in step.build.model.layers[1].state_dict().items()}
    assert equal(part, {name.removeprefix("layers.1."): weight for name, weight in taken(Model, 1)[1].items()
                        if name.startswith("layers.1.")})


@pytest.mark.parametrize("fields", [HOST, BY_BLOCK, LATE], ids=["host", "resident", "loop"])
def test_gradients_that_cannot_be_measured_are_dropped(fields, monkeypatch):
    step = step_of(Model, **fields)
    monkeypatch.setattr(torch, "_foreach_norm", no_room(torch._foreach_norm, times=1))
    with pytest.raises(OutOfMemory):
        step(batch(5), 1e-2)
    results = [step(batch(number), 1e-2).read() for number in range(3)]

    assert (results, True) == (taken(Model)[0], equal(state(step), taken(Model)[1]))
