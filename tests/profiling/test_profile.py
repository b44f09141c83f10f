"""Profiles: a folder gives back what was saved, and every folder that holds none is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.profiling.profiled import STREAMED, empty, hostile, profile
from tightfit.errors import ReportError
from tightfit.profiling import profile as profiles
from tightfit.profiling.profile import VERSION
from tightfit.trace import WALL_PHASES, Op, OpClass, Phase, Trace


def streamed():
    return profile(**STREAMED)


@pytest.mark.parametrize("make", [profile, hostile, empty, streamed])
def test_what_is_saved_is_loaded(tmp_path, make):
    saved = make()
    home = profiles.save(saved, tmp_path / "run")
    assert home == tmp_path / "run" / "profile"
    assert profiles.load(tmp_path / "run") == saved
    assert profiles.load(home) == saved
    assert sorted(p.name for p in home.iterdir()) == sorted(
        ["profile.json", *(f"{n}.json.gz" for n in ("measured", "predicted") if getattr(saved, n) is not None)])


def test_the_phases_sum_to_the_step():
    made = profile()
    assert set(made.phase_seconds) == set(WALL_PHASES)
    assert sum(made.phase_seconds.values()) == pytest.approx(made.step_seconds)


def test_a_second_profile_takes_the_firsts_place(tmp_path):
    profiles.save(profile(), tmp_path)
    profiles.save(empty(), tmp_path)
    assert profiles.load(tmp_path) == empty()
    assert not (tmp_path / "profile" / "predicted.json.gz").exists()


def test_a_save_that_fails_leaves_no_profile_of_mixed_traces(tmp_path):
    profiles.save(profile(), tmp_path)
    broken = Trace(origin="predicted", ops=[Op("x", 1, Phase.FORWARD, OpClass.OTHER, seconds=float("inf"))])
    with pytest.raises(ValueError, match="JSON compliant"):
        profiles.save(replace(profile(), predicted=broken), tmp_path)
    with pytest.raises(ReportError, match="holds no profile"):
        profiles.load(tmp_path)


def test_a_folder_that_is_no_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for folder, reason in ((tmp_path, "this folder holds no profile"), (tmp_path / "gone", "no such folder"),
                           (file, "this is no folder")):
        with pytest.raises(ReportError, match=f"{reason}.*tightfit profile RECIPE"):
            profiles.load(folder)


def test_a_run_without_a_profile_is_told_how_to_make_one(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: gpt2\n")
    with pytest.raises(ReportError, match=f"`tightfit profile {tmp_path}/recipe.yaml output_dir={tmp_path}` "):
        profiles.load(tmp_path)


@pytest.mark.parametrize(("change", "expected"), [
    ({"version": VERSION + 1}, f"version {VERSION + 1}.*update tightfit"),
    ({"format": "other"}, "no profile of tightfit's"),
    ({"step_seconds": "fast"}, "damaged"), ({"step_seconds": -1}, "damaged"), ({"step_seconds": None}, "damaged"),
    ({"peak_bytes": True}, "damaged"), ({"recipe": {"modell": 1}}, "damaged.*modell"), ({"recipe": 7}, "damaged"),
    ({"device": {}}, "damaged"), ({"device": {"kind": "tpu"}}, "damaged"), ({"phase_seconds": {"lunch": 1}}, "damaged"),
    ({"readings": {"power": ["x"]}}, "damaged"), ({"notes": 3}, "damaged"), ({"traces": None}, "damaged"),
    ({"recipe": {}}, "damaged.*says nothing of"), ({"peak_bytes": 10**400}, "damaged"),
])
def test_a_damaged_or_newer_profile_is_named(tmp_path, change, expected):
    path = profiles.save(profile(), tmp_path) / "profile.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ReportError, match=expected):
        profiles.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"format": NaN}', "\0"])
def test_a_file_that_is_no_profile(tmp_path, content):
    path = profiles.save(empty(), tmp_path) / "profile.json"
    path.write_text(content)
    with pytest.raises(ReportError, match=r"profile\.json"):
        profiles.load(tmp_path)


def test_a_trace_that_is_gone_or_cut(tmp_path):
    home = profiles.save(profile(), tmp_path)
    trace = home / "measured.json.gz"
    trace.write_bytes(trace.read_bytes()[:1000])
    with pytest.raises(ReportError, match=r"measured\.json\.gz.*too early"):
        profiles.load(tmp_path)
    trace.unlink()
    with pytest.raises(ReportError, match=r"measured\.json\.gz.*cannot be read"):
        profiles.load(tmp_path)
