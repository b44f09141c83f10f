"""Published runs become the recipes that their words say, or are left out with the reason; errors are summed up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from published import FAR, compare, held_out, published, spread, summary, with_reasons
from published_context import as_loaded, loads_all_with
from published_held_to import held_to
from published_intervals import card_error, interval, intervals, needed
from published_reasons import REASONS
from published_recipes import (
    CannotExpress,
    Row,
    backward_samples_per_second,
    counted_by,
    express,
    gradients_stayed,
    samples_per_second,
)
from tightfit.backends import load_backend
from tightfit.backends.cuda_context import assumed
from tightfit.backends.pytorch.model_size import model_size
from tightfit.devices import MIB, find_device
from tightfit.planning.standard_tools import standard_tools
from tightfit.planning.timing.uncertainty import CARD_ERROR

ROWS = {row["id"]: row for row in published()}
RECORD = json.loads((Path(__file__).parents[1] / "results" / "published.json").read_text("utf-8"))
RUN: Row = {
    "id": "run", "grade": "A", "gpu": "V100-SXM2-16GB (cloud)", "shape": "bert-base-uncased", "seq_len": 32,
    "task": "sequence classification, random", "micro_batch": 2, "accumulation": 3, "precision": "fp32",
    "optimizer": "AdamW (adamw_hf)", "checkpointing": "none", "attention": "eager", "loss": "plain CE",
    "source": "somebody/else @1", "notes": "",
}  # fmt: skip
LOOP = {"name": "adamw", "implementation": "loop"}


def run(**changes: Any) -> Row:
    return {**RUN, **changes}


def test_a_runs_words_become_a_recipe():
    found = express(run())
    recipe = found.recipe
    assert (found.device.name, found.timed, found.memory, found.kernels) == ("V100 16GB", "step", "", "")
    assert (recipe.model, recipe.task, recipe.seq_len) == ("bert-base", "sequence-classification", 32)
    assert (recipe.micro_batch_size, recipe.batch_size) == (2, 6)
    values = recipe.to_dict()
    assert (values["precision"], values["attention"], values["loss"]) == ("fp32", "eager", "plain")
    assert (values["checkpointing"], values["compile"]) == ("none", "off")
    assert values["optimizer"] == LOOP
    assert recipe.open_choices() == ()


@pytest.mark.parametrize(("changes", "field", "value"), [
    ({"precision": "tf32 (inferred)", "gpu": "A100-SXM4-40GB"}, "precision", {"name": "fp32", "tf32": True}),
    ({"precision": "fp16 autocast"}, "precision", "fp16"),
    ({"precision": "fp16 (apex AMP O2, dynamic scale)"}, "precision", "fp16"),
    ({"precision": "fp16 (apex AMP O2)", "gpu": "L4"}, "precision", {"name": "bf16-pure", "rounding": "nearest"}),
    ({"optimizer": "torch AdamW", "versions": "torch 1.13.0"}, "optimizer", LOOP),
    ({"optimizer": "torch AdamW", "versions": "torch 2.1"}, "optimizer", {**LOOP, "implementation": "foreach"}),
    ({"optimizer": "apex FusedAdam"}, "optimizer", "adamw"),
    ({"checkpointing": "full per-layer"}, "checkpointing", "every-block"),
    ({"attention": "HF default (SDPA)"}, "attention", "sdpa"),
    ({"attention": "SDPA flash"}, "attention", {"name": "sdpa", "kernel": "flash"}),
    ({"attention": "eager (no flash)"}, "attention", "eager"),
    ({"lora": True, "precision": "nf4 weights (adapters fp32)", "notes": "LoRA r=16 on q,k,v,o."}, "base", "nf4"),
    ({"task": "inference forward"}, "mode", "inference"),
])  # fmt: skip
def test_words_of_a_field(changes, field, value):
    assert express(run(**changes)).recipe.to_dict()[field] == value


def test_adapters_are_of_the_layers_that_a_runs_notes_name():
    found = express(run(shape="mistralai/Mistral-7B-v0.1", lora=True, gpu="A100-SXM4-80GB", notes="r=16 on q,k,v,o.",
                        precision="fp16 weights (adapters fp32)", task="SFT packed (rows of 32 tokens)"))
    trainable = found.recipe.trainable
    assert (trainable.rank, trainable.targets) == (16, ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert (found.timed, found.recipe.to_dict()["base"]) == ("step", "bf16")


def test_a_run_may_say_its_recipe_itself():
    row = run(recipe={"model": "gpt2", "compile": "whole", "precision": "bf16"}, gpu="L4", held_out="today",
              memory_bytes=1, memory_kind="nvidia-smi used", precision="of words that no field has")
    found = express(row)
    values = found.recipe.to_dict()
    assert (values["model"], values["compile"], found.recipe.micro_batch_size) == ("gpt2", "whole", 2)
    assert (found.device.name, found.recipe.batch_size, found.timed, found.memory) == ("L4", 6, "nothing", "driver")
    assert express({**row, "step_seconds": 1.0}).timed == "step"


def test_runs_held_out_stand_by_themselves():
    rows = {row["id"] for row in RECORD["rows"] if "held_out" in row}
    assert rows == {name for name, row in ROWS.items() if "held_out" in row}
    sums = RECORD["held_out"]
    assert sums["runs"] == len(rows)
    assert sums["speed"]["all"]["rows"] == sum("speed" in row for row in RECORD["rows"] if row["id"] in rows)
    assert RECORD["summary"]["fits"]["rows"] + sums["fits"]["rows"] == sum("fits" in row for row in RECORD["rows"])
    near = {"id": "a-1", "card": "T4", "speed": {"error": 0.0, "published": 1.0, "predicted": 1.0, "work_error": 0.1},
            "fits": {"agree": True}}  # fmt: skip
    found = held_out([near, {**near, "id": "b-1", "speed": {**near["speed"], "predicted": 9.0, "error": 8.0}}])
    assert (found["speeds_inside_their_interval"], found["fits"]["agree"]) == (1, 2)
    assert (found["speed"]["a"]["worst"], found["speed"]["b"]["worst"]) == (0.0, 8.0)


@pytest.mark.parametrize(("changes", "reasons"), [
    ({"gpu": "GTX 1080 Ti"}, ["gpu: GTX 1080 Ti is not in the catalogue"]),
    ({"gpu": "RTX 3080 Laptop"}, ["gpu: RTX 3080 Laptop is not in the catalogue"]),
    ({"lora": True}, ["model: LoRA of a rank or targets that are not stated"]),
    ({"n_gpus": 8}, ["parallel: several GPUs"]),
    ({"optimizer": "apex FusedLAMB", "task": "MLM+NSP pretraining", "loss": "plain CE on MLM logits"},
     ["task: logits of the hidden positions alone", "optimizer: LAMB"]),
    ({"shape": "bigscience/bloom (176B)"}, ["model: bigscience/bloom is not in the table of shapes"]),
    ({"precision": "FP8 (TE)"}, ["precision: FP8 (TE)"]),
    ({"seq_len": None}, ["seq_len: not stated"]),
])  # fmt: skip
def test_what_no_recipe_says_is_left_out_with_every_reason(changes, reasons):
    with pytest.raises(CannotExpress) as told:
        express(run(**changes))
    assert str(told.value).splitlines() == reasons


@pytest.mark.parametrize(("name", "parameters"), [
    ("peft-full-3b", 3_212_749_824),
    ("litgpt-full-tinyllama", 1_100_048_384),
    ("neusight-l4-opt_13-inf-2048-2", 1_315_758_080),
    ("neusight-h100-sxm5-80gb-gpt3_27-train-2048-1", 2_651_553_280),
])
def test_shapes_have_the_published_numbers_of_parameters(name, parameters):
    assert model_size(express(ROWS[name]).recipe).parameters == parameters


def test_a_published_forward_pass_has_no_dropout_and_no_update():
    found = express(ROWS["neusight-h100-sxm5-80gb-opt_13-inf-2048-2"])
    assert found.timed == "forward"
    assert not found.fits
    assert found.recipe.model_overrides["dropout"] == 0.0
    both = express(ROWS["neusight-h100-sxm5-80gb-opt_13-train-2048-2"])
    assert both.timed == "forward and backward"
    assert "dropout" not in both.recipe.model_overrides
    assert both.recipe.batch_size == 2 * 2  # the second pass's gradients are added to the first's


def test_who_counted_the_memory():
    assert counted_by("") == ""
    assert counted_by("torch max_memory_allocated /1e9") == "allocated"
    assert counted_by("max memory RESERVED") == "reserved"
    assert counted_by("NVML used (driver)") == counted_by("nvidia-smi used") == "driver"


def test_gradients_stayed_between_steps_before_pytorch_2():
    old, new = "transformers ~4.16, torch ~1.10, driver 460.91", "torch 2.1.0, transformers 4.38.1"
    assert [gradients_stayed(text) for text in (old, "NGC pytorch 21.11", new, "")] == [True, True, False, False]
    memory = {"memory_bytes": 1, "memory_kind": "NVML used", "accumulation": 1}
    found = express(run(**memory, versions=old))
    assert (found.recipe.batch_size, found.held.batch_size, found.held.micro_batch_size) == (2, 4, 2)
    assert express(run(**memory, versions=new)).held == found.recipe
    summed = express(run(**{**memory, "accumulation": 3}, versions=old))
    assert summed.held == summed.recipe  # whose gradients are there as it is


def test_every_reason_is_of_some_run():
    for ids, figure, why in REASONS:
        assert figure in ("speed", "memory")
        assert why
        assert any(re.match(ids, name) for name in ROWS), ids


def test_a_speed_is_in_samples():
    assert samples_per_second(run(samples_per_second=8.5, step_seconds=9)) == 8.5
    assert samples_per_second(run(step_seconds=0.25)) == 8
    assert samples_per_second(RUN) is None


def test_a_run_is_compared_by_speed_memory_and_whether_it_fits():
    backend = load_backend("pytorch")
    tools = standard_tools(backend)
    row = run(samples_per_second=1e-3, memory_bytes=1 << 40, memory_kind="NVML used", oom=False)
    found = express(row)
    trace = tools.predict(found.recipe, found.device)
    result = with_reasons(compare(row, found, trace, trace, tools))
    assert result["speed"]["error"] == pytest.approx(result["speed"]["predicted"] / 1e-3 - 1, rel=1e-3)
    assert result["speed"]["error"] > FAR
    assert "reason" in result["speed"]
    memory = result["memory"]
    assert memory["counted"] == "driver"
    assert memory["error"] == pytest.approx(memory["predicted"] / (1 << 40) - 1, abs=1e-4)
    assert result["fits"] == {"published": True, "predicted": "yes", "agree": True}
    failed = {**row, "oom": True}
    result = compare(failed, express(failed), trace, trace, tools)
    assert "speed" not in result
    assert result["fits"] == {"published": False, "predicted": "yes", "agree": False}


def test_errors_are_summed_up_without_sign():
    found = spread([-0.3, 0.1, 0.2])
    assert (found["median"], found["p95"], found["worst"], found["median_with_sign"]) == (0.2, 0.3, 0.3, 0.1)
    assert (found["rows"], found["within_20_percent"]) == (3, 2)
    row = {"id": "a", "grade": "A", "card": "T4", "source": "s", "precision": "fp32", "timed": "step", "kernels": "",
           "speed": {"error": 0.1, "published": 1.0, "predicted": 1.1, "work_error": 0.1},
           "fits": {"published": True, "predicted": "no", "agree": False}}  # fmt: skip
    other = {**row, "id": "b", "grade": "B", "kernels": "apex", "speed": {**row["speed"], "error": 0.5}}
    totals = summary([row, other])
    assert totals["speed"]["all"]["rows"] == 1
    assert totals["speed"]["by_grade"]["B"]["median"] == 0.5
    assert totals["fits"]["ran_and_refused"] == ["a", "b"]
    assert totals["fits"]["rows"] == 2


def test_intervals_hold_what_they_say():
    row = {"card": "A100 40GB", "kernels": "", "speed": {"published": 1.0, "predicted": 1.25, "work_error": 0.12}}
    assert needed(row) == pytest.approx(0.2)
    assert card_error([row]) == pytest.approx(0.16)  # 0.12 and 0.16 are 0.2 in squares
    near = {**row, "card": "H100 SXM", "speed": {**row["speed"], "predicted": 1.0}}
    found = intervals([row, near])
    assert (found["all"]["rows"], found["measured"]["rows"], found["few"]["rows"]) == (2, 2, 0)
    assert found["all"]["inside"] == sum(needed(each) <= interval(each) for each in (row, near))
    assert found["all"]["inside_left_out"] == 1  # the other card's runs let none expect a fifth


def test_nine_published_runs_of_ten_lie_within_their_interval():
    held = RECORD["summary"]["intervals"]
    assert held["all"]["inside"] >= 0.9 * held["all"]["rows"]
    assert held["all"]["inside_left_out"] >= 0.85 * held["all"]["rows"]
    assert held["plain"]["median_interval"] < 0.2
    for kind, error in CARD_ERROR.items():
        assert abs(held[kind]["card_error"] - error) < 0.01


@pytest.mark.parametrize("case", RECORD["mfu"], ids=lambda case: f"{case['model']} on {case['card']}")
def test_no_mfu_is_above_what_was_ever_published_for_the_card(case):
    assert 0.05 < case["predicted"] <= case["mfu"], case["source"]


def test_old_software_loads_every_kernel():
    versions = {"torch 1.4.0": 10, "transformers ~4.16, torch ~1.10, driver 460.91": 11, "NGC pytorch 19.07": 10,
                "NGC pytorch 20.06": 11, "torch 1.13.0a0+936e930, CUDA 11.8, driver 470": 11, "torch 1.13.1": None,
                "torch 2.1.0, transformers 4.38.1": None, "2024": None, "": None}
    assert {text: loads_all_with(text) for text in versions} == versions
    device = find_device("v100-16gb")
    today = assumed(device)
    assert as_loaded(today, device, "torch 2.1.0") == today
    old = as_loaded(today, device, "torch ~1.10")
    total, range_ = sum(figure.bytes for figure in old), sum(figure.uncertainty for figure in old)
    assert abs(total - 1343 * MIB) < range_  # its own context with one tensor


def test_the_record_holds_every_run_and_looks_for_a_reason_where_it_is_far_off():
    assert sorted(row["id"] for part in ("rows", "left_out") for row in RECORD[part]) == sorted(ROWS)
    assert not [row for row in RECORD["left_out"] if row["why"].startswith("failed")]
    for row in RECORD["rows"]:
        for figure in ("speed", "memory"):
            if figure in row:
                assert ("reason" in row[figure]) == (abs(row[figure]["error"]) > FAR)


def test_the_backward_pass_alone_is_read_from_notes():
    assert backward_samples_per_second(run(notes="fwd 103.5 ms, bwd 109.7 ms. mean of best 5")) == 2e3 / 109.7
    assert backward_samples_per_second(run()) is None


def test_lines_of_what_is_held_say_how_many_rows_they_are_of():
    speed = {"error": -0.2, "published": 1.0, "predicted": 0.8, "work_error": 0.1}
    plain = {"id": "a", "grade": "A", "card": "T4", "kernels": "", "speed": speed, "backward": {"error": 0.05},
             "memory": {"counted": "driver", "error": -0.3, "reason": "known"}}  # fmt: skip
    rows = [plain, {**plain, "kernels": "apex", "memory": {"counted": "allocated", "error": 0.02}},
            {**plain, "grade": "B", "memory": {"counted": "driver", "error": -0.3, "reason": ""}}]
    found = {line["of"]: line for line in held_to(rows, ("A", "A-"))}
    assert (found["speed, plain kernels"]["rows"], found["speed, plain kernels"]["median"]) == (1, 0.2)
    assert found["backward pass of whole fp32 models"]["rows"] == 2
    assert found["allocator's memory, grade A"]["median"] == 0.02
    assert found["driver's memory, plain kernels"]["p95"] == 0.3
    assert found["off by more than 20 %, with a reason, any grade"]["part"] == 0.5
    assert found["speeds inside their interval"]["rows"] == 2
