"""A plan that shows itself: in a notebook, and where it is printed."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.display.plans import GIB, candidate, estimate, fitting, nothing_fits
from tightfit.display.plan import ReadablePlan


class Checker(HTMLParser):
    """Every element is closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("make", [fitting, nothing_fits])
def test_a_notebook_shows_a_table(make):
    plan = make()
    asked = plan.asked.model_copy(update={"model": "<script>x</script>&"})
    checker = Checker()
    checker.feed(ReadablePlan.of(replace(plan, asked=asked))._repr_html_())
    assert checker.open == []
    assert "script" not in checker.seen
    assert "<script>x</script>&" in checker.text
    assert "Not calibrated" in checker.text
    assert checker.seen.count("tr") > len(plan.candidates)


def test_a_notebooks_bar_marks_the_devices_end_and_what_lies_beyond_it():
    """24 GiB of 36 are 160 pixels; what a plan that fits needs ends before them, and what is too large is cut off."""
    huge = candidate(estimate(20.0, fits="no", safe=False, missing=218 * GIB), micro_batch_size=32)
    plan = replace(fitting(), candidates=(fitting().chosen, huge))
    fit, large = re.findall(r"<td[^>]*>(<span.*?)</td>", ReadablePlan.of(plan)._repr_html_())
    end = '<span title="end of the device&#39;s memory: 24.0 GiB"'
    widths = [[float(width) for width in re.findall(r"width:([\d.]+)px", part)] for part in large.split(end)]
    assert sum(widths[0]) == pytest.approx(160, abs=0.5)
    assert sum(widths[1][1:]) == pytest.approx(80, abs=0.5)  # after the mark's own 2 pixels
    assert "opacity" not in large.split(end)[0]
    assert large.endswith("&gt;")
    assert fit.index("free: 10.0 GiB") < fit.index(end)
    assert "opacity" not in fit


def test_a_readable_plan_prints_and_stays_a_plan():
    plan = fitting()
    shown = ReadablePlan.of(plan)
    assert "16 x 4" in str(shown)
    assert "CUDA context" in str(shown)
    assert shown.recipe == plan.recipe
    assert shown.to_json() == plan.to_json()
    assert "\n" not in repr(shown)
    assert "10,000 tokens/s" in repr(shown)
    assert "nothing fits" in repr(ReadablePlan.of(nothing_fits()))
