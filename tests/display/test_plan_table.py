"""Plans on a terminal: tables that fit it, the answers."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.display.plans import COPIES, GIB, candidate, estimate, fitting, nothing_fits, streamed
from tightfit.display.answers import SOURCES
from tightfit.display.plan_table import plan_text, show_plan
from tightfit.display.words import fits
from tightfit.planning.costs import FitRank
from tightfit.recipe import Recipe

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(plan, width, **settings):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", **settings)
    show_plan(plan, console)
    return console.file.getvalue()


def squeezed(text):
    return " ".join(text.split())


@pytest.mark.parametrize("make", [fitting, nothing_fits, streamed])
@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(make, width):
    lines = plan_text(make(), width).splitlines()
    assert max(map(len, lines)) <= width


def test_eighty_columns_hold_every_choice_and_figure_unbroken():
    text = plan_text(fitting(), width=80)
    for word in ("16 x 4", "24 x 3", "32 x 2", "bf16", "none", "adamw-8bit", "sdpa", "off", "13.0 / 14.0", "7.0 / 8.0",
                 "with retries", "3.0 GiB short", "10,000", "9,000", "40 %", "3.28 s"):
        assert re.search(rf"(^|\s){re.escape(word)}(\s|$)", text, re.MULTILINE), (word, text)
    heads = [line.split() for line in text.splitlines() if line.lstrip().startswith("#  ")]
    assert [head[-1] for head in heads] == ["compile", "peak"]


def test_a_wide_terminal_has_one_table():
    lines = plan_text(fitting(), width=200).splitlines()
    heads = [line for line in lines if line.lstrip().startswith("#  ")]
    assert len(heads) == 1
    row = next(line for line in lines if line.lstrip().startswith("1  "))
    assert all(word in row for word in ("16 x 4", "bf16", "13.0 / 14.0", "yes", "10,000", "WW"))


def test_a_techniques_knobs_go_on_a_line_of_their_own_where_they_would_be_too_wide():
    selective = candidate(estimate(), checkpointing={"name": "selective", "keep": "attention"}, optimizer="adamw-8bit")
    lines = plan_text(replace(fitting(), candidates=(selective,), chosen=selective), width=80).splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("1  16 x 4"))
    assert lines[row].split() == ["1", "16", "x", "4", "bf16", "plain", "selective", "adamw-8bit", "sdpa", "off"]
    assert lines[row + 1].split() == ["keep=attention"]
    assert lines[row + 1].index("keep") == lines[row].index("selective")


def test_long_choices_and_narrow_terminals_lose_nothing():
    plan = fitting()
    long = candidate(estimate(), precision="bf16-pure", checkpointing={"name": "memory-budget", "budget": 0.25},
                     optimizer="adamw-anyprecision", attention="flash-attn", compile="per-block")
    text = plan_text(replace(plan, candidates=(long,), chosen=long), width=80)
    choices, _, costs = text.partition("reserved / with\n")
    for word in ("memory-budget", "budget=0.25", "adamw-anyprecision", "flash-attn", "per-block"):
        assert word in squeezed(choices), word
    assert "OAA" in costs


def test_without_a_terminal_there_are_no_escapes_and_no_colours_are_needed():
    plan = fitting()
    console = Console(file=io.StringIO(), width=80)
    show_plan(plan, console)
    plain = console.file.getvalue()
    assert "\x1b" not in plain
    coloured = on_terminal(plan, 80)
    assert "\x1b[" in coloured
    stripped = "\n".join(line.rstrip() for line in ANSI.sub("", coloured).splitlines())
    assert stripped == plain.rstrip("\n")


def test_no_color_is_heeded(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "38;2" not in on_terminal(fitting(), 80)
    assert "48;2" not in on_terminal(fitting(), 80)


def test_ascii_terminals_get_ascii():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80, force_terminal=True, color_system=None)
    show_plan(fitting(), console)
    console.file.flush()
    assert b"16 x 4" in raw.getvalue()


ANSWERS = ("optimizer=adamw-8bit: 10 % slower.", "micro_batch_size=32 does not fit", "No smaller GPU would do.",
           "write pad_vocab_to=8 (50,264)")


def test_the_answer_comes_first_in_ten_lines():
    lines = plan_text(fitting(), width=80).splitlines()
    head = lines.index("", 2)
    assert head <= 10
    first = squeezed(" ".join(lines[:head]))
    for sentence in (
        "choice micro_batch_size=16 precision=bf16 loss=plain checkpointing=none optimizer=adamw attention=sdpa "
        "compile=off", "speed 10,000 tokens/s, 3.28 s a step, MFU 40 %; not calibrated",
        "memory 14.0 GiB of 24.0 GiB with CUDA context (reserved 13.0 GiB, allocated 12.0 GiB); peak in the backward "
        "of a micro-batch; safety margin 1.0 GiB", "trade-offs none", "why The fastest that fits.",
    ):
        assert sentence in first, sentence
    rest = squeezed(" ".join(lines[head:]))
    for sentence in (*ANSWERS, "--verbose adds what is not traced, where times come from, 2 notes, and the search's"):
        assert sentence in rest, sentence
    for hidden in ("cuBLAS", "doctor --calibrate", "mind the gap", "left out", "combinations"):
        assert hidden not in rest, hidden


def test_no_more_than_the_card_has_is_in_use_where_cached_memory_is_given_back():
    plan = fitting()
    given_back = replace(plan, chosen=replace(plan.chosen, estimate=estimate(1.9, retries=3)))
    assert "memory 24.0 GiB of 24.0 GiB with CUDA context (reserved 23.8 GiB with more room, allocated 22.8 GiB)" in (
        squeezed(plan_text(given_back, width=80)))


@pytest.mark.parametrize(("changes", "says"), [
    ({"checkpointing": "every-block"}, "checkpointing=every-block computes activations again"),
    ({"compile": "per-block"}, "compiling takes 60 s or so"),
    ({"trainable": "lora", "base": "nf4"}, "trainable=lora trains few weights beside frozen ones"),
    ({"optimizer": "adamw-8bit", "changes_numerics": ("optimizer=adamw-8bit",)}, "optimizer=adamw-8bit changes numer"),
])
def test_the_trade_offs_of_a_choice_are_said(changes, says):
    chosen = candidate(estimate(), **changes)
    text = squeezed(plan_text(replace(fitting(), candidates=(chosen,), chosen=chosen)))
    assert f"trade-offs {says}" in text


def test_verbose_adds_what_else_is_known():
    text = squeezed(plan_text(fitting(), width=80, verbose=True))
    assert "--verbose" not in text
    for sentence in (
        *ANSWERS, "optimizer=adamw-8bit changes numerics: #2.",
        "CUDA context, 1.0 GiB outside the allocator: measured on a card", "cuBLAS workspaces, 32.0 MiB: its handbook",
        SOURCES["cuda"], "mind the gap",
        "left out: flex cannot serve", "1,234 combinations considered, 7 traces made.",
    ):
        assert sentence in text, sentence
    assert re.search(r"2\* +24 x 3", text)


def test_calibrated_times_say_so():
    chosen = candidate(estimate(calibrated=True))
    text = plan_text(replace(fitting(), candidates=(chosen,), chosen=chosen), verbose=True)
    assert "not calibrated" not in text
    assert "Calibrated: by measurements of this machine." in text
    assert "doctor --calibrate" not in text


def test_where_nothing_fits_what_would_help_comes_first():
    text = plan_text(nothing_fits(), width=80)
    first = squeezed(text.partition("micro x")[0])
    for sentence in ("Nothing fits on Test Card; #1 lacks 90.0 GiB.", "checkpointing=every-block (recompute)",
                     "The smallest GPU is Big Card.", "base=nf4 would take 5.0 GiB",
                     "64 GiB of host memory would do."):
        assert sentence in first
    assert text.count("does not fit") == 1
    assert plan_text(nothing_fits(), verbose=True).count("does not fit") == 2


def test_what_leaves_its_margin_only_after_releasing_memory_says_so():
    assert fits(estimate()) == "yes"
    assert fits(estimate(retries=1)) == "with retries"


def test_one_forward_pass_has_no_time_until_the_first_token():
    asked = Recipe.from_dict({"model": "vit-base", "task": "image-classification", "mode": "inference"})
    generating = Recipe.from_dict({"model": "gpt2", "mode": "inference"})
    chosen = candidate(estimate(), mode="inference", precision={"name": "bf16", "full_eval": True})
    texts = [plan_text(replace(fitting(), asked=recipe, candidates=(chosen,), chosen=chosen))
             for recipe in (asked, generating)]
    assert ["prefill" in text for text in texts] == [False, True]
    assert all("full_eval: weights of 16 bits" in text for text in texts)


def test_images_count_samples():
    chosen = candidate(estimate(tokens=0.0))
    asked = Recipe.from_dict({"model": "vit-base", "task": "image-classification"})
    text = plan_text(replace(fitting(), asked=asked, candidates=(chosen,), chosen=chosen))
    assert "samples/s" in text
    assert "tokens/s" not in text
    assert "seq_len" not in text.splitlines()[0]


def test_an_unknown_peak_leaves_mfu_out():
    cost = estimate()
    chosen = candidate(replace(cost, time=replace(cost.time, mfu=0.0)))
    lines = plan_text(replace(fitting(), candidates=(chosen,), chosen=chosen)).splitlines()
    assert any(re.search(r"yes +10,000 +- ", line) for line in lines)
    assert "MFU" not in " ".join(line for line in lines if line.startswith("speed"))


def test_a_close_fit_is_not_called_safe():
    chosen = candidate(estimate(device_rank=FitRank.TIGHT))
    assert re.search(r"13.0 / 14.0 +tight", plan_text(replace(fitting(), candidates=(chosen,), chosen=chosen)))


def test_host_memory_and_copies_of_what_is_streamed_have_a_table_and_a_sentence():
    text = plan_text(streamed(), width=100, verbose=True)
    said = "host memory 48.0 GiB of 64.0 GiB trade-offs copies between host and GPU make a step 1.10 s"
    assert said in squeezed(text)
    row = next(line for line in text.splitlines() if "60.0 / 50.0" in line)
    assert row.split()[:7] == ["2", "48.0", "60.0", "/", "50.0", "1.10", "s"]
    assert re.search(r" WWW\w*GGG\w*OOO\w*A+D+\.+\|$", row)
    assert "| 64.0 GiB, its end" in text
    assert "D prefetched batches and the like" in squeezed(text)
    said = squeezed(text).partition("copies A step")[2]
    for word in ("copies 60.0 GiB to the GPU and 50.0 GiB back", "3.00 s and 2.50 s side by side", "1.10 s longer",
                 "80 % of all copying is hidden", "90 % of that without copies",
                 "From about 7,700 tokens in a global batch on, that is 97 %"):
        assert word in said, word


def test_a_hosts_memory_ends_where_it_is_known_or_assumed_to_and_one_too_small_is_passed():
    assumed = streamed()
    assumed = squeezed(plan_text(replace(assumed, device=replace(assumed.device, host_assumed=True))))
    assert "host memory 48.0 GiB of 64.0 GiB assumed; write --host-memory" in assumed
    assert "64.0 GiB, its assumed end" in assumed
    several = streamed()
    several = squeezed(plan_text(replace(several, device=replace(several.device, cards=2, host_bytes=128 * GIB))))
    assert "host memory of each GPU at its peak" in several
    assert "64.0 GiB, its end" in several
    row = next(line for line in plan_text(streamed(32 * GIB)).splitlines() if "60.0 / 50.0" in line)
    assert re.search(r"G+O+\|o+a+d+$", row)


def test_copies_stand_in_a_plans_json():
    first, second = streamed().to_json()["candidates"]
    assert "copies" not in first["time"]
    assert "host_by_category" not in first["memory"]
    assert second["time"]["copies"] == COPIES.to_json()
    assert second["memory"]["host_by_category"]["activations"] == 4 * GIB


@pytest.mark.parametrize(("fields", "said"), [
    ({"seq_len": 131_072}, True), ({"seq_len": 1024}, False), ({"seq_len": 131_072, "data": {"packing": False}}, False),
    ({"seq_len": 131_072, "data": "dummy"}, False),
])  # fmt: skip
def test_long_packed_rows_say_how_many_documents_their_time_is_of(fields, said):
    choice = candidate(estimate(), **fields)
    text = squeezed(plan_text(replace(fitting(), candidates=(choice,), chosen=choice), width=100))
    assert ("every pair of positions of a document, 4 a row" in text) is ("data" not in fields)
    assert ("tokens/s: of 4 documents a row; of one, which takes longer, with data.packing=false" in text) is said


def test_more_than_the_peak_by_a_count_of_all_pairs_is_explained():
    for mfu in (0.5, 1.2):
        cost = estimate()
        choice = candidate(replace(cost, time=replace(cost.time, mfu=mfu)))
        text = squeezed(plan_text(replace(fitting(), candidates=(choice,), chosen=choice), width=100))
        assert ("half of which causal kernels skip" in text) is (mfu > 1)
