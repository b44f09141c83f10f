"""Write the pages of docs/ that come from declarations: one a technique, their index, and the recipe's fields; and
those that come from records in results/.

    python docs/generate.py           write what changed, remove pages of techniques that are gone
    python docs/generate.py --check   write nothing; exit 1 and name the pages that are not current
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import RootModel

from gpu_records import gpu_page
from ladders import ladder_page
from recorded import recorded_pages
from refusals import knobs, refusals
from tightfit.recipe import Data, Inference, Recipe
from tightfit.techniques import VARIANTS, Technique
from tightfit.techniques.compile import BACKENDS

DOCS = Path(__file__).parent
NOTICE = "<!-- Written by docs/generate.py from src/tightfit and results/; change those, then run: make docs -->\n"

EXACT = {
    "bitwise": "leaves the gradients as they are, bit for bit",
    "rounding": "leaves the gradients as they are up to rounding: sums run in another order",
    "changes": "changes the numbers by design",
}

CONVERGENCE = DOCS.parent / "results" / "convergence.json"
"""What benchmarks/convergence.py recorded last."""

CONSTRAINTS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def pages() -> dict[str, str]:
    """Every generated page's text, by its path below docs/."""
    variants = [variant for slot in VARIANTS.values() for variant in slot]
    result = {f"techniques/{page_name(variant)}": technique_page(variant) for variant in variants}
    result["techniques/README.md"] = index_page()
    result["techniques/compile-backends.md"] = backends_page()
    result["recipe.md"] = recipe_page()
    for path, parts in {**recorded_pages(), "ladder.md": ladder_page(), "gpu.md": gpu_page()}.items():
        result[path] = _page([part if isinstance(part, str) else _table(*part) for part in parts])
    return result


def page_name(variant: type[Technique]) -> str:
    """The file of a technique's page."""
    return f"{variant.slot}.md" if variant.name == variant.slot else f"{variant.slot}-{variant.name}.md"


def technique_page(variant: type[Technique]) -> str:
    """One technique: what it is, what it costs, its knobs, the settings worth trying, and when it is refused."""
    alone = variant.name == variant.slot
    written = "its knobs, such as `loading.workers=2`" if alone else f"`{variant.slot}={variant.name}`"
    exact = EXACT[variant.exact]
    if variant.exact == "changes":
        exact += f"; the held-out loss on quickstart's data may end {variant.tolerance:g} nats above fp32 AdamW's"
    parts = [
        f"# {variant.slot}" if alone else f"# {variant.slot}: {variant.name}",
        _paragraph(variant),
        f"- Write: {written}\n- Exactness: {exact}\n- Speed: {variant.speed}\n- Memory: {variant.memory}",
        "## Knobs",
        _knobs_table(knobs(variant), f"{variant.slot}.") if knobs(variant) else "None.",
    ]
    rungs = [f"{variant.slot}: {_yaml(_short(rung))}" for rung in variant.representative_settings()]
    if len(rungs) > 1:
        parts += ["## Settings worth trying", "\n".join(f"- `{rung}`" for rung in rungs)]
    reasons = refusals(variant)
    if reasons:
        rows = [(r.where, r.when, r.reason) for r in reasons]
        parts += ["## Refused", _table(("on", "with", "because"), rows)]
    if variant.slot == "compile":
        parts.append("See the [table of backends](compile-backends.md).")
    parts += _measured(variant)
    parts.append("[All techniques](README.md)")
    return _page(parts)


def _measured(variant: type[Technique]) -> list[str]:
    """The newest recorded loss of every run that chose this technique; nothing where none is recorded."""
    if not CONVERGENCE.exists():
        return []
    record = json.loads(CONVERGENCE.read_text())
    rows, dates = [], set()
    for name, run in record["runs"].items():
        chosen = run["changes"].get(variant.slot)
        if (chosen["name"] if isinstance(chosen, dict) else chosen) == variant.name:
            end = run["held_out"][-1][1]
            dates.add(run["date"])
            rows.append((name, f"{run['learning_rate']:g}", f"{end:.3f}", f"{run['above_fp32_adamw']:+.3f}"))
    if not rows:
        return []
    where = record["environment"]
    place = f"{where['device']}, torch {where['torch']}, {' and '.join(sorted(dates))}"
    source = (f"Quickstart's data, a smaller model, {record['steps']} steps, {place}; nats a token, in "
              "[convergence.json](../../results/convergence.json).")  # fmt: skip
    table = _table(("run", "peak learning rate", "held-out loss", "against fp32 AdamW"), rows)
    return ["## Measured", source, table]


def index_page() -> str:
    """Every technique in a table for each slot."""
    parts = [
        "# Techniques",
        "One page for each choice a recipe makes. A field that says `auto` is filled in from the device and the model; "
        "what a recipe names stays as named. `bitwise`, `rounding` and `changes` say how a technique leaves the "
        "gradients.",
    ]
    for slot, variants in VARIANTS.items():
        rows = [(f"[{v.name}]({page_name(v)})", v.exact, v.speed, v.memory) for v in variants]
        parts += [f"## {slot}", _table(("name", "exactness", "speed", "memory"), rows)]
    return _page(parts)


def backends_page() -> str:
    """The guides' table of torch.compile backends, and what became of each."""
    rows = [(f"`{name}`", purpose, f"`{instead}`" if instead else "") for name, (purpose, instead) in BACKENDS.items()]
    return _page([
        "# Backends of torch.compile",
        "Each can be written as `compile.backend`; those that cannot train, or are gone, are refused with what to "
        "write instead.",
        _table(("backend", "what it is", "write instead"), rows),
        "[All techniques](README.md)",
    ])


def recipe_page() -> str:
    """Every field of a recipe."""
    links = {slot: f"; see [its techniques](techniques/README.md#{slot})" for slot in VARIANTS}
    return _page([
        "# Recipe",
        "A recipe is a YAML file of these fields; `key=value` on the command line overrides one, and dots reach into "
        "`data`, `inference` and techniques. Fields left out take their defaults.",
        "An editor that knows the YAML language server completes and checks recipes by their JSON schema: run "
        "`tightfit schema > recipe.schema.json`, and write `# yaml-language-server: $schema=recipe.schema.json` as the "
        "first line of a recipe beside it. `tightfit --install-completion` lets the shell complete commands, models, "
        "GPUs and fields.",
        _knobs_table(Recipe.model_fields, "", links),
        "## data",
        "A short string stands for `{source: ...}`.",
        _knobs_table(Data.model_fields, "data."),
        "## inference",
        "A number stands for `{new_tokens: ...}`.",
        _knobs_table(Inference.model_fields, "inference."),
    ])


def _knobs_table(fields: Mapping[str, Any], prefix: str, links: Mapping[str, str] | None = None) -> str:
    rows = []
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        kind = _type(field.annotation, field.metadata)
        if name in VARIANTS and not prefix:
            kind = "technique, or `auto`" if VARIANTS[name][0].may_be_auto else "technique"
        meaning = (field.description or "").rstrip(".") + (links or {}).get(name, "")
        rows.append((f"`{prefix}{name}`", kind, f"`{_yaml(default)}`", meaning))
    return _table(("field", "type", "default", "meaning"), rows)


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A field's type as a person reads it: `int, at least 1, or auto`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    limits = [
        text.format(f"{getattr(limit, key):g}")
        for limit in metadata
        for key, text in CONSTRAINTS.items()
        if hasattr(limit, key)
    ]
    if origin is Annotated:
        inner = [m for extra in arguments[1:] for m in getattr(extra, "metadata", [extra])]
        return _type(arguments[0], inner)
    if origin is Literal:
        text = ", ".join(f"`{value}`" for value in arguments)
    elif origin in (Union, UnionType):
        text = ", or ".join(_type(branch) for branch in arguments)
    elif origin is tuple:
        text = ("list of " if arguments[-1] is ... else f"{len(arguments)} values, each ") + _type(arguments[0])
    elif annotation is NoneType:
        text = "`null`"
    else:
        text = "mapping" if origin is dict or annotation in (Data, Inference) else annotation.__name__
    return ", ".join([text, *limits])


def _short(value: Technique) -> Any:
    """A technique as a recipe holds it."""
    return Recipe.from_dict({value.slot: value}).to_dict()[value.slot]


def _yaml(value: Any) -> str:
    """A value in YAML's flow style, on one line."""
    plain = _short(value) if isinstance(value, Technique) else RootModel(value).model_dump(mode="json")
    text: str = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _paragraph(variant: type[Technique]) -> str:
    return " ".join(inspect.getdoc(variant).split())  # type: ignore[union-attr]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _page(parts: Sequence[str]) -> str:
    return NOTICE + "\n" + "\n\n".join(parts) + "\n"


def outdated() -> list[Path]:
    """Files below docs/ that are not what `pages` says: changed, missing, or of a technique that is gone."""
    current = {DOCS / path: text for path, text in pages().items()}
    wrong = [path for path, text in current.items() if not path.is_file() or path.read_text("utf-8") != text]
    return sorted([*wrong, *(set((DOCS / "techniques").glob("*.md")) - set(current))])


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` name those that are not current. Returns the exit status."""
    wrong = outdated()
    for path in wrong:
        print(path.relative_to(DOCS.parent))
    if "--check" in arguments:
        return 1 if wrong else 0
    texts = pages()
    for path in wrong:
        text = texts.get(path.relative_to(DOCS).as_posix())
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
