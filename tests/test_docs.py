"""The documentation: generated pages are current, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import build_site
import generate

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as Markdown viewers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The page's links to files that do not exist, or to headings that their page does not have."""
    return [link for link, target, anchor in build_site.links(page)
            if not target.is_file() or (anchor and anchor not in anchors(target))]


def test_generated_pages_are_current() -> None:
    assert generate.outdated() == [], "run: make docs"


def test_every_generated_page_says_where_it_comes_from() -> None:
    assert all(text.startswith(generate.NOTICE) for text in generate.pages().values())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](#one-two) [b](page.md#three) [c](https://example.org) ![d](no.png) [e](gone.md)\n"
                    f"[a folder]({tmp_path.name}/..)\n")
    assert broken_links(page) == ["page.md#three", "no.png", "gone.md", f"{tmp_path.name}/.."]


def test_the_site_names_every_page_and_no_other() -> None:
    """Techniques are named by their index, and the tutorial is read first."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = [ROOT / page for page in re.findall(r": (\S+\.md)$", nav, re.MULTILINE)]
    assert named[:2] == [ROOT / "README.md", ROOT / "docs/tutorial.md"]
    assert set(named) <= build_site.files()
    assert {*(ROOT / "docs").glob("*.md"), ROOT / "docs/techniques/README.md"} <= set(named)


def test_the_site_is_not_built_without_its_library(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(build_site, "find_spec", lambda name: None)
    assert build_site.main() == 0
    assert capsys.readouterr().out.endswith("run: pip install '.[site]'\n")


def test_the_site_has_what_its_pages_link_to() -> None:
    pytest.importorskip("zensical")
    assert build_site.main() == 0
    site = ROOT / "build" / "site"
    assert "What it shows" in (site / "docs/plan/index.html").read_text("utf-8")
    assert (site / "results/published.json").is_file()


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
