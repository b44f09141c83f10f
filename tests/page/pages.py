"""A page as a parser reads it, and what holds of every page that tightfit makes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

LARGEST = 8 << 20
TAGS = ("html head meta title link style body a header div h1 p button nav ul li main section h2 h3 dl dt dd ol strong "
        "br code table caption thead tbody tr th td span fieldset legend label input details summary pre footer "
        "script")  # fmt: skip


NEW_PLOT = re.compile(r'Plotly\.newPlot\(\s*"([^"]+)",\s*')


def chart_data(page):
    """The traces of each chart on a page, by its name."""
    found = {}
    for match in NEW_PLOT.finditer(page):
        found[match[1]], _ = json.JSONDecoder().raw_decode(page, match.end())
    return found


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


def stands_alone(page):
    """That nothing in a page is fetched."""
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


def readable_without_eyes(page, charts_at_least):
    """That links lead somewhere, and that each chart has words and tables beside it."""
    read = Read(page)
    assert len(read.ids) == len(set(read.ids))
    links = [a["href"][1:] for t, a in read.tags if t == "a"]
    assert set(links) <= set(read.ids)
    charts = [a for t, a in read.tags if a.get("class") == "chart"]
    assert len(charts) >= charts_at_least
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in charts)
    tags = [t for t, _ in read.tags]
    assert tags.count("table") == tags.count("caption") > len(charts)
    assert tags.count("h1") == 1
    assert all(a["scope"] in ("row", "col") for t, a in read.tags if t == "th")


def names_stay_names(page):
    """That nothing in a page of hostile names became markup, in the page or in a chart."""
    read = Read(page)
    assert {t for t, _ in read.tags} <= set(TAGS.split())
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    for value in _strings(list(chart_data(page).values())):
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
