"""The ladder in the terminal: its columns, figures and remarks."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from tests.ladder.made import CARD, PEER, REFUSED, bert_large, empty, hostile, measured, predicted, without_figures
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.results import remarks, rung_results
from tightfit.ladder.table import cells, show


def rows_of(run):
    heads, rows = cells(rung_results(run))
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


def test_figures_stand_in_their_columns():
    row = rows_of(bert_large())["micro-batch 1, accumulation 4"]
    assert row == {
        "rung": "micro-batch 1, accumulation 4", "s/step": "0.2 ±5%", "samples/s": "20", "MiB": "80", "speed": "0.50x",
        "memory": "0.50x", "pred. s": "0.1", "pred. MiB": "75", "full s": "0.5", "full MiB": "8,000",
        "publ. s": "0.516", "publ. MiB": "8,681",
    }  # fmt: skip
    peer = rows_of(bert_large())[f"batch 4, fp32 ({PEER})"]
    assert (peer["s/step"], peer["speed"], peer["publ. s"], peer["pred. s"]) == ("0.2 ±5%", "0.50x", "", "-")


def test_a_narrow_terminal_shows_every_name_and_figure(capsys):
    show(bert_large(), Console(width=80))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    for shown in ("micro-batch 1,", f"({PEER})", "0.50x", "8,681", "publ. MiB"):
        assert shown in printed


def test_what_did_not_run_says_so():
    rows = rows_of(bert_large())
    assert rows[REFUSED]["s/step"] == "refused"
    assert rows["what it chooses where numerics may change"]["s/step"] == "-"


def test_columns_that_nothing_fills_are_left_out():
    heads, rows = cells(rung_results(empty(ladders()["loading"], "reduced")))
    assert heads == ["rung", "s/step", "samples/s", "MiB", "speed", "memory"]
    assert all(len(row) == len(heads) for row in rows)


def test_memory_is_by_the_account_that_was_published():
    def mib(name):
        run = empty(ladders()[name], "full", CARD)
        rung = run.ladder.rungs[0]
        run.rows.measured.append(measured(run, rung, 1.0, 500, peak_allocated=400 << 20))
        return rows_of(run)[rung.name]["MiB"]

    assert mib("bert-large") == "600"
    assert mib("transformer-156m") == "400"


def test_remarks_name_what_is_no_figure():
    said = {result.name: remarks(result) for result in rung_results(bert_large())}
    assert said[REFUSED] == ["refused: too new"]
    assert said["batch 4, fp32"] == ["at full size: does not fit"]
    assert said[f"batch 4, SDPA ({PEER})"] == ["not the same work: at step 2 its loss is 0.9000, ours 0.6000"]
    assert said["+ checkpointing"] == []


def test_it_is_printed_with_its_heading_and_remarks(capsys):
    show(bert_large(), Console(width=200))
    said = capsys.readouterr().out
    assert said.startswith("BERT-large, sequence classification, 512 tokens\nmeasured on CPU")
    assert f"- {REFUSED}: refused: too new" in said
    assert "0.67x" in said


def test_brackets_in_a_name_stay_as_they_are(capsys):
    run = hostile()
    ladder = run.ladder
    rung = replace(ladder.rungs[0], name="blocks [red]1[/]")
    run.ladder = replace(ladder, rungs=(rung,))
    show(run, Console(width=200))
    assert "blocks [red]1[/]" in capsys.readouterr().out


def test_a_rung_that_came_to_an_earlier_ones_recipe_says_so():
    run = empty(ladders()["bert-large"], "reduced")
    first, second, *_ = run.ladder.rungs
    same = {"recipe": {**run.recipe(first).to_dict(), "allow_numerics": True}}
    for recipe, said, speed in (
        (same, [f"the same recipe as {first.name}: the two differ by noise alone"], "0.50x~"), ({}, [], "0.50x")
    ):
        run.rows.measured[:] = [measured(run, first, 0.2, 100), measured(run, second, 0.4, 100, **recipe)]
        results = rung_results(run)
        assert remarks(results[1]) == said
        assert cells(results)[1][1][4] == speed


def test_rungs_of_one_recipe_have_one_spread():
    run = empty(ladders()["bert-large"], "reduced")
    first, second, third, *_ = run.ladder.rungs
    third = replace(third, against=first.name)
    run.ladder = replace(run.ladder, rungs=(first, second, third))
    same = {"recipe": run.recipe(second).to_dict()}
    run.rows.measured[:] = [measured(run, first, 0.4, 100), measured(run, second, 0.2, 100, **same),
                            measured(run, third, 0.8, 100, **same)]
    assert [row[4] for row in cells(rung_results(run))[1]] == ["", "2.00x~", "0.50x~"]


def test_one_reason_for_both_sizes_is_said_once():
    run = empty(ladders()["bert-large"], "reduced", gpu="t4")
    rung, why = run.ladder.rungs[0], "loss: not there; write loss=plain"
    run.rows.measured.append(without_figures(measured(run, rung, 0.2, 100), "refused", why))
    run.rows.predicted += [predicted(run, rung, device, scale, 0, 0, fits="", status="refused", reason=why)
                           for device, scale in ((run.machine.device, "reduced"), ("t4", "full"))]
    assert remarks(rung_results(run)[0]) == [f"refused: {why}"]
