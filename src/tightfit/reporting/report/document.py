"""A page that opens offline: style, scripts and every chart's data stand in it.

A content policy in the page forbids every request, so that nothing in what it shows can make one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from tightfit.reporting.report.markup import Html, text

POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
          "font-src data:; base-uri 'none'; form-action 'none'")  # fmt: skip


def document(title: str, beneath: str, parts: Mapping[str, tuple[str, Html]], charts: Mapping[str, Any],
             above: str = "") -> str:  # fmt: skip
    """The whole page.

    beneath: a line under the title. parts: sections by their name, each with what the contents call it; an empty one is
    left out. charts: plotly's figures by the name of their place. above: what stands before the first section.
    """
    contents = "".join(f'<li><a href="#{name}">{called}</a></li>' for name, (called, part) in parts.items() if part)
    body = "".join(part for _, part in parts.values())
    name = text(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - tightfit</title>
<link rel="icon" href="data:,">
<style>{_own("page.css")}</style>
</head>
<body>
<a class="skip" href="#{next(iter(parts))}">Skip to the figures</a>
<header>
<div class="top"><div><h1>{name}</h1><p class="soft">{text(beneath)}</p></div>
<button id="theme" type="button" hidden>Dark theme</button></div>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<main>{above}{body}</main>
<footer><p>Made by tightfit. Charts by plotly. Without scripts the tables tell the same.</p></footer>
{"".join(chart_data(chart, figure) for chart, figure in charts.items())}
<script>{_plotly()}</script>
<script>{_own("page.js")}</script>
</body>
</html>
"""


def chart_data(chart: str, figure: Any) -> str:
    """A chart's data, in which nothing can end the script or begin a comment."""
    values = figure.to_json().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="{chart}-data">{values}</script>\n'


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")
