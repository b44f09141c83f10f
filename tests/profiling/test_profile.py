"""Profiles: a folder gives back what was saved, and every folder that holds none is named."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.profiling.profiled import STREAMED, empty, hostile, profile
from tightfit.errors import ReportError
from tightfit.profiling import profile as profiles
from tightfit.profiling.profile import PROFILE_FILE
from tightfit.trace import WALL_PHASES


def streamed():
    return profile(**STREAMED)


@pytest.mark.parametrize("make", [profile, hostile, empty, streamed])
def test_what_is_saved_is_loaded(tmp_path, make):
    saved = make()
    home = profiles.save(saved, tmp_path / "run")
    assert home == tmp_path / "run" / "profile"
    assert profiles.load(tmp_path / "run") == saved
    assert profiles.load(home) == saved
    assert [path.name for path in home.iterdir()] == ["profile.json.gz"]


def test_the_phases_sum_to_the_step():
    made = profile()
    assert set(made.phase_seconds) == set(WALL_PHASES)
    assert sum(made.phase_seconds.values()) == pytest.approx(made.step_seconds)


def test_a_second_profile_takes_the_firsts_place(tmp_path):
    profiles.save(profile(), tmp_path)
    profiles.save(empty(), tmp_path)
    assert profiles.load(tmp_path) == empty()


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
    ({"step_seconds": "fast"}, "damaged"), ({"step_seconds": -1}, "damaged"), ({"step_seconds": None}, "damaged"),
    ({"peak_bytes": True}, "damaged"), ({"recipe": {"modell": 1}}, "damaged.*modell"), ({"recipe": 7}, "damaged"),
    ({"device": {}}, "damaged"), ({"device": {"kind": "tpu"}}, "damaged"), ({"phase_seconds": {"lunch": 1}}, "damaged"),
    ({"readings": {"power": ["x"]}}, "damaged"), ({"notes": 3}, "damaged"), ({"measured": 3}, "damaged"),
    ({"recipe": {}}, "damaged.*says nothing of"), ({"peak_bytes": 10**400}, "damaged"),
])
def test_a_damaged_profile_is_named(tmp_path, change, expected):
    path = profiles.save(profile(), tmp_path) / "profile.json.gz"
    head, body = gzip.decompress(path.read_bytes()).decode().split("\n")
    path.write_bytes(gzip.compress("\n".join([head, json.dumps({**json.loads(body), **change})]).encode()))
    with pytest.raises(ReportError, match=expected):
        profiles.load(tmp_path)


@pytest.mark.parametrize(("head", "expected"), [
    ({"version": PROFILE_FILE.version + 1}, f"version {PROFILE_FILE.version + 1}.*update tightfit"),
    ({"format": "other"}, "no profile of tightfit's"),
])
def test_another_version_and_another_kind_are_named(tmp_path, head, expected):
    path = profiles.save(empty(), tmp_path) / "profile.json.gz"
    first, body = gzip.decompress(path.read_bytes()).decode().split("\n")
    path.write_bytes(gzip.compress("\n".join([json.dumps({**json.loads(first), **head}), body]).encode()))
    with pytest.raises(ReportError, match=expected):
        profiles.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"format": NaN}', "\0"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_no_profile(tmp_path, content, packed):
    path = profiles.save(empty(), tmp_path) / "profile.json.gz"
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    with pytest.raises(ReportError, match=r"profile\.json\.gz.*no profile of tightfit's"):
        profiles.load(tmp_path)


def test_a_profile_that_is_cut(tmp_path):
    path = profiles.save(profile(), tmp_path) / "profile.json.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ReportError, match=r"profile\.json\.gz.*too early"):
        profiles.load(tmp_path)
