"""The JSON schema that editors check recipes by: right ones pass, wrong fields and values are found.

`problems` checks the keywords that the schema uses and no others, and names any that it does not know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_techniques import RUNGS
from tightfit.bundled import bundled_recipes
from tightfit.recipe import Recipe
from tightfit.recipe.json_schema import recipe_schema
from tightfit.recipe.yaml import apply_overrides
from tightfit.recipe.yaml_text import read_yaml
from tightfit.techniques import VARIANTS

SCHEMA = recipe_schema()
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "object": dict,
         "array": (list, tuple)}  # fmt: skip
SAID = {"$schema", "$defs", "title", "description", "default", "examples"}
"""Keywords that hold nobody to anything."""


def problems(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """What a JSON schema finds wrong with a value, each with its place."""
    found = []

    def has_type(name: str) -> bool:
        return isinstance(value, TYPES[name]) and (name == "boolean") == isinstance(value, bool)

    def items(schemas: list[dict[str, Any]]) -> list[str]:
        return [p for n, (item, inner) in enumerate(zip(value, schemas, strict=False))
                for p in problems(item, inner, f"{path}[{n}]")]

    for keyword, said in schema.items():
        wrong = False
        match keyword:
            case "$ref":
                found += problems(value, SCHEMA["$defs"][said.rpartition("/")[2]] if said != "#" else SCHEMA, path)
            case "anyOf":
                wrong = all(problems(value, branch, path) for branch in said)
            case "type":
                wrong = not has_type(said)
            case "const":
                wrong = value != said or type(value) is not type(said)
            case "enum":
                wrong = value not in said
            case "minimum":
                wrong = has_type("number") and value < said
            case "exclusiveMinimum":
                wrong = has_type("number") and value <= said
            case "maximum":
                wrong = has_type("number") and value > said
            case "exclusiveMaximum":
                wrong = has_type("number") and value >= said
            case "minItems":
                wrong = has_type("array") and len(value) < said
            case "maxItems":
                wrong = has_type("array") and len(value) > said
            case "items":
                found += items([said] * len(value)) if has_type("array") else []
            case "prefixItems":
                found += items(said) if has_type("array") else []
            case "required":
                wrong = has_type("object") and not set(said) <= value.keys()
            case "properties":
                if has_type("object"):
                    found += [p for name in value.keys() & said.keys()
                              for p in problems(value[name], said[name], f"{path}.{name}")]
            case "additionalProperties":
                if said is False and has_type("object"):
                    found += [f"{path}.{name}: no such field" for name in value.keys() - schema["properties"].keys()]
            case _:
                assert keyword in SAID, keyword
        if wrong:
            found.append(f"{path}: {value!r} against {keyword} {said!r}")
    return found


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipes_are_valid(name: str) -> None:
    assert problems(read_yaml(bundled_recipes()[name].read_text("utf-8"), name), SCHEMA) == []


def test_the_readme_s_recipe_is_valid() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8").partition("```yaml\n")[2].partition("```")[0]
    assert problems(read_yaml(text, "README"), SCHEMA) == []


@pytest.mark.parametrize("rung", RUNGS, ids=repr)
def test_what_a_run_writes_down_is_valid(rung: Any) -> None:
    assert problems(Recipe.from_dict({rung.slot: rung}).to_dict(), SCHEMA) == []


@pytest.mark.parametrize("word", [
    "compile=off", "checkpointing=off", "offload=null", "precision=tf32", "optimizer={name: sgd}", "report_to=wandb",
    "data=notes.txt", "data.packing=false", "inference=64", "loading.workers=2", "if_cuda={batch_size: 8}",
])  # fmt: skip
def test_short_forms_are_valid(word: str) -> None:
    values = apply_overrides({}, [word])
    assert problems(values, SCHEMA) == []
    values.pop("if_cuda", None)
    Recipe.from_dict(values)


@pytest.mark.parametrize(("word", "place"), [
    ("modle=gpt2", ".modle: no such field"), ("data.sorce=x", ".data"), ("batch_size=0", ".batch_size: 0"),
    ("batch_size=true", ".batch_size: True"), ("task=causallm", ".task: 'causallm'"), ("optimizer=adam", ".optimizer"),
    ("optimizer={name: lion, beta: 1}", ".optimizer"), ("optimizer={betas: [0.9, 0.99]}", ".optimizer"),
    ("optimizer={name: adamw, betas: [0.9, 2]}", ".optimizer"), ("optimizer={name: adamw, betas: [0.9]}", ".optimizer"),
    ("attention={name: sdpa, kernel: flsh}", ".attention"), ("checkpointing={name: every-nth, n: 0}", ".checkpointing"),
    ("learning_rate=0", ".learning_rate: 0"), ("report_to=5", ".report_to"), ("inference=0", ".inference"),
    ("parallel=auto", ".parallel"), ("compile={name: off, mode: default}", ".compile"),
    ("if_cuda={batch_size: 0}", ".if_cuda.batch_size: 0"),
])  # fmt: skip
def test_wrong_fields_and_values_are_found(word: str, place: str) -> None:
    found = problems(apply_overrides({}, [word]), SCHEMA)
    assert len(found) == 1
    assert found[0].startswith(place)


def test_every_field_and_knob_is_described_with_its_default() -> None:
    assert Recipe.model_fields.keys() | {"if_cuda"} == SCHEMA["properties"].keys()
    sections = [SCHEMA, *SCHEMA["$defs"].values()]
    fields = [(name, field) for section in sections for name, field in section["properties"].items()]
    assert [name for name, field in fields if name != "name" and not field.get("description")] == []
    assert [name for name, field in fields if name not in ("name", "if_cuda", "model_overrides", "hugging_face")
            and "default" not in field] == []
    assert problems({name: field["default"] for name, field in SCHEMA["properties"].items() if "default" in field},
                    SCHEMA) == []


def test_techniques_are_offered_by_name_with_what_they_do() -> None:
    for slot, variants in VARIANTS.items():
        offered = {branch.get("const"): branch for branch in SCHEMA["properties"][slot].get("anyOf", [])}
        for variant in variants:
            assert variant.name == slot or offered[variant.name]["description"]
        assert ("auto" in offered) == variants[0].may_be_auto


def test_the_command_prints_it(run: Any) -> None:
    status, out, _ = run("schema")
    assert status == 0
    assert json.loads(out) == json.loads(json.dumps(SCHEMA))
