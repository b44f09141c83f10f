"""The frame of a page: values are escaped, cut and printable, and charts cannot end their scripts."""

from __future__ import annotations

import json
import re

import plotly.graph_objects as go
import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from tests.page.pages import Read
from tests.profiling.profiled import EVIL, EVILS
from tightfit import page


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """A function that renders a template with macros, from a package of its own."""
    folder = tmp_path / f"pages_of_{tmp_path.name}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def rendered(template, **values):
        (folder / "one.jinja").write_text('{% from "page/macros.html.jinja" import table with context %}' + template)
        return page.render(folder.name, "one.jinja", **values)

    return rendered


@pytest.mark.parametrize("name", EVILS)
def test_names_are_escaped(shown, name):
    assert str(Markup.escape(name)) in shown('{{ table("A", ["a"], [[name]]) }}', name=name)


def test_names_are_cut_and_printable(shown):
    assert "a?b?c?" in shown("{{ name }}", name="a\x00b\u202ec\ud800")
    assert len(shown('{{ table("A", ["a"], [[name]]) }}', name="x" * 10_000)) < 600
    assert len(shown("{{ name }}", name="x" * 10_000)) < 2_100
    assert shown("{{ name }}", name=Markup("<b>")) == "<b>"
    assert "Nothing: none." in shown('{{ table("Nothing", ["a"], []) }}')


def test_a_value_that_is_missing_is_an_error(shown):
    with pytest.raises(UndefinedError):
        shown("{{ nothing }}")


def test_a_charts_data_cannot_end_its_script():
    figure = go.Figure(go.Bar(x=[EVILS[1] + "<!--"], y=[1]))
    read = Read(page.chart("a", figure, EVIL))
    assert [tag for tag, _ in read.tags] == ["div", "div", "div", "script"]
    assert read.tags[0][1]["aria-label"] == EVIL
    body = read.scripts[None]
    assert "<" not in body
    assert json.loads(re.search(r'"x":(\[[^]]*\])', body)[1]) == [EVILS[1] + "<!--"]
