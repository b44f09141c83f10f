"""Results: the front, peers' ratios, and the guides' table with each rung's factors beside their words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ladder.made import MIB, PEER, REFUSED, STRANGE, bert_large, empty, predicted
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.results import effects, figures_of, front, rung_results, span, spreads


def found(run):
    return {each.feature: each for each in effects(rung_results(run))}


def test_a_factor_is_of_the_rung_that_a_rung_stands_against():
    (one,) = found(bert_large())["gradient accumulation"].shown
    assert (one.name, one.rung.against) == ("micro-batch 1, accumulation 4", "batch 4, fp32")
    assert (one.speed, one.memory) == pytest.approx((0.5, 0.5))
    kept = found(bert_large())["gradient checkpointing"]
    assert kept.shown[0].rung.against == "micro-batch 1, accumulation 4"
    assert (kept.speed, kept.memory) == ("0.67x", "0.67x")


def test_several_rungs_make_a_range():
    optimizers = found(bert_large())["optimizer choice"]
    assert [each.name for each in optimizers.shown] == ["batch 4, Adafactor", "batch 4, 8-bit AdamW"]
    assert optimizers.speed == "0.12x to 0.17x"


def test_what_no_rung_shows_or_did_not_run_is_not_measured():
    for feature in ("DeepSpeed ZeRO", "data loading", "batch size"):
        each = found(bert_large())[feature]
        assert (each.shown, each.speed, each.memory) == ((), "not measured", "not measured")
    waiting = found(empty(ladders()["bert-large"], "reduced"))["SDPA"]
    assert [each.name for each in waiting.shown] == ["batch 4, SDPA"]
    assert waiting.speed == "not measured"


def test_a_peers_result_shows_no_technique():
    run = bert_large()
    assert any(each.runner != "tightfit" and each.rung.feature == "SDPA" for each in rung_results(run))
    assert len(found(run)["SDPA"].shown) == 1


def test_factors_in_words():
    assert span([]) == span([None]) == "not measured"
    assert span([0.5, None, 0.501]) == "0.50x"
    assert span([2.0, 0.5, 1.0]) == "0.50x to 2.00x"


def test_the_front_is_what_none_beats():
    run = bert_large()
    ladder, shown = run.ladder, rung_results(run)
    # every rung is slower than the one before, and takes less: all are on the front, least memory first
    assert [each.name for each in front(shown)] == [
        rung.name for rung in reversed(ladder.rungs[:-1]) if rung.name != REFUSED]
    most = {"peak_allocated": 1 << 30, "peak_reserved": 1 << 30}
    worse = [replace(each, measured=each.measured.model_copy(update=most)) if each.name == "+ checkpointing" else each
             for each in shown]
    assert "+ checkpointing" not in [each.name for each in front(worse)]
    equal = [replace(each, measured=shown[0].measured) for each in shown[:3] if each.runner == "tightfit"]
    assert len(front(equal)) == 1


def test_peers_ratios_are_ours_in_theirs():
    shown = rung_results(bert_large())
    peers = [each for each in shown if each.runner == PEER]
    assert {(round(each.speed, 6), round(each.memory, 6)) for each in peers} == {(0.5, 2.0)}
    assert [each.rung.name for each in peers if each.other_work] == [STRANGE]
    speed, memory = spreads(shown)
    assert (speed.peer, speed.ratio, speed.rungs, speed.values) == (PEER, "speed", 9, pytest.approx([2.0] * 5))
    assert (memory.ratio, memory.values) == ("memory", pytest.approx([0.5] * 5))


def test_a_prediction_of_unknown_time_has_its_memory():
    run = empty(ladders()["bert-large"], "reduced")
    row = predicted(run, run.ladder.rungs[0], "CPU", "reduced", 0.0, 90)
    assert figures_of(row, run.ladder) == (None, 90 * MIB)
    refused = row.model_copy(update={"status": "refused"})
    assert figures_of(refused, run.ladder) == figures_of(None, run.ladder) == (None, None)
