"""A form from the JSON schema of a question's answer, and the answer from the posted form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import JsonValue

from meshpoint.errors import AnswerRefused

Form: TypeAlias = Mapping[str, Sequence[str]]
Schema: TypeAlias = Mapping[str, Any]

ROOT = "answer"
_MAX_DEPTH = 6
_MAX_CHOICES = 200
_MAX_LINE = 80
_INPUTS = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "yes_no",
    "null": "nothing",
}
_FORMATS = {"date": "date", "email": "email", "uri": "url"}
_MISSING: Any = object()


@dataclass(slots=True)
class Input:
    """One input of a form.

    Attributes:
        name: in the posted form; "answer.city" is the property `city` of the answer.
        kind: text, long, integer, number, yes_no, choice, choices, lines, date, email, url, json,
            group or nothing.
        choices: labels by value, as JSON.
        inputs: of a group.
    """

    name: str
    label: str
    kind: str
    is_required: bool
    description: str = ""
    value: str = ""
    values: Sequence[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    attributes: Mapping[str, str] = field(default_factory=dict)
    schema: Schema = field(default_factory=dict)


def make_input(schema: Schema, posted: Form | None = None) -> Input:
    """The inputs for an answer, with posted values or the defaults of the schema."""
    return _Builder(schema.get("$defs", {}), posted).build(schema, ROOT, "Answer", required=True)


class _Builder:
    def __init__(self, definitions: Schema, posted: Form | None) -> None:
        self._definitions, self._posted = definitions, posted

    def build(
        self, schema: Schema, name: str, label: str, *, required: bool, depth: int = 0
    ) -> Input:
        schema, is_nullable = self._simplify(schema)
        found = Input(
            name,
            str(schema.get("title") or label),
            self._kind(schema, depth),
            required and not is_nullable,
            str(schema.get("description", "")),
            schema=schema,
        )
        default = schema.get("default", _MISSING)
        match found.kind:
            case "group":
                needed = schema.get("required", ())
                found.inputs = [
                    self.build(
                        each,
                        f"{name}.{key}",
                        key.replace("_", " "),
                        required=key in needed,
                        depth=depth + 1,
                    )
                    for key, each in schema["properties"].items()
                ]
            case "choice":
                found.choices = {json.dumps(each): str(each) for each in schema["enum"]}
            case "choices":
                items, _ = self._simplify(schema["items"])
                found.choices = {json.dumps(each): str(each) for each in items["enum"]}
        found.attributes = _attributes(found.kind, schema)
        if self._posted is not None:
            found.values = self._posted.get(name, ())
            found.value = found.values[0] if found.values else ""
        elif default is not _MISSING and default is not None:
            found.value, found.values = _shown(found.kind, default)
        return found

    def _simplify(self, schema: Any) -> tuple[Schema, bool]:
        """Follow references, and unwrap `X | None`."""
        is_nullable = False
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return {}, is_nullable
            rest = {
                key: value
                for key, value in schema.items()
                if key not in {"$ref", "allOf", "anyOf", "oneOf"}
            }
            if isinstance(reference := schema.get("$ref"), str):
                target = self._definitions.get(reference.removeprefix("#/$defs/"), {})
                schema = {**target, **rest} if isinstance(target, Mapping) else {}
            elif len(schema.get("allOf", ())) == 1:
                schema = {**schema["allOf"][0], **rest}
            elif options := schema.get("anyOf") or schema.get("oneOf"):
                others = [each for each in options if each != {"type": "null"}]
                if len(others) != 1:
                    return {"title": schema.get("title")}, is_nullable
                is_nullable = is_nullable or len(others) < len(options)
                schema = {**others[0], **rest}
            else:
                break
        if "const" in schema:
            schema = {**schema, "enum": [schema["const"]]}
        return schema, is_nullable

    def _kind(self, schema: Schema, depth: int) -> str:
        kind, enum = schema.get("type"), schema.get("enum")
        if isinstance(enum, list) and 0 < len(enum) <= _MAX_CHOICES:
            return "choice"
        if kind == "object" and schema.get("properties") and depth < _MAX_DEPTH:
            is_open = schema.get("additionalProperties") not in (None, False)
            return "json" if is_open else "group"
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            items, _ = self._simplify(schema["items"])
            if isinstance(items.get("enum"), list) and len(items["enum"]) <= _MAX_CHOICES:
                return "choices"
            return "lines" if items.get("type") == "string" else "json"
        if kind == "string":
            if schema.get("maxLength", _MAX_LINE + 1) > _MAX_LINE and "format" not in schema:
                return "long"
            return _FORMATS.get(str(schema.get("format")), "text")
        return _INPUTS.get(kind, "json") if isinstance(kind, str) else "json"


def read_answer(found: Input, form: Form) -> JsonValue:
    """The answer in a posted form.

    Raises:
        AnswerRefused: A value is missing or cannot be read. It may still not fit the schema.
    """
    value = _read(found, form)
    return None if value is _MISSING else value


def read_json(text: str) -> JsonValue:
    """An answer that was typed as JSON.

    Raises:
        AnswerRefused: It is not JSON.
    """
    try:
        value: JsonValue = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise AnswerRefused(f"the answer is not JSON: {error}") from error
    return value


def _read(found: Input, form: Form) -> Any:
    given = [each.replace("\r\n", "\n") for each in form.get(found.name, ())]
    text = given[0] if given else ""
    match found.kind:
        case "group" if not found.is_required and _is_blank(found, form):
            return _MISSING
        case "group":
            read = {each.name.rpartition(".")[2]: _read(each, form) for each in found.inputs}
            return {key: value for key, value in read.items() if value is not _MISSING}
        case "nothing":
            return None
        case "choices":
            return [read_json(each) for each in given]
        case "lines":
            return [line for line in text.split("\n") if line.strip()]
    if not text.strip():
        return _empty(found)
    if found.kind in {"choice", "yes_no", "json"}:
        return read_json(text)
    if found.kind in {"integer", "number"}:
        try:
            return int(text) if found.kind == "integer" else float(text)
        except ValueError as error:
            raise AnswerRefused(f"{found.label}: {text[:40]!r} is not a number") from error
    return text


def _is_blank(found: Input, form: Form) -> bool:
    """Whether nothing below an input was filled in."""
    prefix = f"{found.name}."
    return not any(
        text.strip() for name, given in form.items() if name.startswith(prefix) for text in given
    )


def _empty(found: Input) -> Any:
    """What an empty input stands for: its absence, unless the answer must have it."""
    if not found.is_required:
        return _MISSING
    if found.kind in {"text", "long"} and not found.schema.get("minLength"):
        return ""
    raise AnswerRefused(f"{found.label}: give a value")


def _shown(kind: str, default: JsonValue) -> tuple[str, Sequence[str]]:
    if kind == "choices" and isinstance(default, list):
        return "", [json.dumps(each) for each in default]
    if kind == "lines" and isinstance(default, list):
        return "\n".join(map(str, default)), ()
    if kind in {"choice", "yes_no", "json"}:
        return json.dumps(default, ensure_ascii=False), ()
    return str(default), ()


def _attributes(kind: str, schema: Schema) -> dict[str, str]:
    """The limits that a browser checks itself."""
    names = {"minimum": "min", "maximum": "max"} if kind in {"integer", "number"} else {}
    if kind in {"text", "long"}:
        names = {"minLength": "minlength", "maxLength": "maxlength"}
    found = {html: str(schema[name]) for name, html in names.items() if name in schema}
    if kind == "number":
        found["step"] = "any"
    return found
