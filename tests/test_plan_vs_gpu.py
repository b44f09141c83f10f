"""The comparison with a GPU, as far as it can be tested without one: its cases and its runner."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.backends.pytorch.simulate.target_cases import gpu
from tests.benchmark_modules import BENCHMARKS, benchmark
from tightfit.devices import find_device
from tightfit.model_facts import model_facts
from tightfit.recipe import CHOSEN_SLOTS
from tightfit.tasks import TASKS
from tightfit.techniques import SLOTS

cases, forking, plans, runs, truth = map(benchmark, ("gpu_cases", "forking", "gpu_plans", "gpu_runs", "gpu_truth"))
entry = benchmark("plan_vs_gpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    cases.write_configurations(place)
    return place


# The cases


def test_there_are_enough_cases_and_each_has_a_name_of_its_own():
    every = cases.all_cases()
    assert len(every) >= 150
    assert len({case.name for case in every}) == len({case.key for case in every}) == len(every)
    assert len({case.line.split()[0] for case in every}) >= 30  # models


def test_every_rung_of_every_technique_is_there(folder):
    chosen = [case.recipe(folder) for case in cases.all_cases()]
    for slot in CHOSEN_SLOTS:
        found = {getattr(recipe, slot) for recipe in chosen}
        missing = [rung for variant in SLOTS[slot] for rung in variant.representative_settings() if rung not in found]
        assert not missing, slot
    assert {recipe.task for recipe in chosen} == set(TASKS)
    assert any(recipe.pad_vocab_to for recipe in chosen)
    assert any(recipe.pad_sequence_to for recipe in chosen)
    assert any(recipe.batch_size % recipe.micro_batch_size for recipe in chosen)
    assert any(recipe.batch_size > recipe.micro_batch_size for recipe in chosen)
    assert {(r.data.source != "dummy", r.data.packing) for r in chosen} >= {(True, True), (True, False)}
    assert {False, True} == {recipe.loading.pin_memory for recipe in chosen}


def test_fills_are_spread_and_the_tight_ones_are_there():
    aims = [case.aim for case in cases.all_cases()]
    fills = [aim.percent for aim in aims if aim.kind == "fill"]
    bins = Counter(sum(fill > edge for edge in (50, 70, 90)) for fill in fills)
    assert min(fills) == 30
    assert max(fills) == 98
    assert min(bins[number] for number in range(4)) >= 15
    assert {2, 5, 10} == {aim.percent for aim in aims if aim.kind == "short"}
    assert sum(aim.kind == "retries" for aim in aims) >= 8


@pytest.mark.parametrize("name", ["h200", "a100-80gb-sxm", "a100-40gb-sxm"])
def test_nothing_is_refused_but_for_a_missing_library_and_an_older_cards_formats(name, folder):
    device = find_device(name)
    reasons = {case.name: case.recipe(folder).refusals(device) for case in cases.all_cases()}
    for found in reasons.values():
        assert all("is not installed" in reason or ("fp8" in reason and device.capability < (8, 9)) for reason in found)


def test_every_model_can_be_read(folder):
    for case in {case.line.split()[0]: case for case in cases.all_cases()}.values():
        facts = model_facts(case.recipe(folder))
        assert facts.vocab_size or facts.image_size
        positions, recipe = facts.max_positions, case.recipe(folder)
        assert positions is None or recipe.seq_len <= positions, case.name


def test_parts_share_the_cases_out_and_compiling_comes_last():
    every = cases.all_cases()
    shares = [every[number::3] for number in range(3)]
    assert sorted(case.name for share in shares for case in share) == sorted(case.name for case in every)
    for share in shares:
        assert len({case.group for case in share[:12]}) >= 6
    flags = [case.compiles for case in every]
    assert flags == sorted(flags)


def test_a_key_follows_the_line_the_model_and_the_base(monkeypatch):
    case = cases.all_cases()[0]
    assert replace(case, line=case.line + " seed=1").key != case.key
    assert replace(case, expandable=not case.expandable).key != case.key
    before = case.key
    monkeypatch.setitem(cases.BASE, "precision", "fp32")
    assert case.key != before


# The runner


def outcomes(*jobs, **options):
    return {outcome.name: outcome for outcome in forking.run_forked(jobs, **options)}


def test_a_job_that_fails_crashes_or_hangs_ends_alone():
    shared = []

    def change():
        shared.append(1)
        return {"seen": len(shared)}

    def crash():
        os.kill(os.getpid(), signal.SIGKILL)

    def leave():
        os._exit(3)

    def hang():
        time.sleep(60)

    work = {"good": change, "again": change, "error": lambda: 1 / 0, "crash": crash, "leaves": leave, "hangs": hang}
    jobs = [forking.Job(name, do, 0.2 if do is hang else 20) for name, do in work.items()]
    found = outcomes(*jobs, at_once=3)
    assert found["good"].value == found["again"].value == {"seen": 1}  # neither saw the other's change
    assert not shared
    assert "ZeroDivisionError" in found["error"].failure
    assert found["crash"].failure == "ended by SIGKILL"
    assert found["leaves"].failure == "ended with status 3"
    assert found["hangs"].failure == "took more than 0 seconds"


def test_what_a_hanging_job_started_ends_with_it(tmp_path):
    def start():
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pid").write_text(str(child.pid))
        time.sleep(60)

    outcomes(forking.Job("hangs", start, 0.5))
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_after_the_deadline_nothing_begins_and_nothing_is_told():
    jobs = [forking.Job("quick", lambda: 1, 20), forking.Job("slow", lambda: time.sleep(60), 60),
            forking.Job("never", lambda: 1, 20)]
    began = time.monotonic()
    found = outcomes(*jobs, deadline=began + 1.0)
    assert list(found) == ["quick"]
    assert not outcomes(*jobs, deadline=began)


FACTS = {"kind": "cuda", "name": "a GPU", "memory_bytes": 1 << 34, "units": 8, "capability": [8, 0]}


def test_rows_last_and_a_cut_line_costs_only_itself(tmp_path):
    path = tmp_path / "rows.jsonl"
    first, second, third = cases.all_cases()[:3]
    rows = runs.Rows(path, FACTS)
    rows.add(first, measured={"outcome": "ran"})
    rows.add(second, failure="ended by SIGKILL")
    with path.open("a") as file:
        file.write('{"key": "cut o')  # the machine went away
    rows = runs.Rows(path, FACTS)
    assert rows.measured(first)
    assert not rows.measured(second)
    rows.add(third, measured={"outcome": "out of memory"})
    assert [json.loads(line)["name"] for line in path.read_text().splitlines() if line.endswith("}")] == [
        first.name, second.name, third.name,
    ]
    assert runs.Rows(path, FACTS).measured(third)
    assert not runs.Rows(path, {**FACTS, "name": "another"}).newest


def test_a_run_goes_on_with_what_is_left_failures_last_and_not_for_ever(tmp_path):
    some = cases.all_cases()[:4]
    rows = runs.Rows(tmp_path / "rows.jsonl", FACTS)
    rows.add(some[0], measured={"outcome": "ran"})
    rows.add(some[1], failure="took more than 60 seconds")
    assert runs.left_to_do(some, rows) == [some[2], some[3], some[1]]
    for _ in range(runs.TRIED - 1):
        rows.add(some[1], failure="took more than 60 seconds")
    assert runs.left_to_do(some, rows) == some[2:]


def test_tiny_cases_run_for_real_and_are_not_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(truth, "TIMED_SECONDS", 0.0)
    path = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--rows", str(path), "--workers", "1"]
    assert entry.main(arguments) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["name"] for row in rows} == {case.name for case in cases.smoke_cases()}
    for row in rows:
        assert row["measured"]["outcome"] == "ran"
        assert row["measured"]["step_seconds"] > 0
        for part in ("weights", "gradients", "optimizer"):
            assert row["measured"]["categories"][part] == row["predicted"]["categories"][part] > 0
    summed = json.loads(next(tmp_path.glob("rows-*.json")).read_text())
    assert summed["measured"] == 3
    assert entry.main(arguments) == 0
    assert len(path.read_text().splitlines()) == 3
    assert "3 of 3 cases measured" in capsys.readouterr().out


def test_plans_made_before_serve_the_card_however_it_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "FOLDER", tmp_path)
    first, second = cases.all_cases()[:2]
    ahead = plans.GpuPlans("plan_vs_gpu", find_device("h100-sxm"))
    ahead.add(first.key, {"fits": "yes", "limit": 7})
    named = replace(find_device("h100-sxm"), name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(runs, "predict_case", lambda *given: {"fits": "no", "limit": 8})
    monkeypatch.setattr(cases.Case, "recipe", lambda case, folder: None)
    rows = runs.Rows(tmp_path / "rows.jsonl", FACTS)

    def planned(device):
        found = runs.plan_all([first, second], device, tmp_path, rows, 1, time.monotonic() + 60)
        return [plan["limit"] for plan in found.values()]

    assert planned(named) == [7, 8]
    assert planned(find_device("h200")) == [8, 8]
    monkeypatch.setattr(plans, "made_with", lambda: "another source")
    assert planned(named) == [8, 8]


def test_a_card_is_planned_for_ahead(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plans, "FOLDER", tmp_path)
    name = "gpt2 8x1024 loss=plain"
    assert entry.main(["--plan", "h200", "--only", name, "--workers", "1"]) == 0
    (plan,) = plans.GpuPlans("plan_vs_gpu", find_device("h200")).newest.values()
    assert plan["fits"] == "yes"
    assert plan["limit"] > plan["peak_reserved"] > 0
    assert "1 plans in " in capsys.readouterr().out
    assert entry.main(["--plan", "h2000"]) == 2
    assert "h2000" in capsys.readouterr().err


def test_planning_again_takes_the_memory_that_was_measured_with(tmp_path, monkeypatch):
    first, second, third = cases.all_cases()[:3]
    rows = runs.Rows(tmp_path / "rows.jsonl", FACTS)
    for case in (first, second):
        rows.add(case, measured={"outcome": "ran"}, predicted={"limit": 7, "fits": "yes"})
    rows.add(third, failure="ended by SIGKILL")

    def planned(case, recipe, device, calibration, limit):
        return {"fits": "no", "limit": limit + 1} if case == first else {"failure": "ModelError: no"}

    monkeypatch.setattr(runs, "predict_case", planned)
    monkeypatch.setattr(cases.Case, "recipe", lambda case, folder: None)
    found = {row["name"]: row for row in runs.plan_again([first, second, third], gpu(8), tmp_path, rows, at_once=2)}
    assert found[first.name]["predicted"] == {"fits": "no", "limit": 8}
    assert found[first.name]["measured"] == {"outcome": "ran"}
    assert found[second.name]["failure"] == "ModelError: no"
    assert third.name not in found
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3  # the record stays as it was measured


def test_without_a_gpu_the_answer_is_a_sentence(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert entry.main(["--rows", str(tmp_path / "rows.jsonl")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert entry.main(["--rows", str(tmp_path / "rows.jsonl"), "--again"]) == 2
    assert "no measurement" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", ""])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(SystemExit):
        entry.main(["--part", text])


def test_what_does_not_survive_a_fork_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    with entry.cuda_unopened():
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
        with pytest.raises(ImportError):
            importlib.import_module("torchao")
    assert "torchao" not in sys.modules


@pytest.mark.gpu
def test_tiny_cases_on_the_gpu(tmp_path):
    """In a process of its own: this one may have a CUDA context already."""
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCHMARKS / "plan_vs_gpu.py"), "--smoke", "--rows", str(rows), "--minutes", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in map(json.loads, rows.read_text().splitlines()):
        assert row["measured"]["outcome"] == "ran", row
        assert row["measured"]["peak_reserved"] > 0
        assert row["measured"]["context"] > 0
