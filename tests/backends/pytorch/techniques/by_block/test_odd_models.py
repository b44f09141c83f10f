"""Models that call their blocks again or in another order, share weights between them, or have blocks of several kinds:
what they learn block by block, and what is left of an update that failed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.backends.pytorch.techniques.by_block.streaming_cases import BY_BLOCK, EVERYTHING, HOST, SWEEPS
from tests.backends.pytorch.techniques.by_block.test_own_models import (
    WIDTH,
    Block,
    Model,
    batch,
    equal,
    state,
    step_of,
    taken,
)
from tests.failing import no_room
from tightfit.errors import OutOfMemory

CHANGES = {"host": HOST, "sweeps": SWEEPS, "everything": EVERYTHING}
IN_BACKWARD = {**HOST, "update": "in-backward", "max_grad_norm": 0}


class Shuffled(Model):
    def through(self, x):
        for number in (2, 0, 3, 1):
            x = self.layers[number](x)
        return x


class LookedAhead(Model):
    def through(self, x):
        with torch.no_grad():
            shift = self.layers[3](x)
        return super().through(x) + shift


class Kinds(Model):
    def __init__(self):
        super().__init__()
        self.layers[1] = nn.Sequential(nn.Linear(WIDTH, 80), nn.Tanh(), nn.Linear(80, WIDTH))
        self.layers[3].requires_grad_(False)
        self.layers[2].unused = nn.Parameter(torch.ones(7))


class Normalized(Model):
    class block(Block):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class Again(Model):
    def through(self, x):
        return super().through(super().through(x))


class Shared(Model):
    def __init__(self):
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("model", [Shuffled, LookedAhead, Kinds, Normalized])
def test_it_learns_as_in_the_plain_step(model, changes):
    (wanted, weights), (got, others) = taken(model), taken(model, **changes)
    assert got == wanted
    assert equal(others, weights)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("model", [Again, Shared])
def test_gradients_of_several_uses_are_summed_in_another_order(model, changes):
    (_, weights), (_, others) = taken(model, **BY_BLOCK), taken(model, **changes)
    for name, weight in taken(model)[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)  # of 1e-2 a step
        torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-5)


class Late(Model):
    """Its last block learns once it is told."""

    learns = False

    def through(self, x):
        for layer in self.layers[:3]:
            x = layer(x)
        if self.learns:
            return self.layers[3](x)
        with torch.no_grad():
            shift = self.layers[3](x)
        return x + shift


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_checkpoint_without_the_states_of_some_weights_is_gone_on_from(changes, steps, tmp_path):
    found = []
    for fields in {}, changes:
        first, second, third = (step_of(Late, **fields) for _ in range(3))
        for number in range(steps):
            first(batch(number), 1e-2)
        second.load(tmp_path, first.save(tmp_path))
        second.build.model.learns = True
        results = [second(batch(number), 1e-2).read() for number in range(2, 5)]
        third.load(tmp_path, second.save(tmp_path))
        third.build.model.learns = True
        found.append((results, third(batch(5), 1e-2).read(), state(third)))

    assert found[0][:2] == found[1][:2]
    assert equal(found[0][2], found[1][2])


@pytest.mark.parametrize("fields", [IN_BACKWARD, {**IN_BACKWARD, "offload": "none"}, HOST], ids=str)
def test_the_last_update_that_fails_leaves_no_other_error(fields, monkeypatch):
    step = step_of(Model, **fields)
    step(batch(0), 1e-2)
    inner, fail = step.optimizer.step, no_room()

    def last_fails():
        return (fail if step.update._pending is not None and not step.update._pending.parts else inner)()

    monkeypatch.setattr(step.optimizer, "step", last_fails)
    with pytest.raises(OutOfMemory, match="Tried to allocate 9 bytes"):
        step(batch(1), 1e-2)
    step.close()
    assert all(weight.isfinite().all() for weight in state(step).values())


class Fewer(Model):
    fewer = False

    def through(self, x):
        for layer in self.layers[:1] if self.fewer else self.layers:
            x = layer(x)
        return x


def test_updates_that_wait_find_room_where_a_later_sweep_failed():
    step = step_of(Fewer, **SWEEPS)
    for number in range(2):
        step(batch(number), 1e-2)
    step.build.model.fewer = True
    step.build.model.layers[0].register_full_backward_pre_hook(no_room(at=2))
    with pytest.raises(OutOfMemory):
        step(batch(2), 1e-2)
    assert equal(state(step), taken(Model, 2)[1])


@pytest.mark.parametrize("fields", [HOST, {"update": "with-forward"}], ids=["host", "loop"])
def test_a_step_whose_own_update_failed_is_not_taken_again_upon_it(fields, monkeypatch):
    step = step_of(Model, **fields)
    step(batch(0), 1e-2)
    step.update.flush()
    monkeypatch.setattr("tightfit.backends.pytorch.techniques.by_block.update.clip_grads_with_norm_", no_room())
    with pytest.raises(OutOfMemory):
        step(batch(1), 1e-2)
    assert not step.intact
