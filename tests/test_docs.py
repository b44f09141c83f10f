"""The documentation: generated pages are current, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import generate

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as Markdown viewers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The page's links to files that do not exist, or to headings that their page does not have."""
    broken = []
    for groups in LINK.findall(page.read_text("utf-8")):
        link = "".join(groups)
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_generated_pages_are_current() -> None:
    assert generate.outdated() == [], "run: make docs"


def test_every_generated_page_says_where_it_comes_from() -> None:
    assert all(text.startswith(generate.NOTICE) for text in generate.pages().values())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](#one-two) [b](page.md#three) [c](https://example.org) ![d](no.png) [e](gone.md)\n")
    assert broken_links(page) == ["page.md#three", "no.png", "gone.md"]


def test_pages_that_changed_or_are_gone_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path / "docs")
    assert generate.main([]) == 0
    stale = tmp_path / "docs/techniques/optimizer-gone.md"
    stale.write_text("left over")
    changed = tmp_path / "docs/recipe.md"
    changed.write_text("edited")
    assert generate.outdated() == [changed, stale]
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    assert not stale.exists()
