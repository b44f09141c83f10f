"""Between what a person writes and a recipe's values: short forms of techniques, overrides, and error sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel, BeforeValidator, PlainSerializer, RootModel, ValidationError

from tightfit.errors import RecipeError, cut, nearest, shown
from tightfit.recipe.yaml_text import load
from tightfit.techniques import VARIANTS, Technique

SHORT_FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("precision", "tf32"): {"name": "fp32", "tf32": True},
}
"""Names that stand for a variant with a knob set."""

SAID_BY_FALSE = ("off", "none")
"""Names of variants that YAML's false and null mean as well."""

SHORT_FIELDS = {"data": "source", "inference": "new_tokens"}
"""Fields that are mappings, and the one of theirs that a plain value stands for."""

TEXT_FIELDS = (
    "model", "tokenizer", "output_dir", "sample_prompt", "cache_dir", "data.source", "data.config", "data.split",
    "data.text", "data.text_pair", "data.messages", "data.chat_template", "data.prompt", "data.completion",
    "data.label", "data.target", "data.eval_source", "data.eval_split",
)  # fmt: skip
"""Fields whose value on a command line is a text as it stands, and no YAML, but for `null` and what is in quotes: a
folder may be named 007, and a file `a #1: b`."""


def parse_technique(slot: str, value: Any) -> Technique | str:
    """The technique that `value` stands for in `slot`: its name, a mapping with `name` and knobs, or itself.

    Raises RecipeError naming the field, the value and the nearest right one.
    """
    variants = {variant.name: variant for variant in VARIANTS[slot]}
    if isinstance(value, Technique):
        return value
    if value == "auto" and VARIANTS[slot][0].may_be_auto:
        return "auto"
    if isinstance(value, str | bool) or value is None:
        value = {"name": value}
    if not isinstance(value, Mapping) or not all(isinstance(knob, str) for knob in value):
        raise RecipeError(f"{slot}: {shown(value)} is not a name or a mapping of knobs; "
                          f"{nearest(str(value), variants)}")
    knobs = dict(value)
    name = knobs.pop("name", slot if slot in variants else "")
    if name is None or name is False:  # YAML reads `null` and `off` so
        written = "null" if name is None else "off"
        name = next((off for off in SAID_BY_FALSE if off in variants), written)
    if not isinstance(name, str) or not name:
        raise RecipeError(f"{slot}: {shown(value)} has no `name`; choose from: {', '.join(sorted(variants))}")
    if (slot, name) in SHORT_FORMS:
        short = dict(SHORT_FORMS[slot, name])
        name, knobs = short.pop("name"), {**short, **knobs}
    if name not in variants:
        if reason := VARIANTS[slot][0].unserved.get(name):
            raise RecipeError(f"{slot}: {name!r} is not to be had yet: {reason}")
        choices = [*variants, *(short for where, short in SHORT_FORMS if where == slot)]
        raise RecipeError(_unknown(slot, name, choices))
    try:
        return variants[name](**knobs)
    except ValidationError as error:
        fields = getattr(variants[name], "__pydantic_fields__", {})
        prefix = slot if name == slot else f"{slot} {name}"
        raise RecipeError(_join(_sentence(e, fields, slot, prefix) for e in error.errors())) from None


def technique_to_yaml(value: Technique | str) -> str | dict[str, Any]:
    """The shortest form of a technique: its name, or a mapping of its name and the knobs that are not the default."""
    if isinstance(value, str):
        return value
    knobs = RootModel(value).model_dump(mode="json", exclude_defaults=True)
    unnamed = value.name == value.slot
    if not knobs:
        return {} if unnamed else value.name
    return knobs if unnamed else {"name": value.name, **knobs}


def value_text(value: Any) -> str:
    """A plain value as a person writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def field_text(field: str, value: Any) -> str:
    """A field as a person writes it: `checkpointing=every-nth checkpointing.n=3`."""
    if not isinstance(value, Technique):
        return f"{field}={value_text(value)}"
    plain = technique_to_yaml(value)
    if isinstance(plain, str):
        return f"{field}={plain}"
    knobs = (field_text(f"{field}.{knob}", setting) for knob, setting in plain.items() if knob != "name")
    return " ".join([f"{field}={value.name}", *knobs])


def slot_field(slot: str) -> tuple[BeforeValidator, PlainSerializer]:
    """Reading and writing of a recipe's field of a slot."""
    return BeforeValidator(lambda value: parse_technique(slot, value)), PlainSerializer(technique_to_yaml)


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """A validation error as sentences that name each field, its value, and what to write instead."""
    from tightfit.recipe.hf_arguments.table import misplaced  # for messages alone

    unknown = [str(e["loc"][0]) for e in error.errors() if e["type"] == "extra_forbidden" and len(e["loc"]) == 1]
    return _join([*misplaced(unknown), *(_sentence(e, _fields_at(model, e["loc"]), "", "") for e in error.errors())])


def _join(sentences: Iterable[str]) -> str:
    """One text; the branches of a union, which begin alike, are joined with `or`."""
    merged: dict[str, str] = {}
    for sentence in sentences:
        head, should, expected = sentence.partition(" should be ")
        known = merged.get(head)
        merged[head] = f"{known} or {expected}" if known and should else f"{head}{should}{expected}"
    return "; ".join(merged.values())


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = model.model_fields
    for part in location[:-1]:
        annotation = getattr(fields.get(str(part)), "annotation", None)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            fields = annotation.model_fields
    return fields


def _unknown(path: str, value: str, choices: list[str]) -> str:
    """A sentence for a value that a field does not take."""
    from tightfit.recipe import synonyms  # for messages alone

    meant = next((each for each in choices if value.lower() in synonyms.VALUES.get(each, ())), None)
    hint = nearest(value, choices) if meant is None else f"did you mean {meant!r}?"
    return f"{path}: {shown(value)} is not known; {hint}"


def _sentence(error: Any, fields: Mapping[str, Any], slot: str, where: str) -> str:
    # A union's branches add their own names behind the field; only what a person wrote belongs in the path.
    parts = [str(part) for part in error["loc"]]
    written = [p for p in parts if p.isidentifier() and p not in ("int", "float", "literal", "constrained")] or parts
    path = cut(".".join(([slot] if slot else []) + written))
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        name = parts[-1]
        from tightfit.recipe.hf_arguments.table import in_place_of

        if not slot and (advice := in_place_of(name, fields)):
            return f"{path}: not a field; {advice}"
        owner = f" of {where}" if where else ""
        if not fields:
            return f"{path}: not a field{owner}, which has no knobs"
        return f"{path}: not a field{owner}; {nearest(name, fields)}"
    if error["type"] == "invalid_key":
        return f"{path}: {shown(error['input'])} is not the name of a field"
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ").partition(", unable")[0]
    if error["type"] == "string_type":  # of what YAML reads as a number or a truth value
        message = "a text" + ", in quotes" * isinstance(error["input"], bool | int | float)
    if error["type"] == "int_parsing_size":  # whose message is a sentence of its own
        message = "a smaller integer"
    if error["type"] in ("tuple_type", "missing", "too_long"):
        default = getattr(fields.get(written[-1]), "default", None)
        message = "a list" + (f" such as {list(default)}" if isinstance(default, tuple) and default else "")
    expected = error.get("ctx", {}).get("expected")
    if expected and expected.count("'") == 2:  # one word beside numbers, such as auto
        return f"{path}: {shown(error['input'])} should be {expected}"
    if expected and isinstance(error["input"], str):
        choices = [c.strip(" '") for c in expected.replace(" or ", ", ").split(",")]
        return _unknown(path, error["input"], choices)
    if isinstance(error["input"], str) and error["type"] == "int_parsing":
        from tightfit.recipe import synonyms

        message += synonyms.LARGEST.get(path, "")
    return f"{path}: {shown(error['input'])} should be {message}"


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Plain recipe values with `key=value` texts applied in order; dots reach into mappings.

    Raises RecipeError for a text without `=`, or a knob whose technique is not named yet.
    """
    result = dict(values)
    texts = list(overrides)
    for text, following in zip(texts, [*texts, ""][1:], strict=True):
        key, equals, raw = text.partition("=")
        if key.startswith("-"):
            given = raw if equals else "VALUE" if "=" in following else following or "VALUE"
            raise RecipeError(f"{key}: no such option, which --help lists; for a field of the recipe, write "
                              f"{key.lstrip('-').replace('-', '_')}={given}")
        if not equals or not key:
            raise RecipeError(f"{shown(text)}: write key=value, such as max_steps=100")
        try:
            value = raw if _as_it_stands(key.strip(), raw) else load(raw) if raw else None
        except RecipeError as error:
            raise RecipeError(f"{key}: {error}") from None
        except (yaml.YAMLError, ValueError):  # text that only looks like YAML, or like a number
            value = raw
        *parents, last = path = key.strip().split(".")
        place = result
        for depth, parent in enumerate(parents):
            place[parent] = _as_mapping(parent, place.get(parent), text, path[depth + 1])
            place = place[parent]
        place[last] = value
        if key.strip() == "max_steps":
            result.pop("num_train_epochs", None)
    return result


def _as_it_stands(field: str, raw: str) -> bool:
    """Whether a field's value on a command line is that text; `data` may be a mapping in braces as well."""
    yaml_begins = "'\"{[" if field == "data" else "'\""
    return (field == "data" or field in TEXT_FIELDS) and raw not in ("", "null", "~") and raw[0] not in yaml_begins


def _as_mapping(field: str, value: Any, text: str, knob: str) -> dict[str, Any]:
    """The mapping that a short string stands for, so that its field `knob` can be set."""
    if isinstance(value, Mapping):
        return dict(value)
    if field in SHORT_FIELDS:
        return {} if value is None else {SHORT_FIELDS[field]: value}
    if field in VARIANTS and VARIANTS[field][0].name != field:
        if knob == "name":
            return {}
        if value in (None, "auto"):
            able = [variant for variant in VARIANTS[field] if knob in getattr(variant, "__pydantic_fields__", {})]
            name = (able or VARIANTS[field])[0].name
            left = "auto" if VARIANTS[field][0].may_be_auto else "not named"
            raise RecipeError(f"{shown(text)}: {field} is {left}; name it first, such as {field}={name}")
        technique = parse_technique(field, value)
        assert isinstance(technique, Technique)
        short = technique_to_yaml(technique)
        return short if isinstance(short, dict) else {"name": short}
    if value is not None:
        hint = f"; write model_overrides.{cut(text.partition('.')[2])}" if field == "model" else ""
        raise RecipeError(f"{shown(text)}: {field} is {shown(value)}, which has no fields{hint}")
    return {}
