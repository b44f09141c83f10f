"""The report of the JAX backend's step: measured, and with no GPU as it is compiled for one; and what it finds."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.backends.jax.cases import TINY, UNROLLED
from tightfit.devices import find_device
from tightfit.planning.defaults import resolve
from tightfit.planning.targets import Target
from tightfit.profiling import profile as profiles
from tightfit.profiling.findings import findings
from tightfit.profiling.measure import predicted_profile
from tightfit.profiling.profile import Profile
from tightfit.profiling.report.page import report
from tightfit.recipe import Recipe
from tightfit.trace import Phase

A5000 = find_device("rtx-a5000")
LONG = {**TINY["model_overrides"], "max_seq_len": 128}


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """The profile of a tiny recipe as it is compiled for a card that is not there; attention's scores are the largest
    arrays of it."""
    cache = tmp_path_factory.mktemp("compiled")

    def made(**changes) -> Profile:
        fields = {**TINY, "device": "auto", "attention": "eager", "precision": "bf16", "cache_dir": str(cache),
                  "model_overrides": LONG, "seq_len": 128, "checkpointing": "none", **changes}
        recipe = resolve(Recipe.from_dict(fields), A5000)
        found, plan = predicted_profile(recipe, Target(device=A5000), lambda message: None)
        assert plan is None
        return found

    return made


def found(profile, word):
    return next((finding for finding in findings(profile) if word in finding.sentence), None)


def test_the_largest_arrays_and_the_copies_of_a_loop_over_layers_are_found(ahead):
    scanned = ahead()
    largest = found(scanned, "largest array")
    assert largest.sentence == ("the largest array at the peak is float32 3x2x2x128x128, 768 KiB: stacked by a loop "
                                "for the backward pass, in layers.attention.softmax")
    assert largest.change == "attention=sdpa attention.kernel=cudnn"
    assert largest.bytes == 3 * 2 * 2 * 128 * 128 * 4
    stacking = found(scanned, "dynamic-update-slice")
    assert stacking.change == "backend.layers=unrolled"
    assert 0.01 < stacking.seconds < 1
    assert found(scanned, "rematted_computation") is None


def test_unrolled_layers_copy_nothing(ahead):
    unrolled = ahead(backend=UNROLLED)
    assert found(unrolled, "dynamic-update-slice") is None
    assert "stacked" not in found(unrolled, "largest array").sentence


def test_what_is_computed_again_is_found_with_its_price(ahead):
    again = ahead(checkpointing="every-block")
    computed = found(again, "rematted_computation")
    assert computed.change == "checkpointing=none"
    assert 0.01 < computed.seconds < 0.5
    full = Profile(**{**vars(again), "capacity_bytes": again.predicted_peak_bytes})
    assert found(full, "rematted_computation").change == ""
    assert "stacked" not in found(again, "largest array").sentence


def test_a_prediction_alone_makes_the_whole_report(ahead):
    alone = ahead()
    assert alone.measured is None
    assert set(alone.predicted_seconds) == {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    page = report(alone)
    assert "while." not in page
    for said in ("predicted, not calibrated, not measured", "The 25 largest tensors alive at the predicted peak",
                 "layers.attention.softmax", "This profile is predicted only", "Time by op class"):  # fmt: skip
        assert said in page


def test_a_profile_is_measured_kept_and_drawn_and_xprof_is_told_where_it_lies(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny.yaml").write_text(json.dumps({**TINY, "loading": {"workers": 0}, "checkpointing": "every-block"}))
    status, out, err = run("profile", "tiny.yaml")
    assert status == 0, err
    folder = tmp_path / "runs/tiny"
    assert {path.name for path in folder.iterdir()} == {"profile", "report.html", "trace.json.gz"}
    assert "report: runs/tiny/report.html\ntrace: runs/tiny/trace.json.gz in ui.perfetto.dev, or: xprof --logdir " \
        "runs/tiny/profile" in out
    kept = profiles.load(folder)
    assert any("planned for GPUs alone" in note for note in kept.notes)
    assert {"jax", "jaxlib"} <= set(kept.versions)
    assert {op.phase for op in kept.measured.ops} == {
        Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER}  # fmt: skip
    with gzip.open(folder / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    page = (folder / "report.html").read_text("utf-8")
    assert "layers.attention" in page
    assert ";transpose(jvp(" not in page
    assert "This profile is measured only: not predicted: backend: jax" in page
    assert kept.capacity_bytes == kept.device.memory_bytes > 0
    assert "capacity not known" not in page
    assert "not calibrated" not in page  # the head of a column of predicted seconds, of which there are none
    assert (folder / "profile/plugins/profile/step/local.xplane.pb").stat().st_size
