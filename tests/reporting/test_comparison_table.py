"""The table over the catalogue."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from tests.reporting.plans import fitting, nothing_fits
from tightfit.devices import catalogue, find_device
from tightfit.planning.search.comparison import Compared, Comparison
from tightfit.reporting.comparison_table import show_comparison
from tightfit.reporting.gpu_table import gpu_table


def text_of(rows, width=80):
    console = Console(file=io.StringIO(), width=width)
    show_comparison(Comparison(asked=fitting().asked, rows=tuple(rows)), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return "\n".join(lines)


def row(name, plan, **more):
    return Compared(device=replace(plan.device, name=name), plan=plan, **more)


def line_of(text, name):
    return next(line for line in text.splitlines() if line.startswith(name))


def test_a_gpu_is_one_line_on_eighty_columns():
    text = text_of([row("A100 80GB PCIe", fitting(), price=2.0), row("Two", fitting())])
    line = line_of(text, "A100 80GB PCIe")
    for word in ("14.0 GiB of 24.0 GiB", "10,000", "5,000", "16x4, bf16"):
        assert word in line
    assert re.search(r"10,000 +- +16x4", line_of(text, "Two"))
    assert "per price: tokens/s for one unit of the price" in text
    assert "Not calibrated" in text


def test_no_prices_no_column():
    assert "per price" not in text_of([row("One", fitting())])


def test_what_does_not_fit_and_what_refuses_is_said():
    plan = fitting()
    text = text_of([row("Full", nothing_fits()), Compared(device=plan.device, refused="precision: no bf16 here")])
    assert "90.0 GiB short" in " ".join(text.split())
    assert "refused on Test Card: precision: no bf16 here" in text
    assert "Not calibrated" not in text


def test_changed_numerics_are_marked():
    eight = fitting().candidates[1]
    text = text_of([row("One", replace(fitting(), chosen=eight, candidates=(eight,)))])
    assert "retries*" in " ".join(text.split())
    assert "* changes numerics" in text


def test_the_catalogue_lists_names_that_can_be_written():
    console = Console(file=io.StringIO(), width=80)
    console.print(gpu_table())
    names = [line.split()[0] for line in console.file.getvalue().splitlines()[2:] if line.strip()]
    assert [find_device(name) for name in names] == list(catalogue())
