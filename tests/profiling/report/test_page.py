"""The report's page: everything stands in it, nothing in it is fetched, and no name becomes markup; the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from shutil import rmtree

import pytest

from tests.page.pages import Read, chart_data, names_stay_names, readable_without_eyes, stands_alone
from tests.profiling.profiled import EVIL, STREAMED, empty, hostile, profile
from tightfit.profiling import profile as profiles
from tightfit.profiling.report.compare import recipe_changes
from tightfit.profiling.report.memory import curves
from tightfit.profiling.report.page import report
from tightfit.trace import Place
from tightfit.training.record import record_of
from tightfit.training.summary import Summary
from tightfit.training.trainer import Trainer

SUMMARY = Summary(steps=3, seconds=1.0, training_seconds=1.0, compile_seconds=0.0, data_wait_seconds=0.0,
                  samples_per_second=1.0, tokens_per_second=2.0, peak_memory=1, device="CPU", eval_loss=1.5,
                  eval_accuracy=0.25, eval_perplexity=4.5)  # fmt: skip
NO_NUMBERS = (float("nan"), float("inf"), 10**400)


@pytest.fixture(scope="module")
def page():
    return report(profile(), profile(waiting=0.05, attention="sdpa", seed=1))


def test_all_of_it_is_there(page):
    read = Read(page)
    for name in ("headline", "difference", "memory", "time", "ops", "predicted", "readings", "about"):
        assert name in read.ids
    for word in ("tokens/s", "MFU", "peak allocated", "18 % of the step waits for data", "loading.workers=1",
                 "Launch-bound", "compile=per-block", "of fp32 tensors under bf16", "The 25 largest tensors",
                 "128x257", "transformer.h.*.attn", "of the roofline", "residual", "attention", "power W",
                 "CUDA context", "plain steps differ by 3 %", "checkpointing: none"):
        assert word in read.said, word


def test_the_run_that_a_profile_is_of_is_there_where_it_finished(tmp_path):
    assert "run" not in Read(report(profile())).ids
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY.to_dict()))
    read = Read(report(profile(), run=record_of(tmp_path)))
    assert "run" in read.ids
    assert "loss 1.5000, perplexity 4.50, accuracy 25.0%" in read.said


def test_values_that_are_not_known_are_left_out_of_a_record(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n{"step": 3, "lo')
    found = record_of(tmp_path)
    assert found.lines == [{"step": 1, "loss": 2.0}, {"step": 2}]
    assert "run" in Read(report(profile(), run=found)).ids


WRONG = {"empty": b"", "binary": b"\x80\x00\xff", "not JSON": b"{1}", "a list": b"[]", "deep": b"[" * 100_000}


def test_damaged_files_of_a_run_are_one_line_and_exit_2(tmp_path, run):
    profiles.save(profile(), tmp_path)
    line, whole = {"step": 1, "loss": 2.0}, SUMMARY.to_dict()
    wrong_lines = [{"step": "1"}, {"loss": 2.0}, *({**line, "loss": value} for value in ("<b>", [], *NO_NUMBERS))]
    wrong_values = [{**whole, name: value} for name, value in (
        ("steps", "<b>"), ("steps", 1.5), ("seconds", None), ("eval_loss", []), ("unheard", 1), ("device", 3),
        ("metrics", {"balance_loss": float("inf")}), ("peak_memory", 10**400), *(("seconds", v) for v in NO_NUMBERS))]
    damaged = [("metrics.jsonl", text) for text in (*WRONG.values(), *(json.dumps(each).encode() + b"\n" for each in
                                                                       wrong_lines))]
    damaged += [("summary.json", text) for text in (*WRONG.values(), *(json.dumps(v).encode() for v in wrong_values))]
    for name, text in [*damaged, ("metrics.jsonl", None), ("summary.json", None)]:
        (tmp_path / "summary.json").write_text(json.dumps(whole))
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / name).unlink()
        if text is None:
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(text)
        status, out, err = run(tmp_path)
        assert (status, out, err.count("\n")) == (2, "", 1), (name, text)
        assert err.startswith(f"tightfit: {tmp_path / name}: the file is damaged ("), err
        if text is None:
            (tmp_path / name).rmdir()


def test_it_stands_alone(page):
    stands_alone(page)


def test_it_can_be_read_without_eyes_and_without_scripts(page):
    readable_without_eyes(page, 8)


def test_charts_hold_what_was_measured(page):
    data = chart_data(page)
    metas = [str(trace.get("meta")) for trace in data["memory-chart"]]
    for category in ("weights", "gradients", "optimizer", "activations", "temporary"):
        assert {f"measured {category}", f"predicted {category}"} <= set(metas)
    assert {"measured peak", "predicted peak", "predicted all"} <= set(metas)
    assert data["roofline-chart"]


def test_copies_of_a_streamed_step_have_lanes_and_host_memory():
    page = report(profile(**STREAMED))
    read, data = Read(page), chart_data(page)
    assert "copies" in read.ids
    rows = {row for trace in data["lanes-chart"] for row in trace["y"]}
    assert rows == {f"{lane}, {step}" for lane in ("compute", "copies to the GPU", "copies back")
                    for step in ("measured", "predicted")}
    metas = {str(trace.get("meta")) for trace in data["host-chart"]}
    assert {"measured weights", "predicted weights", "predicted optimizer", "measured peak"} <= metas
    for word in ("Measured lanes are of the traced step", "of it beside compute", "Host memory by category"):
        assert word in read.said, word
    assert "No lanes were measured" not in read.said
    device = {str(trace.get("meta")) for trace in data["memory-chart"]}
    assert "predicted temporary" in device
    stands_alone(page)
    readable_without_eyes(page, 10)


def test_the_device_memory_of_a_streamed_step_leaves_out_the_hosts():
    streamed = profile(**STREAMED)
    step = streamed.predicted.last_step()
    _, peak = streamed.predicted.peak(step.start, step.stop)
    assert curves(streamed)["predicted"].peak_bytes == peak
    assert curves(streamed, Place.HOST)["predicted"].peak_bytes > 0


def test_a_step_that_copies_nothing_has_no_lanes(page):
    assert "copies" not in Read(page).ids


@pytest.mark.parametrize(("change", "said"), [
    (lambda p: replace(p, measured=None, lanes={"predicted": p.lanes["predicted"]}), "Nothing was measured"),
    (lambda p: replace(p, lanes={"predicted": p.lanes["predicted"]}), "the profiler has no kernels"),
    (lambda p: replace(p, lanes={}, device=replace(p.device, kind="cpu")), "a processor, on which this step ran"),
])
def test_where_no_lanes_were_measured_it_says_so(change, said):
    assert said in Read(report(change(profile(**STREAMED)))).said


@pytest.mark.parametrize("count", [1, 2])
def test_names_stay_names(count):
    page = report(*[hostile()] * count)
    assert EVIL in Read(page).said
    names_stay_names(page)


def test_an_empty_profile_and_others_with_something_missing():
    for made in (empty(), empty(), replace(profile(), measured=None, phase_seconds={}, step_seconds=0.0, peak_bytes=0),
                 replace(profile(), predicted=None, predicted_seconds={}, predicted_peak_bytes=None),
                 replace(profile(), measured=None, predicted=None), replace(profile(), readings={"power": (None,)})):
        Read(report(made))
        Read(report(made, profile()))
        Read(report(profile(), made))
    assert "No allocations were recorded" in Read(report(empty())).said


def test_a_device_without_figures():
    unknown = replace(profile().device, bandwidth=0.0, flops={}, units=0)
    said = Read(report(replace(profile(), device=unknown))).said
    assert "the device's peak is not known" in said
    assert "points have no roof" in said


def test_what_two_recipes_differ_in():
    other = replace(profile(attention="sdpa"), versions={"torch": "2.14.0"})
    assert list(recipe_changes(profile(), other)) == [("attention", "eager", "sdpa"),
                                                       ("(version of torch)", "2.13.0", "2.14.0")]
    assert list(recipe_changes(profile(), profile())) == []


@pytest.fixture
def run(run):
    """`tightfit report` with some words."""
    return partial(run, "report")


def test_the_command(tmp_path, run):
    for name, made in (("a", profile()), ("b", profile(attention="sdpa"))):
        profiles.save(made, tmp_path / name)
    status, out, err = run(tmp_path / "a")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith("gpt2 on RTX 4090: tokens/s ")
    assert out.splitlines()[1].startswith("tokens/s: predicted ")
    assert out.splitlines()[2:] == [f"report: {tmp_path / 'a' / 'report.html'}"]
    assert (tmp_path / "a" / "report.html").read_text().startswith("<!doctype html>")
    status, out, _ = run(tmp_path / "a", tmp_path / "b")
    assert "report-against-b.html" in out
    drawn = (tmp_path / "a" / "report-against-b.html").read_text()
    assert "Difference to the other run" in drawn
    assert f'{tmp_path / "a"}</th>' in drawn
    assert f'{tmp_path / "b"}</th>' in drawn
    status, _, _ = run(tmp_path / "a", "--output", tmp_path / "mine.html")
    assert (tmp_path / "mine.html").exists()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"profile", "report.html", "report-against-b.html"}


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_without_a_profile_shows_what_it_recorded_and_says_how_to_profile_it(tmp_path, run, tiny, finished):
    folder = Path(Trainer(recipe={**tiny, "eval_steps": 2}).train().output_dir)
    if not finished:
        (folder / "summary.json").unlink()
        with (folder / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 4, "loss"')  # and the process ended
    status, out, err = run(folder)
    assert (status, err) == (0, "")
    assert ("waiting for data: " if finished else "steps so far: 4\nloss: ") in out
    assert "peak " in out
    assert f"no step was profiled: `tightfit profile {folder}/recipe.yaml output_dir={folder}` writes one there" in out
    page = (folder / "report.html").read_text()
    stands_alone(page)
    readable_without_eyes(page, 1)
    training, held_out = chart_data(page)["loss-chart"]
    assert [len(training["x"]), len(held_out["x"])] == [4, 2]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:1]]
    assert f"{logged[0]['loss']:.4f}" in Read(page).said
    figures = out[:out.index("no step was profiled")]
    profiles.save(profile(), folder)
    assert run(folder)[1].split("\n", 2)[2] == f"{figures}report: {folder / 'report.html'}\n"


def test_runs_without_profiles_are_compared_by_what_they_recorded(tmp_path, run, tiny):
    folders = []
    for name, changes in (("first", {}), ("it's second", {"seed": 1, "eval_steps": 2})):
        folders.append(Path(Trainer(recipe={**tiny, **changes, "output_dir": str(tmp_path / name)}).train()
                            .output_dir))
    profiles.save(profile(), folders[0])
    for first, second in (folders, folders[::-1]):
        status, out, err = run(first, second)
        assert (status, err) == (0, "")
        assert out.splitlines()[0].split("  ")[-1] == str(second)
        assert any(line.startswith("held-out ") and line.count("loss ") == 2 for line in out.splitlines())
        assert f"no step was profiled: `tightfit profile {quote(str(folders[1] / 'recipe.yaml'))}" in out
        page = (first / f"report-against-{second.name}.html").read_text()
        stands_alone(page)
        assert "seed" in Read(page).said
        assert len(chart_data(page)["loss-chart"]) == 4
    (folders[0] / "recipe.yaml").unlink()
    rmtree(folders[0] / "profile")
    for words in (folders, folders[::-1]):
        assert run(*words)[2].startswith(f"tightfit: {folders[0]}: this folder holds no profile, and no recipe.yaml")
    status, _, err = run(folders[1], tmp_path / "gone")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"tightfit: {tmp_path / 'gone'}: there is no such folder")


def test_bad_input_is_one_line_and_exit_2(tmp_path, run):
    good = tmp_path / "good"
    profiles.save(empty(), good)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "recipe.yaml").write_bytes(b"model: [\xff")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "recipe.yaml").touch()
    damaged = f"{tmp_path / 'damaged' / 'recipe.yaml'}: the recipe of this folder's run cannot be read"
    for words, expected in (((tmp_path,), "holds no profile"), ((tmp_path / "gone",), "no such folder"),
                            ((good, tmp_path), "holds no profile"), ((good, tmp_path / "damaged"), damaged),
                            ((tmp_path / "damaged",), damaged),
                            ((tmp_path / "blank",), "cannot be read (the file is empty; write "),
                            ((good, "--output", tmp_path / "no" / "x.html"), "--output")):
        status, out, err = run(*words)
        assert (status, out) == (2, "")
        assert err.startswith("tightfit: ")
        assert err.count("\n") == 1
        assert expected in err


def test_plotly_is_loaded_only_for_a_report():
    code = ("import sys, tightfit.cli, tightfit.commands.plan, tightfit.planner; "
            "sys.exit(any(name.split('.')[0] == 'plotly' for name in sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
