"""The cache of plans: what comes back, what makes another key, what is no entry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.display.plans import CARD, fitting, nothing_fits, streamed
from tightfit.display.plan_table import ReadablePlan, plan_text
from tightfit.planning import plan_cache
from tightfit.planning.plan import Plan
from tightfit.planning.plan_cache import cache_key, cached, load, machine_fingerprint, save
from tightfit.planning.search.every_gpu import Comparison, GpuRow
from tightfit.system import expanded


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entries(home):
    return sorted((home / ".cache/tightfit/plans").iterdir())


@pytest.mark.parametrize("made", [fitting(), streamed(), nothing_fits()])
def test_a_plan_comes_back_equal(made):
    save(ReadablePlan, "a", plan := ReadablePlan.of(made))
    found = load(ReadablePlan, "a")
    assert found == plan
    assert plan_text(found) == plan_text(plan)
    assert found.to_json() == plan.to_json()


def test_plans_lie_where_the_system_keeps_caches(home, monkeypatch):
    for given, expected in ((str(home / "mine"), home / "mine"), ("not/whole", home / ".cache"), ("", home / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert expanded("~/.cache/tightfit") == expected / "tightfit"
        assert expanded("~/other/.cache") == home / "other/.cache"
        save(Plan, "a", fitting())
        assert (expected / "tightfit/plans/a.json").is_file()
        assert load(Plan, "a") == fitting()


def test_a_comparison_comes_back_equal():
    made = Comparison(asked=fitting().asked, rows=(GpuRow(device=CARD, plan=fitting(), price=2.0),
                                                   GpuRow(device=CARD, refused="too old")))
    save(Comparison, "a", made)
    assert load(Comparison, "a") == made


def test_what_would_not_come_back_equal_is_not_kept(home):
    save(Plan, "a", replace(fitting(), price=float("inf")))
    assert load(Plan, "a") is None


@pytest.mark.parametrize("damage", [
    lambda raw: b"", lambda raw: raw[:-20], lambda raw: raw.replace(b"1234", b"1235"), lambda raw: b"\xff" + raw,
    lambda raw: raw.splitlines()[0] + b"\n{}",
])
def test_a_damaged_entry_is_no_entry(home, damage):
    save(Plan, "a", fitting())
    [path] = entries(home)
    path.write_bytes(damage(path.read_bytes()))
    assert load(Plan, "a") is None


def test_what_is_longest_unused_goes_first(home, monkeypatch):
    save(Plan, "a", fitting())
    monkeypatch.setattr(plan_cache, "MOST", int(2.5 * entries(home)[0].stat().st_size))
    for name in "bcd":
        load(Plan, "a")
        save(Plan, name, fitting())
    assert [path.stem for path in entries(home)] == ["a", "d"]


def test_a_plan_is_made_once():
    plans = iter([fitting()])
    assert cached(Plan, lambda: "a", lambda: next(plans)) == (fitting(), False)
    assert cached(Plan, lambda: "a", lambda: next(plans)) == (fitting(), True)
    names = iter([None, "b", "b"])  # as of a configuration that is fetched while it is planned
    again = iter([nothing_fits()])
    for from_cache in (False, True):
        assert cached(Plan, lambda: next(names), lambda: next(again)) == (nothing_fits(), from_cache)


def test_a_folder_that_cannot_be_written_keeps_nothing(home):
    (home / ".cache").write_text("a file")
    save(Plan, "a", fitting())
    assert load(Plan, "a") is None


def key(recipe="mine.yaml", *words, arguments=None, **options):
    return cache_key(recipe, words, options, arguments, machine_fingerprint())


def test_what_can_change_the_answer_makes_another_key(home, monkeypatch):
    (home / "mine.yaml").write_text("model: folder\nif_cuda: {model: other}\n")
    for name in ("folder", "other"):
        (home / name).mkdir()
        (home / name / "config.json").write_text("{}")
    arguments = home / "arguments.json"
    arguments.write_text("{}")
    same = key(arguments=arguments, gpu="l4")
    assert same is not None
    assert key(arguments=arguments, gpu="l4") == same
    seen = {same, key(gpu="l4"), key(arguments=arguments), key("mine.yaml", "seq_len=8", gpu="l4"),
            key("gpt2", gpu="l4")}
    assert len(seen) == 5

    def change(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        seen.add(key(arguments=arguments, gpu="l4"))

    change(home / "mine.yaml", "model: folder\nif_cuda: {model: other}\nseq_len: 8")
    change(arguments, '{"bf16": true}')
    change(home / "folder/config.json", '{"n_layer": 2}')
    change(home / "other/config.json", '{"n_layer": 2}')
    change(home / ".cache/tightfit/calibration/cpu.json", "{}")
    change(home / ".cache/tightfit/context_bytes.json", "{}")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen.add(key(arguments=arguments, gpu="l4"))
    (home / "site").mkdir()
    (home / "site/torch-9.9.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(home / "site"))
    seen.add(key(arguments=arguments, gpu="l4"))
    assert len(seen) == 13
    assert None not in seen


@pytest.mark.parametrize("words", [
    ("package.module:factory",), ("gpt2", "model=package.module:factory"), ("gpt2", "trust_remote_code=true"),
    ("someone/never-fetched",), ("gone.yaml",),
])
def test_what_no_file_tells_of_has_no_entry(words):
    assert key(*words) is None
