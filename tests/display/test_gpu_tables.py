"""The table over the catalogue."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from tests.display.plans import GIB, candidate, estimate, fitting, nothing_fits, streamed
from tightfit.devices import catalogue, find_device
from tightfit.display.gpu_tables import gpu_table, show_comparison, show_overview
from tightfit.planning.search.every_gpu import Comparison, GpuRow
from tightfit.planning.search.overview import GpuEstimate, GpuSummary, Overview


def text_of(rows, width=80, tokens=0):
    console = Console(file=io.StringIO(), width=width)
    show_comparison(Comparison(asked=fitting().asked, rows=tuple(rows), tokens=tokens), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return "\n".join(lines)


def row(name, plan, **more):
    return GpuRow(device=replace(plan.device, name=name), plan=plan, **more)


def line_of(text, name):
    return next(line for line in text.splitlines() if line.startswith(name))


def test_a_gpu_is_one_line_on_eighty_columns():
    text = text_of([row("A100 80GB PCIe", fitting(), price=2.0), row("Two", fitting())])
    line = line_of(text, "A100 80GB PCIe")
    for word in ("14.0 of 24.0", "10,000", "5,000", "16 x 4 a"):
        assert word in line
    assert re.search(r"10,000 +- +16 x 4 a", line_of(text, "Two"))
    assert "a  precision=bf16 loss=plain checkpointing=none optimizer=adamw attention=sdpa" in text
    assert "per price: tokens/s for one unit of the price" in text
    assert "Not calibrated" in text


def test_a_cost_has_a_unit():
    text = text_of([row("A100 80GB PCIe", fitting(), price=2.0)], tokens=360_000_000)
    assert "cost: of the whole run, at an hour's --price" in text
    assert "per price" not in text
    for tokens, unit, cells in ((3_000_000, "minutes", "5.0 0.167"), (300_000, "seconds", "30.0 0.0167")):
        text = " ".join(text_of([row("A100 80GB PCIe", fitting(), price=2.0)], tokens=tokens).split())
        assert f"{unit} cost" in text
        assert f"{cells} 16 x 4 a" in text


def test_a_recipes_own_steps_are_a_run_in_every_row():
    plan = fitting()
    written = row("One", replace(plan, asked=plan.asked.override(max_steps=7200)), price=2.0)
    hours = written.plan.whole_run.hours
    text = " ".join(text_of([written]).split())
    assert "hours cost recipe" in text
    assert f"{hours:,.1f} {2 * hours:,.2f} 16 x 4 a" in text


def test_throughput_for_a_high_price_keeps_its_digits():
    assert " 4.40 " in line_of(text_of([row("One", fitting(), price=10_000 / 4.4)]), "One")


def test_no_prices_no_column():
    assert "per price" not in text_of([row("One", fitting())])


def test_host_memory_that_a_choice_takes_has_a_column_and_is_said_to_be_assumed():
    plan = streamed()
    assumed = [replace(plan, device=replace(plan.device.in_machine_with(size * GIB))) for size in (64, 192)]
    text = text_of([row("A100 80GB SXM", assumed[1], price=1.0), row("Small", assumed[0]), row("Full", nothing_fits()),
                    row("Two", fitting(), price=2.0)], tokens=10**9)
    assert line_of(text, "A100 80GB SXM").split()[3:7] == ["8.0", "of", "24.0", "48"]
    assert line_of(text, "Two").split()[4] == "-"
    remark = "host: of the machine's memory, 64.0 GiB to 192 GiB of it assumed; write --host-memory SIZE"
    assert remark in " ".join(text.split())
    known = text_of([row("Small", plan)])
    assert " 48 " in line_of(known, "Small")
    assert "assumed" not in known
    assert "host" not in text_of([row("Two", fitting())])


def faster(plan, factor, error):
    """A plan whose speed is `factor` times as high, and off by at most `error`."""
    cost = plan.chosen.estimate
    time = replace(cost.time, step_seconds=cost.time.step_seconds / factor, error=error,
                   tokens_per_second=factor * cost.time.tokens_per_second)
    choice = replace(plan.chosen, estimate=replace(cost, time=time))
    return replace(plan, candidates=(choice,), chosen=choice)


def test_the_best_is_named_and_what_predictions_cannot_tell_from_it():
    plan = fitting()
    rows = [row("One", faster(plan, 2, 0.2)), row("Two", faster(plan, 1.6, 0.2)), row("Three", faster(plan, 1, 0.1)),
            row("Full", nothing_fits())]
    text = text_of(rows, width=120)
    assert "fastest: One, 20.0k ± 4.0k tokens/s; too close to tell by predictions: Two\n" in text
    assert "fastest: One, 20.0k ± 2.0k tokens/s\n" in text_of([row("One", faster(plan, 2, 0.1)), *rows[2:]], width=120)
    assert "fastest" not in text_of([rows[0], rows[3]])  # of which one alone fits
    priced = [replace(each, price=price) for each, price in zip(rows, (2.0, 2.0, 9.0, 1.0), strict=True)]
    assert "most per price: One, 20.0k" in text_of(priced, width=120)
    assert "cheapest: One, for 20.00 (16.67 to 25.00); too close" in text_of(priced, width=120, tokens=720_000_000)
    host = row("Host", faster(streamed(), 2, 0.1))
    assert re.search(r"fastest: Host, .* with 48.0 GiB of its machine's memory\n", text_of([host, rows[2]], width=120))
    found = Comparison(asked=plan.asked, rows=tuple(rows)).to_json()
    assert (found["best"], found["close"]) == ("One", ["Two"])


def test_what_does_not_fit_and_what_refuses_is_said():
    plan = fitting()
    text = text_of([row("Full", nothing_fits()), GpuRow(device=plan.device, refused="precision: no bf16 here")])
    assert line_of(text, "Full").rstrip().endswith("none: 90.0 GiB short")
    assert "refused on Test Card: precision: no bf16 here" in text
    assert "Not calibrated" not in text


def test_what_a_card_refuses_of_every_way_is_said_below():
    found = candidate(estimate())
    estimated = GpuEstimate(recipe=found.recipe, memory=found.estimate.memory, time=found.estimate.time)
    cards = (GpuSummary(device=find_device("t4"), ways={"LoRA": "precision: T4 has no bf16"}),
             GpuSummary(device=find_device("l4"), ways={"LoRA": estimated}))
    out = io.StringIO()
    show_overview(Overview(asked=found.recipe, cards=cards, traces=2), Console(file=out, width=100))
    assert line_of(out.getvalue(), "T4").split()[-1] == "-"
    assert "refused where there is -: precision: T4 has no bf16" in out.getvalue()


def test_the_smallest_card_comes_first_and_recipes_say_their_cards():
    found, one = candidate(estimate()), candidate(estimate(), micro_batch_size=1)
    fits, small = (GpuEstimate(recipe=each.recipe, memory=each.estimate.memory, time=each.estimate.time)
                   for each in (found, one))
    cards = tuple(GpuSummary(device=find_device(name), ways={"LoRA": way, "QLoRA": replace(way, time=None)})
                  for name, way in (("t4", small), ("l4", fits), ("a100-80gb-pcie", fits)))
    out = io.StringIO()
    show_overview(Overview(asked=found.recipe, cards=cards), Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[1] == "smallest: LoRA T4, QLoRA none"
    assert next(line for line in lines if "micro_batch_size=1 " in line).rstrip().endswith(" on T4")
    assert sum(line.rstrip().endswith(" on the others") for line in lines) == 1


def test_long_choices_do_not_break_a_row():
    long = candidate(estimate(), precision="bf16-pure", checkpointing={"name": "memory-budget", "budget": 0.25},
                     optimizer="adamw-anyprecision", compile="per-block",
                     changes_numerics=("optimizer=adamw-anyprecision",))
    rows = [row("RTX 4070 Ti Super", replace(fitting(), chosen=one, candidates=(one,)), price=1.0)
            for one in (fitting().chosen, long)]
    text = text_of(rows)
    assert [line.split()[-2:] for line in text.splitlines() if line.startswith("RTX 4070")] == [
        ["a", "same"], ["b", "changed"]]
    assert "b  precision=bf16-pure" in text
    assert "budget=0.25" in text


def test_changed_numerics_have_a_column():
    eight = fitting().candidates[1]
    text = text_of([row("One", replace(fitting(), chosen=eight, candidates=(eight,))), row("Two", fitting())])
    assert line_of(text, "One").split()[-3:] == ["with", "retries", "changed"]
    assert line_of(text, "Two").split()[-1] == "same"
    assert "numerics" in text
    assert "numerics" not in text_of([row("Two", fitting())])


def test_the_catalogue_lists_names_that_can_be_written():
    console = Console(file=io.StringIO(), width=80)
    console.print(gpu_table())
    names = [line.split()[0] for line in console.file.getvalue().splitlines()[2:] if line.strip()]
    assert [find_device(name) for name in names] == list(catalogue())
