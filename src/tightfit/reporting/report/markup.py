"""Pieces of HTML. Whatever comes from a trace or a recipe goes through `text`, so that markup in a name stays a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

LONGEST = 200
MOST = 2000
"""Characters of a name, and of a sentence, that are shown: either can be of any length."""
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, marks that turn the direction of text around, and halves of characters."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Cell = str | Html


def text(value: object) -> Html:
    """A value as HTML: markup in it is shown, not followed; what cannot be shown is `?`; what is too long is cut."""
    if isinstance(value, Html):
        return value
    shown = UNPRINTABLE.sub("?", str(value))
    return Html(escape(shown if len(shown) <= LONGEST else shown[:LONGEST] + " ..."))


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Cell]], left: int = 1) -> Html:
    """A table that scrolls sideways where it is too wide. left: columns of words; the rest are numbers."""
    def cells(row: Sequence[Cell]) -> str:
        first = f'<th scope="row">{text(row[0])}</th>'
        return first + "".join(f"<td{'' if at < left else ' class=num'}>{text(cell)}</td>"
                               for at, cell in enumerate(row[1:], start=1))

    heads = "".join(f'<th scope="col"{"" if at < left else " class=num"}>{text(heading)}</th>'
                    for at, heading in enumerate(headings))
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    if not body:
        return Html(f"<p>{text(caption)}: none.</p>")
    return Html(f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table>'
                f"<caption>{text(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>")


def paragraph(*sentences: str) -> Html:
    said = " ".join(sentence for sentence in sentences if sentence)
    return Html(f"<p>{prose(said)}</p>") if said else Html("")


def bullets(items: Iterable[str]) -> Html:
    body = "".join(f"<li>{prose(item)}</li>" for item in items)
    return Html(f"<ul>{body}</ul>") if body else Html("")


def prose(sentence: str) -> Html:
    """A sentence as HTML, which may be longer than a name."""
    return sentence if isinstance(sentence, Html) else Html(escape(UNPRINTABLE.sub("?", sentence[:MOST])))


def section(name: str, title: str, *parts: Html) -> Html:
    return Html(f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{text(title)}</h2>'
                + "".join(parts) + "</section>")


def folded(title: str, *parts: Html) -> Html:
    """Parts behind a line that opens them."""
    return Html(f"<details><summary>{text(title)}</summary>{''.join(parts)}</details>")


def code(value: str) -> Html:
    return Html(f"<code>{text(value)}</code>")


def tiles(figures: Iterable[tuple[str, str, str]]) -> Html:
    """Figures in large print: what each is, the figure, and what stands beside it."""
    shown = "".join(f'<div><dt>{text(name)}</dt><dd>{text(figure)}</dd><dd class="beside">{text(beside)}</dd></div>'
                    for name, figure, beside in figures)
    return Html(f'<dl class="figures">{shown}</dl>')


def chart(name: str, label: str) -> Html:
    """A place for the chart of that name. label: what it shows, for those who cannot see it."""
    return Html(f'<div class="chart" id="{name}" role="img" aria-label="{text(label)}"></div>')
