"""`tightfit profile` and `tightfit report` as a person uses them: a tiny model measured for real on this machine."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from tests.failing import failing
from tightfit.backends.pytorch.backend import PytorchBackend
from tightfit.backends.pytorch.measure import step_profiler
from tightfit.errors import ModelError
from tightfit.profiling import measure
from tightfit.profiling import profile as profiles
from tightfit.trace import Phase

pytestmark = pytest.mark.usefixtures("few_objects")

RECIPE = """\
model: gpt2
model_overrides: {n_layer: 2, n_head: 2, n_embd: 16, n_positions: 32, attn_pdrop: 0.0}
vocab_size: 64
seq_len: 16
batch_size: 4
micro_batch_size: 2
data: {source: dummy, samples: 64}
loading: {workers: 0}
"""

PINNED = {"precision": "bf16", "loss": "plain", "checkpointing": "none", "optimizer": "adamw", "attention": "sdpa",
          "compile": "off", "offload": "none", "accumulation": "loop", "update": "after-backward"}


@pytest.fixture
def run(run, monkeypatch, tmp_path):
    """The command in a folder of its own, with a recipe."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return run


def test_a_profile_is_measured_predicted_kept_and_drawn(run, tmp_path):
    status, out, _ = run("profile", "tiny.yaml", "device=cpu")
    assert status == 0
    folder = tmp_path / "runs" / "tiny"
    assert "report: runs/tiny/report.html" in out
    assert {path.name for path in folder.iterdir()} == {"profile", "report.html", "trace.json.gz"}
    found = profiles.load(folder)
    assert sum(found.phase_seconds.values()) == pytest.approx(found.step_seconds, rel=0.05, abs=1e-3)
    assert found.peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    assert set(found.predicted_seconds) == {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert all(op.seconds is not None for op in found.predicted.ops)
    with gzip.open(folder / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    assert "tokens/s" in (folder / "report.html").read_text("utf-8")

    assert found.tokens == 4 * 16

    status, out, _ = run("report", "runs/tiny", "runs/tiny")
    assert status == 0
    assert (folder / "report-against-tiny.html").stat().st_size < 8 << 20
    first = out.splitlines()
    assert first[0].split() == ["runs/tiny", "runs/tiny", "difference"]
    assert [line.split("  ")[0] for line in first[2:4]] == ["tokens/s", "step"]


def test_a_step_is_predicted_and_drawn_for_a_card_that_is_not_there(run, tmp_path):
    status, out, err = run("profile", "tiny.yaml", "--gpu", "rtx-4090")
    assert status == 0, err
    assert "gpt2 on RTX 4090: tokens/s" in out
    assert "report: runs/tiny-on-rtx-4090/report.html" in out
    found = profiles.load(tmp_path / "runs/tiny-on-rtx-4090")
    assert found.measured is None
    assert found.predicted_peak_bytes > 0
    assert "predicted, not calibrated, not measured" in (
        tmp_path / "runs/tiny-on-rtx-4090/report.html").read_text("utf-8")
    assert not (tmp_path / "runs/tiny").exists()


def test_a_prediction_is_written_where_the_command_says(run, tmp_path):
    for _ in range(2):
        assert run("profile", "tiny.yaml", "--gpu", "rtx-4090", "output_dir=runs/pg")[0] == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["pg"]
    assert profiles.load(tmp_path / "runs/pg").measured is None


def test_a_step_with_weights_of_four_bits_is_measured(run, tmp_path):
    words = ("trainable=lora", "base=nf4", "model_overrides.n_embd=64", "micro_batch_size=4")
    status, _, err = run("profile", "tiny.yaml", "device=cpu", *words)
    assert status == 0, err
    found = profiles.load(tmp_path / "runs" / "tiny")
    assert found.measured is not None
    assert found.peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.01)


def test_what_emptying_the_cache_costs_is_in_a_predicted_step(run, tmp_path):
    words = ("tiny.yaml", "--gpu", "l4", "micro_batch_size=4", "model_overrides.n_embd=256", "vocab_size=8192",
             *(f"{field}={value}" for field, value in PINNED.items()))
    seconds = []
    for more in ((), ("empty_cache_steps=1",)):
        assert run("profile", *words, *more)[0] == 0
        seconds.append(profiles.load(tmp_path / "runs" / "tiny-on-l4").predicted_step_seconds)
    _, out, _ = run("plan", *words, "empty_cache_steps=1", "--json")
    assert seconds[1] > 1.1 * seconds[0]
    assert seconds[1] == pytest.approx(json.loads(out)["candidates"][0]["time"]["step_seconds"], rel=1e-3)


def test_a_prediction_leaves_the_measured_profile_alone_and_is_set_beside_it(run, tmp_path):
    assert run("profile", "tiny.yaml", "device=cpu", "output_dir=mine")[0] == 0
    assert run("profile", "tiny.yaml", "--gpu", "rtx-4090", "output_dir=mine")[0] == 0
    assert profiles.load(tmp_path / "mine").measured is not None
    ahead = profiles.load(tmp_path / "mine-on-rtx-4090")
    status, out, err = run("report", "mine", "mine-on-rtx-4090")
    assert status == 0, err
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert rows["origin"][1:3] == ["measured", "predicted"]
    assert rows["tokens/s"][2] != "0"
    assert "-100.0" not in out
    assert ahead.predicted_peak_bytes > 0


def test_a_run_may_begin_where_a_profile_was_taken(run, tmp_path):
    assert run("profile", "tiny.yaml", "device=cpu")[0] == 0
    status, _, err = run("train", "tiny.yaml", "device=cpu", "max_steps=1")
    assert status == 0, err
    recipe = (tmp_path / "runs/tiny/recipe.yaml").read_text()
    assert run("profile", "tiny.yaml", "device=cpu", "batch_size=2")[0] == 0
    assert (tmp_path / "runs/tiny/recipe.yaml").read_text() == recipe
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    assert run("train", "tiny.yaml", "device=cpu", "max_steps=1", "output_dir=other")[0] == 2


def test_a_run_may_begin_where_a_profile_was_killed(run, tmp_path):
    killed = tmp_path / "runs" / "tiny" / ".unfinished-profile-1-a1b2"
    killed.mkdir(parents=True)
    killed.with_name(f"{killed.name}.lock").touch()
    status, _, err = run("train", "tiny.yaml", "max_steps=1")
    assert (status, "not empty" in err) == (0, False)
    assert run("profile", "tiny.yaml", "device=cpu")[0] == 0
    assert not list(killed.parent.glob(f"{killed.name}*"))


def test_what_cannot_be_predicted_is_measured_all_the_same(run, monkeypatch, tmp_path):
    monkeypatch.setattr(PytorchBackend, "predict", failing(ModelError("model: no way to trace it")))
    status, out, _ = run("profile", "tiny.yaml", "device=cpu", "output_dir=here")
    assert status == 0
    assert "not predicted: model: no way to trace it" in out.splitlines()
    found = profiles.load(tmp_path / "here")
    assert found.predicted is None
    assert found.predicted_peak_bytes is None
    assert any("no way to trace it" in note for note in found.notes)


def test_a_full_disk_names_the_file_and_leaves_nothing_cut(run, monkeypatch, tmp_path):
    monkeypatch.setattr(step_profiler.shutil, "copyfileobj", failing(OSError(28, "No space left on device")))
    status, _, err = run("profile", "tiny.yaml", "device=cpu")
    assert status == 2
    assert re.fullmatch(r"tightfit: runs/tiny/\.unfinished-profile-[\w-]+/trace\.json\.gz: cannot be written "
                        r"\(No space left on device\); free some space, or write another output_dir=\.\.\.",
                        err.splitlines()[-1])
    assert list((tmp_path / "runs/tiny").iterdir()) == []


def test_an_interrupted_profile_leaves_the_one_before_it_whole(run, monkeypatch, tmp_path):
    assert run("profile", "tiny.yaml", "device=cpu")[0] == 0
    files = {path: path.read_bytes() for path in (tmp_path / "runs/tiny").rglob("*") if path.is_file()}
    monkeypatch.setattr(measure, "prediction", failing(KeyboardInterrupt()))
    assert run("profile", "tiny.yaml", "device=cpu", "seed=7")[0] == 130
    assert {path: path.read_bytes() for path in (tmp_path / "runs/tiny").rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(("words", "expected"), [
    (("profile", "tiny.yaml", "mode=inference"), "mode=train"),
    (("profile", "tiny.yaml", "seq_len=0"), "seq_len"),
    (("profile", "nowhere.yaml"), "nowhere"),
    (("profile", "tiny.yaml", "--gpu", "rtx-nothing"), "write a size such as 24GB for a card that is not there"),
    (("profile", "tiny.yaml", "--gpu", "8xl4"), "or ask tightfit plan RECIPE --gpu 8xl4"),
    (("profile", "tiny.yaml", "--gpu-memory", "24GB"), "no such option, which --help lists"),
    (("profile", "tiny.yaml", "output_dir=tiny.yaml", "device=cpu"), "output_dir"),
    (("report", "nowhere"), "tightfit profile"),
], ids=str)  # fmt: skip
def test_bad_input_is_one_sentence(run, words, expected):
    status, _, err = run(*words)
    assert status == 2
    assert expected in err
    assert "Traceback" not in err
