"""An HTML page that opens offline, from a jinja2 template: style, scripts and every chart's data stand in it.

`page.html.jinja` is the frame that pages extend, `macros.html.jinja` has their tables and lists. A content policy in
the frame forbids every request. Values are escaped, so that markup in a name stays a name.
"""

from __future__ import annotations

import re
from html import escape
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup

from tightfit import text

UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, marks that turn the direction of text around, and halves of characters."""
MOST_CHARACTERS = 2000
"""Characters of a value that are shown: a name or a sentence can be of any length."""
TOOLBAR = {
    "responsive": True, "displaylogo": False, "plotlyServerURL": "", "showSendToCloud": False,
    "modeBarButtonsToRemove": ["sendChartToCloud", "sendDataToCloud", "select2d", "lasso2d"],
}  # fmt: skip
"""Plotly's bar of buttons offers to send a chart to its cloud: a page's data is nobody else's business."""


def render(package: str, template: str, **values: Any) -> str:
    """A page. package: the one with the template in its folder. The frame's own templates are found under `page/`."""
    loader = PrefixLoader({"page": PackageLoader(__name__, "."), "own": PackageLoader(package, ".")})
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, finalize=printable,
                              trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.do"])
    environment.filters.update(size=text.size, signed_size=text.signed_size, seconds=text.seconds, flops=text.flops,
                               percent=text.percent, shape=text.shape)
    environment.globals.update(chart=chart, relative=text.relative, part=_part, plotly=_plotly,
                               any=MOST_CHARACTERS)
    return environment.get_template(f"own/{template}").render(**values)


def printable(value: Any) -> Any:
    """A value as a page shows it: what cannot be shown is `?`, what is too long is cut."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    shown = UNPRINTABLE.sub("?", value)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]} ..."


def chart(name: str, figure: Any, label: str) -> Markup:
    """A plotly figure in its place on the page. label: what it shows, for those who cannot see it."""
    drawn = figure.to_html(config=TOOLBAR, include_plotlyjs=False, full_html=False, div_id=name, default_width="100%")
    return Markup('<div class="chart" role="img" aria-label="{}">{}</div>').format(label, Markup(drawn))


def label_of(name: object) -> str:
    """A name as plotly shows it: markup escaped, the middle left out of a long one."""
    shown = str(name)
    if len(shown) > 48:
        shown = f"{shown[:22]}…{shown[-25:]}"
    return escape(UNPRINTABLE.sub("?", shown), quote=False)  # plotly shows other entities as they are written


def styled(figure: Any, height: int) -> Any:
    """A figure that takes its width and its theme from the page. height: pixels."""
    figure.update_layout(
        template="none", height=height, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", autosize=True,
        margin={"l": 60, "r": 16, "t": 30, "b": 50}, font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left", "traceorder": "normal"},
        modebar={"bgcolor": "rgba(0,0,0,0)"},
    )  # fmt: skip
    return figure


def _part(name: str) -> Markup:
    """A style sheet or script of the frame's."""
    return Markup(resources.files(__name__).joinpath(name).read_text("utf-8"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs().replace("</script", "<\\/script"))
