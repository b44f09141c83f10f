"""YAML of plain values: read as a person means it, and written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tightfit.errors import RecipeError, cut, shown

INTEGER = re.compile(r"[-+]?\d+(_\d+)*$|0x[\da-fA-F]+$|0o[0-7]+$")
FLOAT = re.compile(r"[-+]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
NUMBERS = {key: [("tag:yaml.org,2002:int", INTEGER), ("tag:yaml.org,2002:float", FLOAT)] for key in "-+.0123456789"}
"""Rules for plain values by their first character: numbers of YAML 1.2, and with underscores. YAML 1.1 takes 010 for 8,
1:30 for 90, 1e-6 for a text and 2026-01-01 for a date."""
READ = {**yaml.SafeLoader.yaml_implicit_resolvers, **NUMBERS}
WRITTEN = {first: [*NUMBERS.get(first, ()), *rules] for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)


class _Loader(yaml.SafeLoader):
    """YAML's plain values; a key that stands twice in a mapping is refused, where the last would win, and so is what
    looks like one and its value, as in `{n_layer:2}`, and is a key alone."""

    yaml_implicit_resolvers = READ

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")]
        seen: set[str] = set()
        for key in keys:
            if key.value in seen:
                raise RecipeError(f"{key.value!r} is written twice; keep one")
            seen.add(key.value)
        plain = [key for key, value in node.value if isinstance(key, yaml.ScalarNode) and not key.style
                 and isinstance(value, yaml.ScalarNode) and not (value.value or value.style)]
        for key in plain:
            name, _, rest = key.value.partition(":")
            if rest:
                raise RecipeError(f"{cut(key.value)!r} has no space behind the colon; write {cut(name)}: {cut(rest)}")
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)

MOST_VALUES = 100_000
"""More values than a recipe ever has: aliases of lists of aliases make billions of a few lines."""


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Values in a node, those of an alias counted wherever it stands."""
    if id(node) not in counted:
        counted[id(node)] = MOST_VALUES + 1  # which one that holds itself has as well
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (each if isinstance(each, tuple) else (each,) for each in inner)
        counted[id(node)] = 1 + sum(_count(each, counted) for pair in pairs for each in pair)
    return counted[id(node)]


def load(text: str) -> Any:
    """A YAML text's value. Raises RecipeError, YAMLError, or ValueError for a number of too many digits."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > MOST_VALUES:
            raise RecipeError(f"more than {MOST_VALUES:,} values, each *alias counted wherever it stands; write fewer")
        return loader.construct_document(node)
    except RecursionError:
        raise RecipeError(f"{shown(text)} is nested too deeply") from None
    finally:
        loader.dispose()


def read_yaml(text: str, origin: str = "", example: str = "model: gpt2") -> dict[str, Any]:
    """A file's plain values. Raises RecipeError, which begins with `origin`, for what is no mapping as the `example`.
    """
    origin = origin and f"{origin}: "
    try:
        values = load(text)
    except RecipeError as error:
        raise RecipeError(f"{origin}{error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of too many digits
        raise RecipeError(f"{origin}not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        raise RecipeError(f"{origin}the file is empty; write at least `{example}`")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"{origin}it should be a mapping of fields to values, such as `{example}`")
    return values


class _Dumper(yaml.SafeDumper):
    """Plain values as YAML, texts in quotes where either version of YAML would read a number."""

    yaml_implicit_resolvers = WRITTEN

    def analyze_scalar(self, scalar: str) -> Any:
        """Styles that a text may be written in: escaped alone for one with a NEL, a line break that PyYAML reads as a
        space."""
        found = super().analyze_scalar(scalar)
        if "\x85" in scalar:
            found.allow_single_quoted = found.allow_block = found.allow_flow_plain = found.allow_block_plain = False
        return found


def to_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML text, a field a line, in the order given."""
    # A mapping of nothing but plain values is written in braces, and so the outermost one, were all written at once.
    return "".join(
        yaml.dump({field: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100,
                  default_flow_style=None if isinstance(value, dict | list | tuple) else False)
        for field, value in values.items()
    )
