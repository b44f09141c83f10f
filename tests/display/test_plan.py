"""A plan that shows itself: in a notebook, and where it is printed."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.display.plans import fitting, nothing_fits
from tightfit.backends.measurements import ModelSize
from tightfit.display.plan_table import ReadablePlan


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
    assert "WWW" in checker.text


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


def test_a_mixture_of_experts_has_total_and_active_parameters():
    size = ModelSize(parameters=6_900, active_parameters=1_300, flops=70, values=0)
    plan = replace(fitting(), experts=size)
    assert "gpt2 (6,900 parameters, of which 1,300 are active per token) on" in str(ReadablePlan.of(plan))
    assert "N is the number of active parameters" in str(ReadablePlan.of(plan))
    assert plan.to_json()["model"] == {"parameters": 6_900, "active_parameters": 1_300, "flops": 70, "values": 0}
    assert "model" not in fitting().to_json()
