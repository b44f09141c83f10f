"""The report as one HTML page that opens offline: plotly's script stands in it once, each chart's data beside it.

A content policy in the page forbids every request, so that nothing in a trace can make one.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from tightfit.profiles import Profile
from tightfit.reporting.report.difference import difference_section
from tightfit.reporting.report.headline import title
from tightfit.reporting.report.markup import Html, text
from tightfit.reporting.report.sections import (
    View,
    about_section,
    headline_section,
    memory_section,
    prediction_section,
    readings_section,
)
from tightfit.reporting.report.time_sections import ops_section, time_section
from tightfit.trace_file import replacing
from tightfit.trace_sample import sampling_notes

POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
          "font-src data:; base-uri 'none'; form-action 'none'")  # fmt: skip

SECTIONS = {"headline": "Headline", "difference": "Difference", "memory": "Memory", "time": "Time", "ops": "Ops",
            "predicted": "Predicted", "readings": "Readings", "about": "About"}  # fmt: skip
"""The page's order, and what its contents call each section."""


def report(profile: Profile, other: Profile | None = None) -> str:
    """The page. other: a second run, which this one is compared with."""
    view = View.of(profile)
    parts = {
        "headline": headline_section(view),
        "difference": difference_section(view, View.of(other)) if other is not None else Html(""),
        "memory": memory_section(view),
        "time": time_section(view),
        "ops": ops_section(view),
        "predicted": prediction_section(view),
        "readings": readings_section(view),
        "about": about_section(view),
    }
    contents = "".join(f'<li><a href="#{name}">{SECTIONS[name]}</a></li>' for name, part in parts.items() if part)
    sampled = [f"{trace.origin}: {note}" for trace in (profile.measured, profile.predicted) if trace is not None
               for note in sampling_notes(trace)]
    warnings = "".join(f'<p role="note"><strong>{text(note)}. Sums below are of what was kept.</strong></p>'
                       for note in sampled)
    name = text(title(profile))
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
<a class="skip" href="#headline">Skip to the figures</a>
<header>
<div class="top"><div><h1>{name}</h1><p class="soft">{text(_what(profile))}</p></div>
<button id="theme" type="button" hidden>Dark theme</button></div>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<main>{warnings}{"".join(parts.values())}</main>
<footer><p>Made by tightfit. Charts by plotly. Without scripts the tables tell the same.</p></footer>
{"".join(chart_data(chart, figure) for chart, figure in view.charts.items())}
<script>{_plotly()}</script>
<script>{_own("page.js")}</script>
</body>
</html>
"""


def write_report(path: Path, profile: Profile, other: Profile | None = None) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    page = report(profile, other)
    with replacing(path) as temporary:
        temporary.write_text(page, "utf-8")


def _what(profile: Profile) -> str:
    recipe = profile.recipe
    choices = [f"{field}={getattr(getattr(recipe, field), 'name', getattr(recipe, field))}"
               for field in ("precision", "checkpointing", "optimizer", "attention", "compile")]
    return (f"global batch {recipe.batch_size:,}, micro-batch {recipe.micro_batch_size}, seq_len {recipe.seq_len:,}, "
            + ", ".join(choices))


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
