"""The guides' table of features: each rung that shows one, its factors, and the guides' words beside them."""

from __future__ import annotations

import pytest

from tests.ladder.climbs import climbed, empty
from tightfit.ladder.catalogue import LADDERS, find_ladder
from tightfit.ladder.effects import effects, span
from tightfit.ladder.from_recipe import FEATURE_OF
from tightfit.ladder.lines import lines
from tightfit.ladder.published import FEATURES, GUIDES


def found(climb):
    return {each.feature: each for each in effects(lines(climb))}


def test_a_factor_is_of_the_rung_that_a_rung_stands_against():
    one = found(climbed())["gradient accumulation"].shown
    assert [(each.rung, each.against) for each in one] == [("micro-batch 1, accumulation 4", "batch 4, fp32")]
    assert one[0].speed == pytest.approx(0.5)
    assert one[0].memory == pytest.approx(0.5)
    kept = found(climbed())["gradient checkpointing"]
    assert kept.shown[0].against == "micro-batch 1, accumulation 4"
    assert (kept.speed, kept.memory) == ("0.67x", "0.67x")


def test_several_rungs_make_a_range():
    optimizers = found(climbed())["optimizer choice"]
    assert [each.rung for each in optimizers.shown] == ["batch 4, Adafactor", "batch 4, 8-bit AdamW"]
    assert optimizers.speed == "0.12x to 0.17x"


def test_what_no_rung_shows_or_did_not_run_is_not_measured():
    for feature in ("DeepSpeed ZeRO", "data loading", "batch size"):
        each = found(climbed())[feature]
        assert (each.shown, each.speed, each.memory) == ((), "not measured", "not measured")
    waiting = found(empty(find_ladder("bert-large"), "reduced"))["SDPA"]
    assert [each.rung for each in waiting.shown] == ["batch 4, SDPA"]
    assert waiting.speed == "not measured"


def test_a_peers_line_shows_no_feature():
    climb = climbed()
    assert any(line.runner != "tightfit" and line.rung.feature == "SDPA" for line in lines(climb))
    assert len(found(climb)["SDPA"].shown) == 1


def test_every_feature_that_a_ladder_names_is_in_the_table():
    named = {rung.feature for name in LADDERS for rung in find_ladder(name).rungs if rung.feature is not None}
    assert named | set(FEATURE_OF.values()) <= set(FEATURES)
    assert all(len(words.speed) == len(words.memory) == len(GUIDES) for words in FEATURES.values())


def test_factors_in_words():
    assert span([]) == span([None]) == "not measured"
    assert span([0.5, None, 0.501]) == "0.50x"
    assert span([2.0, 0.5, 1.0]) == "0.50x to 2.00x"
