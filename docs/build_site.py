"""Build the site of the documentation: the pages that the README and docs/ link to, by mkdocs.yml, in build/site.

    python docs/build_site.py

Pages lie in the site as they lie in the repository, so that a link serves both. A broken one fails the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "pages"
"""The folder that mkdocs.yml names: a copy of the pages and of what they link to."""
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """A page's links to files: as written, the file, and the anchor in it or an empty text."""
    for link in LINK.findall(page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            yield link, (page.parent / path).resolve() if path else page, anchor


def files() -> set[Path]:
    """The README, every page of docs/, and whatever they link to."""
    found, left = set[Path](), [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    while left:
        file = left.pop()
        if file not in found and file.is_file():
            found.add(file)
            left += [target for _, target, _ in links(file)] if file.suffix == ".md" else []
    return found


def main() -> int:
    """Copy the pages and build the site, where the library for it is installed. Returns the exit status."""
    if find_spec("zensical") is None:
        print("the site is not built, for the library zensical is not installed; run: pip install '.[site]'")
        return 0
    shutil.rmtree(SOURCE, ignore_errors=True)
    for file in files():
        copy = SOURCE / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
