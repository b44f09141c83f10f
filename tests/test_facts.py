"""Who compares techniques by class or name, instead of reading a fact that they carry: counted by the syntax tree."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tightfit.techniques import SLOTS

SOURCE = Path(__file__).parents[1] / "src" / "tightfit"
CLASSES = {variant.__name__ for variants in SLOTS.values() for variant in variants if len(variants) > 1}
NAMES = {variant.name for variants in SLOTS.values() for variant in variants if len(variants) > 1}
OWN = {"techniques", *(f"{slot}.py" for slot in SLOTS)}
"""A technique's two files: techniques/<slot>.py and backends/<backend>/<slot>.py."""
MOST = 2
"""How many are left: what DeepSpeed's engine does is declared for one variant alone, and DataParallel has one loss."""


def compares(node: ast.AST) -> bool:
    """Whether it asks which technique a value is: isinstance with a variant, or a name compared with one's."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return any(isinstance(part, ast.Name) and part.id in CLASSES for part in ast.walk(node.args[1]))
    if not isinstance(node, ast.Compare) or not (isinstance(node.left, ast.Attribute) and node.left.attr == "name"):
        return False
    return any(isinstance(part, ast.Constant) and part.value in NAMES for right in node.comparators
               for part in ast.walk(right))


def comparisons() -> Counter[str]:
    """Comparisons by file, the techniques' own files and the peers' tables left out."""
    found: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        own = inside.parts[0] == "techniques" or (inside.parts[0] == "backends" and inside.name in OWN)
        if not own and inside.parts[:2] != ("ladder", "peers"):
            found[str(inside)] += sum(map(compares, ast.walk(ast.parse(path.read_text()))))
    return +found


def test_few_compare_techniques_instead_of_reading_their_facts() -> None:
    found = comparisons()
    assert found.total() <= MOST, found


def test_planning_compares_none() -> None:
    assert not [name for name in comparisons() if name.startswith("planning/search")]


def test_a_comparison_is_seen() -> None:
    seen = ("isinstance(x, Fp16 | Bf16)", "isinstance(x.y, (AdamW,))", "x.name == 'fp32'", "x.name in ('none', 'mlp')")
    untraced = ("isinstance(x, str)", "x.name == y.name", "x.name == 'somebody'")
    assert all(any(map(compares, ast.walk(ast.parse(text)))) for text in seen)
    assert not any(any(map(compares, ast.walk(ast.parse(text)))) for text in untraced)
