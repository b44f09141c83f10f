"""Predicting rungs: anew where what they depend on changed, and each apart from one that hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ladder.climbs import CPU, DONE, Processes, how, use
from tightfit import calibration
from tightfit.calibration import Ceilings
from tightfit.errors import RecipeError
from tightfit.ladder.cards import card
from tightfit.ladder.catalogue import find_ladder
from tightfit.ladder.climbing import climb
from tightfit.ladder.climbs import Climb
from tightfit.ladder.lines import lines
from tightfit.ladder.rows import Machine, read
from tightfit.ladder.table import remarks

RUNGS = [rung.name for rung in find_ladder("bert-large").rungs]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Climb, list[str], list[str]]]:
    """Climbs, and returns what came of it, the rungs that were predicted, and what was said."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def climbed(
        machine: Machine = CPU, hangs: tuple[str, ...] = (), **asked: Any
    ) -> tuple[Climb, list[str], list[str]]:
        made, said = use(monkeypatch, Processes(lambda job: DONE, machine, hangs)), list[str]()
        done = climb(how(find_ladder("bert-large"), "smallest", tmp_path / "ladder", **asked), said.append)
        return done, made.foretold, said

    return climbed


def test_a_prediction_is_kept_as_long_as_nothing_changed(go: Callable[..., Any]) -> None:
    assert go()[1] == RUNGS
    assert go()[1] == []
    assert go(gpu="t4")[1] == RUNGS
    assert go(gpu="t4")[1] == []


@pytest.mark.parametrize("changed", ["versions", "memory_bytes"])
def test_another_machine_or_version_is_predicted_for_anew(go: Callable[..., Any], changed: str) -> None:
    other = {"versions": replace(CPU, versions={"torch": "2.14"}), "memory_bytes": replace(CPU, memory_bytes=1 << 33)}
    go(gpu="t4")
    done, foretold, _ = go(other[changed], gpu="t4")
    assert foretold == RUNGS * (2 if changed == "versions" else 1)  # a card is what it was
    assert all(line.predicted and line.full for line in lines(done))
    assert len(read(done.path).predicted) == 2 * len(RUNGS) + len(foretold)  # the older ones are kept


def test_a_new_calibration_is_predicted_with(
    go: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(gpu="t4")
    ceilings = Ceilings(device="CPU", kind="cpu", processor="p", torch="2.13.0", threads=2, host={"forward": 1e-6})
    monkeypatch.setattr(calibration, "load", lambda *device, threads: ceilings if device == ("CPU",) else None)
    assert go(gpu="t4")[1] == RUNGS
    assert go(gpu="t4")[1] == []
    ceilings = replace(ceilings, host={"forward": 2e-6})
    assert go(gpu="t4")[1] == RUNGS


def test_another_commit_of_the_package_is_predicted_with(
    go: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    go()
    monkeypatch.setattr(Climb, "commit", "fedcba9")
    assert go()[1] == RUNGS


def test_a_rung_whose_prediction_hangs_costs_no_other_one_its_own(go: Callable[..., Any]) -> None:
    done, foretold, said = go(hangs=(RUNGS[1], RUNGS[4]), limit=30.0)
    assert foretold == [name for name in RUNGS if name not in (RUNGS[1], RUNGS[4])]
    shown = {line.rung.name: line for line in lines(done)}
    missing = shown[RUNGS[1]].predicted
    assert missing is not None
    assert (missing.status, missing.fits, missing.limit) == ("timed-out", "", 30.0)
    assert "not predicted: took more than 30 seconds" in remarks(shown[RUNGS[1]])
    assert f"  {RUNGS[1]} is not predicted: took more than 30 seconds" in said
    assert all(line.measured is not None and line.measured.status == "done" for line in shown.values())
    assert go(limit=30.0)[1] == []
    assert go(limit=60.0)[1] == [RUNGS[1], RUNGS[4]]


def test_what_is_predicted_is_said(go: Callable[..., Any]) -> None:
    _, _, said = go(gpu="t4", hangs=(RUNGS[2],))
    titles = [text for text in said if text.startswith("predicting")]
    assert titles == [f"predicting {number} of 15 {where}: {name}" for where in ("for CPU", "for t4, at full size")
                      for number, name in enumerate(RUNGS, start=1)]


def test_figures_are_measured_before_any_is_predicted(go: Callable[..., Any]) -> None:
    _, _, said = go(gpu="t4")
    kinds = [text.split()[0] for text in said if text.startswith(("rung", "predicting"))]
    assert kinds == ["rung"] * len(RUNGS) + ["predicting"] * 2 * len(RUNGS)


@pytest.mark.parametrize(("word", "said"), [
    ("h2000", "write --gpu 24GB for a card that is not there; did you mean 'h200'"),
    ("2000GB", "gpu: '2000GB' should be at least 2GB and at most 1024GB"),
    ("v100", "write one of: v100-16gb, v100-32gb"),
])  # fmt: skip
def test_a_card_that_is_none_says_what_to_write(word: str, said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        card(word)
    assert said in str(raised.value)


def test_a_card_has_a_name_or_a_size() -> None:
    assert card("rtx-4090").device.name == "RTX 4090"
    assert 23 << 30 < card("24 GB").device.memory_bytes < 24 << 30
