"""The JSON schema of a recipe's file, from the fields and knobs that are declared: for editors that complete and check
YAML as it is written."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from tightfit.bundled import BUNDLED
from tightfit.recipe.lookup import IF_CUDA
from tightfit.recipe.schema import Recipe
from tightfit.recipe.yaml import SAID_BY_FALSE, SHORT_FIELDS, SHORT_FORMS, technique_to_yaml
from tightfit.techniques import VARIANTS, Technique

if TYPE_CHECKING:
    from pydantic_core import core_schema


class _RecipeSchema(GenerateJsonSchema):
    """The schema that pydantic generates, with techniques as a person writes them: a name, or a mapping of `name` and
    knobs."""

    def is_instance_schema(self, schema: core_schema.IsInstanceSchema) -> JsonSchemaValue:
        variants = VARIANTS[schema["cls"].slot]
        names = [{"const": name, "description": _text(v)} for v in variants for name in _names(v)]
        knobs = [self.generate_inner(vars(variant)["__pydantic_core_schema__"]) for variant in variants]
        return {"anyOf": names + knobs}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        variant, made = schema["cls"], super().dataclass_schema(schema)
        for knob, field in vars(variant)["__pydantic_fields__"].items():  # which has the docstrings of inherited knobs
            made["properties"][knob].setdefault("description", field.description)
        if variant.name != variant.slot:
            made["properties"] = {"name": {"enum": _names(variant)}, **made["properties"]}
            made["required"] = ["name"]
        return {**made, "description": _text(variant)}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return technique_to_yaml(dft) if isinstance(dft, Technique) else super().encode_default(dft)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe's file. It holds each field by itself; what fields say together, training tells."""
    made = Recipe.model_json_schema(schema_generator=_RecipeSchema)
    fields = made["properties"]
    for field, short in SHORT_FIELDS.items():
        section = fields[field].pop("$ref")
        plain = made["$defs"][section.rpartition("/")[2]]["properties"][short]
        fields[field]["anyOf"] = [{"$ref": section}, plain]
    fields["model"]["examples"] = sorted(BUNDLED)
    fields[IF_CUDA] = {"$ref": "#", "description": "Fields that take another value on a CUDA device."}
    return {"$schema": _RecipeSchema.schema_dialect, **made, "title": "tightfit recipe"}


def _names(variant: type[Technique]) -> list[str | bool | None]:
    """The values of its field that mean a variant; YAML reads `off` as false and `null` as nothing."""
    own = (variant.slot, variant.name)
    short = [name for (slot, name), knobs in SHORT_FORMS.items() if (slot, knobs["name"]) == own]
    return [variant.name, *short, *((False, None) if variant.name in SAID_BY_FALSE else ())]


def _text(variant: type[Technique]) -> str:
    return " ".join(inspect.cleandoc(variant.__doc__ or "").split())
