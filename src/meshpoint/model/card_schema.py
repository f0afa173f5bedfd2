"""Check the JSON schemas in agent cards.

A framework or a model provider that refuses one schema refuses the whole request to the model, so
one card would fail every task that is offered it.
"""

from __future__ import annotations

from typing import Any

from meshpoint.errors import NotJson
from meshpoint.model.json_values import check_json

_DEFINITIONS = "#/$defs/"
_MAX_DEPTH = 64
_MAX_EXPANDED_DEPTH = 200
_MAX_EXPANDED_VALUES = 20_000
"""Maximum size with each reference replaced by its definition, as some providers need it."""

_SCHEMAS = ("additionalProperties", "contains", "items", "not", "propertyNames")
_SCHEMAS_BY_NAME = ("$defs", "patternProperties", "properties")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def check_card_schema(schema: dict[str, Any]) -> None:
    """Check that readers of cards can use `schema`.

    Raises:
        ValueError: It is nested too deeply, a keyword has a value of the wrong type, a reference
            does not name a definition in `$defs`, or it is too large with its references expanded.
    """
    _check_depth(schema)
    try:
        check_json(schema, "schema")
    except NotJson as error:
        raise ValueError(str(error)) from error
    _check_keywords(schema, "schema")
    _Expansion(schema.get("$defs", {})).add(schema, 0)


def _check_depth(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_keywords(schema: Any, path: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{path} must be an object or a boolean")
    for key in _SCHEMAS:
        if key in schema:
            _check_keywords(schema[key], f"{path}.{key}")
    for key in _SCHEMAS_BY_NAME:
        for name, each in _read(schema, key, dict, path).items():
            _check_keywords(each, f"{path}.{key}.{name}")
    for key in _LISTS_OF_SCHEMAS:
        for index, each in enumerate(_read(schema, key, list, path)):
            _check_keywords(each, f"{path}.{key}.{index}")
    for key in ("enum", "required"):
        _read(schema, key, list, path)
    if "$ref" in schema and not isinstance(schema["$ref"], str):
        raise ValueError(f"{path}.$ref must be a string")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not (isinstance(kind, str) and kind in _TYPES):
            raise ValueError(f"{path}.type must name types of JSON")


def _read(schema: dict[str, Any], key: str, type_: type[Any], path: str) -> Any:
    value = schema.get(key, type_())
    if not isinstance(value, type_):
        kind = "an object" if type_ is dict else "a list"
        raise ValueError(f"{path}.{key} must be {kind}")
    return value


class _Expansion:
    """Counts the values of a schema with its references expanded, except recursive ones."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._left = _MAX_EXPANDED_VALUES
        self._open: set[str] = set()

    def add(self, value: Any, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > _MAX_EXPANDED_DEPTH:
            raise ValueError("too large with its references expanded")
        for child in _children(value):
            self.add(child, depth + 1)
        if isinstance(value, dict):
            # A property may be called "$ref"; its schema is not a string.
            for key in ("$ref", "$dynamicRef"):
                if isinstance(reference := value.get(key), str):
                    self._add_definition(reference, depth + 1)

    def _add_definition(self, reference: str, depth: int) -> None:
        name = reference.removeprefix(_DEFINITIONS).replace("~1", "/").replace("~0", "~")
        if not reference.startswith(_DEFINITIONS) or name not in self._definitions:
            raise ValueError(f"{reference!r} must refer to a definition in $defs")
        if name not in self._open:
            self._open.add(name)
            self.add(self._definitions[name], depth)
            self._open.remove(name)
