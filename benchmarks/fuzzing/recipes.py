"""Recipes that no one would write: a recipe with the values that were written, or one message.

`tightfit plan` reads each as it does for a person; what it would then plan is taken from it, except for a few seeds,
which are planned, and fewer that are planned by a process from cold.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from fuzzing.harness import HANGS_AFTER, Kind, Said, fault, run_command
from tightfit.recipe import Recipe
from tightfit.recipe.yaml import NO_DOT
from tightfit.techniques import SLOTS, VARIANTS

PLANNED, COLD = 100, 1000
"""One seed of so many is planned, or is planned from cold."""
TINY: dict[str, Any] = {
    "model": "gpt2", "model_overrides": {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64},
    "vocab_size": 300, "seq_len": 32, "batch_size": 4, "micro_batch_size": 2, "device": "cpu", "precision": "fp32",
    "loss": "plain", "checkpointing": "none", "optimizer": "adamw", "attention": "eager", "compile": "off",
}  # fmt: skip
TEXTS = (
    "", " ", "auto", "none", "null", "off", "on", "yes", "~", "true", "1e-3", "1_000", "0x10", "0o17", "1:30", "٣",
    "½", "é", "\u202e", "🦊" * 9, "\x00", "\ud800", "a\nb", "a: b", "{", "[", "*a", "&a", "!!python/object:os.system",
    "%s", "{0}", "../..", "~/x",
    "/", "/dev/null", "C:\\x", "gpt2", "gpt3", "openai/none such", "os:system", "math:sqrt", "no.such:thing",
    "2020-01-01", "2020-13-45", "<b>", "-1", "inf", "nan", ".nan", "x" * 300, "x" * 100_000, "[bold]", "[/]",
)  # fmt: skip
NAMES = ("lora", "bf16", "fsdp", "adamw-8bit", "every-block", "flash", "jax", "dummy", "whole", "host")
NUMBERS = (
    0, 1, -1, 2, 3, 7, 0.0, -0.0, 0.5, 1.5, -2.5, 1e-300, 1e300, 1e16, math.nan, math.inf, -math.inf, 2**31 - 1,
    2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63),
)  # fmt: skip
DOCUMENT_END = "\n...\n"
YES_OR_NO = ("0", "1", "0.0", "-0.0", "1.0", "on", "off", "yes", "no", "y", "n", "true", "false")
"""Other ways to write true and false."""


def any_value(draw: random.Random, depth: int = 0) -> Any:
    """A value of any type."""
    kind = draw.randrange(10 if depth < 3 else 6)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(TEXTS)
    if kind == 4:
        return draw.choice((None, True, False))
    if kind == 5:
        return draw.choice(NAMES)
    if kind == 6:
        return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {draw.choice(("name", "source", "tokens", "x", "", "a.b")): any_value(draw, depth + 1)
                for _ in range(draw.randrange(4))}
    slot = draw.choice(list(SLOTS))
    variant = draw.choice(list(VARIANTS[slot]))
    knobs = list(getattr(variant, "__pydantic_fields__", {})) or ["x"]
    return {"name": variant.name, draw.choice(knobs): any_value(draw, depth + 1)}


def any_field(draw: random.Random) -> str:
    """A field's name, a knob's or a section's field's behind a dot, or none that there is."""
    name = draw.choice(list(Recipe.model_fields))
    kind = draw.randrange(12)
    if kind < 6:
        return name
    if kind < 8:
        return draw.choice(list(VARIANTS))
    if kind == 8:
        return "data." + draw.choice(("source", "text", "packing", "samples", "eval_fraction", "split", "none", ""))
    if kind == 9:
        slot = draw.choice(list(SLOTS))
        knobs = [knob for variant in VARIANTS[slot] for knob in getattr(variant, "__pydantic_fields__", {})]
        return f"{slot}.{draw.choice([*knobs, 'name', 'x'])}"
    if kind == 10:
        field = draw.choice(("n_layer", "n_embd", "n_head", "activation_function", "x", "vocab_size"))
        return f"model_overrides.{field}"
    return draw.choice(("", ".", "..", "if_cuda", name.upper(), name + " ", name[:-1], "é", "lr", "__class__", "<b>",
                        "model_config", "model.x", "max_steps.y", "1", "-x", "--json", "x" * 3000))


def values_text(draw: random.Random, values: dict[str, Any]) -> str:
    """Values as YAML, in one of its styles."""
    return yaml.safe_dump(values, allow_unicode=draw.random() < 0.5, sort_keys=False,
                          default_flow_style=draw.choice((True, False, None)))


def laughs(draw: random.Random) -> str:
    """Aliases of lists of aliases: few bytes that stand for very many values."""
    lines = ["a0: &a0 [lol, lol]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    field = draw.choice(("model", "model_overrides", "report_to", "data", "optimizer", "hugging_face", "x"))
    return "\n".join([*lines, f"{field}: {draw.choice(('*a11', '{x: *a11}', '[*a11]'))}"])


def damaged(draw: random.Random, text: str) -> bytes:
    """A recipe's text with something about it that YAML, or a reader of files, may stumble over."""
    raw, place = text.encode(errors="surrogatepass"), draw.randrange(len(text) + 1)
    before, behind, slot = raw[:place], raw[place:], draw.choice(list(Recipe.model_fields))
    odd = draw.choice((b"\x00", b"\t", b"\xff", b"\x0c", b"---\n", b"...\n", b"%YAML 9.9\n", b"!!binary "))
    tag = draw.choice(("x", "!set {a, b}", "!omap [a: 1]", "!timestamp 2020-01-01", "!binary YWJj",
                       "!python/object/apply:os.system ['touch executed']",
                       "!python/object/new:subprocess.Popen [[touch, executed]]"))
    many = ", ".join(f"k{i}: 1" for i in range(300))
    return draw.choice((
        b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n"), text.encode("utf-16", errors="surrogatepass"), before,
        before + draw.randbytes(draw.randint(1,
                                             40)) + behind, before + odd + behind, draw.randbytes(draw.randrange(300)),
        b"", raw + raw, raw + f"\n{slot}: 1\n{slot}: 2\n".encode(), raw + f"\n{slot}: !{tag}\n".encode(),
        laughs(draw).encode(), b"a: &a [*a]\nmodel: *a\n", b"x: &x {y: *x}\nmodel_overrides: *x\n",
        f"{slot}: {'[' * draw.choice((10, 900, 30_000))}\n".encode(), f"{slot}: {'[' * 900}{']' * 900}\n".encode(),
        b"<<: {model: gpt2, seq_len: 32}\n" + raw.partition(b"model_overrides")[2], b"? [a, b]\n: 1\n" + raw,
        b"- " + raw.replace(b"\n", b"\n  "), f"model: gpt2\n{slot}: {'9' * 6000}\n".encode(),
        f"model: gpt2\n{slot}: {'x' * 200_000}\n".encode(), f"model: gpt2\n# {'x' * 200_000}\n".encode(),
        f"model: gpt2\nmodel_overrides: {{{many}}}\n".encode(),
    ))  # fmt: skip


def attempt(seed: int, folder: Path) -> str | None:
    """A recipe file and overrides, drawn from a seed."""
    draw = random.Random(seed)
    written = dict(TINY)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        written[any_field(draw)] = any_value(draw)
    try:
        text = values_text(draw, written)
    except (yaml.YAMLError, RecursionError, ValueError):  # what no YAML can hold
        text, written = values_text(draw, TINY), dict(TINY)
    whole = draw.random() < 0.6
    overrides = []
    for _ in range(draw.choice((0, 0, 1, 2))):
        value = any_value(draw)
        plain = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
        overrides.append(f"{any_field(draw)}={plain.removesuffix(DOCUMENT_END).strip()}".replace("\x00", "0"))
    file = draw.choice(("mine.yaml", "mine.yaml", "mine.yaml", "mine.yml", "m i n é.yaml", "model=x.yaml"))
    raw = text.encode(errors="surrogatepass") if whole else damaged(draw, text)
    (folder / file).write_bytes(raw)
    words = ["plan", file, *overrides, "--gpu", draw.choice(("cpu", "rtx-4090"))]
    said, recipe = read(words)
    if recipe is not None:
        wrong = changed(recipe, written) if whole and not overrides else None
        if wrong is None and seed % PLANNED == 0:
            said = run_command(*words)
        if wrong is not None:
            return f"{wrong}\n{words}\n{text[:2000]}"
    if seed % COLD == 1 and not any("\ud800" in word for word in words):
        done = subprocess.run([sys.executable, "-m", "tightfit", *words], capture_output=True, text=True, check=False,
                              timeout=HANGS_AFTER, cwd=folder, errors="replace")
        said = Said(done.returncode, done.stdout, done.stderr)
    wrong = fault(said)
    if wrong is None and (folder / "executed").exists():
        wrong = "a tag was executed"
    return wrong and f"{wrong}\n{words}\n{raw[:2000]!r}"


def read(words: list[str]) -> tuple[Said, Recipe | None]:
    """What `tightfit plan` says of a recipe that it cannot read, and the recipe that it reads."""
    def planned(recipe_on: Callable[[bool], Recipe], *_: Any, **__: Any) -> None:
        kept.append(recipe_on(False))
        raise SystemExit(0)

    kept: list[Recipe] = []
    with mock.patch("tightfit.commands.plan.plan_on", planned):
        said = run_command(*words)
    return said, next(iter(kept), None)


def changed(recipe: Recipe, written: dict[str, Any]) -> str | None:
    """The field of which the recipe has another value than was written."""
    for field, value in written.items():
        found = recipe.to_dict().get(field, "no such field")
        if not same(field, value, found):
            return f"{field}: {value!r} was written, and {found!r} was read"
    return None


def same(field: str, value: Any, found: Any) -> bool:
    """Whether a value that was read is the one that was written, in one of its forms."""
    if isinstance(value, bool) or isinstance(found, bool):
        off = field in VARIANTS and value is False and found in ("off", "none")
        return value is found or off or (found in (True, False) and str(value).lower() in YES_OR_NO)
    if isinstance(value, dict):
        value = dict(value)
        if isinstance(found, str):  # a technique whose knobs are what they are by default
            return bool(value.pop("name", None) == found)
        return isinstance(found, dict) and all(same("", each, found.get(key)) for key, each in value.items())
    if isinstance(found, dict):
        short = (None, found.get("source"), found.get("name"), found.get("new_tokens"))
        return value in short or (value == "tf32" and found.get("tf32") is True)
    if isinstance(value, list) or isinstance(found, list):
        return bool(found == (value if isinstance(value, list) else [value]))
    if value is None:
        return found is None or (field in VARIANTS and found in ("off", "none"))
    number = isinstance(value, int | float) or (isinstance(value, str) and NO_DOT[1].fullmatch(value))
    if number and isinstance(found, float):
        return bool(float(value) == found)
    return bool(found == value) or (isinstance(value, str) and value.removeprefix("eval_") == found)


KIND = Kind(attempt, quick=200, chunk=100, shared=(
    "tightfit.planner", "tightfit.commands.plan", "tightfit.recipe.hf_arguments.table", "transformers",
    "transformers.models.gpt2.configuration_gpt2", "tightfit.backends.pytorch.simulate.predict",
))  # fmt: skip
