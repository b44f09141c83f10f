"""`tightfit plan` as a person uses it: tiny models planned for real, here and for a GPU that is not there."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import TrainingArguments

import tightfit
from tests.data.helpers import write_jsonl
from tests.display.plans import fitting, nothing_fits
from tests.failing import failing
from tests.own_models import Scores
from tightfit.backends import load_backend
from tightfit.backends.pytorch.measure.calibration import measure as measuring
from tightfit.calibration import Calibration, Curve, processor, torch_version
from tightfit.commands import plan as plan_command
from tightfit.devices import Device, find_device
from tightfit.display.plan_table import ReadablePlan
from tightfit.errors import ModelError, RecipeError, Refused
from tightfit.models import GIVEN_MODULE
from tightfit.planner import own_device
from tightfit.planning.plan import Interrupted
from tightfit.recipe import Recipe
from tightfit.recipe.lookup import load_recipe

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "attn_pdrop": 0.0}
FIELDS = {"model": "gpt2", "model_overrides": TINY, "vocab_size": 64, "seq_len": 16, "batch_size": 4,
          "micro_batch_size": 2, "compile": "off", "checkpointing": "none"}
RECIPE = """\
model: gpt2
model_overrides: {n_layer: 2, n_head: 2, n_embd: 16, n_positions: 32, attn_pdrop: 0.0}
vocab_size: 64
seq_len: 16
batch_size: 4
micro_batch_size: 2
compile: "off"
checkpointing: none
if_cuda: {batch_size: 6}
"""
COLUMNS = {"rank", "recipe", "fits", "memory", "time", "calibrated", "untraced", "reasons"}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # no calibration made here comes in
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_a_gpu_that_is_not_there(recipe, run):
    status, out, _ = run("plan", recipe, "--gpu", "rtx-4090")
    assert status == 0
    assert "on RTX 4090 (23.5 GiB): global batch 6, seq_len 16" in out
    for word in ("2 x 3", "bf16", "adamw", "sdpa", "tokens/s", "MFU", "yes", "A", "....|", "with CUDA context"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80


def test_this_machines_processor(recipe, run):
    status, out, _ = run("plan", recipe, "batch_size=2", "precision=fp32", "--gpu", "cpu", "-v")
    assert status == 0
    assert "on CPU" in out
    for word in ("global batch 2", "2 x 1", "fp32", "tokens/s", "--calibrate --device cpu"):
        assert word in out


def test_inference_is_planned_by_number_format_and_attention(recipe, run):
    status, out, _ = run("plan", recipe, "mode=inference", "inference=8", "compile=auto", "--gpu", "rtx-4090", "-v")
    assert status == 0
    assert "on RTX 4090 (23.5 GiB): inference, 6 prompts, seq_len 16, 8 new tokens" in out
    for word in ("prefill", "bf16 full_eval=true", "eager", "KV cache", "6 combinations considered, 7 traces made"):
        assert word in out
    assert "micro x" not in out
    assert "micro_batch_size=2, checkpointing=none: for training alone" in " ".join(out.split())
    status, _, err = run("plan", recipe, "mode=inference", "inference=20", "--gpu", "cpu")
    assert status == 2
    assert "write seq_len=12" in err


def test_json_is_all_that_standard_output_holds(recipe, run):
    status, out, err = run("plan", recipe, "--gpu", "rtx-4090", "--json")
    assert status == 0, err
    values = json.loads(out)
    assert values["device"] == {"name": "RTX 4090", "memory_bytes": find_device("rtx-4090").memory_bytes,
                                "host_memory_bytes": 48 << 30, "host_memory_assumed": True}
    best = values["candidates"][0]
    assert best.keys() == COLUMNS
    assert best["recipe"]["batch_size"] == 6
    assert best["recipe"]["micro_batch_size"] == 2
    assert sum(best["memory"]["by_category"].values()) == best["memory"]["peak_allocated"] > 0
    assert best["memory"]["peak_reserved"] >= best["memory"]["peak_allocated"]
    assert best["time"]["tokens_per_second"] == pytest.approx(6 * 16 / best["time"]["step_seconds"])
    assert Recipe.from_dict(best["recipe"]).to_dict() == best["recipe"]


def test_what_a_model_prints_is_no_part_of_the_json(recipe, run, monkeypatch):
    def talkative(*_, **__):
        print("a model's own words")
        return ReadablePlan.of(fitting())

    monkeypatch.setattr(plan_command, "plan_on", talkative)
    status, out, err = run("plan", recipe, "--gpu", "l4", "--json")
    assert status == 0
    assert json.loads(out)["candidates"]
    assert "a model's own words" in err


def test_top_shows_the_best_alone(recipe, run, monkeypatch):
    monkeypatch.setattr(plan_command, "plan_on", lambda *_, **__: ReadablePlan.of(fitting()))
    words = ("plan", recipe, "--gpu", "l4", "--json")
    every, best = (json.loads(run(*words, *more)[1])["candidates"] for more in ((), ("--top", "1")))
    assert len(every) == 3
    assert best == every[:1]
    _, out, _ = run("plan", recipe, "--gpu", "l4", "--top", "2")
    assert "24 x 3" in out
    assert "32 x 2" not in out


def test_a_plan_is_drawn_as_a_page(recipe, run, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_command, "plan_on", lambda *_, **__: ReadablePlan.of(fitting()))
    words = ("plan", recipe, "--gpu", "l4", "--html")
    status, out, err = run(*words, tmp_path / "plan.html")
    assert status == 0
    assert "The fastest that fits." in out
    assert err == f"page: {tmp_path / 'plan.html'}\n"
    assert "The fastest that fits." in (tmp_path / "plan.html").read_text()
    for option in ("--html", "--save"):
        status, _, err = run(*words[:-1], option, tmp_path / "gone" / "plan")
        assert status == 2
        assert f"{option[2:]}: " in err
        assert "cannot be written" in err


def test_the_choice_is_saved_as_a_recipe(recipe, run, monkeypatch, tmp_path):
    processor = replace(fitting(), device=Device(kind="cpu", name="CPU", memory_bytes=1 << 30))
    plans = iter([fitting(), nothing_fits(), processor])
    monkeypatch.setattr(plan_command, "plan_on", lambda *_, **__: ReadablePlan.of(next(plans)))
    words, path = ("plan", recipe, "--gpu", "l4", "--save"), tmp_path / "mine.yaml"
    status, _, err = run(*words, path)
    assert (status, err) == (0, f"recipe: {path}\n")
    assert load_recipe(str(path)) == fitting().recipe
    status, _, _ = run(*words, tmp_path / "none.yaml")
    assert status == 2
    assert not (tmp_path / "none.yaml").exists()
    run(*words, path)
    assert load_recipe(str(path)) == fitting().recipe.override(device="cpu")


def test_training_arguments_are_planned_as_they_are(tmp_path, run):
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "bf16": True,
                                "run_name": "mine"}))
    written = [f"model_overrides={json.dumps(TINY)}", "vocab_size=64", "seq_len=16"]
    status, out, _ = run("plan", "model=gpt2", *written, "--training-args", str(file), "--gpu", "l4", "--json")
    assert status == 0
    candidates = json.loads(out)["candidates"]
    assert [(c["recipe"]["micro_batch_size"], c["recipe"]["batch_size"]) for c in candidates] == [(2, 6)]
    assert candidates[0]["recipe"]["precision"] == "bf16"
    assert candidates[0]["recipe"]["compile"] == "off"
    words = ("plan", "model=gpt2", *written, "--training-args", str(file), "--gpu")
    assert re.search("not read +hugging_face: without effect here: run_name", run(*words, "l4")[1])
    assert "not read: hugging_face: without effect here: run_name" in run(*words, "l4,t4")[1]


def test_use_cpu_of_training_arguments_gives_way_to_a_named_gpu(tmp_path, run):
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"per_device_train_batch_size": 2, "bf16": True, "use_cpu": True}))
    fields = [f"model_overrides={json.dumps(TINY)}", "vocab_size=64", "seq_len=16"]
    words = ("plan", "gpt2", *fields, "--training-args", str(file), "--gpu", "l4")
    found = json.loads(run(*words, "--json")[1])
    assert found["candidates"][0]["recipe"]["device"] == "auto"
    assert "use_cpu: left aside for L4" in found["candidates"][0]["reasons"]
    assert re.search("not read +use_cpu: left aside for L4", run(*words)[1])
    status, _, err = run(*words, "device=cpu")
    assert (status, "device: 'cpu' contradicts planning for l4" in err) == (2, True)
    plan = tightfit.plan("gpt2", TrainingArguments(use_cpu=True, per_device_train_batch_size=1), gpu="l4")
    assert plan.device.name == "L4"


def test_training_arguments_stand_between_the_recipe_and_the_overrides(tmp_path):
    arguments, recipe = tmp_path / "arguments.json", tmp_path / "mine.yaml"
    arguments.write_text('{"learning_rate": 0.5, "per_device_train_batch_size": 2}')
    recipe.write_text("{model: gpt2, seq_len: 7, learning_rate: 0.1, batch_size: 9, if_cuda: {seq_len: 8, seed: 3}}")
    read = load_recipe(str(recipe), ["batch_size=4"], cuda=True, training_arguments=arguments)
    assert (read.learning_rate, read.batch_size, read.seq_len, read.seed) == (0.5, 4, 8, 42)
    assert load_recipe(str(recipe), cuda=False, training_arguments=arguments).seq_len == 7


@pytest.mark.parametrize(("words", "expected"), [
    (["--gpu", "rtx-4091"], ["'rtx-4091'", "'rtx-4090'"]),
    (["--gpu", "a100"], ["'a100'", "a100-40gb"]),
    (["--gpu-memory", "24"], ["'24'", "24GB"]),
    (["--gpu", "cpu", "--gpu-memory", "24GB"], ["24GB", "processor"]),
    (["--gpu", "all", "--gpu-memory", "24GB"], ["24GB", "several are compared"]),
    (["--gpu", "l4,t4", "--save", "a.yaml"], ["save: a.yaml", "--gpu with its name"]),
    (["--gpu", "l4,rtx-4091"], ["'rtx-4091'", "'rtx-4090'"]),
    (["--gpu", "8xl4,t4"], ["gpu: 'l4,t4'", "one device each"]),
    (["--gpu", "l4,8xt4"], ["gpu: '8xt4' cannot be one of several", "--gpu l4,rtx-4090"]),
    (["--gpu", "l4,cpu"], ["gpu: 'cpu' cannot be one of several"]),
    (["--gpu", "24GB,l4"], ["gpu: '24GB' cannot be one of several"]),
    (["--gpu", "l4,t4", "--price", "h100-sxm=2"], ["price: H100 SXM", "not among"]),
    (["--gpu", "all", "--price", "rtx-4090"], ["'rtx-4090'", "rtx-4090=0.35"]),
    (["--gpu", "all", "--price", "rtx-4091=1"], ["price: 'rtx-4091=1'", "not in the catalogue", "'rtx-4090'"]),
    (["--gpu", "all", "--price", "a100-80gb=1.5"], [
        "price: 'a100-80gb=1.5': 'a100-80gb' is the name of 2 GPUs; write one of: a100-80gb-pcie, a100-80gb-sxm"]),
    (["--gpu", "l4", "--price", "foo"], ["price: 'foo'", "--tokens 1B"]),
    (["--gpu", "l4", "--price", "foo", "--tokens", "1B"], ["price: 'foo'", "--price 2.50"]),
    (["--gpu", "l4", "--tokens", "many"], ["tokens: 'many'", "500M"]),
    (["--gpu", "l4", "--tokens", "1001T"], ["tokens: '1001T'", "up to 1000T"]),
    (["--gpu", "l4", "--longest", "seq_len", "--largest", "micro_batch_size"], ["two questions"]),
    (["--gpu", "all", "--html", "a.html"], ["html: a.html", "--gpu with its name"]),
    (["--gpu", "all", "--save", "a.yaml"], ["save: a.yaml", "--gpu with its name"]),
    (["--gpu", "all", "--longest", "seq_len"], ["longest: 'seq_len'", "asked of one GPU"]),
    (["--gpu", "l4", "--tokens", "1B", "--price", "2", "--price", "3"], ["price: 2, 3 are several", "--gpu all"]),
    (["--gpu", "l4", "--host-memory", "0GB"], ["host-memory: '0GB'", "64GB"]),
    (["--gpu", "l4", "--save", ""], ["save: . cannot be written"]),
    (["--gpu", "l4", "--save", "a", "--html", "a"], ["save: a is the page of --html"]),
    (["--gpu", "2xl4", "--longest", "seq_len"], ["asked of one device"]),
    (["--gpu", "l4", "--largest", "model=qwen9-*"], ["model=qwen9-*", "no bundled model"]),
    (["--gpu", "l4", "--top", "0"], ["top: 0 should be 1 or more"]),
    (["--gpu", "l4", "--top", "x"], ["top: 'x' should be a whole number"]),
    (["--gpu", "l4", "--gpus", "1e3"], ["gpus: '1e3' should be a whole number", "--gpus 2"]),
    (["--gpu-memory", ""], ["gpu-memory: ''", "24GB"]),
    (["--gpu", "l4", "--host-memory", ""], ["host-memory: ''", "64GB"]),
    (["--gpu", "l4", "--tokens", ""], ["tokens: ''", "500M"]),
    (["batch_size=4", "micro_batch_size=8", "--gpu", "l4"], ["micro_batch_size: 8", "batch_size=4"]),
    (["--gpu", "l4", "--price", "l4=1"], ["'l4=1'", "--gpu all"]),
    (["--gpu", "l4", "--tokens", "1B", "--price", "h100-sxm=2"], ["'h100-sxm=2' is not the price of L4"]),
    (["--gpu", "l4", "--training-args", "gone.json"], ["gone.json", "to_json_string"]),
    (["--gpu", "l4", "--cards=l4"], ["--cards", "cards=l4"]),
    (["--gpu", "l4", "batch_size=0"], ["batch_size", "0"]),
    (["--gpu", "l4", "device=cpu"], ["device", "'cpu'", "l4"]),
    (["--gpu", "cpu", "device=cuda"], ["device", "'cuda'", "cpu"]),
    (["--gpu", "all", "device=cpu"], ["device", "'cpu'", "all"]),
    (["--gpu", "v100-16gb", "precision=bf16"], ["precision: ", "V100 16GB", "write precision=fp16"]),
    (["--gpu", "l4", "checkpointing=memory-budget"], ["checkpointing: ", "write compile=per-block"]),
])
def test_bad_input_is_one_line_and_exit_2(recipe, run, words, expected):
    status, out, err = run("plan", recipe, *words, "--json")
    assert (status, out) == (2, "")
    assert err.startswith("tightfit: ")
    assert err.count("\n") == 1
    for word in expected:
        assert word in err


@pytest.mark.parametrize(("words", "expected"), [
    (["plan", "--gpu", "l4"], ["RECIPE"]),
    (["plan", "nope", "--gpu", "l4"], ["'nope'", "recipe"]),
    (["doctor", "--device", "cpu"], ["--calibrate"]),
    (["plan", "gpt2", "model_overrides.n_head=0", "--gpu", "l4"], ["model_overrides.n_head: 0 should be 1 or more"]),
    (["plan", "seq_len=16", "--gpu", "l4"], ["RECIPE is missing before seq_len=16; write a model too"]),
    (["train", "data=notes.txt"], ["RECIPE is missing before data=notes.txt"]),
    (["profile", "data=notes.txt"], ["RECIPE is missing before data=notes.txt"]),
    (["plan", "gpt2", "seq_len=2048", "--gpu", "l4"], ["seq_len: 2048", "1024 positions; write seq_len=1024"]),
    (["plan", "bert-base", "seq_len=600", "mode=inference", "--gpu", "l4"], ["write seq_len=512"]),
    (["doctor", "--calibrate", "--device", "tpu"], ["device", "'tpu'"]),
])
def test_other_bad_commands(run, words, expected):
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    for word in expected:
        assert word in err


def test_a_model_among_the_overrides_is_read_as_a_name_is(tmp_path, run):
    file = tmp_path / "arguments.json"
    file.write_text('{"per_device_train_batch_size": 2}')
    words = ["model_overrides.num_hidden_layers=1", "--training-args", str(file), "--gpu", "l4", "--json"]
    asked = [json.loads(run("plan", name, *words)[1])["candidates"][0]["recipe"]
             for name in ("bert-base", "model=bert-base")]
    assert asked[0] == asked[1]
    assert (asked[1]["task"], asked[1]["seq_len"]) == ("masked-lm", 512)


def test_training_arguments_need_a_model(tmp_path, run):
    file = tmp_path / "arguments.json"
    file.write_text("{}")
    status, _, err = run("plan", "seq_len=16", "--training-args", str(file), "--gpu", "l4")
    assert status == 2
    assert "model=gpt2" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_machine_without_a_gpu_is_told_of_every_gpu(recipe, run, monkeypatch):
    monkeypatch.setattr("tightfit.planner.catalogue", lambda: [find_device(name) for name in ("l4", "t4")])
    status, out, _ = run("plan", recipe)
    assert status == 0
    assert "gpt2 on every GPU of the catalogue: global batch 6, seq_len 16" in out
    lines = [line.split() for line in out.splitlines() if line.startswith(("T4 ", "L4 "))]
    assert [(line[0], len(line)) for line in lines] == [("T4", 10), ("L4", 10)]
    for word in ("trainable=lora base=nf4", "trainable=lora base=bf16", "precision=fp16", "8 traces"):
        assert word in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    [row] = json.loads(run("plan", recipe, "--top", "1", "--json")[1])["gpus"]
    assert row["device"]["name"] == "T4"
    assert row["ways"]["QLoRA"]["fits"]
    status, out, err = run("plan", recipe, "--tokens", "1B")
    assert (status, out) == (2, "")
    for word in ("--gpu l4,rtx-4090", "--gpu all", "tightfit gpus", "--gpu cpu"):
        assert word in err


def test_a_recipe_for_the_processor_needs_no_gpu(recipe, run):
    status, out, _ = run("plan", recipe, "device=cpu", "precision=fp32")
    assert status == 0
    assert "on CPU" in out


def test_nothing_fits_is_shown_and_exits_2(recipe, run, monkeypatch):
    monkeypatch.setattr(plan_command, "plan_on", lambda *_, **__: ReadablePlan.of(nothing_fits()))
    status, out, err = run("plan", recipe, "--gpu", "l4")
    assert status == 2
    assert "#1 lacks 90.0 GiB" in " ".join(out.split())
    assert err == "tightfit: nothing fits on Test Card; what would help is said above\n"
    status, out, err = run("plan", recipe, "--gpu", "l4", "--json")
    assert status == 2
    assert json.loads(out)["candidates"][0]["fits"] == "no"
    assert "checkpointing=every-block" in err
    assert err.count("\n") == 1


def test_every_gpu_is_compared(recipe, run, monkeypatch):
    cards = [find_device(name) for name in ("rtx-4090", "l4", "v100-16gb")]
    monkeypatch.setattr("tightfit.planner.catalogue", lambda: cards)
    words = ("plan", recipe, "precision=bf16", "loss=plain", "--gpu", "all", "--price", "l4=0.001")
    status, out, _ = run(*words)
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith(("RTX 4090", "L4"))]
    assert lines[0].startswith("L4")
    assert lines[0].rstrip().endswith("2 x 3 a")
    text = " ".join(out.split())
    assert "a precision=bf16 loss=plain checkpointing=none optimizer=adamw attention=sdpa compile=off" in text
    assert "refused on V100 16GB: precision: V100 16GB computes bf16 in emulation" in text
    status, out, _ = run(*words, "--json")
    rows = json.loads(out)["gpus"]
    assert [row["device"]["name"] for row in rows] == ["L4", "RTX 4090", "V100 16GB"]
    assert [row["price"] for row in rows] == [0.001, None, None]
    assert rows[0]["candidates"][0].keys() == COLUMNS
    status, out, _ = run(*words[:-2], "--price", "rtx-4090=0.001", "--tokens", "3M", "--host-memory", "64GB", "--json")
    rows = json.loads(out)["gpus"][:2]
    assert [(row["device"]["name"], row["price"]) for row in rows] == [("RTX 4090", 0.001), ("L4", None)]
    assert [row["whole_run"]["tokens"] for row in rows] == [3_000_000] * 2
    assert [row["device"].get("host_memory_bytes") for row in rows] == [64 << 30] * 2
    assert rows[0]["whole_run"]["cost"] == pytest.approx(rows[0]["whole_run"]["hours"] * 0.001)


def test_ctrl_c_shows_the_best_so_far(recipe, run, tmp_path, monkeypatch):
    stopped = Interrupted(fitting(), "the search was not over")
    plans = failing(stopped, lambda *_, **__: ReadablePlan.of(nothing_fits()), times=1)
    monkeypatch.setattr(plan_command, "plan_on", plans)
    words = ("plan", recipe, "--gpu", "l4", "--save", tmp_path / "chosen.yaml")
    status, out, err = run(*words)
    assert status == 130
    assert "10,000" in out
    assert err.endswith("the search was not over\ntightfit: interrupted\n")
    assert not (tmp_path / "chosen.yaml").exists()
    assert "Nothing fits" in run(*words)[1]


def test_several_gpus_are_compared_in_whichever_order_they_are_named(recipe, run, monkeypatch):
    monkeypatch.setattr("tightfit.planner.catalogue", list)
    asked = [("--gpu", "rtx-4090,l4", "--price", "l4=0.001"), ("--gpu", "L4", "--gpu", "4090", "--price", "4090=0.001")]
    answers = [json.loads(run("plan", recipe, "precision=bf16", "loss=plain", "--json", *more)[1]) for more in asked]
    assert [[row["device"]["name"] for row in answer["gpus"]] for answer in answers] == [
        ["L4", "RTX 4090"], ["RTX 4090", "L4"]]


def test_the_longest_sequences_that_fit_are_planned(recipe, run):
    words = ("plan", recipe, "--gpu-memory", "3GB", "--longest", "seq_len")
    status, out, _ = run(*words)
    assert status == 0
    assert "seq_len 32" in out  # all of the model's positions
    assert "seq_len=32 fits" in out
    assert json.loads(run(*words, "--json")[1])["largest"] == {"seq_len": 32}


def test_gpus_are_listed(run):
    status, out, _ = run("gpus")
    assert status == 0
    assert "rtx-4090" in out
    assert "h100-sxm" in out


def test_what_calibration_measures_is_used_by_the_next_plan(recipe, run, monkeypatch):
    def measure(device, progress):
        curve = Curve((1.0, 1e9), (1e-7, 1.0))
        return Calibration(device="CPU", kind="cpu", processor=processor(), torch=torch_version(),
                        threads=torch.get_num_threads(), memory={"add": {"float32": curve}}, host={"forward": 1e-5})

    monkeypatch.setattr(measuring, "measure", measure)
    status, out, _ = run("doctor", "--calibrate", "--device", "cpu")
    assert status == 0
    assert "1.0 GB/s" in out
    assert "plans for this device are calibrated by it" in " ".join(out.split())
    _, out, _ = run("plan", recipe, "precision=fp32", "--gpu", "cpu", "--verbose")
    assert "Calibrated: by measurements of this machine." in out


def test_from_python(recipe):
    plan = tightfit.plan("gpt2", {**FIELDS, "precision": "bf16"}, gpu="rtx-4090")
    assert isinstance(plan, tightfit.ReadablePlan)
    assert plan.recipe.micro_batch_size == 2
    assert plan.recipe.optimizer.name == "adamw"
    assert "2 x 2" in str(plan)
    assert "<pre" in plan._repr_html_()
    assert "<details><summary>The recipe</summary><pre>model: gpt2" in plan._repr_html_()
    assert plan.training_arguments()["gradient_accumulation_steps"] == 2
    named = tightfit.plan(recipe=recipe, gpu="l4")
    assert named.recipe.batch_size == 6


@pytest.mark.parametrize(("progress", "shown"), [(True, "planning: 0 s, 0 traces done"), (False, "")])
def test_from_python_progress_is_shown_where_it_is_asked_for(progress, shown, capsys):
    tightfit.plan("gpt2", {**FIELDS, "precision": "bf16"}, gpu="rtx-4090", progress=progress)
    out, err = capsys.readouterr()
    assert (out, err[: len(shown) or None]) == ("", shown)


def test_a_module_of_the_callers_own():
    fields = {**FIELDS, "model_overrides": {}, "precision": "fp32", "data": {"packing": False}}
    plans = [tightfit.plan(Scores(64, width), fields, gpu="l4") for width in (16, 32)]
    weights = [plan.candidates[0].estimate.memory.by_category["weights"] for plan in plans]
    assert weights == [4 * (64 * width + width * 64 + 64) for width in (16, 32)]
    assert all(plan.chosen.estimate.time.mfu == 0 for plan in plans)
    assert plans[0].recipe.model == GIVEN_MODULE


FACTORY = """\
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids):
        return self.out(self.embed(input_ids))
"""


def test_a_factory_named_in_a_recipe_or_in_the_place_of_one(tmp_path, run, monkeypatch):
    (tmp_path / "factory_of_words.py").write_text(FACTORY)
    (tmp_path / "mine.yaml").write_text("model: factory_of_words:Words\nvocab_size: 64\nseq_len: 16\nbatch_size: 4\n"
                                        "data: {source: dummy}\nprecision: fp32\nattention: sdpa\noptimizer: adamw\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    fields = ("vocab_size=64", "seq_len=16", "batch_size=4", "data=dummy", "precision=fp32", "attention=sdpa",
              "optimizer=adamw")
    for words, device in (
        ((str(tmp_path / "mine.yaml"),), "t4"), ((str(tmp_path / "mine.yaml"),), "cpu"),
        (("factory_of_words:Words", *fields), "t4"), ((*fields, "model=factory_of_words:Words"), "t4"),
    ):
        status, out, err = run("plan", *words, "compile=off", "--gpu", device, "--json")
        assert status == 0, err
        held = json.loads(out)["candidates"][0]["memory"]["by_category"]
        assert held["weights"] >= 4 * (64 * 16 + 16 * 64 + 64)


def test_a_model_that_cannot_be_traced_is_named():
    # texts are packed, of which its forward pass knows nothing
    fields = {**FIELDS, "model_overrides": {}, "attention": "sdpa", "data": "notes.txt"}
    with pytest.raises(ModelError, match=r"packing: Scores .*data.packing=false"):
        tightfit.plan(Scores(64, 16), fields, gpu="l4")


def test_what_a_trace_does_not_show_is_each_candidates_own():
    plan = tightfit.plan("gpt2", {**FIELDS, "micro_batch_size": "auto", "batch_size": 64}, gpu="rtx-4090")
    backend, device = load_backend("pytorch"), find_device("rtx-4090")
    for candidate in plan.candidates:
        figures = backend.predict(candidate.recipe, device).untraced
        assert candidate.estimate.untraced == tuple(figures)
        assert sum(figure.bytes for figure in figures if figure.where == "host") == candidate.estimate.memory.host
    assert all(f"{figure.name}, " in plan.text(verbose=True) for figure in plan.chosen.estimate.untraced)


def test_a_plans_recipe_can_be_applied_to_the_model():
    model = Scores(64, 16)
    plan = tightfit.plan(model, {**FIELDS, "model_overrides": {}}, gpu="cpu")
    assert not plan.recipe.data.packing  # as its rows are trained
    applied = tightfit.apply(model, plan.recipe)
    applied.model(torch.zeros(2, 16, dtype=torch.long)).sum().backward()
    applied.optimizer.step()
    assert plan.training_arguments()["use_cpu"] is True
    with pytest.raises(RecipeError, match=r"auto; .*tightfit\.plan"):
        tightfit.apply(model, FIELDS)


def test_the_machines_own_devices():
    recipe = Recipe(device="cpu")
    assert own_device(recipe, "cpu").kind == "cpu"
    assert (own_device(recipe, "cuda") is not None) == torch.cuda.is_available()


def test_host_memory_limits_what_waits_there():
    streamed = {"accumulation": "by-block", "update": "with-forward", "offload": "host", "attention": "sdpa",
                "precision": "fp32", "optimizer": "adamw", "loss": "plain", "data": {"source": "dummy"}}
    recipe = {**FIELDS, **streamed}

    assert tightfit.plan(None, recipe, "rtx-4090", host_memory="8GB").chosen is not None
    lacking = tightfit.plan(None, recipe, "rtx-4090", host_memory="0.01MiB")
    assert lacking.chosen is None
    assert lacking.candidates[0].estimate.memory.host_missing > 0
    for gpu, size in (("cpu", "8GB"), ("rtx-4090", "lots")):
        with pytest.raises(RecipeError, match="host-memory"):
            tightfit.plan(None, FIELDS, gpu, host_memory=size)


def test_a_model_that_is_pinned_to_the_gpu_and_does_not_fit_is_told_of_the_hosts_memory():
    pins = {"seq_len": 32, "batch_size": 2, "micro_batch_size": 1, "checkpointing": "every-block", "precision": "bf16",
            "loss": "chunked", "optimizer": "adamw", "attention": "sdpa", "compile": "off", "offload": "none"}
    plan = tightfit.plan("gpt2", pins, gpu_memory="2.3GB")
    assert plan.chosen is None
    change = plan.answers.smallest_change
    assert (change.text, change.estimate.fit_rank.is_safe) == ("offload=auto", True)
    assert change.estimate.memory.host > 2**30


def test_a_run_over_epochs_of_data_that_is_here_is_as_long_as_its_samples_make_it(recipe, run, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_command, "plan_on", lambda *_, **__: ReadablePlan.of(fitting()))
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"{number} and some more words " * 9} for number in range(40)])
    words = ("plan", recipe, "--gpu", "l4", f"data={tmp_path / 'rows.jsonl'}", "num_train_epochs=2.5",
             "vocab_size=300")
    unpacked = run(*words, "data.packing=false", "data.eval_fraction=0")[1]
    assert f"for {round(2.5 * 40 * 16):,} tokens" in " ".join(unpacked.split())
    priced = " ".join(run(*words, "--price", "2")[1].split())  # packed
    assert re.search(r"whole run .* for [\d,]+ tokens, cost [\d.]+ at 2 an hour", priced)
    status, out, err = run(*words, "task=sequence-classification")
    assert (status, "whole run" in out) == (0, False)
    assert "note: how long 2.5 epochs take is not known: data.label: " in err


@pytest.mark.parametrize(("fields", "said"), [
    ({"backend": "jax", "optimizer": "adamw-8bit"}, "adamw-8bit is not in backend: jax"),
    ({"backend": "jax", "deterministic": True}, "XLA has a flag for it"),
    ({"mode": "inference", "seq_len": 1000, "inference": {"new_tokens": 100}}, "write seq_len=924"),
])
def test_what_nothing_would_mend_is_refused_before_anything_is_traced(fields, said):
    traced = []
    with pytest.raises(Refused, match=said):
        tightfit.plan("gpt2", fields, gpu="l4", progress=lambda *each: traced.append(each))
    assert not traced
