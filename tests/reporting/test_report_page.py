"""The report's page: everything stands in it, nothing in it is fetched, and no name becomes markup; the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.reporting.profiled import EVIL, EVILS, empty, hostile, profile
from tightfit import profiles
from tightfit.cli import main
from tightfit.reporting.report.difference import recipe_changes
from tightfit.reporting.report.markup import Html, table, text
from tightfit.reporting.report.page import chart_data, report, write_report
from tightfit.trace_sample import SAMPLED

LARGEST = 8 << 20
TAGS = ("html head meta title link style body a header div h1 p button nav ul li main section h2 h3 dl dt dd ol strong "
        "br code table caption thead tbody tr th td span fieldset legend label input details summary pre footer "
        "script")  # fmt: skip


class Read(HTMLParser):
    """A page's tags, text and ids; unclosed tags are an error."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.ids, self.text, self.scripts = [], [], [], [], {}
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag not in ("meta", "link", "input", "br"):
            self.open.append((tag, attributes.get("id")))

    def handle_endtag(self, tag):
        opened, name = self.open.pop()
        assert opened == tag, f"<{opened}> closed by </{tag}>"
        self._last = name

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts.setdefault(self.open[-1][1], "")
            self.scripts[self.open[-1][1]] += data
        elif not self.open or self.open[-1][0] != "style":
            self.text.append(data)

    @property
    def said(self):
        return " ".join(self.text)


@pytest.fixture(scope="module")
def page():
    return report(profile(), profile(waiting=0.05, attention="sdpa", seed=1))


def test_all_of_it_is_there(page):
    read = Read(page)
    for name in ("headline", "difference", "memory", "time", "ops", "predicted", "readings", "about"):
        assert name in read.ids
    for word in ("tokens/s", "MFU", "peak memory", "18 % of the step waits for data", "loading.workers=4",
                 "launch-bound", "compile=per-block", "of fp32 tensors under bf16", "The 25 largest tensors",
                 "128x257", "transformer.h.*.attn", "of the roofline", "residual", "attention", "power W",
                 "CUDA context", "plain steps differ by 3 %", "checkpointing: none"):
        assert word in read.said, word


def test_it_stands_alone(page):
    read = Read(page)
    assert len(page.encode()) < LARGEST
    assert page.count("plotly.js v") == 1
    for tag, attributes in read.tags:
        assert "src" not in attributes
        assert tag not in ("iframe", "object", "embed", "base", "form")
        if "href" in attributes:
            assert attributes["href"].startswith(("#", "data:"))
    assert "url(" not in page.split("</style>")[0]
    policy = next(a["content"] for t, a in read.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_it_can_be_read_without_eyes_and_without_scripts(page):
    read = Read(page)
    assert len(read.ids) == len(set(read.ids))
    links = [a["href"][1:] for t, a in read.tags if t == "a"]
    assert set(links) <= set(read.ids)
    charts = [a for t, a in read.tags if a.get("class") == "chart"]
    assert len(charts) >= 8
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in charts)
    assert {f"{a['id']}-data" for a in charts} == {name for name in read.scripts if name}
    tags = [t for t, _ in read.tags]
    assert tags.count("table") == tags.count("caption") > len(charts)
    assert tags.count("h1") == 1
    assert all(a["scope"] in ("row", "col") for t, a in read.tags if t == "th")


def test_charts_hold_what_was_measured(page):
    read = Read(page)
    memory = json.loads(read.scripts["memory-chart-data"])
    metas = [str(trace.get("meta")) for trace in memory["data"]]
    for category in ("weights", "gradients", "optimizer", "activations", "temporary"):
        assert {f"measured {category}", f"predicted {category}"} <= set(metas)
    assert {"measured peak", "predicted peak", "predicted all"} <= set(metas)
    assert json.loads(read.scripts["roofline-chart-data"])["data"]


@pytest.mark.parametrize("other", [None, hostile()], ids=["one", "two"])
def test_names_stay_names(other):
    page = report(hostile(), other)
    read = Read(page)
    assert {t for t, _ in read.tags} <= set(TAGS.split())
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    assert EVIL in read.said
    assert [name for name in read.scripts if name is None or not name.endswith("-data")] == [None]
    for name, body in read.scripts.items():
        if name is not None:
            assert "<" not in body
            for value in _strings(json.loads(body)):
                assert not re.search(r"<(?!br>)", value), value  # plotly would read it as markup


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in ("hovertemplate", "bdata"):
                yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def test_a_charts_data_cannot_end_its_script():
    class Figure:
        def to_json(self):
            return json.dumps({"x": EVILS[1] + "<!--"})

    markup = chart_data("a", Figure())
    assert markup.count("<") == 2
    assert json.loads(Read(markup).scripts["a-data"]) == {"x": EVILS[1] + "<!--"}


def test_an_empty_profile_and_others_with_something_missing():
    for made in (empty(), empty(), replace(profile(), measured=None, phase_seconds={}, step_seconds=0.0, peak_bytes=0),
                 replace(profile(), predicted=None, predicted_seconds={}, predicted_peak_bytes=0),
                 replace(profile(), measured=None, predicted=None), replace(profile(), readings={"power": (None,)})):
        Read(report(made))
        Read(report(made, profile()))
        Read(report(profile(), made))
    assert "No allocations were recorded" in Read(report(empty())).said


def test_a_device_without_figures():
    unknown = replace(profile().device, bandwidth=0.0, flops={}, units=0)
    said = Read(report(replace(profile(), device=unknown))).said
    assert "the device's peak is not known" in said
    assert "points stand without a roof" in said


def test_a_sample_says_so_at_the_top():
    made = profile()
    note = f"{SAMPLED}: 9 of 10 ops were left out"
    said = Read(report(replace(made, measured=replace(made.measured, notes=[note])))).said
    assert said.index(note) < said.index("tokens/s")


def test_what_two_recipes_differ_in():
    other = replace(profile(attention="sdpa"), versions={"torch": "2.14.0"})
    assert list(recipe_changes(profile(), other)) == [("attention", "eager", "sdpa"),
                                                       ("(version of torch)", "2.13.0", "2.14.0")]
    assert list(recipe_changes(profile(), profile())) == []


def test_names_are_escaped_cut_and_printable():
    assert text(EVIL) == "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert text(EVILS[2]).startswith("&quot;")
    assert text("a\x00b\u202ec\ud800") == "a?b?c?"
    assert len(text("x" * 10_000)) < 300
    assert text(Html("<b>")) == "<b>"
    assert "none" in table("Nothing", ("a",), [])


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "gone" / "report.html", empty())
    write_report(tmp_path / "report.html", empty())
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


@pytest.fixture
def run(monkeypatch, capsys):
    def command(*words):
        monkeypatch.setattr(sys, "argv", ["tightfit", "report", *map(str, words)])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return command


def test_the_command(tmp_path, run):
    for name, made in (("a", profile()), ("b", profile(attention="sdpa"))):
        profiles.save(made, tmp_path / name)
    status, out, err = run(tmp_path / "a")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith("gpt2 on RTX 4090: tokens/s ")
    assert out.splitlines()[1] == f"report: {tmp_path / 'a' / 'report.html'}"
    assert (tmp_path / "a" / "report.html").read_text().startswith("<!doctype html>")
    status, out, _ = run(tmp_path / "a", tmp_path / "b")
    assert "report-against-b.html" in out
    assert "Difference to the other run" in (tmp_path / "a" / "report-against-b.html").read_text()
    status, _, _ = run(tmp_path / "a", "--output", tmp_path / "mine.html")
    assert (tmp_path / "mine.html").exists()


def test_bad_input_is_one_line_and_exit_2(tmp_path, run):
    good = tmp_path / "good"
    profiles.save(empty(), good)
    for words, expected in (((tmp_path,), "holds no profile"), ((tmp_path / "gone",), "no such folder"),
                            ((good, tmp_path), "holds no profile"),
                            ((good, "--output", tmp_path / "no" / "x.html"), "--output")):
        status, out, err = run(*words)
        assert (status, out) == (2, "")
        assert err.startswith("tightfit: ")
        assert err.count("\n") == 1
        assert expected in err


def test_plotly_is_loaded_only_for_a_report():
    code = ("import sys, tightfit.cli, tightfit.report_command, tightfit.planner; "
            "sys.exit(any(name.split('.')[0] == 'plotly' for name in sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
