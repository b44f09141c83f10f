"""Bounds against the truth, on toy models: a combination that was not traced is never said to be worse than it is."""

from __future__ import annotations

import pytest

from tests.planning.toy import Toy
from tightfit.devices import Device
from tightfit.planning.defaults import settle_rest
from tightfit.planning.estimate import Margin
from tightfit.planning.search.bounds import CARRIED, UNKNOWN, Bounds
from tightfit.planning.search.budget import Budget
from tightfit.planning.search.candidates import Scope, configs
from tightfit.planning.search.probing import Prober
from tightfit.recipe import Recipe
from tightfit.techniques.checkpointing import EveryBlock

DEVICE = Device(kind="cuda", name="toy", memory_bytes=1 << 40, capability=(8, 0))


def searched(toy, scope, **pins):
    """A prober that knows nothing yet, and every combination of the scope."""
    recipe = settle_rest(Recipe.from_dict({"batch_size": 16, **pins}), DEVICE)
    choices = configs(recipe, DEVICE, scope)
    prober = Prober(recipe, DEVICE, toy.tools(), Margin(), [1, 2, 4, 8, 16], Budget())
    for config in choices:
        prober.plain.setdefault(config.family, config)
    return prober, choices


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pins", [{"precision": "bf16"}, {"precision": "bf16-pure"}, {"precision": "fp32"}])
def test_no_bound_is_worse_than_the_truth(seed, pins):
    toy = Toy.drawn(seed)
    prober, choices = searched(toy, Scope(numerics=True), compile="off", **pins)
    bounds, plain = Bounds(prober), choices[0]
    for known in (plain, plain.with_checkpointing(EveryBlock())):
        assert prober.probe(known)
    unknown = [config for config in choices if not prober.knows(config)]
    told = {(config, micro): (bounds.peak(config, micro), bounds.seconds(config, micro))
            for config in unknown for micro in prober.sizes}
    assert told
    for (config, micro), (peak, seconds) in told.items():
        assert prober.probe(config)
        assert peak <= prober.peak(config, micro), (config, micro)
        assert seconds <= prober.seconds(config, micro) * (1 + 1e-9), (config, micro)


def test_what_is_known_is_no_bound():
    prober, choices = searched(Toy.drawn(3), Scope(), precision="bf16", compile="off")
    bounds, plain = Bounds(prober), choices[0]
    assert bounds.seconds(plain, 4) == 0.0
    assert prober.probe(plain)
    assert (bounds.peak(plain, 4), bounds.seconds(plain, 4)) == (prober.peak(plain, 4), prober.seconds(plain, 4))
    assert bounds.certainty(plain) == 1.0


def test_another_family_tells_how_a_kind_of_checkpointing_does():
    prober, choices = searched(Toy.drawn(3), Scope(full_precision=True), compile="off", attention="sdpa")
    bounds = Bounds(prober)
    half, full = (next(c for c in choices if c.precision.name == name) for name in ("bf16", "fp32"))
    every = full.with_checkpointing(EveryBlock())
    assert prober.probe(half)
    assert prober.probe(full)
    assert not bounds.carried(every)
    assert bounds.certainty(every) == UNKNOWN
    assert prober.probe(half.with_checkpointing(EveryBlock()))
    assert bounds.carried(every)
    assert bounds.certainty(every) == CARRIED
    assert bounds.seconds(every, 4) > prober.seconds(full, 4)
