"""Check JSON values against the JSON schemas that pydantic writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_MAX_DEPTH = 50
_MAX_STEPS = 100_000
"""Maximum values and alternatives to check, which takes about a tenth of a second."""
_MAX_NAME_LENGTH = 100
"""Maximum characters of a field's name in a path."""


def find_mismatch(schema: Mapping[str, Any], value: JsonValue, path: str) -> str | None:
    """Return the first mismatch, such as "approval.approved: should be a boolean", or `None`.

    `path` names the value. Types, required and unknown fields, enumerations, items and unions are
    checked. Other keywords, and values beyond the limits of depth and steps, are left to the type
    from which the schema was made.

    The library `jsonschema` checks all keywords, but a schema or a value can make it run for
    minutes or exceed the recursion limit, and its messages do not name the value.
    """
    problem = _Search(schema.get("$defs", {})).find(schema, value, _MAX_DEPTH)
    return None if problem is None else f"{path}{problem}"


class _Search:
    """One check, with its remaining steps."""

    def __init__(self, defs: Mapping[str, Any]) -> None:
        self._defs, self._steps_left = defs, _MAX_STEPS

    def find(self, schema: Any, value: JsonValue, depth: int) -> str | None:
        """The first mismatch in `value`, starting with its path within `value`.

        The path is built from the mismatch up: a value may have millions of long paths.
        """
        self._steps_left -= 1
        if not isinstance(schema, Mapping) or not depth or self._steps_left <= 0:
            return None
        if isinstance(reference := schema.get("$ref"), str):
            target = self._defs.get(reference.removeprefix("#/$defs/"))
            return self.find(target, value, depth - 1)
        for choices in (schema.get("anyOf"), schema.get("oneOf")):
            if isinstance(choices, list):
                problem = self._find_in_choices(choices, value, depth)
                if problem is not None:
                    return problem
        if "enum" in schema and value not in schema["enum"]:
            return f": should be one of {', '.join(map(repr, schema['enum']))}"
        if "const" in schema and value != schema["const"]:
            return f": should be {schema['const']!r}"
        kinds = schema.get("type")
        if isinstance(kinds, str) and not _has_type(value, kinds):
            article = "an" if kinds[0] in "aio" else "a"
            return f": should be {article} {kinds}" if kinds != "null" else ": no value"
        if isinstance(value, dict):
            return self._find_in_fields(schema, value, depth)
        if isinstance(value, list):
            return self._find_in_items(schema.get("items"), value, depth)
        return None

    def _find_in_choices(self, choices: list[Any], value: JsonValue, depth: int) -> str | None:
        problem = None
        for each in choices:
            problem = self.find(each, value, depth - 1)
            if problem is None:
                return None
        return problem if len(choices) <= 1 else ": fits none of its types"

    def _find_in_items(self, schema: Any, values: list[JsonValue], depth: int) -> str | None:
        for index, each in enumerate(values):
            if self._steps_left <= 0:
                return None
            problem = self.find(schema, each, depth - 1)
            if problem is not None:
                return f"[{index}]{problem}"
        return None

    def _find_in_fields(
        self, schema: Mapping[str, Any], value: dict[str, JsonValue], depth: int
    ) -> str | None:
        for name in schema.get("required", ()):
            if name not in value:
                return f".{name}: is missing"
        fields, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, each in value.items():
            if self._steps_left <= 0:
                return None
            if name not in fields and others is False:
                return f".{_shorten(name)}: is unknown"
            problem = self.find(fields.get(name, others), each, depth - 1)
            if problem is not None:
                return f".{_shorten(name)}{problem}"
        return None


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 1]}…"


def _has_type(value: JsonValue, kind: str) -> bool:
    if isinstance(value, bool) and kind in {"number", "integer"}:
        return False
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))
